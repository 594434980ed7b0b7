"""The driver of tests/e2e with an Engine that stands for SGLang's: what it records, resumes, and reports as failed."""

import json
import os
import sys
from pathlib import Path

import pytest
from e2e import report, run

from treemla.gate import schema

FAKE = str(Path(__file__).parent / "fake_engine")


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """Run the driver's command line; returns its exit code and the records by key."""
    monkeypatch.setattr(run, "build_kernels", lambda: None)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([FAKE, *filter(None, [os.environ.get("PYTHONPATH")])]))

    def call(*stages):
        monkeypatch.setattr(sys, "argv", ["run.py", "--out", str(tmp_path), "--work", str(tmp_path / "work"), *stages])
        code = run.main()
        lines = (tmp_path / "results.jsonl").read_text().splitlines()
        return code, {record["key"]: record for record in map(json.loads, lines)}

    return call


def test_every_stage_runs_and_two_equal_engines_pass(drive, tmp_path, capsys):
    code, records = drive()
    said = capsys.readouterr().out
    assert code == 0, said
    assert {key for key in records if key.startswith("answers")} == {run.answers_key(*one) for one in run.ANSWERS}
    assert {"rates-0-triton", "rates-1-treemla", "profile-treemla-65536"} <= set(records)
    assert said.count("ok  ") == 1 + len(report.RUNS) + len(report.FAULTS)
    measured = {(m.case, m.metric): m for m in schema.load(tmp_path / "e2e.jsonl")}
    rate = measured["engine-b1-c65536-ngram9-61x48-treemla", "decode"]
    assert rate.value == pytest.approx(100) and len(rate.samples) == 2 * run.STARTS
    before = (tmp_path / "results.jsonl").stat().st_mtime_ns
    assert drive()[0] == 0 and (tmp_path / "results.jsonl").stat().st_mtime_ns == before  # nothing is done twice


def test_an_engine_that_does_not_start_fails_the_stage_with_its_log(drive, monkeypatch, capsys):
    drive("rates-1")
    monkeypatch.setenv("FAKE_DIES", "treemla")
    code, records = drive("correctness", "verdict")
    said = capsys.readouterr().out
    assert code == 1
    assert "small-ngram-treemla: ended with code 3" in said and "| a traceback in the log" in said
    assert "answers-decode-triton" in records and "answers-decode-treemla" not in records
    assert "FAILED  decode: not run" in said


def test_a_reference_that_does_not_start_ends_the_stage(drive, monkeypatch, capsys):
    drive("rates-1")
    monkeypatch.setenv("FAKE_DIES", "all")
    code, records = drive("correctness")
    assert code == 1 and not any(key.startswith("answers") for key in records)
    assert "small-ngram-treemla" not in capsys.readouterr().out


@pytest.mark.parametrize("fault", report.FAULTS)
def test_a_fault_that_changes_nothing_is_a_failure(drive, fault):
    records = list(drive("correctness")[1].values())
    (right,) = (r for r in records if r["key"] == "answers-ngram-treemla")
    for record in records:
        if record["fault"] == fault:
            record["answers"] = {name: right["answers"][name] for name in record["answers"]}
    wrong = {what: complaints for what, _, complaints in report.judge(records) if complaints}
    assert set(wrong) == {f"fault {fault}"} and wrong[f"fault {fault}"] == ["noticed 0 times, expected 3"]
