"""Quarantine: owner, reason, link and an end, or no entry at all."""

from dataclasses import replace
from datetime import date, timedelta

import pytest

from treemla.gate import cli, quarantine
from treemla.gate.baseline import BrokenBaseline
from treemla.gate.exits import Exit
from treemla.gate.quarantine import Entry

DAY = date(2026, 12, 1)
ENTRY = Entry("verify-b1", "ann", 'noisy "since" \\ the update', "https://example.org/1", DAY, DAY + timedelta(days=21))


def test_what_is_added_is_loaded_as_it_was(tmp_path):
    path = tmp_path / "quarantine.toml"
    quarantine.add(ENTRY, path)
    quarantine.add(replace(ENTRY, case="verify-b8"), path)
    assert quarantine.load(path) == [ENTRY, replace(ENTRY, case="verify-b8")]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"owner": ""}, "owner"),
        ({"reason": " "}, "reason"),
        ({"issue": "later"}, "issue"),
        ({"issue": None}, "issue"),
        ({"expires": DAY + timedelta(days=22)}, "at most 21 days"),
        ({"expires": DAY - timedelta(days=1)}, "at most 21 days"),
        ({"expires": "2026-12-09"}, "expected days"),
    ],
)
def test_an_entry_without_owner_reason_link_or_end_is_refused(tmp_path, change, said):
    path = tmp_path / "quarantine.toml"
    with pytest.raises(BrokenBaseline, match=said):
        quarantine.add(replace(ENTRY, **change), path)
    assert not path.exists()


def test_an_entry_is_not_prolonged(tmp_path):
    quarantine.add(ENTRY, tmp_path / "q.toml")
    with pytest.raises(BrokenBaseline, match="already"):
        quarantine.add(replace(ENTRY, expires=DAY), tmp_path / "q.toml")


@pytest.mark.parametrize("text", ["[[case]]\ncase = 'x'\n", "case = 1", "nonsense", "[[case]]\nowner = 3\n"])
def test_a_file_that_lacks_something_is_not_believed(tmp_path, text):
    path = tmp_path / "q.toml"
    path.write_text(text)
    with pytest.raises(BrokenBaseline):
        quarantine.load(path)


def test_an_entry_is_red_from_the_day_after_it_ends():
    ends = ENTRY.expires
    assert quarantine.overdue(ends, [ENTRY]) == []
    (late,) = quarantine.overdue(ends + timedelta(days=1), [ENTRY])
    assert late.exit is Exit.FAILED and "ann" in late.text


@pytest.fixture
def file(monkeypatch, tmp_path):
    path = tmp_path / "q.toml"
    load, add = quarantine.load, quarantine.add
    monkeypatch.setattr(quarantine, "load", lambda path=path: load(path))
    monkeypatch.setattr(quarantine, "add", lambda entry: add(entry, path))
    return path


def test_the_command_adds_lists_and_refuses(file, capsys):
    assert cli.main(["quarantine"]) == Exit.PASS
    given = ["--owner", "ann", "--reason", "noisy", "--issue", "https://example.org/1"]
    assert cli.main(["quarantine", "verify-b1", *given]) == Exit.PASS
    assert cli.main(["quarantine"]) == Exit.PASS
    assert "verify-b1" in capsys.readouterr().out
    assert cli.main(["quarantine", "verify-b8", "--owner", "ann"]) == Exit.USAGE
    assert "reason" in capsys.readouterr().out
    assert cli.main(["quarantine", "verify-b1", *given]) == Exit.BASELINE_MISSING
