"""What tests/e2e changes inside an Engine's processes is there to be changed, and its faults do what they say."""

import importlib
import inspect
import json
import multiprocessing

import pytest
import torch
from e2e import faults, inside, stand_ins
from runners import eagle_input, full_mask, make_runner, view
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.server_args import ServerArgs

from treemla import VerifyPlan
from treemla.sglang import backend

SIBLINGS = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)


def test_the_suite_s_plug_in_finds_everything_it_changes(monkeypatch, tmp_path):
    loader = importlib.import_module("sglang.srt.model_loader.loader")
    workers = [importlib.import_module(name) for name in inside.SAMPLERS]
    for module, name in ((loader, "initialize_dummy_weights"), *((worker, "eagle_sample") for worker in workers)):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back afterwards
    before = [worker.eagle_sample for worker in workers]
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "the user's")
    monkeypatch.setenv(inside.ASKED, json.dumps({"weights": True, "fault": None, "folder": str(tmp_path)}))
    inside.register()
    assert loader.initialize_dummy_weights.__module__ == "e2e.weights"
    assert all(worker.eagle_sample is not old for worker, old in zip(workers, before, strict=True))
    assert (tmp_path / "plugin.json").exists()


@pytest.mark.parametrize("run", stand_ins.RUNS)
@pytest.mark.parametrize("model", ["small", "slice"])
def test_every_setting_of_the_suite_s_engines_is_one_that_sglang_has(tmp_path, model, run):
    taken = inspect.signature(ServerArgs).parameters.keys()
    assert stand_ins.settings(model, run, "treemla", tmp_path).keys() <= taken


@pytest.fixture
def faulty(monkeypatch):
    """Inject a fault for the duration of a test; returns a step's plan and words after it."""

    def step(name, lens):
        monkeypatch.setattr(VerifyPlan, "update", VerifyPlan.update)
        monkeypatch.setattr(backend, "pack_tree_mask", backend.pack_tree_mask)
        faults.inject(name)
        runner = make_runner(speculative_algorithm="EAGLE", max_context=640)
        served = backend.TreemlaAttnBackend(runner)
        mask = full_mask(lens, [SIBLINGS] * len(lens))
        batch = view(runner, lens, ForwardMode.TARGET_VERIFY, eagle_input(mask, 3))
        served.init_forward_metadata(batch)
        return served._step

    return step


def test_the_causal_fault_turns_trees_into_chains(faulty):
    assert faulty("causal", [5, 9]).words.tolist() == [1, 3, 7, 1, 3, 7]


def test_the_length_fault_loses_a_committed_token(faulty):
    assert faulty("length", [5, 9]).plan.committed[:2].tolist() == [4, 8]


def test_the_piece_fault_drops_the_first_of_several_pieces(faulty):
    assert faulty("piece", [600]).plan.request_ptr[0] == 1
    assert faulty("piece", [5]).plan.request_ptr[0] == 0
