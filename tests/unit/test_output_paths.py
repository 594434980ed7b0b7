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
