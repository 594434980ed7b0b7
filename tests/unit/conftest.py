"""A checkout with baselines, and the gate run on a made-up machine."""

import json
from contextlib import nullcontext

import pytest
from fake_gate import CASE, TODAY, stored
from fake_sides import HERE

from treemla.gate import baseline, cli, gating, quarantine, trees
from treemla.gate.cases import GATED_CASES


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """A checkout whose baselines are `tmp_path / head / perf_baselines`, with a ratio for every case; a base beside it."""
    head, base = tmp_path / "head", tmp_path / "base"
    for tree in (head, base):
        (tree / "src/treemla").mkdir(parents=True)
        (tree / "src/treemla/__init__.py").touch()
    root = head / "perf_baselines"
    monkeypatch.setattr(gating, "REPO", head)
    monkeypatch.setattr(trees, "fork_point", lambda: None)
    find = baseline.find
    monkeypatch.setattr(baseline, "find", lambda metric, machine, case: find(metric, machine, case, root))
    entries = []
    monkeypatch.setattr(quarantine, "load", lambda: entries)
    monkeypatch.setattr(baseline, "today", lambda: TODAY)
    for case in GATED_CASES:
        stored("triton_ratio", "sm_90", 50.0 / 12500.0, case=case).dump(root)
    return head, base, entries


@pytest.fixture
def gate(monkeypatch, checkout, tmp_path, capsys):
    """Runs the command on a machine; gives (exit code, findings as JSON, what was printed)."""
    _, base, _ = checkout

    def gate(machine, *arguments, verb="gate", cases=(CASE.id,), has_base=True):
        monkeypatch.setattr(gating, "this_machine", lambda _: HERE)
        monkeypatch.setattr(gating.hygiene, "lease", lambda *_: nullcontext())
        monkeypatch.setattr(gating, "Worker", lambda make, metric, source: machine.start(source.parent.name))
        asked = [part for case in cases for part in ("--case", case)]
        named = ["--base", str(base)] if verb == "gate" and has_base else []
        out = tmp_path / "gate.json"
        code = cli.main([verb, *named, "--out", str(tmp_path / "out"), *asked, "--json", str(out), *arguments])
        return code, json.loads(out.read_text()), capsys.readouterr().out

    return gate
