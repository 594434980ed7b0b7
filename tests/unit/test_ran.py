"""The table of supported versions: made of what ran and passed, and never of anything else."""

import json
import sys
from dataclasses import asdict, replace

import pytest

from treemla.gate import layers, ran
from treemla.gate.exits import Exit
from treemla.gate.ran import Ran

RUN = Ran("unit", 2269, "3.12", "2.13.0+cpu", "3.7.1", "0.5.23", "none", None, "a" * 40, "2026-11-29T10:00:00Z")
GPU = replace(RUN, layer="gpu-parity", gpu="NVIDIA H200", driver="580.1")


def test_the_committed_page_is_what_the_committed_runs_make():
    assert ran.PAGE.read_text() == ran.page(ran.load(ran.KEPT)), "run: python -m treemla.gate.ran"


def test_of_each_kind_the_newest_counts_and_another_version_is_another_kind():
    later = replace(RUN, tests=2300, torch="2.13.0+cu130", date="2026-11-30T10:00:00Z")
    others = [replace(RUN, **other) for other in ({"sglang": "0.5.16"}, {"python": "3.11"}, {"torch": "2.11.0"})]
    assert ran.newest([later, RUN, GPU, *others]).count(RUN) == 0
    assert set(ran.newest([later, RUN, GPU, *others])) == {later, GPU, *others}
    assert (
        "| gpu-parity | 2269 | 0.5.23 | 2.13.0+cpu | 3.7.1 | NVIDIA H200 | 580.1 | 3.12 | aaaaaaa | 2026-11-29 |"
        in ran.page([GPU])
    )


@pytest.mark.parametrize("change", [{"tests": "many"}, {"gpu": None}, {"more": 1}])
def test_a_line_that_is_no_run_is_named(tmp_path, change):
    (tmp_path / "ran.jsonl").write_text(json.dumps(asdict(RUN)) + "\n" + json.dumps({**asdict(RUN), **change}) + "\n")
    with pytest.raises(ValueError, match=r"ran.jsonl:2: expected a layer that ran"):
        ran.load(tmp_path / "ran.jsonl")


@pytest.fixture
def layer(monkeypatch, tmp_path):
    """Runs a layer of one test that passes or fails, in a checkout of its own; gives what it left."""
    monkeypatch.setattr(layers, "REPO", tmp_path)

    def layer(body, *extra):
        (tmp_path / "test_one.py").write_text(f"def test_one(): {body}\n")
        held = layers.Layer("one", ("pytest", "test_one.py"))
        outcome = layers.run(held, extra)
        left = tmp_path / "build/ran.jsonl"
        return outcome.exit, ran.load(left) if left.exists() else []

    return layer


def test_a_layer_that_passed_leaves_a_line_and_one_that_failed_or_was_cut_leaves_none(layer):
    assert layer("assert False") == (Exit.FAILED, [])
    assert layer("pass", "-q") == (Exit.PASS, [])
    code, (left,) = layer("pass")
    assert (code, left.layer, left.tests, left.gpu) == (Exit.PASS, "one", 1, "none")
    assert left.python == f"{sys.version_info.major}.{sys.version_info.minor}"


def test_added_runs_join_those_kept_and_get_the_commit_that_their_copy_did_not_know(monkeypatch, tmp_path):
    monkeypatch.setattr(ran, "KEPT", tmp_path / "kept.jsonl")
    monkeypatch.setattr(ran, "PAGE", tmp_path / "page.md")
    for name, runs in (
        ("kept", [RUN]),
        ("a", [replace(GPU, treemla="unknown")]),
        ("b", [replace(GPU, layer="gpu-graph")]),
    ):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(asdict(run)) + "\n" for run in runs))
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    monkeypatch.setattr("sys.argv", ["ran", "--add", *files, "--commit", "b" * 40])
    ran.main()
    held = {run.layer: run.treemla[0] for run in ran.load(ran.KEPT)}
    assert held == {"unit": "a", "gpu-parity": "b", "gpu-graph": "a"}
    assert ran.PAGE.read_text() == ran.page(ran.load(ran.KEPT))
