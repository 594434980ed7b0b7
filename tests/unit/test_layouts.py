"""Slots in longer and shorter runs: every layout is an order of all pages, with the runs that its name says."""

import numpy as np
import pytest
import torch

from treemla.gate import layouts, schema
from treemla.gate.cases import VerifyCase
from treemla.gate.exits import Exit
from treemla.gate.inputs import make_inputs
from treemla.kv import run_lengths

PAGES = 100_000
MEAN_RUNS = {"one": PAGES, "runs_64": 64, "runs_16": 16, "tier1": 37.4, "tier0": 1.7, "stock": 1.1, "random": 1}


@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_a_layout_orders_all_pages_into_runs_of_its_length(name: str) -> None:
    order = layouts.LAYOUTS[name](np.random.default_rng(1), PAGES)
    assert np.array_equal(np.sort(order), np.arange(PAGES))
    assert run_lengths(order).mean() == pytest.approx(MEAN_RUNS[name], rel=0.03)


def test_requests_take_their_slots_in_the_layouts_order() -> None:
    case = VerifyCase((40,), 4, 2)
    inputs = make_inputs(case, torch.device("cpu"), cold_bytes=0, order_pages=layouts.one_run)
    assert inputs.owned[0].tolist() == list(range(44))


def test_it_writes_a_metric_a_layout_and_shows_what_each_costs(monkeypatch, tmp_path, capsys) -> None:
    where = schema.Where("H200", None, None, "2", None, None, "abc", "2026-11-29", "bench-layouts")
    monkeypatch.setattr(layouts.fingerprint, "collect", lambda commit: where)
    times = {name: [10.0 + i] * 3 for i, name in enumerate(layouts.LAYOUTS)}
    monkeypatch.setattr(layouts, "measure_case", lambda case: times)
    assert layouts.bench_layouts(tmp_path / "x.jsonl", None).exit is Exit.PASS
    made = schema.load(tmp_path / "x.jsonl")
    assert len(made) == len(layouts.CASES) * len(layouts.LAYOUTS)
    assert {m.metric for m in made} == {f"verify_{name}" for name in layouts.LAYOUTS}
    assert "+60.0%" in capsys.readouterr().out
