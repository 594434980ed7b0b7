"""The driver of tests/e2e with an Engine that stands for SGLang's: what it records, resumes, and reports as failed."""

import copy
import json
import os
import sys
from pathlib import Path

import pytest
from e2e import judge, run

from treemla.gate import schema

FAKE = str(Path(__file__).parent / "fake_engine")


class Driver:
    """Runs the driver's command line in a folder of its own."""

    def __init__(self, folder, monkeypatch):
        self.results, self.folder, self.monkeypatch = folder / "results.jsonl", folder, monkeypatch
        monkeypatch.setattr(run, "build_kernels", lambda: None)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([FAKE, *filter(None, [os.environ.get("PYTHONPATH")])]))

    def __call__(self, *stages):
        """Exit code, and the records by key in the order in which they were written."""
        out = ["--out", str(self.folder), "--work", str(self.folder / "work")]
        self.monkeypatch.setattr(sys, "argv", ["run.py", *out, *stages])
        code = run.main()
        lines = self.results.read_text().splitlines() if self.results.exists() else []
        return code, {record["key"]: record for record in map(json.loads, lines)}


@pytest.fixture
def drive(tmp_path, monkeypatch):
    return Driver(tmp_path, monkeypatch)


ALL = [one for asked in run.ANSWERS.values() for one in asked]


def test_every_stage_runs_and_two_equal_engines_pass(drive, tmp_path, capsys):
    code, records = drive()
    said = capsys.readouterr().out
    assert code == 0, said
    assert {key for key in records if key.startswith("answers")} == {run.answers_key(*one) for one in ALL}
    assert {"rates-0-triton-4096-1", "rates-1-treemla-65536-0", "profile-treemla-65536"} <= set(records)
    assert said.count("ok  ") == len(judge.JUDGED)
    measured = {(m.case, m.metric): m for m in schema.load(tmp_path / "e2e.jsonl")}
    rate = measured["engine-b1-c65536-ngram9-61x48-treemla", "decode"]
    assert rate.value == pytest.approx(100) and len(rate.samples) == run.TURNS * run.STARTS
    before = (tmp_path / "results.jsonl").stat().st_mtime_ns
    assert drive()[0] == 0 and (tmp_path / "results.jsonl").stat().st_mtime_ns == before  # nothing is done twice


def test_large_engines_are_timed_in_turns_when_the_small_ones_are_gone(drive):
    drive("rates", "correctness")
    lines = (drive.results).read_text().splitlines()
    keys = [json.loads(line)["key"] for line in lines]
    assert [key.startswith("answers") for key in keys] == sorted(
        (key.startswith("answers") for key in keys), reverse=True
    )
    of_first = [key for key in keys if key.startswith("rates-0") and "-65536-" in key]
    assert [key.split("-")[2] for key in of_first] == ["triton", "treemla", "treemla", "triton"]
    assert keys[-4:] == [
        f"profile-{backend}-{context}" for context in run.PROFILED for backend in ("treemla", "triton")
    ]


def test_what_was_cut_off_goes_on_at_the_next_timing(drive):
    assert drive("rates")[0] == 0
    path = drive.results
    lines = path.read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["key"] != "rates-1-treemla-16384-1" and "profile" not in line]
    path.write_text("\n".join(kept) + "\n")
    code, records = drive("rates")
    assert code == 0 and len(records) == len(lines)
    assert list(records)[: len(kept)] == [json.loads(line)["key"] for line in kept]
    again = [key for key in list(records)[len(kept) :] if key.startswith("rates")]
    assert again == ["rates-1-treemla-16384-1"]


def test_nothing_begins_that_would_end_too_late(drive, capsys):
    code, records = drive("--seconds", "1", "rates")
    said = capsys.readouterr().out
    assert code == 1 and not records
    assert "rates-0-triton-65536-0: not begun" in said and "start 1: not begun" in said


def test_an_engine_that_does_not_start_fails_the_stage_with_its_log(drive, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_DIES", "treemla")
    code, records = drive("correctness", "verdict")
    said = capsys.readouterr().out
    assert code == 1
    assert "small-ngram-treemla: ended with code 3" in said and "| a traceback in the log" in said
    assert "answers-decode-triton" in records and "answers-decode-treemla" not in records
    assert "FAILED  decode: not run" in said


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """The records of all small engines, once."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return Driver(tmp_path_factory.mktemp("answered"), monkeypatch)("correctness", "more")[1]


@pytest.fixture
def wrong_after(answered):
    """Judge the records after a change to them; what is wrong, by what was judged."""

    def change(function):
        records = copy.deepcopy(answered)
        function(records)
        return {what: complaints for what, _, complaints in judge.judge(list(records.values())) if complaints}

    return change


@pytest.mark.parametrize("fault", [*judge.FAULTS, "holder"])
def test_a_fault_that_changes_nothing_is_a_failure(wrong_after, fault):
    run_name = "churn-compact" if fault == "holder" else "ngram"

    def as_right(records):
        right, faulty = (records[run.answers_key(run_name, "treemla", which)] for which in (None, fault))
        faulty["answers"] = {name: right["answers"][name] for name in faulty["answers"]}

    assert wrong_after(as_right) == {f"fault {fault}": ["noticed 0 times, expected 3"]}


def without(lines, what):
    return [line for line in lines if what not in line]


CHURN, SHADOW = "answers-churn-compact-treemla", "answers-shadow-treemla-shadow"
LATE = "treemla: nothing moved: 90 of 100 pages are free, cached or a session's"
BEYOND = "treemla: beyond the tolerance in step 32 (1 such steps so far): treemla in 1 layers"


@pytest.mark.parametrize(
    ("key", "change", "what", "complaint"),
    [
        (CHURN, lambda r: r.update(log=without(r["log"], "moved")), "churn", "0 compactions, expected 5"),
        (CHURN, lambda r: r.update(log=without(r["log"], "held slots: ")), "churn", "0 figures of ordered slots"),
        (CHURN, lambda r: r["log"].append(LATE), "churn", "1 lines of slots that nobody was known to hold"),
        (
            CHURN,
            lambda r: [a.update(cached=0) for a in r["answers"].values()],
            "churn",
            "0 tokens from the cache after",
        ),
        ("answers-churn-treemla", lambda r: r["log"].append("treemla: 4 held slots: "), "churn", "no stock slots"),
        (SHADOW, lambda r: r.update(log=without(r["log"], "compared")), "shadow", "0 layers compared, expected 100"),
        (SHADOW, lambda r: r["log"].append(BEYOND), "shadow", "beyond the tolerance in step 32"),
        (f"{SHADOW}-causal", lambda r: r.update(log=[BEYOND]), "shadow of fault causal", "no alarm"),
    ],
)
def test_evidence_that_is_missing_is_a_failure(wrong_after, key, change, what, complaint):
    wrong = wrong_after(lambda records: change(records[key]))
    assert set(wrong) == {what} and any(complaint in one for one in wrong[what])
