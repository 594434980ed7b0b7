"""The proof of the gate on a GPU, on made-up times: what it plants, what it runs, what it lets pass."""

import io
import json
import shutil
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import pytest
from fake_sides import HERE, Machine
from gpu_gate import plant, proof

from treemla.gate import cli, gating, schema
from treemla.gate.exits import InvalidEnvironment

CSRC = Path(__file__).parents[2] / "csrc"
US = {4096: 14.6, 16_384: 19.4, 65_536: 34.5}


@pytest.mark.parametrize("context", US)
def test_the_planted_wait_is_five_percent_of_each_measured_case(context):
    fixed, per_64k = plant.clocks(US, 0.05, 1980)
    waited_us = (fixed + per_64k * context / 65_536) / 1980
    assert waited_us / US[context] == pytest.approx(0.05, rel=0.05)


@pytest.mark.parametrize("times", [{4096: 14.6}, {4096: 34.5, 65_536: 14.6}])
def test_times_that_tell_no_slope_plant_nothing(times):
    with pytest.raises(ValueError, match="us_by_context"):
        plant.clocks(times, 0.05, 1980)


def test_the_wait_has_one_place_in_the_kernel_and_none_in_another(tmp_path):
    shutil.copy(CSRC / plant.FILE, tmp_path)
    plant.plant(tmp_path, 1000, 2000)
    text = (tmp_path / plant.FILE).read_text()
    assert text.count("clocks = 1000 + 2000ll *") == 1
    kernel = text.partition(plant.KERNEL)[2]
    assert f"wait_for_dependency();\n{plant.BEFORE}  if (kKv == KvType::bf16" in kernel
    (tmp_path / plant.FILE).write_text("")
    with pytest.raises(RuntimeError, match="plant anew"):
        plant.plant(tmp_path, 1000, 2000)


class Compiled:
    def wait(self):
        return 0


@pytest.fixture
def prove(monkeypatch, tmp_path):
    """Runs the proof where the planted head is `slow` times the base; gives (what is wrong, commands that ran)."""
    monkeypatch.setattr(gating, "this_machine", lambda _: HERE)
    monkeypatch.setattr(gating.hygiene, "lease", lambda *_: nullcontext())
    monkeypatch.setattr(proof, "asked_of_gpu", {"clocks.max.sm": "1980", "compute_cap": "9.0"}.get)
    monkeypatch.setattr(proof.subprocess, "Popen", lambda *_, **__: Compiled())
    (tmp_path / "out").mkdir()
    ran = []

    def prove(slow=1.05, *, itself=1.0, budget_s=1000.0):
        def execute(tree, arguments, out, log, _):
            machine = Machine({"head": 500 * (slow if arguments[0] == "gate" else itself), "base": 500}, spread=0.003)
            monkeypatch.setattr(gating, "Worker", lambda make, metric, source: machine.start(source.parent.name))
            monkeypatch.setattr(gating, "REPO", tree)
            with redirect_stdout(io.StringIO()) as said:
                code = cli.main([*arguments, "--json", str(out)])
            ran.append(arguments)
            lines = [(float(n), line) for n, line in enumerate(said.getvalue().splitlines())]
            found = json.loads(out.read_text())
            for finding in found["found"]:  # what a wait is derived from must rise with the context
                if finding["name"] in proof.CONTEXTS:
                    finding["cells"]["us"] = str(US[proof.CONTEXTS[finding["name"]]])
            return proof.Ran(code, found, lines)

        return proof.prove(tmp_path / "out", tmp_path, "a" * 40, budget_s, io.StringIO(), execute), ran

    return prove


def test_same_three_times_and_five_percent_slower_is_proven_with_sessions_kept(prove, tmp_path):
    wrong, ran = prove()
    assert wrong == []
    assert [arguments[0] for arguments in ran] == ["selfcheck", "selfcheck", "gate", "selfcheck"]
    sessions = schema.load(tmp_path / "out/sessions.jsonl")
    assert sorted({run.case for run in sessions}) == sorted(proof.CONTEXTS) and len(sessions) == 9
    assert "// planted" in (tmp_path / "slowed/csrc" / plant.FILE).read_text()
    assert len(list((tmp_path / "out").iterdir())) <= 7  # beside them the log


def test_a_slowdown_that_the_gate_does_not_call_a_regression_proves_nothing(prove):
    wrong, _ = prove(slow=1.0)
    assert wrong == ["gate on a slowdown of 5%: exit code 0, same"]


def test_a_program_that_is_not_itself_proves_nothing_and_leaves_no_sessions(prove, tmp_path):
    wrong, ran = prove(slow=1.10, itself=1.05)
    assert ["selfcheck" in text for text in wrong] == [True] * 3 and len(ran) == 4
    assert not (tmp_path / "out/sessions.jsonl").exists()


def test_a_machine_on_which_nothing_is_measured_ends_the_proof_at_once(prove, monkeypatch):
    def busy(_):
        raise InvalidEnvironment("busy")

    monkeypatch.setattr(gating, "this_machine", busy)
    wrong, ran = prove()
    assert "selfcheck 1: exit code 4" in wrong[0] and len(ran) == 1


def test_where_time_is_short_the_later_selfchecks_have_fewer_cases(prove):
    _, ran = prove(budget_s=1.0)
    assert [arguments.count("--case") for arguments in ran] == [3, 1, 1, 1]


def test_the_cases_that_fit_follow_from_what_a_process_and_a_case_took():
    lines = [(10.0, "process 1 of 3: 3 cases"), (60.0, "process 3 of 3: 3 cases")]
    lines += [(70.0 + 2 * n, f"  verify-{n}: head 1 us") for n in range(3)]
    first = proof.Ran(0, {}, lines)
    assert proof.cost(first) == (8.0, 2.0)
    red = 12 + 8 * (8 + 2)
    assert [proof.cases_that_fit(first, red + 2 * (12 + 3 * (8 + 2 * n))) for n in (1, 2, 3)] == [1, 2, 3]
