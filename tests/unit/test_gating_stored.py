"""The gate beside stored figures: what blocks, what advises, what expires, and what a quarantine excuses."""

from datetime import timedelta

import pytest
from fake_gate import CASE, TODAY, US, finding, stored
from fake_sides import FINGERPRINT, Machine

from treemla.gate import baseline, cli, gating, quarantine
from treemla.gate.cases import GATED_CASES
from treemla.gate.exits import Exit


@pytest.mark.parametrize(("starts", "code"), [(12, Exit.FAILED), (11, Exit.PASS)])
def test_stored_times_block_with_twelve_starts_and_advise_with_fewer(gate, checkout, starts, code):
    head, _, _ = checkout
    stored("verify", FINGERPRINT, 47.0, starts).dump(head / "perf_baselines")
    got, made, _ = gate(Machine(US))
    assert got == code
    assert ("advisory: 11 of 12 machine starts" in finding(made)["cells"]["vs stored"]) == (starts == 11)


def test_fp8_rows_are_not_held_to_a_kernel_that_rounds_more(gate, checkout):
    head, _, _ = checkout
    fp8 = next(case for case in GATED_CASES if case.fp8_kv)
    baseline.path_of("triton_ratio", "sm_90", fp8.id, head / "perf_baselines").unlink()
    code, made, _ = gate(Machine(US), cases=[fp8.id])
    assert code == Exit.PASS and set(finding(made, fp8.id)["data"]["us"]) == {"head", "base"}
    assert gate(Machine({**US, "head": 52.5}), cases=[fp8.id])[0] == Exit.FAILED


def test_stored_times_of_another_machine_are_not_compared(gate, checkout):
    head, _, _ = checkout
    stored("verify", "ffffffffffff", 30.0).dump(head / "perf_baselines")
    code, made, _ = gate(Machine(US))
    assert code == Exit.PASS and "vs stored" not in finding(made)["cells"]


@pytest.mark.parametrize(("overdue", "code"), [(0, Exit.PASS), (14, Exit.PASS), (15, Exit.BASELINE_MISSING)])
def test_stored_times_expire_after_a_grace(gate, checkout, overdue, code):
    head, _, _ = checkout
    until = (TODAY - timedelta(days=overdue)).isoformat()
    stored("verify", FINGERPRINT, 50.0, until=until).dump(head / "perf_baselines")
    got, made, _ = gate(Machine(US))
    assert got == code and ("days past" in finding(made)["text"]) == (overdue > 0)


def test_an_edited_baseline_is_not_believed(gate, checkout):
    head, _, _ = checkout
    path = baseline.path_of("triton_ratio", "sm_90", CASE.id, head / "perf_baselines")
    path.write_text(path.read_text().replace('"median": 0.004', '"median": 0.008'))
    code, _, said = gate(Machine(US))
    assert code == Exit.BASELINE_MISSING and "from the sessions" in said


def entry(expires, case=CASE.id):
    return quarantine.Entry(case, "ann", "noisy", "https://example.org/1", TODAY - timedelta(days=5), expires)


def test_a_quarantined_slowdown_is_reported_and_passes_until_it_expires(gate, checkout):
    *_, entries = checkout
    entries.append(entry(TODAY))
    code, made, _ = gate(Machine({**US, "head": 52.5}))
    assert code == Exit.PASS and finding(made)["verdict"] == "quarantined (regression)"
    entries[0] = entry(TODAY - timedelta(days=1))
    assert gate(Machine(US))[0] == Exit.FAILED


def test_a_quarantine_that_does_not_load_stops_the_gate_before_it_measures(monkeypatch, tmp_path):
    def broken():
        raise baseline.BrokenBaseline("quarantine.toml: broken")

    monkeypatch.setattr(quarantine, "load", broken)
    monkeypatch.setattr(gating, "this_machine", lambda _: pytest.fail("went on"))
    assert cli.main(["gate", "--base", str(tmp_path)]) == Exit.BASELINE_MISSING


def test_no_quarantine_excuses_a_wrong_result_or_a_missing_baseline(gate, checkout):
    head, _, entries = checkout
    entries.append(entry(TODAY))
    assert gate(Machine(US, faults={"head": ("prepare", "wrong")}))[0] == Exit.FAILED
    baseline.path_of("triton_ratio", "sm_90", CASE.id, head / "perf_baselines").unlink()
    assert gate(Machine({**US, "head": 52.5}))[0] == Exit.BASELINE_MISSING


def test_what_stored_figures_only_advise_is_said_and_is_no_regression(gate, checkout):
    head, _, _ = checkout
    stored("verify", FINGERPRINT, 47.0, starts=3).dump(head / "perf_baselines")
    code, made, said = gate(Machine(US))
    assert code == Exit.PASS and finding(made)["verdict"] == "advised"
    assert "allowed by 3 stored sessions" in said and "regression" not in said and "more" not in said
    baseline.path_of("triton_ratio", "sm_90", CASE.id, head / "perf_baselines").unlink()
    code, made, _ = gate(Machine(US), "--no-triton", has_base=False)
    assert code == Exit.BASELINE_MISSING and "allowed by 3 stored sessions" in finding(made)["text"]


def test_times_that_are_stored_for_another_class_of_machine_are_said_to_be_left_out(gate, checkout):
    head, _, _ = checkout
    told = "No stored times are of this class of machine"
    stored("verify", "ffffffffffff", 30.0).dump(head / "perf_baselines")
    assert any(told in note for note in gate(Machine(US))[1]["notes"])
    stored("verify", FINGERPRINT, 50.0).dump(head / "perf_baselines")
    assert not any(told in note for note in gate(Machine(US))[1]["notes"])
