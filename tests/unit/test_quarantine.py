"""Quarantine: owner, reason, link and an end, or no entry at all."""

from dataclasses import replace
from datetime import date, timedelta

import pytest

from treemla.gate import cli, quarantine
from treemla.gate.baseline import BrokenBaseline
from treemla.gate.cases import GATED_CASES
from treemla.gate.exits import Exit
from treemla.gate.quarantine import Entry

CASE, OTHER = GATED_CASES[0].id, GATED_CASES[1].id
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
        ({"reason": "noisy \x07 or not"}, "reason: expected printable text"),
        ({"owner": "ann\x7f"}, "owner: expected printable text"),
        ({"issue": "https://example.org/\x00"}, "issue"),
        ({"issue": "https://"}, "issue"),
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


@pytest.mark.parametrize(
    "text", ["[[case]]\ncase = 'x'\n", "case = 1", b"\xff\xfe", "nonsense", "[[case]]\nowner = 3\n"]
)
def test_a_file_that_lacks_something_is_not_believed(tmp_path, text):
    path = tmp_path / "q.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BrokenBaseline):
        quarantine.load(path)


def test_an_entry_at_the_end_of_the_calendar_is_judged_as_any_other():
    assert quarantine.problem_of(replace(ENTRY, added=date.max, expires=date.max)) == ""


def test_a_file_that_the_new_entry_would_spoil_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "q.toml"
    quarantine.add(ENTRY, path)
    before = path.read_bytes()
    monkeypatch.setattr(quarantine, "_quoted", lambda text: f'"{text}')
    with pytest.raises(BrokenBaseline):
        quarantine.add(replace(ENTRY, case="verify-b8"), path)
    assert path.read_bytes() == before


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
    assert cli.main(["quarantine", CASE, *given]) == Exit.PASS
    assert cli.main(["quarantine"]) == Exit.PASS
    assert CASE in capsys.readouterr().out
    assert cli.main(["quarantine", OTHER, "--owner", "ann"]) == Exit.USAGE
    assert "reason" in capsys.readouterr().out
    assert cli.main(["quarantine", CASE, *given]) == Exit.BASELINE_MISSING


@pytest.mark.parametrize(
    "arguments", [["verify-b1"], ["../x"], [""], [CASE, "--days", "99999999999"], [CASE, "--days", "-1"]]
)
def test_unknown_cases_and_days_without_end_are_wrong_usage(file, arguments):
    given = ["--owner", "ann", "--reason", "noisy", "--issue", "https://example.org/1"]
    assert cli.main(["quarantine", *arguments, *given]) == Exit.USAGE
    assert not file.exists()
