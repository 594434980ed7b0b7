"""The whole gate on made-up times: planted changes, missing baselines, troubled machines, and their exit codes."""

import subprocess
from dataclasses import replace

import pytest
from fake_gate import CASE, US, finding, stored
from fake_sides import COOL, CRASH, FINGERPRINT, Machine

from treemla.gate import baseline, cli, hygiene, schema, trees
from treemla.gate.cases import GATED_CASES, chosen
from treemla.gate.exits import Exit, InvalidEnvironment


def test_no_change_passes_after_three_processes_and_says_what_would_be_noticed(gate):
    machine = Machine(US)
    code, made, said = gate(machine)
    assert code == Exit.PASS and finding(made)["data"]["processes"] == 3
    assert f"machine class {FINGERPRINT}, start aaaaaaaaaaaa" in said  # what bless asks for, and tells apart
    assert "Detectable today: +" in said and said.strip().splitlines()[-1].startswith("gate: PASS")


def test_a_five_percent_slowdown_is_red_and_says_by_how_much(gate):
    code, made, said = gate(Machine({**US, "head": 52.5}))
    assert code == Exit.FAILED
    assert finding(made)["verdict"] == "regression" and "beside the base" in finding(made)["text"]
    assert finding(made)["data"]["processes"] == 8
    assert "FAILED: " + CASE.id in said


def test_three_times_running_the_same_program_is_the_same(gate):
    slow = {"head": 500.0, "base": 500.0}  # no case is near its floor
    for seed in range(3):
        code, made, _ = gate(Machine(slow, spread=0.007, seed=seed), verb="selfcheck", cases=["verify", "plan"])
        assert code == Exit.PASS
        assert {f["verdict"] for f in made["found"]} == {"same"} and len(made["found"]) == len(GATED_CASES)


def test_a_program_faster_than_itself_fails_the_selfcheck(gate):
    assert gate(Machine({**US, "head": 45.0}), verb="selfcheck")[0] == Exit.FAILED
    assert gate(Machine({**US, "head": 45.0}), verb="gate")[0] == Exit.PASS


def test_a_selfcheck_leaves_sessions_only_of_a_machine_that_can_be_trusted(gate, tmp_path):
    kept = tmp_path / "out/sessions.jsonl"
    gate(Machine({**US, "head": 45.0}), verb="selfcheck")
    assert not kept.exists()
    gate(Machine(US), verb="selfcheck")
    assert {run.metric for run in schema.load(kept)} == {"verify"}


def test_the_plan_step_is_judged_beside_the_base_and_stored_times_and_not_beside_triton(gate, checkout, tmp_path):
    head, _, _ = checkout
    plan = GATED_CASES[-1]
    stored("plan", FINGERPRINT, 5.0, case=plan).dump(head / "perf_baselines")
    us = {"head": 5.0, "base": 5.0}
    code, made, _ = gate(Machine(us), cases=[plan.id])
    assert code == Exit.PASS and set(finding(made, plan.id)["data"]["parts"]) == {"vs base", "vs stored"}
    assert [(run.metric, run.unit) for run in schema.load(tmp_path / "out/sessions.jsonl")] == [("plan", "us")]
    for slower in ({**us, "head": 5.5}, {"head": 5.5, "base": 5.5}):  # than the base; than what is stored
        assert gate(Machine(slower), cases=[plan.id])[0] == Exit.FAILED


def test_triton_left_out_is_said_and_neither_started_nor_judged(gate, checkout):
    head, _, _ = checkout
    baseline.path_of("triton_ratio", "sm_90", CASE.id, head / "perf_baselines").unlink()
    machine = Machine(US)
    code, made, said = gate(machine, "--no-triton")
    assert code == Exit.PASS and set(machine.started) == {"head", "base"}
    assert "vs Triton" not in finding(made)["data"]["parts"] and "Triton was left out" in said


def test_a_machine_too_noisy_to_tell_is_ambiguous_and_no_pass(gate):
    code, made, _ = gate(Machine(US, spread=0.1, seed=5))
    assert code == Exit.AMBIGUOUS and "would not be noticed" in finding(made)["text"]


@pytest.mark.parametrize(
    ("side", "code"),
    [("head", Exit.FAILED), ("base", Exit.BASELINE_MISSING), ("triton", Exit.INVALID_ENVIRONMENT)],
)
def test_a_side_that_cannot_be_measured_has_its_own_exit_code(gate, side, code):
    got, made, _ = gate(Machine(US, faults={side: ("make", CRASH)}))
    assert got == code and side in finding(made)["text"]


def test_a_hot_gpu_is_an_environment_and_no_verdict(gate):
    hot = replace(COOL, slowdowns=("HwThermalSlowdown",))
    assert gate(Machine(US, readings=(COOL, hot)))[0] == Exit.INVALID_ENVIRONMENT


def test_a_case_that_lost_its_ratio_to_triton_is_exit_5(gate, checkout):
    head, _, _ = checkout
    baseline.path_of("triton_ratio", "sm_90", CASE.id, head / "perf_baselines").unlink()
    code, made, _ = gate(Machine(US))
    assert code == Exit.BASELINE_MISSING and "bless" in finding(made)["text"]


def test_a_baseline_that_the_head_removed_is_exit_5(gate, checkout):
    _, base, _ = checkout
    stored("verify", "ffffffffffff", 50.0).dump(base / "perf_baselines")
    code, made, _ = gate(Machine(US))
    assert code == Exit.BASELINE_MISSING and any(f["verdict"] == "removed" for f in made["found"])


def test_slower_beside_triton_is_red_though_the_base_is_as_slow(gate):
    slow = {**US, "head": 55.0, "base": 55.0}
    code, made, _ = gate(Machine(slow))
    assert code == Exit.FAILED and "faster than Triton" in finding(made)["text"]


def test_small_steps_that_added_up_are_red(gate, checkout):
    head, _, _ = checkout
    stored("verify", FINGERPRINT, 49.9, anchor=47.0).dump(head / "perf_baselines")
    code, made, _ = gate(Machine(US))
    assert code == Exit.FAILED and "small steps have added up" in finding(made)["text"]


def test_faster_than_the_bytes_allow_is_invalid(gate):
    code, made, _ = gate(Machine({**US, "head": 9.0, "base": 9.0}))
    assert code == Exit.FAILED and finding(made)["verdict"] == "invalid"


def test_a_busy_gpu_is_exit_4_and_its_files_are_written(gate, monkeypatch):
    def busy(*_):
        raise InvalidEnvironment("the GPU is busy")

    monkeypatch.setattr(hygiene, "alone", busy)
    code, made, said = gate(Machine(US))
    assert code == Exit.INVALID_ENVIRONMENT and made["exit"] == "INVALID_ENVIRONMENT" and "busy" in said


def test_a_base_may_be_a_commit_of_this_checkout(gate, checkout, monkeypatch):
    head, _, _ = checkout
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "base"]):
        subprocess.run(["git", "-C", str(head), *command], check=True)
    monkeypatch.setattr(trees, "REPO", head)
    assert gate(Machine(US), "--base", "HEAD")[0] == Exit.PASS


def test_without_a_base_a_checkout_stands_beside_itself_and_the_stored_figures_decide(gate, checkout):
    head, _, _ = checkout
    slow = {**US, "head": 55.0, "base": 55.0}
    assert gate(Machine(slow), has_base=False)[0] == Exit.FAILED  # beside the stored ratio
    code, made, _ = gate(Machine(US), has_base=False)
    assert code == Exit.PASS and any(note.startswith("No base: ") for note in made["notes"])
    baseline.path_of("triton_ratio", "sm_90", CASE.id, head / "perf_baselines").unlink()
    for arguments in ([], ["--no-triton"]):  # beside itself alone nothing passes
        code, made, said = gate(Machine(US), *arguments, has_base=False)
        assert code == Exit.BASELINE_MISSING and finding(made)["verdict"] == "no baseline" and "bless" in said
    stored("verify", FINGERPRINT, 50.0, starts=3).dump(head / "perf_baselines")
    code, made, _ = gate(Machine(US), "--no-triton", has_base=False)  # figures that only advise could not fail it
    assert code == Exit.BASELINE_MISSING and "advisory: 3 of 12" in finding(made)["cells"]["vs stored"]
    stored("verify", FINGERPRINT, 50.0, starts=12).dump(head / "perf_baselines")
    assert gate(Machine(US), "--no-triton", has_base=False)[0] == Exit.PASS


def test_where_this_checkout_left_main_is_the_base_that_nobody_named(gate, checkout, monkeypatch):
    head, base, _ = checkout
    monkeypatch.setattr(trees, "fork_point", lambda: str(base))
    baseline.path_of("triton_ratio", "sm_90", CASE.id, head / "perf_baselines").unlink()
    code, made, _ = gate(Machine(US), "--no-triton", has_base=False)
    assert code == Exit.PASS and not any(note.startswith("No base: ") for note in made["notes"])


def test_a_gate_that_is_killed_after_three_processes_has_left_their_sessions(gate, monkeypatch, tmp_path):
    machine = Machine({**US, "head": 52.5})
    begin = machine.start

    def start(side):
        if len(machine.started) == 9:
            raise KeyboardInterrupt
        return begin(side)

    monkeypatch.setattr(machine, "start", start)
    with pytest.raises(KeyboardInterrupt):
        gate(machine)
    (run, _) = schema.load(tmp_path / "out/sessions.jsonl")
    assert run.metric == "verify" and len(run.samples) == 3


def test_a_base_that_is_neither_folder_nor_commit_is_exit_5(gate):
    code, _, said = gate(Machine(US), "--base", "no-such-commit")
    assert code == Exit.BASELINE_MISSING and "neither a folder nor a commit" in said


def test_the_run_is_kept_as_sessions_that_can_be_blessed(gate, tmp_path):
    gate(Machine(US, spread=0))
    runs = {run.metric: run for run in schema.load(tmp_path / "out/sessions.jsonl")}
    assert runs["verify"].value == pytest.approx(50, rel=0.02) and len(runs["verify"].samples) == 3
    assert runs["triton_ratio"].value == pytest.approx(0.004, rel=0.02)
    assert runs["verify"].where.fingerprint == FINGERPRINT


def test_explain_shows_every_process_of_a_verdict(gate, tmp_path, capsys):
    gate(Machine({**US, "head": 52.5}))
    code = cli.main(["explain", CASE.id, "--from", str(tmp_path / "gate.json")])
    said = capsys.readouterr().out
    assert code == Exit.FAILED and "head / base" in said
    (line,) = [line for line in said.splitlines() if "head / base" in line]
    assert len([word for word in line.split() if word.endswith("%")]) == 8


def test_an_id_chooses_its_case_alone_and_a_part_of_ids_all_of_them():
    ids = [case.id for case in GATED_CASES]
    fp8 = next(case for case in GATED_CASES if case.fp8_kv)
    plain = replace(fp8, fp8_kv=False)
    assert [case.id for case in chosen(GATED_CASES, [plain.id])] == [plain.id]
    assert [case.id for case in chosen(GATED_CASES, ["-c65536-t9"])] == [i for i in ids if "-c65536-t9" in i]
    assert [case.id for case in chosen(GATED_CASES, None)] == ids and len(set(ids)) == len(ids) <= 12
    assert chosen(GATED_CASES, ["no such"]) == []
