"""The gate on SGLang's Engine, on made-up rates: beside Triton, beside stored figures, and files that tell nothing."""

import json
from dataclasses import asdict, replace
from datetime import date

import jsonschema
import pytest
from e2e import report
from fake_sides import FINGERPRINT, HERE, WHERE

from treemla.gate import baseline, bless, cli, engine, schema
from treemla.gate.baseline import Baseline, Session
from treemla.gate.cases import GATED_ENGINES
from treemla.gate.exits import Exit

RATES = {4096: (260.0, 145.0), 16_384: (155.0, 44.0), 65_536: (140.0, 11.6)}  # treemla, Triton: tokens a second
SLOW = GATED_ENGINES[-1]


def stored(metric, machine, case, value, starts=12, anchor=None):
    sessions = [Session(value, f"{n:012x}", "a" * 40, "2026-11-01") for n in range(starts)]
    return Baseline.of(
        case.id, metric, baseline.UNITS[metric], machine, sessions, anchor=anchor or value, blessed="b-0001",
        valid_until="2027-01-01",
    )  # fmt: skip


@pytest.fixture
def gate(monkeypatch, tmp_path, capsys):
    """Runs the verb on a file a session; each a change of treemla's rate, and contexts to leave out."""
    root, find = tmp_path / "perf_baselines", baseline.find
    monkeypatch.setattr(baseline, "find", lambda *of, root=root: find(*of[:3], root))
    monkeypatch.setattr(engine, "this_machine", lambda _: HERE)
    for case in GATED_ENGINES:
        ours, triton = RATES[case.context]
        stored("engine_ratio", "sm_90", case, triton / ours).dump(root)

    def gate(*changes, without=(), where=WHERE):
        files = []
        for number, change in enumerate(changes):
            made = [
                schema.Measurement.of(f"{case.id}-{side}", "decode", "tokens/s", [rate * factor] * 4, where)
                for case in GATED_ENGINES
                for side, rate, factor in zip(("treemla", "triton"), RATES[case.context], (change, 1.0), strict=True)
                if (case.context, side) not in without
            ]
            files.append(tmp_path / f"e2e-{number}.jsonl")
            schema.dump(files[-1], made)
        out = tmp_path / "engine.json"
        asked = ["--from", *map(str, files), "--out", str(tmp_path / "out"), "--json", str(out)]
        return cli.main(["engine", *asked]), json.loads(out.read_text()), capsys.readouterr().out

    gate.root = root
    return gate


def test_rates_like_the_stored_ones_pass_and_leave_sessions_that_bless_reads(gate, tmp_path):
    code, made, said = gate(1.0)
    assert code == Exit.PASS and {f["verdict"] for f in made["found"]} == {"same"}
    assert "140.0" in said and "12.07x faster" in said
    runs = schema.load(tmp_path / "out/sessions.jsonl")
    assert {run.metric for run in runs} == {"engine", "engine_ratio"} and len(runs) == 6
    assert {run.where.fingerprint for run in runs} == {FINGERPRINT}
    assert next(run.value for run in runs if run.case == SLOW.id and run.metric == "engine") == pytest.approx(
        1000 / 140
    )


def test_what_the_engine_suite_writes_is_what_is_judged():
    short, long = {"seconds": 1.0, "tokens": 32, "steps": 4}, {"seconds": 2.0, "tokens": 160, "steps": 20}
    records = [
        {
            "key": f"rates-{start}-{side}-{case.context}-0",
            "context": case.context,
            "backend": side,
            "timed": [short, long],
        }
        for start in (0, 1)
        for case in GATED_ENGINES
        for side in ("treemla", "triton")
    ]
    runs = report.measurements(records, WHERE)
    schema_of_results = json.loads(schema.SCHEMA.read_text())
    for run in runs:
        jsonschema.validate(json.loads(json.dumps(asdict(run))), schema_of_results)
    for case in GATED_ENGINES:
        assert engine.session_of(case, runs) == engine.Session((1000 / 128,) * 2, (1000 / 128,) * 2)


def test_sessions_of_three_starts_become_the_baseline_that_is_judged_by(gate, tmp_path):
    gate(1.0)
    runs = [
        replace(run, where=replace(run.where, start=f"{n:012x}"))
        for n in range(3)
        for run in schema.load(tmp_path / "out/sessions.jsonl")
    ]
    bless.bless(SLOW.id, runs, "first figures", date(2026, 12, 1), machine=FINGERPRINT, root=gate.root)
    assert baseline.find("engine", FINGERPRINT, SLOW.id).median == pytest.approx(1000 / 140)
    assert baseline.find("engine_ratio", "sm_90", SLOW.id).blessed == "b-0002"
    assert "advisory: 3 of 12" in gate(1.0)[2]


def test_one_slow_session_asks_for_two_more_and_their_median_decides(gate):
    assert gate(0.85)[0] == Exit.AMBIGUOUS
    assert gate(0.85, 0.85, 0.86)[0] == Exit.FAILED
    assert gate(0.85, 1.0, 0.99)[0] == Exit.PASS
    assert gate(0.96)[0] == Exit.PASS


def test_stored_times_block_from_twelve_starts_on_and_advise_before(gate):
    triton_slower_too = stored("engine_ratio", "sm_90", SLOW, 1.0)
    triton_slower_too.dump(gate.root)
    stored("engine", FINGERPRINT, SLOW, 1000 / 140, starts=11).dump(gate.root)
    code, made, _ = gate(0.85, 0.85, 0.85)
    found = next(f for f in made["found"] if f["name"] == SLOW.id)
    assert found["exit"] == "PASS" and "advisory: 11 of 12" in found["cells"]["vs stored"]
    stored("engine", FINGERPRINT, SLOW, 1000 / 140).dump(gate.root)
    code, made, _ = gate(0.85, 0.85, 0.85)
    found = next(f for f in made["found"] if f["name"] == SLOW.id)
    assert code == Exit.FAILED and "119.0 tokens/s, 140.0 are stored" in found["text"]


def test_small_steps_that_added_up_are_red(gate):
    stored("engine_ratio", "sm_90", SLOW, 11.6 / 130, anchor=11.6 / 150).dump(gate.root)
    code, made, _ = gate(0.95, 0.95, 0.95)
    assert code == Exit.FAILED and [f["name"] for f in made["found"] if f["exit"] == "FAILED"] == [SLOW.id]


def test_a_context_or_side_that_was_not_measured_is_exit_3(gate):
    code, made, _ = gate(1.0, without=[(65_536, "triton")])
    assert code == Exit.NOTHING_MEASURED
    assert next(f for f in made["found"] if f["name"] == SLOW.id)["verdict"] == "not measured"


def test_without_a_stored_ratio_a_case_is_not_passed(gate):
    baseline.path_of("engine_ratio", "sm_90", SLOW.id, gate.root).unlink()
    code, _, said = gate(1.0)
    assert code == Exit.BASELINE_MISSING and "bless" in said


@pytest.mark.parametrize("other", [{"gpu": "NVIDIA RTX PRO 6000"}, {"driver": "999.1"}])
def test_runs_of_another_machine_are_no_runs_of_this_one(gate, other):
    code, _, said = gate(1.0, where=replace(WHERE, **other))
    assert code == Exit.BASELINE_MISSING and "expected runs of this machine" in said


def test_a_file_that_is_not_there_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(engine, "this_machine", lambda _: HERE)
    assert cli.main(["engine", "--from", str(tmp_path / "none.jsonl")]) == Exit.BASELINE_MISSING
    assert "none.jsonl" in capsys.readouterr().out
