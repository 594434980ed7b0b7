"""What tests/e2e changes inside an Engine's processes is there to be changed, and its faults do what they say."""

import ast
import importlib
import inspect
import json
import multiprocessing
import sys
from unittest import mock

import pytest
import torch
from e2e import faults, inside, stand_ins
from runners import eagle_input, full_mask, make_runner, view
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.server_args import ServerArgs

from treemla import VerifyPlan
from treemla.kv import Moves
from treemla.sglang import allocator, backend, slots

SIBLINGS = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)


def test_the_suite_s_plug_in_finds_everything_it_changes(monkeypatch, tmp_path):
    loader = importlib.import_module("sglang.srt.model_loader.loader")
    workers = [importlib.import_module(name) for name in inside.SAMPLERS]
    for module, name in ((loader, "initialize_dummy_weights"), *((worker, "eagle_sample") for worker in workers)):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back afterwards
    before = [worker.eagle_sample for worker in workers]
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: "the user's")
    monkeypatch.setenv(inside.ASKED, json.dumps({"weights": True, "fault": None, "folder": str(tmp_path)}))
    with mock.patch.dict(sys.modules):
        inside.register()
    assert loader.initialize_dummy_weights.__module__ == "e2e.weights"
    assert all(worker.eagle_sample is not old for worker, old in zip(workers, before, strict=True))
    assert (tmp_path / "plugin.json").exists()


def test_backends_that_need_deep_gemm_have_stand_ins_that_nothing_is_an_instance_of():
    with mock.patch.dict(sys.modules):
        inside.stand_in_for_backends()
        for module, name in inside.NEED_DEEP_GEMM.items():
            held = {}
            exec(f"from {module} import {name}", held)  # as SGLang does
            assert not issubclass(backend.TritonAttnBackend, held[name])


def test_the_eagle_worker_asks_those_backends_for_nothing_but_their_stand_ins():
    """It imports them where the draft's graphs are captured, whatever serves."""
    worker = importlib.import_module("sglang.srt.speculative.eagle_worker_v2")
    imports = [node for node in ast.walk(ast.parse(inspect.getsource(worker))) if isinstance(node, ast.ImportFrom)]
    asked = [(node.module, name.name) for node in imports for name in node.names]
    of_these = {(module, name) for module, name in asked if module in inside.NEED_DEEP_GEMM}
    assert of_these == set(inside.NEED_DEEP_GEMM.items())


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


@pytest.mark.parametrize("count", [faults.LARGE - 1, faults.LARGE])
def test_the_holder_fault_leaves_the_tree_with_slots_that_are_free(monkeypatch, count):
    monkeypatch.setattr(allocator, "relocate", allocator.relocate)
    monkeypatch.setattr(slots.IdleSlots, "turn", turn := slots.IdleSlots.turn)
    faults.inject("holder")
    old, new = torch.arange(1, 1 + count), torch.arange(1000, 1000 + count)
    rows, node, now_free = torch.arange(2000.0)[:, None], old.clone(), []
    allocator.relocate(Moves(old.numpy(), new.numpy()), [rows], [node], new, now_free.append)
    is_forgotten = count == faults.LARGE
    assert rows[new, 0].tolist() == old.tolist() == now_free[0].tolist()
    assert torch.equal(node, old if is_forgotten else new)
    assert (slots.IdleSlots.turn is not turn) == is_forgotten
