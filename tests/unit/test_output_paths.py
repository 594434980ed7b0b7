"""Where a command writes: never over what it reads, and known to be possible before anything is measured."""

import os

import pytest

from treemla.gate import baseline, cli, gating, verbs
from treemla.gate.exits import Exit
from treemla.gate.findings import Finding, Findings

FOUND = Findings("report", (Finding("k", "same", Exit.PASS),)).as_json()


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "gate.json"
    path.write_text(FOUND)
    return path


@pytest.mark.parametrize("form", ["--json", "--junit", "--md"])
@pytest.mark.parametrize("alias", ["same", "dotted", "symbolic", "hard"])
def test_an_input_under_any_name_is_no_output(source, form, alias):
    link = source.with_name("link")
    if alias == "symbolic":
        link.symlink_to(source)
    if alias == "hard":
        os.link(source, link)
    path = {"same": source, "dotted": source.parent / "x" / ".." / source.name}.get(alias, link)
    (source.parent / "x").mkdir()
    for verb in (
        ["report"],
        ["explain", "k", "--from"],
        ["history", "k", "--from"],
        ["compare", "--base", "a", "--head"],
    ):
        assert cli.main([*verb, str(source), form, str(path)]) == Exit.USAGE
        assert source.read_text() == FOUND


@pytest.mark.parametrize("place", ["folder", "file/below", "n" * 300, "/proc/nothing.json"])
def test_a_path_that_cannot_be_written_stops_the_gate_before_it_measures(tmp_path, place, monkeypatch, capsys):
    monkeypatch.setattr(gating, "gate", lambda *_: pytest.fail("went on"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    given = ["gate", "--base", "HEAD", "--out", str(tmp_path / "out")]
    assert cli.main([*given, "--json", str(tmp_path / place)]) == Exit.USAGE
    assert "--json" in capsys.readouterr().err
    assert cli.main([*given[:-1], str(tmp_path / "file")]) == Exit.USAGE
    assert "--out" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["bench", "peers", "tune", "bench-moves", "bench-layouts", "bench-slots"])
def test_what_a_measuring_verb_writes_is_tried_before_it_measures(verb, tmp_path, monkeypatch, capsys):
    for name in (
        "bench.bench",
        "peers_bench.bench_peers",
        "tune_gpu.tune",
        "moves.bench_moves",
        "layouts.bench_layouts",
    ):
        monkeypatch.setattr(f"treemla.gate.{name}", lambda *_, **__: pytest.fail("went on"))
    monkeypatch.setattr("treemla.gate.slots.run", lambda *_: pytest.fail("went on"))
    option = "--picture" if verb == "bench-slots" else "--out"
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file/below", baseline.ROOT / "x.jsonl"):
        assert cli.main([verb, option, str(place)]) == Exit.USAGE
        assert option in capsys.readouterr().err
    one = str(tmp_path / "one")
    assert cli.main([verb, option, one, "--json", one]) == Exit.USAGE


@pytest.mark.parametrize(("verb", "form"), [("bench", "svg"), ("peers", "svg"), ("peers", "png")])
def test_a_picture_beside_what_was_measured_is_no_other_output(verb, form, tmp_path):
    given = [verb, "--out", str(tmp_path / "a.jsonl"), "--md", str(tmp_path / f"a.{form}")]
    assert cli.main(given) == Exit.USAGE


@pytest.mark.parametrize("given", [["gate", "--base"], ["static", "--against"]])
def test_nothing_of_a_base_tree_is_written_over(given, tmp_path, monkeypatch, capsys):
    for name in ("gating.gate", "static_gate.static_gate"):
        monkeypatch.setattr(f"treemla.gate.{name}", lambda *_, **__: Findings("gate", ()))
    tree = tmp_path / "tree"
    source = tree / "src/treemla/plan.py"
    source.parent.mkdir(parents=True)
    source.write_text("held")
    (tmp_path / "link").symlink_to(tree)
    out = ["--out", str(tmp_path / "out")] if given[0] == "gate" else []
    for base in (tree, tmp_path / "link"):
        for path in (source, tmp_path / "link/src/treemla/plan.py", tree / "new.json"):
            assert cli.main([*given, str(base), *out, "--json", str(path)]) == Exit.USAGE
            assert "an input of this command" in capsys.readouterr().err
    assert source.read_text() == "held" and not (tree / "new.json").exists()
    assert cli.main([*given, str(tree), *out, "--json", str(tree / "build/a.json")]) == Exit.NOTHING_MEASURED


def test_two_outputs_are_not_one_file_nor_a_stored_baseline(source, tmp_path, monkeypatch):
    one = str(tmp_path / "one")
    assert cli.main(["report", str(source), "--json", one, "--md", one]) == Exit.USAGE
    stored = baseline.ROOT / "quarantine.json"
    assert cli.main(["report", str(source), "--json", str(stored)]) == Exit.USAGE
    assert not stored.exists()


def test_trying_a_path_leaves_what_is_there(source, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    old, new = tmp_path / "old.md", tmp_path / "new.md"
    old.write_text("held")
    monkeypatch.setattr(verbs, "_findings", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cli.main(["explain", "k", "--from", str(source), "--md", str(old), "--json", str(new)])
    assert old.read_text() == "held" and not new.exists()


def test_a_disk_that_is_full_at_the_end_is_no_pass(source, capsys):
    assert cli.main(["report", str(source), "--json", "/dev/full"]) == Exit.USAGE
    assert "not written" in capsys.readouterr().out
