"""Every verb of the command line gives its findings as JSON, JUnit and Markdown, and ends with their exit code."""

import argparse
import json
from contextlib import nullcontext
from xml.etree import ElementTree as ET

import pytest

from treemla.gate import check, cli, doctor, gating, layers, schema
from treemla.gate.exits import Exit, InvalidEnvironment
from treemla.gate.findings import Finding, Findings
from treemla.gate.layers import Outcome
from treemla.gate.measured import measured

WHERE = schema.Where("NVIDIA H200", "580.1", "13.0", "2.11.0", None, None, "0" * 40, "2026-01-02T03:04:05Z", "-")
RUN = schema.Measurement.of("verify-b1-c4096-t9-h8-p1-bf16", "verify", "us", [14.0, 15.0, 15.5], WHERE)
FOUND = Findings("stand-in", (Finding("k", "slower", Exit.FAILED, "why"),))


def verbs() -> dict[str, argparse.ArgumentParser]:
    actions = cli.parser()._actions
    return next(action.choices for action in actions if isinstance(action, argparse._SubParsersAction))


@pytest.mark.parametrize("verb", verbs())
def test_every_verb_takes_every_form(verb):
    assert {"--json", "--junit", "--md"} <= set(verbs()[verb]._option_string_actions)


@pytest.fixture
def forms(tmp_path):
    """Runs a verb with all forms; gives (exit, JSON, JUnit's root, Markdown)."""

    def forms(*arguments):
        paths = {form: tmp_path / f"out.{form}" for form in ("json", "junit", "md")}
        given = [part for form, path in paths.items() for part in (f"--{form}", str(path))]
        code = cli.main([arguments[0], *given, *arguments[1:]])
        text = {form: path.read_text() for form, path in paths.items()}
        return code, json.loads(text["json"]), ET.fromstring(text["junit"]), text["md"]

    return forms


@pytest.mark.parametrize(
    ("verb", "made"),
    [
        (["bench"], "bench.bench"),
        (["peers"], "peers_bench.bench_peers"),
        (["tune"], "tune_gpu.tune"),
        (["bench-moves"], "moves.bench_moves"),
        (["bench-layouts"], "layouts.bench_layouts"),
        (["bench-slots"], "slots.run"),
        (["check"], "cli.check"),
    ],
)
def test_what_a_verb_found_is_in_every_form_and_in_the_exit_code(forms, monkeypatch, tmp_path, capsys, verb, made):
    monkeypatch.setattr(f"treemla.gate.{made}", lambda *_, **__: FOUND)
    monkeypatch.setattr(gating, "alone_on_gpu", lambda wait_s: nullcontext())
    monkeypatch.chdir(tmp_path)
    code, held, junit, markdown = forms(*verb)
    assert code == Exit.FAILED and held["exit"] == "FAILED" and held["found"][0]["text"] == "why"
    assert junit.find(".//failure").get("message") == "slower: why"
    assert "k: why" in markdown and "FAILED: k: why" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["bench", "peers", "tune", "bench-moves", "bench-layouts"])
def test_a_machine_without_a_gpu_is_a_finding_in_every_form(forms, monkeypatch, tmp_path, verb):
    monkeypatch.setattr(gating, "gpu_problem", lambda: "no GPU: none here")
    monkeypatch.chdir(tmp_path)
    code, held, junit, markdown = forms(verb)
    assert code == Exit.INVALID_ENVIRONMENT and held["exit"] == "INVALID_ENVIRONMENT"
    assert "no GPU: none here" in junit.find(".//error").get("message") and "no GPU: none here" in markdown


@pytest.mark.parametrize("outcome", [Outcome(Exit.PASS, 7), Outcome(Exit.FAILED, 6, 1, why="pytest exit 1, see above")])
def test_a_layer_is_one_finding_and_what_follows_its_name_is_pytests(forms, monkeypatch, capsys, outcome):
    asked = []
    monkeypatch.setattr(layers, "run", lambda layer, extra: asked.append((layer.name, extra)) or outcome)
    code, held, junit, _ = forms("test", "unit", "-k", "tree", "--json", "x")
    assert asked == [("unit", ["-k", "tree", "--json", "x"])]
    assert code == outcome.exit and [finding["name"] for finding in held["found"]] == ["unit"]
    assert len(junit.findall(".//failure")) == outcome.failed
    assert bool(capsys.readouterr().out) == bool(outcome.failed)  # pytest has said what passed


def test_doctor_gives_every_fact_and_its_remedy(forms):
    code, held, junit, _ = forms("doctor")
    facts = doctor.facts()
    assert code == Exit.PASS and len(held["found"]) == len(facts) == len(junit.findall(".//testcase"))
    assert [finding["cells"]["remedy"] for finding in held["found"]] == [fact.remedy for fact in facts]


def test_a_measurement_is_a_finding_and_so_is_each_failure():
    made = measured("bench", [RUN], ["case x: wrong"])
    assert [(f.name, f.exit) for f in made.found] == [(f"{RUN.case} verify", Exit.PASS), ("bench", Exit.FAILED)]
    assert made.found[0].cells == {"median": "15", "spread": "0.5", "unit": "us"}
    assert measured("bench", [RUN]).exit is Exit.PASS
    assert measured("bench", []).exit is Exit.NOTHING_MEASURED


def test_a_layer_that_was_not_run_is_no_pass_when_it_was_asked_for():
    assert check.finding("gpu-graph", Outcome(Exit.INVALID_ENVIRONMENT, why="no GPU", ran=False)).exit is not Exit.PASS


def test_what_a_verb_printed_itself_is_not_said_twice(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("treemla.gate.bench.bench", lambda *_, **__: measured("bench", [RUN]))
    monkeypatch.setattr(gating, "alone_on_gpu", lambda wait_s: nullcontext())
    assert cli.main(["bench", "--out", str(tmp_path / "a.jsonl")]) == Exit.PASS
    assert capsys.readouterr().out == ""


def test_what_keeps_a_verb_from_running_is_printed(monkeypatch, tmp_path, capsys):
    def lacking(*_, **__):
        raise InvalidEnvironment("no GPU: none here")

    monkeypatch.setattr("treemla.gate.bench.bench", lacking)
    monkeypatch.setattr(gating, "alone_on_gpu", lambda wait_s: nullcontext())
    assert cli.main(["bench", "--out", str(tmp_path / "a.jsonl")]) == Exit.INVALID_ENVIRONMENT
    assert "no GPU: none here" in capsys.readouterr().out
