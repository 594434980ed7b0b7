"""Recorded runs: steps over time, and two sets of them beside each other."""

import math
import random
from dataclasses import replace

import pytest
from fake_sides import WHERE

from treemla.gate import cli, history, schema, trend
from treemla.gate.exits import Exit
from treemla.gate.findings import Finding, Findings

CASE = "verify-b1-c65536-t9-h8-p1-bf16"


def runs(values, metric="verify", unit="us", case=CASE, **where):
    held = replace(WHERE, **where)
    return [
        schema.Measurement.of(
            case, metric, unit, [value], replace(held, date=f"2026-{1 + n // 28:02}-{1 + n % 28:02}T00:00:00Z", treemla=f"c{n}")
        )
        for n, value in enumerate(values)
    ]  # fmt: skip


def noisy(count, level=100.0, spread=0.01, seed=0):
    noise = random.Random(seed)
    return [level * math.exp(noise.gauss(0, spread)) for _ in range(count)]


def test_a_flat_history_has_no_step():
    found = [trend.steps(noisy(60, spread=spread, seed=seed)) for seed in range(40) for spread in (0.01, 0.02)]
    assert sum(map(bool, found)) <= 1


def test_a_step_of_five_percent_shows_after_four_nights_where_it_happened():
    for seed in range(10):
        first, *_ = trend.steps(noisy(30, seed=seed) + noisy(4, 105.0, seed=100 + seed))
        assert abs(first.index - 30) <= 1 and 0.03 < first.change < 0.07


def test_steps_up_and_down_are_both_found():
    found = trend.steps(noisy(20) + noisy(20, 110.0, seed=1) + noisy(20, 95.0, seed=2))
    assert [round(step.change, 1) for step in found] == [0.1, -0.1]


def test_small_steps_and_lone_outliers_are_none():
    assert trend.steps(noisy(30) + noisy(30, 102.0, seed=1)) == []
    assert trend.steps([*noisy(15), 160.0, *noisy(15, seed=1)]) == []


@pytest.mark.parametrize("value", [math.nan, 0.0, -1.0, math.inf])
def test_values_that_are_no_times_are_an_error(value):
    with pytest.raises(ValueError, match="positive finite"):
        trend.steps([1.0, value])


def test_history_names_the_commit_of_a_step_and_does_not_fail():
    made = history.history(runs(noisy(20) + noisy(10, 120.0, seed=1)), "c65536")
    assert made.exit is Exit.PASS and "c20" in made.found[0].text
    assert history.history(runs([1.0]), "no such case").exit is Exit.NOTHING_MEASURED


def test_history_keeps_machines_apart_and_sorts_by_date():
    mixed = runs([1.0, 2.0]) + runs([9.0], fingerprint="ffffffffffff")
    made = history.history(mixed[::-1], "verify")
    assert sorted(tuple(finding.data["values"]) for finding in made.found) == [(1.0, 2.0), (9.0,)]


@pytest.mark.parametrize(
    ("base", "head", "code"),
    [
        (noisy(4), noisy(4, seed=9), Exit.PASS),
        (noisy(4), noisy(4, 108.0, seed=9), Exit.FAILED),
        (noisy(4), noisy(4, 80.0, seed=9), Exit.PASS),
        (noisy(2), noisy(9), Exit.AMBIGUOUS),
        (noisy(4, spread=0.1), noisy(4, spread=0.1, seed=9), Exit.AMBIGUOUS),
    ],
)
def test_runs_beside_runs(base, head, code):
    assert history.compare(runs(base), runs(head)).exit is code


def test_more_tokens_a_second_are_no_slowdown():
    slow, fast = noisy(4), noisy(4, 120.0, seed=1)
    rate = {"metric": "engine", "unit": "tokens/s"}
    assert history.compare(runs(slow, **rate), runs(fast, **rate)).exit is Exit.PASS
    assert history.compare(runs(fast, **rate), runs(slow, **rate)).exit is Exit.FAILED


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (runs(noisy(4), fingerprint="ffffffffffff"), Exit.BASELINE_MISSING),
        (runs(noisy(4), unit="clocks"), Exit.BASELINE_MISSING),
        (runs(noisy(4), case="verify-x1"), Exit.NOTHING_MEASURED),
    ],
)
def test_foreign_machines_swapped_units_and_missing_cases_are_no_pass(head, code):
    made = history.compare(runs(noisy(4)), head)
    assert made.exit is code


def test_the_commands_read_files_and_say_what_is_wrong_with_them(tmp_path, capsys):
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    schema.dump(good, runs(noisy(4)))
    bad.write_text('{"case": NaN}\n')
    assert cli.main(["compare", "--base", str(good), "--head", str(good)]) == Exit.PASS
    assert cli.main(["history", "verify", "--from", str(good)]) == Exit.PASS
    deep, binary = tmp_path / "deep.jsonl", tmp_path / "binary.jsonl"
    deep.write_text("[" * 99_999)
    binary.write_bytes(b"\xff\xfe")
    for path in (bad, deep, binary, tmp_path, tmp_path / "absent"):
        assert cli.main(["compare", "--base", str(good), "--head", str(path)]) == Exit.BASELINE_MISSING
        assert path.name in capsys.readouterr().out


@pytest.mark.parametrize("data", [{"parts": 3}, {"parts": {"base": {}}}, {"us": {"head": ["x"]}}])
def test_explain_says_which_figures_it_cannot_read(tmp_path, data, capsys):
    path = tmp_path / "gate.json"
    path.write_text(Findings("gate", (Finding(CASE, "same", Exit.PASS, data=data),)).as_json())
    assert cli.main(["explain", CASE, "--from", str(path)]) == Exit.BASELINE_MISSING
    assert "expected the figures that gate writes" in capsys.readouterr().out
