"""Baselines and how they are made: recorded runs, a reason, and never quietly a looser figure."""

import json
from dataclasses import replace
from datetime import date
from pathlib import Path

import jsonschema
import pytest
from fake_sides import FINGERPRINT, WHERE
from hypothesis import given
from hypothesis import strategies as st

from treemla.gate import baseline, bless, cli, schema
from treemla.gate.bless import Refused
from treemla.gate.exits import Exit

CASE = "verify-b1-c65536-t9-h8-p1-bf16"
TODAY = date(2026, 12, 1)
COMMITTED = Path(__file__).parents[2] / "perf_baselines"


def run(value, start, metric="verify", **where):
    unit = "us" if metric == "verify" else "ratio"
    day = f"2026-11-{10 + start:02}T00:00:00Z"
    held = replace(WHERE, **{"start": f"{start:012x}", "date": day, **where})
    return schema.Measurement.of(CASE, metric, unit, [value] * 3, held)


def runs(*values, **where):
    return [run(value, start, **where) for start, value in enumerate(values)]


@pytest.fixture
def make(tmp_path):
    def make(taken, reason="first figures", **more):
        return bless.bless(CASE, taken, reason, TODAY, machine=FINGERPRINT, root=tmp_path, **more)

    make.root = tmp_path
    return make


def test_three_runs_become_a_file_that_loads_and_a_line_of_the_ledger(make):
    made = make([*runs(50.0, 51.0, 50.5), *(run(0.004, n, "triton_ratio") for n in range(3))])
    held = baseline.find("verify", FINGERPRINT, CASE, make.root)
    assert (held.median, held.anchor, held.valid_until) == (50.5, 50.5, "2027-03-31")
    assert baseline.find("triton_ratio", "sm_90", CASE, make.root).median == 0.004
    assert [b.id for b in made] == ["b-0001", "b-0002"] == [b.id for b in bless.read_ledger(make.root / bless.LEDGER)]
    assert held.blessed == "b-0001"


@pytest.mark.parametrize(
    ("taken", "said"),
    [
        (runs(50.0, 50.0), "3 machine starts or more, got 2"),
        ([run(50.0, 1)] * 3, "got 1"),
        ([*runs(50.0, 50.0), run(50.0, 7, fingerprint="ffffffffffff")], "expected runs of machine class"),
        ([*runs(50.0, 50.0), run(50.0, 7, fingerprint=None)], "expected runs of machine class"),
        (runs(50.0, 50.0, 50.0, treemla="abc-dirty"), "of a commit"),
        ([replace(r, case="verify-x") for r in runs(50.0, 50.0, 50.0)], "none of the 3 runs"),
        ([], "none of the 0 runs"),
        ([*runs(50.0, 50.0), replace(run(50.0, 7), unit="clocks")], "expected runs in us, got some in clocks"),
        ([replace(r, unit="clocks") for r in runs(50.0, 50.0, 50.0)], "expected runs in us, got some in clocks"),
    ],
)
def test_few_foreign_or_unknown_runs_are_refused_and_nothing_is_written(make, taken, said):
    with pytest.raises(Refused, match=said):
        make(taken)
    assert not list(make.root.rglob("*"))


def test_no_reason_no_baseline(make):
    with pytest.raises(Refused, match="--reason"):
        make(runs(50.0, 50.0, 50.0), reason="  ")


def test_a_faster_figure_tightens_and_moves_the_anchor(make):
    make(runs(50.0, 50.0, 50.0))
    (made,) = make(runs(40.0, 40.0, 40.0), reason="faster")
    held = baseline.find("verify", FINGERPRINT, CASE, make.root)
    assert (made.old, made.new, held.median, held.anchor) == (50.0, 40.0, 40.0, 40.0)


def test_a_slower_figure_keeps_the_anchor_and_beyond_five_percent_needs_an_issue(make):
    make(runs(50.0, 50.0, 50.0))
    make(runs(52.0, 52.0, 52.0), reason="driver")
    assert baseline.find("verify", FINGERPRINT, CASE, make.root).anchor == 50.0
    slower = runs(53.0, 53.0, 53.0)
    with pytest.raises(Refused, match=r"6\.0% above the best ever blessed"):
        make(slower, reason="features")
    for no_link in ("", "later", "https://", "https://example.org/ 1"):
        with pytest.raises(Refused, match="--issue: expected a link"):
            make(slower, reason="features", issue=no_link)
    make(slower, reason="features", issue="https://example.org/1")
    assert baseline.find("verify", FINGERPRINT, CASE, make.root).anchor == 53.0


def test_runs_of_the_same_level_add_up_once_each(make):
    make(runs(50.0, 50.1, 50.2))
    make([run(50.1, start) for start in range(2, 7)], reason="more runs")
    held = baseline.find("verify", FINGERPRINT, CASE, make.root)
    assert len(held.sessions) == len({s.start for s in held.sessions}) == 7
    assert "7 of 12" in held.why_advisory


def test_a_ledger_that_was_tampered_with_is_not_appended_to(make):
    make(runs(50.0, 50.0, 50.0))
    (make.root / bless.LEDGER).write_text("{}\n")
    with pytest.raises(Refused, match="expected a blessing"):
        make(runs(40.0, 40.0, 40.0))


@pytest.mark.parametrize("name", ["..", "../x", "a/b", "", "/tmp/x", ".hidden", "x\n"])
def test_no_name_leads_out_of_the_folder_of_baselines(tmp_path, name):
    for machine, case in ((name, CASE), (FINGERPRINT, name)):
        with pytest.raises(baseline.BrokenBaseline, match="expected a name"):
            baseline.path_of("verify", machine, case, tmp_path)


@pytest.mark.parametrize(
    "change", [{"case": "../../x"}, {"case": "verify-x"}, {"machine": "../x"}, {"issue": ""}, {"reason": " "}]
)
def test_wrong_arguments_of_the_command_are_wrong_usage(tmp_path, monkeypatch, change, capsys):
    monkeypatch.setattr(bless.baseline, "path_of", lambda *_: pytest.fail("went on"))
    schema.dump(tmp_path / "a.jsonl", runs(50.0, 50.0, 50.0))
    given = {"case": CASE, "machine": FINGERPRINT, "reason": "why", "issue": "https://example.org/1", **change}
    options = [f"--{name}={given[name]}" for name in ("machine", "reason", "issue")]
    assert cli.main(["bless", given["case"], "--from", str(tmp_path / "a.jsonl"), *options]) == Exit.USAGE
    assert next(iter(change)) in capsys.readouterr().out


def test_a_ledger_that_is_no_text_is_refused(make):
    (make.root / bless.LEDGER).write_bytes(b"\xff\xfe")
    with pytest.raises(Refused, match="UTF-8"):
        make(runs(50.0, 50.0, 50.0))


@pytest.fixture
def stored(make):
    make(runs(50.0, 51.0, 50.5))
    return baseline.path_of("verify", FINGERPRINT, CASE, make.root), make.root


@pytest.mark.parametrize(
    "change",
    [
        {"median": 60.0}, {"mad": 9.0}, {"anchor": -1.0}, {"anchor": None}, {"machine": "ffffffffffff"}, {"metric": "triton_ratio"},
        {"sessions": []}, {"sessions": [{"value": 1}]}, {"valid_until": "soon"}, {"extra": 1}, {"unit": "clocks"},
        {"case": 5}, {"anchor": "1"}, {"blessed": None}, {"sessions": [{"value": 50.0, "start": 1, "commit": "a", "date": "b"}]},
        {"case": "another"},
    ],
)  # fmt: skip
def test_a_file_edited_by_hand_does_not_load(stored, change):
    path, root = stored
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(baseline.BrokenBaseline):
        baseline.load(path, root)


@given(st.binary(max_size=200))
def test_no_bytes_are_taken_for_a_baseline(tmp_path_factory, junk):
    path = tmp_path_factory.mktemp("junk") / "x.json"
    path.write_bytes(junk)
    with pytest.raises(baseline.BrokenBaseline):
        baseline.load(path)


def test_what_is_written_is_as_the_schema_says(stored):
    path, _ = stored
    jsonschema.validate(json.loads(path.read_text()), json.loads(baseline.SCHEMA.read_text()))


def test_every_committed_baseline_loads_and_its_blessing_is_in_the_ledger():
    ledger = {b.id for b in bless.read_ledger(COMMITTED / bless.LEDGER)}
    for folder in baseline.FOLDERS.values():
        for path in (COMMITTED / folder).rglob("*.json"):
            assert baseline.load(path).blessed in ledger
