"""A side of the gate, on a CPU with a stand-in for the graph: that timed work which is no work is noticed."""

import random
import shutil

import pytest
import torch

from treemla import VerifyPlan
from treemla.gate import machine, nvml, pairs, side, trees, work
from treemla.gate.cases import PlanCase, VerifyCase
from treemla.gate.fingerprint import REPO
from treemla.gate.inputs import make_inputs
from treemla.gate.side import Side
from treemla.gate.work import Unproven
from treemla.gate.worker import Worker

CASE = VerifyCase((40, 7), 3, 2)


def cpu_inputs(case):
    return make_inputs(case, torch.device("cpu"), cold_bytes=1)


class Replays:
    """In the place of a graph: runs the layers once a sample, 1 us each."""

    def __init__(self, layers):
        self.layers = layers

    def sample_us(self, replays):
        for _ in range(replays):
            for layer in self.layers:
                layer()
        return [1.0] * replays


class Slow(Replays):
    """5 ms a layer."""

    def sample_us(self, replays):
        return [5000.0 * us for us in super().sample_us(replays)]


class Nothing(Replays):
    """A graph in which nothing was recorded."""

    def sample_us(self, replays):
        return [1.0] * replays


class Remembers(Replays):
    """Puts back the result of its first inputs, whatever the inputs."""

    first = None

    def sample_us(self, replays):
        super().sample_us(replays)
        out = self.layers[-1]()
        if self.first is None:
            self.first = out.clone()
        out.copy_(self.first)
        return [1.0] * replays


class FirstHalf(Replays):
    """Leaves rows out."""

    def sample_us(self, replays):
        super().sample_us(replays)
        out = self.layers[-1]()
        out[len(out) // 2 :] = torch.nan
        return [1.0] * replays


@pytest.fixture
def prepared(monkeypatch):
    def prepared(timer, case=CASE):
        made = Side("verify", cpu_inputs, timer)
        assert made.prepare(case) == ""
        return made

    return prepared


def test_blocks_of_real_work_are_proven(prepared):
    held = prepared(Replays)
    assert [held.block(3, seed).samples_us for seed in (1, 2, 3)] == [(1.0, 1.0, 1.0)] * 3


PLAN = PlanCase(VerifyCase((40, 7), 9, 2))


def test_plan_steps_on_new_trees_are_proven(prepared):
    held = prepared(Replays, PLAN)
    assert len(held.held[0].steps) == work.PLAN_STEPS
    assert [held.block(3, seed).samples_us for seed in (1, 2, 3)] == [(1.0, 1.0, 1.0)] * 3
    with pytest.raises(Unproven, match="the block before"):
        held.block(3, 3)


def test_a_plan_step_that_was_not_done_is_noticed(prepared):
    with pytest.raises(Unproven, match="another output"):
        prepared(Nothing, PLAN).block(3, 1)


class WordsAlone(Replays):
    """Packs masks and plans nothing."""

    def sample_us(self, replays):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(VerifyPlan, "update", lambda *lengths: None)
            return super().sample_us(replays)


def test_a_plan_step_that_writes_words_alone_is_noticed(prepared):
    with pytest.raises(Unproven, match="another output"):
        prepared(WordsAlone, PLAN).block(3, 1)


class OtherPlan(VerifyPlan):
    """A base's, which knows `work` where this checkout's has `part_work`."""

    @property
    def tensors(self):
        return self.committed, self.pieces, self.work, self.request_ptr, self.partial_out, self.partial_lse

    def load(self, made):
        arrays = made.committed, made.pieces, made.part_work, made.request_ptr
        for held, array in zip(self.tensors, arrays, strict=False):
            held[: len(array)].copy_(torch.from_numpy(array))
        self.batch = len(made.committed)


def test_a_plan_step_of_a_base_with_other_tensors_is_timed():
    """The gate of this checkout times its base's package."""
    inputs = cpu_inputs(PLAN.verify)
    inputs.plan.__class__, inputs.plan.work = OtherPlan, inputs.plan.part_work
    del inputs.plan.part_work
    made = Side("verify", lambda _: inputs, Replays)
    assert made.prepare(PLAN) == ""
    inputs.plan.work[0, 5] += 1
    assert "work of the plan" in Side("verify", lambda _: inputs, Nothing).prepare(PLAN)


@pytest.mark.parametrize("name", ["words", "pieces", "part_work", "request_ptr", "committed"])
def test_a_wrong_plan_is_not_timed(monkeypatch, name):
    inputs = cpu_inputs(PLAN.verify)
    held = inputs.words if name == "words" else getattr(inputs.plan, name)
    held[0] += 1
    made = Side("verify", lambda _: inputs, Replays)
    assert name in made.prepare(PLAN)
    assert name in Side("verify", lambda _: inputs, Nothing).prepare(PLAN)  # looking does not mend it


def test_a_slow_kernel_is_timed_less_often(prepared):
    held = prepared(Slow)
    fits = side.BLOCK_US / (5000.0 * len(held.held[0].steps))
    assert len(held.block(15, 1).samples_us) == max(side.MIN_REPLAYS, int(fits)) < 15


def test_work_that_was_not_done_is_noticed(prepared):
    with pytest.raises(Unproven, match="not finite"):
        prepared(Nothing).block(3, 1)
    with pytest.raises(Unproven, match="not finite"):
        prepared(FirstHalf).block(3, 1)


def test_a_result_that_was_remembered_is_noticed(prepared):
    with pytest.raises(Unproven, match="another output"):
        prepared(Remembers).block(3, 1)


def test_the_same_inputs_twice_are_noticed(prepared):
    held = prepared(Replays)
    held.block(3, 1)
    with pytest.raises(Unproven, match="the block before"):
        held.block(3, 1)


def test_a_wrong_result_is_not_timed(monkeypatch):
    def wrong(inputs):
        return [lambda: inputs.empty_out().zero_()]

    made = Side("verify", cpu_inputs, Replays)
    made.layers_of = wrong
    assert "relative error" in made.prepare(CASE)
    with pytest.raises(RuntimeError, match="expected a prepared case"):
        made.block(3, 1)


def test_a_checksum_knows_values_and_places():
    out = torch.randn(4, 2, 8).bfloat16()
    swapped = out[[1, 0, 2, 3]]
    other = out.clone()
    other[3, 1, 7] += 1
    assert len({work.checksum(t) for t in (out, swapped, other)}) == 3
    assert work.checksum(out) == work.checksum(out.clone())


def test_a_block_carries_what_the_gpu_said_around_it(prepared):
    held, told = prepared(Replays), [nvml.Reading(n, n, n, n, ()) for n in (1, 2)]
    held.gauge = type("Gauge", (), {"read": lambda _: told.pop(0)})()
    assert [reading.sm_mhz for reading in held.block(1, 5).readings] == [1, 2]


FACTS = {"gpu": "NVIDIA H200", "compute_capability": "9.0", "driver": "580.1", "ecc": None, "power_limit_mw": 700_000}


def test_a_machine_class_does_not_depend_on_order_and_changes_with_every_fact():
    digits = machine.fingerprint(FACTS)
    assert digits == machine.fingerprint(dict(reversed(FACTS.items()))) and len(digits) == 12
    for name in FACTS:
        assert machine.fingerprint({**FACTS, name: "other"}) != digits
    assert machine.fingerprint({**FACTS, "ecc": "None"}) != digits


def test_an_architecture_is_named_as_compilers_do():
    assert [machine.arch({"compute_capability": cc}) for cc in ("9.0", "12.0")] == ["sm_90", "sm_120"]


def proc(tmp_path, boot, began):
    (tmp_path / "sys/kernel/random").mkdir(parents=True, exist_ok=True)
    (tmp_path / "1").mkdir(exist_ok=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text(boot)
    (tmp_path / "1/stat").write_text(f"1 (a (b) c) S {' '.join('0' * 18)} {began} 0")
    return machine.start(tmp_path)


def test_a_start_of_the_machine_is_told_from_another(tmp_path):
    first = proc(tmp_path, "a", 5)
    assert first == proc(tmp_path, "a", 5) and len(first) == 12
    assert len({first, proc(tmp_path, "b", 5), proc(tmp_path, "a", 6)}) == 3
    assert machine.start(tmp_path / "absent") is None


def test_two_trees_are_timed_in_processes_of_their_own(tmp_path, monkeypatch):
    """Real processes, real pipes; one tree is a copy whose library computes a wrong result."""
    monkeypatch.setattr(pairs, "REPLAYS", 1)
    monkeypatch.setattr(pairs, "ROUNDS", 1)
    wrong = tmp_path / "wrong"
    shutil.copytree(REPO / "src", wrong / "src", ignore=shutil.ignore_patterns("gate", "__pycache__"))
    portable = wrong / "src/treemla/portable.py"
    portable.write_text(
        portable.read_text().replace("sm_scale *", "1.5 * sm_scale *").replace("* sm_scale", "* 1.5 * sm_scale")
    )
    trees_of = {"head": REPO, "base": REPO, "wrong": wrong}
    sources = {name: trees.join(tree, tmp_path / "joined" / name) for name, tree in trees_of.items()}

    def start(name):
        return Worker(Side, "verify", cpu_inputs, Replays, source=sources[name])

    for sides, problem in ((("head", "base"), None), (("wrong",), "wrong")):
        taken = {CASE.id: pairs.Taken()}
        pairs.launch({CASE: sides}, start, random.Random(0), taken)
        held = taken[CASE.id]
        assert (held.problem and held.problem.side) == problem
        assert len(held.launches) == (problem is None)
    assert "relative error" in held.problem.text
