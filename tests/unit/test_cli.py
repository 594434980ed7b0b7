"""The command line: verbs, exit codes, and that nothing passes by not having run."""

import subprocess
import sys
import tempfile

import pytest
from fake_sides import HERE

from treemla import tiles
from treemla.gate import check, cli, doctor, gating, hygiene, layers, verbs
from treemla.gate.baseline import BrokenBaseline
from treemla.gate.exits import BaselineMissing, Exit, InvalidEnvironment
from treemla.gate.findings import Finding, Findings
from treemla.gate.layers import Layer, Outcome

PASSED = Outcome(Exit.PASS, passed=3)
NOT_RUN = Outcome(Exit.INVALID_ENVIRONMENT, why="no GPU", ran=False)


def junit(tmp_path, cases):
    path = tmp_path / "report.xml"
    path.write_text(f'<testsuites><testsuite tests="9">{cases}</testsuite></testsuites>')
    return path


@pytest.mark.parametrize(
    ("code", "cases", "expected"),
    [
        (0, "<testcase/><testcase/>", (Exit.PASS, 2, 0)),
        (1, "<testcase/><testcase><failure/></testcase>", (Exit.FAILED, 1, 1)),
        (1, "<testcase><error/></testcase>", (Exit.FAILED, 0, 1)),
        (0, "<testcase><failure/></testcase>", (Exit.FAILED, 0, 1)),
        (0, "", (Exit.NOTHING_MEASURED, 0, 0)),
        (5, "", (Exit.NOTHING_MEASURED, 0, 0)),
        (0, "<testcase/><testcase><skipped/></testcase>", (Exit.NOTHING_MEASURED, 1, 0)),
        (2, "<testcase><error/></testcase>", (Exit.FAILED, 0, 1)),
        (3, "<testcase/>", (Exit.FAILED, 1, 0)),
        (4, "", (Exit.INVALID_ENVIRONMENT, 0, 0)),
        (-11, "<testcase/>", (Exit.FAILED, 1, 0)),
    ],
)
def test_an_outcome_needs_both_the_exit_code_and_the_report(tmp_path, code, cases, expected):
    outcome = layers.count_tests(code, junit(tmp_path, cases))
    assert (outcome.exit, outcome.passed, outcome.failed) == expected
    assert bool(outcome.why) == (outcome.exit is not Exit.PASS)


@pytest.mark.parametrize("text", [None, "", "<testsuites><testsuite>", "not xml"])
@pytest.mark.parametrize(("code", "verdict"), [(0, Exit.NOTHING_MEASURED), (1, Exit.FAILED), (-11, Exit.FAILED)])
def test_a_missing_or_broken_report_never_passes(tmp_path, text, code, verdict):
    path = tmp_path / "report.xml"
    if text is not None:
        path.write_text(text)
    assert layers.count_tests(code, path).exit is verdict


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ([PASSED, PASSED], Exit.PASS),
        ([PASSED, NOT_RUN], Exit.PASS),
        ([NOT_RUN, NOT_RUN], Exit.NOTHING_MEASURED),
        ([], Exit.NOTHING_MEASURED),
        ([PASSED, Outcome(Exit.FAILED), NOT_RUN], Exit.FAILED),
        ([PASSED, Outcome(Exit.NOTHING_MEASURED)], Exit.NOTHING_MEASURED),
        ([PASSED, Outcome(Exit.INVALID_ENVIRONMENT)], Exit.INVALID_ENVIRONMENT),
        ([Outcome(Exit.NOTHING_MEASURED), Outcome(Exit.FAILED)], Exit.FAILED),
    ],
)
def test_check_passes_only_where_something_ran_and_all_of_it_passed(outcomes, verdict):
    assert check.findings({str(i): outcome for i, outcome in enumerate(outcomes)}).exit is verdict


def test_the_summary_never_calls_a_layer_passed_that_did_not_run():
    made = check.findings({"unit": PASSED, "gpu-graph": NOT_RUN, "static": Outcome(Exit.FAILED, 1, 2)})
    assert [(f.name, f.verdict) for f in made.found] == [("unit", "passed"), ("static", "FAILED (exit 1)")]
    assert made.notes == ("gpu-graph: not run: no GPU",)


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """A checkout in which every layer passes and no compiler is needed; gives the findings of `check`."""
    static = Findings("static", (Finding("sm_90a k", "compiled", Exit.PASS),), ("Predicted:\n\nus\n--\n9\n",))

    def run(made=static, outcome=PASSED):
        def gate():
            if isinstance(made, Exception):
                raise made
            return made

        monkeypatch.setattr(check, "REPO", tmp_path)
        monkeypatch.setattr(layers, "run", lambda _: outcome)
        monkeypatch.setattr("treemla.gate.static_gate.static_gate", gate)
        return check.check()

    return run


def test_check_leaves_a_page_with_the_static_gate_and_its_predictions(checkout, tmp_path):
    assert checkout().exit is Exit.PASS
    text = (tmp_path / check.PAGE).read_text()
    assert "check: PASS" in text and "sm_90a k" in text and "Predicted" in text


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        (Findings("static", (Finding("k", "worse", Exit.FAILED, "spills"),)), Exit.FAILED),
        (Findings("static", ()), Exit.NOTHING_MEASURED),
        (BaselineMissing("gone"), Exit.BASELINE_MISSING),
        (BrokenBaseline("edited"), Exit.BASELINE_MISSING),
        (InvalidEnvironment("no compiler"), Exit.PASS),
    ],
)
def test_the_static_gate_counts_in_check_where_the_machine_can_run_it(checkout, tmp_path, made, verdict):
    (tmp_path / "build").mkdir()
    (tmp_path / "build/static-gate.json").write_text("an older one")
    assert checkout(made).exit is verdict
    assert "an older one" not in (tmp_path / check.PAGE).read_text()
    assert (tmp_path / "build/static-gate.json").exists() == isinstance(made, Findings)


def test_check_passes_nothing_where_nothing_ran(checkout):
    assert checkout(InvalidEnvironment("no compiler"), NOT_RUN).exit is Exit.NOTHING_MEASURED


@pytest.mark.parametrize("name", [name for name, layer in layers.LAYERS.items() if "gpu" in layer.needs])
def test_a_gpu_layer_without_a_gpu_is_not_tried(monkeypatch, name):
    monkeypatch.setitem(doctor.WHY_NOT, "gpu", lambda: "no GPU: none here")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("ran"))
    assert layers.run(layers.LAYERS[name]) == Outcome(Exit.INVALID_ENVIRONMENT, why="no GPU: none here", ran=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["test", "gpu-parity"],
        ["test", "gpu-graph"],
        ["test", "gpu-sanitize"],
        ["test", "gpu-e2e"],
        ["bench"],
        ["bench", "--warm"],
        ["peers"],
        ["tune"],
        ["gate", "--base", "."],
        ["selfcheck"],
    ],
)
def test_a_gpu_verb_without_a_gpu_exits_4_and_says_why(monkeypatch, tmp_path, capsys, arguments):
    monkeypatch.chdir(tmp_path)  # where --out is tried
    (tmp_path / "treemla").mkdir()
    (tmp_path / "treemla/__init__.py").touch()  # a base
    monkeypatch.setitem(doctor.WHY_NOT, "gpu", lambda: "no GPU: none here")
    monkeypatch.setattr(gating, "gpu_problem", lambda: "no GPU: none here")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the process in which the gate looks
    assert cli.main(arguments) == Exit.INVALID_ENVIRONMENT
    said = capsys.readouterr()
    assert "no GPU: " in said.err + said.out


@pytest.mark.parametrize(
    "arguments",
    [[], ["no-such-verb"], ["test"], ["test", "no-such-layer"], ["bench", "--path", "x"], ["bless", "x"]],
)
def test_wrong_usage_exits_2(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == Exit.USAGE


@pytest.mark.parametrize(
    "arguments", [["bench"], ["bench", "--warm"], ["peers"], ["tune"], ["gate", "--base", "."], ["selfcheck"]]
)
def test_a_case_that_does_not_exist_exits_2_and_names_those_that_do(monkeypatch, tmp_path, capsys, arguments):
    monkeypatch.chdir(tmp_path)  # where --out is tried
    assert cli.main([*arguments, "--case", "no-such-case"]) == Exit.USAGE
    said = capsys.readouterr()
    assert "verify-b1-c4096-t9-h8-p1-bf16" in said.err + said.out


def test_a_run_counts_its_own_report_and_not_an_older_one(monkeypatch, tmp_path):
    """The layer is a command that passes and writes no report; an old report lies where it would have been."""
    monkeypatch.setattr(layers, "REPO", tmp_path)
    quiet = Layer("quiet", ("pytest", "--version"))
    (tmp_path / "build").mkdir()
    (tmp_path / quiet.results).write_text("<testsuites><testcase/></testsuites>")
    assert layers.run(quiet).exit is Exit.NOTHING_MEASURED


def test_a_run_reports_the_tests_of_the_command_it_printed(monkeypatch, tmp_path, capfd):
    (tmp_path / "test_two.py").write_text("def test_a(): pass\ndef test_b(): assert False\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setattr(layers, "REPO", tmp_path)
    outcome = layers.run(Layer("two", ("pytest", "test_two.py")), ["-k", "a or b"])
    assert (outcome.exit, outcome.passed, outcome.failed) == (Exit.FAILED, 1, 1)
    printed = capfd.readouterr().out.splitlines()[0]
    assert printed == "$ PYTHONPATH=src python -m pytest test_two.py --junitxml build/two.xml -k 'a or b'"


@pytest.mark.parametrize(("text", "verdict"), [("", Exit.NOTHING_MEASURED), (None, Exit.NOTHING_MEASURED)])
def test_a_bench_that_left_no_results_measured_nothing(tmp_path, text, verdict):
    path = tmp_path / "a.jsonl"
    if text is not None:
        path.write_text(text)
    assert layers.count_measurements(0, path).exit is verdict


def test_doctor_waits_for_the_gpu_before_it_looks_and_says_that_it_is_free(monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(gating, "this_machine", lambda _: HERE)
    monkeypatch.setattr(hygiene, "wait_until_free", lambda uuid, gauge, wait_s: waited.append((uuid, wait_s)))
    monkeypatch.setattr(doctor, "facts", lambda: [doctor.Fact("python", "3.12")])
    assert cli.main(["doctor", "--wait", "600"]) == Exit.PASS
    assert waited == [(HERE.uuid, 600.0)] and f"free: {HERE.uuid}" in capsys.readouterr().out


def test_doctor_without_a_gpu_to_wait_for_is_exit_4(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["doctor", "--wait", "1"]) == Exit.INVALID_ENVIRONMENT
    assert "no GPU" in capsys.readouterr().out


def test_doctor_lists_each_fact_once_with_a_remedy_for_each_problem(capsys):
    assert cli.main(["doctor"]) == Exit.PASS
    said = capsys.readouterr().out.splitlines()
    names = [line.split("  ")[0] for line in said]
    assert len(set(names)) == len(names) >= 12
    for fact in doctor.facts():
        assert bool(fact.problem) == bool(fact.remedy), fact


@pytest.mark.parametrize(
    ("driver", "wrong", "code"),
    [
        (None, "gpu", Exit.PASS),  # a machine that was never meant to measure
        (None, "torch", Exit.INVALID_ENVIRONMENT),
        ("580.1", "gpu", Exit.INVALID_ENVIRONMENT),  # a torch without CUDA beside a GPU's driver
        ("580.1", "cuda-core", Exit.INVALID_ENVIRONMENT),
        ("580.1", "cost constants", Exit.INVALID_ENVIRONMENT),
        ("580.1", "sglang", Exit.PASS),
        ("580.1", "cubin sm_120a", Exit.PASS),  # of another GPU
    ],
)
def test_doctor_fails_where_something_keeps_a_machine_with_a_gpu_from_measuring(monkeypatch, driver, wrong, code):
    monkeypatch.setattr(doctor, "driver_version", lambda: driver)
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        doctor, "facts", lambda: [doctor.Fact("python", "3.12"), doctor.Fact(wrong, "-", "bad", "mend")]
    )
    assert cli.main(["doctor"]) == code


def test_the_cubin_of_the_gpu_that_is_there_is_needed(monkeypatch):
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(doctor.cubins, "target_of", lambda device: tiles.TARGETS["sm_120a"])
    assert "cubin sm_120a" in doctor.needed() and "cubin sm_90a" not in doctor.needed()


@pytest.mark.parametrize(
    ("verb", "measures"),
    [
        ("bench", "bench.bench"),
        ("peers", "peers_bench.bench_peers"),
        ("tune", "tune_gpu.tune"),
        ("bench-moves", "moves.bench_moves"),
        ("bench-layouts", "layouts.bench_layouts"),
    ],
)
def test_a_verb_that_measures_has_the_gpu_alone(monkeypatch, tmp_path, capsys, verb, measures):
    measured = []

    def measure(*_, **__):
        with pytest.raises(InvalidEnvironment, match="held by"), hygiene.lease("GPU-x", 0):
            pass
        measured.append(verb)
        return Findings(verb, (Finding(verb, "measured", Exit.PASS),))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(gating, "gpu_problem", lambda: "")
    monkeypatch.setattr(gating.machine, "gpu_uuid", lambda: "GPU-x")
    monkeypatch.setattr(f"treemla.gate.{measures}", measure)
    arguments = [verb, "--out", str(tmp_path / "out.jsonl"), "--wait", "0"]
    with hygiene.share("GPU-x", 0):  # a test suite
        assert cli.main(arguments) == Exit.INVALID_ENVIRONMENT
    assert measured == [] and "held by a test suite" in capsys.readouterr().out
    assert cli.main(arguments) == Exit.PASS and measured == [verb]


def test_check_gates_where_there_is_a_gpu():
    gate = layers.LAYERS["gate"]
    assert gate.command == ("treemla", "gate") and "gpu" in gate.needs
    assert gate.results == str(verbs.SESSIONS) and layers.LAYERS["gpu-perf"].results == "build/gpu-perf.jsonl"


def test_the_module_runs_as_a_command():
    done = subprocess.run([sys.executable, "-m", "treemla", "--help"], capture_output=True, text=True, check=True)
    for verb in ("check", "test", "bench", "peers", "tune", "static", "doctor"):
        assert verb in done.stdout
