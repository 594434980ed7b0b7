"""`tune` with a made-up GPU: its times are the model's with other constants and noise, so what is right is known."""

import functools
import math
import random
from dataclasses import astuple, fields, replace

import numpy as np
import pytest
import torch

from treemla import cost, tuned
from treemla.gate import measure, schema, tune, tune_gpu
from treemla.gate.cases import VerifyCase
from treemla.gate.inputs import make_inputs
from treemla.tiles import MMA, WGMMA

GPUS = {"wgmma": tune.Gpu(WGMMA, 132), "mma": tune.Gpu(MMA, 188)}
FACTORS = (0.8, 1.3, 0.7, 1.5, 0.6, 1.2, 0.6, 1.3)  # of the made-up GPU's constants to the defaults
NOISE = 0.003
H64 = tune.ROWS[-1]
WHERE = schema.Where("NVIDIA H200", "580.1", "13.0", "2.11.0", None, None, "0" * 40, "2026-01-02T03:04:05Z", "-")
OF = tuned.Fingerprint("NVIDIA H200", 132, 150_000_000_000, "wgmma", "0" * 64)


class MadeUpTimer:
    def __init__(self, gpu: tune.Gpu, noise: float = NOISE) -> None:
        self.gpu, self.noise, self.random, self.asked = gpu, noise, random.Random(0), []
        pairs = zip(astuple(cost.DEFAULTS[gpu.kernel.name]), FACTORS, strict=True)
        self.truth = cost.Constants(*(value * factor for value, factor in pairs))

    def __call__(self, case, tiling) -> float:
        self.asked.append((case, tiling))
        shares = tiling.schedule(case.contexts, case.tree_tokens, self.gpu.kernel).shares[0]
        us = self.gpu.estimate(self.truth, case, tiling).us * (1 + cost.SHARE_COST * (shares - 1))
        return us * math.exp(self.noise * self.random.gauss(0, 1))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def fitted(timer: MadeUpTimer) -> cost.Constants:
    return tune.fit(timer.gpu, [(probe, timer(*probe)) for probe in tune.probes(timer.gpu)])


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_probes_without_noise_give_every_constant(gpu) -> None:
    timer = MadeUpTimer(gpu, noise=0.0)
    assert astuple(fitted(timer)) == pytest.approx(astuple(timer.truth), rel=0.03)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_probes_are_launches_that_a_plan_can_make(gpu) -> None:
    probes = tune.probes(gpu)
    assert len(probes) <= 16  # a handful: seconds on a GPU
    for case, tiling in probes:
        assert tiling.block_rows in gpu.kernel.block_heights
        assert tiling.blocks == -(-case.tree_tokens * case.heads // tiling.block_rows)
        assert all(context > 0 for context in case.contexts)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_no_constant_hangs_on_a_little_noise(gpu) -> None:
    """Standard error of each constant by the linearised fit: a percent of noise is at most 15 percent of it, and 60 of
    what a mask costs, which is a small part of any launch."""
    at = np.log(astuple(cost.DEFAULTS[gpu.kernel.name]))

    def log_us(logs):
        return np.log([gpu.estimate(cost.Constants(*np.exp(logs)), *probe).us for probe in tune.probes(gpu)])

    slope = np.stack([(log_us(at + step) - log_us(at - step)) / 0.02 for step in 0.01 * np.eye(len(at))], axis=1)
    error = dict(
        zip([f.name for f in fields(cost.Constants)], np.sqrt(np.diag(np.linalg.inv(slope.T @ slope))), strict=True)
    )
    assert error.pop("ragged_row_us") < 60
    assert max(error.values()) < 15, error


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_the_choice_is_near_the_best_of_the_sweep_on_every_row(gpu) -> None:
    timer = MadeUpTimer(gpu)
    made = fitted(timer)
    rows = [tune.sweep(gpu, case, timer, (made,)) for case in tune.ROWS]
    assert tune.worst_off(gpu, made, rows) <= tune.MOST_OFF


def test_the_table_is_the_issue_s() -> None:
    assert [(c.batch, c.contexts[0], c.tree_tokens, c.heads) for c in tune.ROWS] == [
        (1, 4096, 9, 8), (1, 16384, 9, 8), (1, 65536, 9, 8), (1, 65536, 1, 8), (1, 65536, 32, 8), (8, 16384, 9, 8),
        (32, 4096, 9, 8), (8, 16384, 1, 8), (8, 16384, 9, 64),
    ]  # fmt: skip


def test_a_sweep_times_each_schedule_once_and_knows_every_tiling() -> None:
    gpu = GPUS["wgmma"]
    timer = MadeUpTimer(gpu)
    row = tune.sweep(gpu, tune.ROWS[0], timer, (timer.truth, cost.DEFAULTS["wgmma"]))
    # 72 rows by one, two and three, 40 by one and two, seven numbers of parts; a lone request has no overhead.
    assert len(timer.asked) == 35 < len(row.us)
    assert all(
        t.halved_tiles == t.third_tiles == 0 for t in tune.sweep(gpu, H64, timer, (timer.truth,)).us
    )  # of 8 blocks and more
    assert gpu.choose(timer.truth, row.case, (row.case.contexts,)) in row.us
    assert gpu.choose(timer.truth, row.case, cost.design_steps(1)) in row.us


def test_constants_that_choose_better_are_stored_and_shown(capsys) -> None:
    timer = MadeUpTimer(GPUS["wgmma"])
    assert tune_gpu.run(timer.gpu, tune.ROWS, timer, OF, WHERE) == []
    stored = tuned.load(OF)
    assert stored is not None
    assert astuple(stored)[:2] == pytest.approx(astuple(timer.truth)[:2], rel=0.05)
    said = capsys.readouterr().out
    assert str(OF.path) in said
    for case in tune.ROWS:
        assert f"\n{case.id}\n    " in said  # why
    assert "bound by memory" in said and "bound by arithmetic" in said


def test_constants_that_choose_worse_than_the_stored_ones_do_not_replace_them(monkeypatch, capsys) -> None:
    timer = MadeUpTimer(GPUS["wgmma"])
    tuned.store(OF, timer.truth, "2026-01-02T03:04:05Z", "-")
    timer.noise = 0.0
    monkeypatch.setattr(tune_gpu, "fit", lambda gpu, measured: replace(timer.truth, tile_row_us=1.0))
    assert tune_gpu.run(timer.gpu, tune.ROWS[:3], timer, OF, WHERE) == []
    assert tuned.load(OF) == timer.truth
    assert "not stored: the constants before choose better" in capsys.readouterr().out


def test_a_gpu_that_the_model_does_not_describe_fails() -> None:
    """Times without rhyme or reason: whatever is chosen, something else was quicker."""
    timer = MadeUpTimer(GPUS["wgmma"], noise=0.3)
    assert "more than 2% from the best" in tune_gpu.run(timer.gpu, tune.ROWS, timer, OF, WHERE)[0]


def test_constants_of_some_rows_are_not_stored(capsys) -> None:
    timer = MadeUpTimer(GPUS["wgmma"])
    assert tune_gpu.run(timer.gpu, tune.ROWS[:1], timer, OF, WHERE) == []
    assert tuned.load(OF) is None and "not stored: 1 of the table's 9 rows" in capsys.readouterr().out


def test_the_timer_runs_the_plan_that_was_asked_for_and_keeps_its_time_at_once(monkeypatch, tmp_path, capsys) -> None:
    """On a CPU, with a clock that stands still at 3 us: everything else is what a GPU does."""
    ran = []

    def time_layers(layers) -> list[float]:
        for layer in layers:
            layer()
            ran.append(layer.args[4])
        return [2.0, 3.0, 50.0]

    monkeypatch.setattr(measure, "time_layers", time_layers)
    monkeypatch.setattr(tune_gpu, "make_inputs", functools.partial(make_inputs, cold_bytes=10_000))
    out = tmp_path / "build/tune.jsonl"
    timer = tune_gpu.GpuTimer(torch.device("cpu"), "wgmma", WHERE, out)
    case = VerifyCase((300, 300), 9, 8)
    assert timer(case, cost.Tiling(2, 40, 5, 3)) == 3.0
    assert schema.load(out) == timer.made and "overhead 3: 3.0 us" in capsys.readouterr().out
    assert timer(case, cost.Tiling(1, 72, 7, 1)) == 3.0
    assert timer(case, cost.Tiling(1, 72, 7, 1).by_shares(3)) == 3.0
    assert [(plan.halved_tiles > 0, plan.third_tiles > 0) for plan in ran[-1:]] == [(False, True)]
    cut = {(plan.blocks, plan.block_rows, plan.parts, plan.overhead_tiles, plan.batch) for plan in ran}
    assert cut == {(2, 40, 5, 3, 2), (1, 72, 7, 1, 2)}
    assert [(m.case, m.metric, m.value) for m in timer.made] == [
        (case.id, "verify_wgmma_r40_p5_o3", 3.0),
        (case.id, "verify_wgmma_r72_p7_o1", 3.0),
        (case.id, "verify_wgmma_r72_p7_o1_third", 3.0),
    ]
    assert schema.load(out) == timer.made
