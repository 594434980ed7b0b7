"""Cases that are measured and reported and do not block, each with an owner, a reason and a day on which that ends."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from datetime import date, timedelta
from pathlib import Path

from treemla.gate.baseline import ROOT, BrokenBaseline, is_link
from treemla.gate.exits import Exit, gravest
from treemla.gate.findings import Finding
from treemla.gate.records import text_of

FILE = ROOT / "quarantine.toml"
MAX_DAYS = 21
EXCUSED = (Exit.FAILED, Exit.AMBIGUOUS)  # a missing baseline, a busy GPU or a removed file is not excused by any entry


@dataclass(frozen=True)
class Entry:
    case: str
    owner: str
    reason: str
    issue: str
    added: date
    expires: date


def load(path: Path = FILE) -> list[Entry]:
    """BrokenBaseline names the entry that lacks something or lasts longer than MAX_DAYS; no file: no entries."""
    try:
        return _parse(text_of(path), path) if path.exists() else []
    except ValueError as error:
        raise BrokenBaseline(str(error)) from error


def _parse(text: str, path: Path) -> list[Entry]:
    try:
        entries = [Entry(**record) for record in tomllib.loads(text).get("case", [])]
    except (tomllib.TOMLDecodeError, TypeError) as error:
        raise BrokenBaseline(f"{path}: expected [[case]] tables with {_names()}: {error}") from error
    for entry in entries:
        if problem := problem_of(entry):
            raise BrokenBaseline(f"{path}: {entry.case}: {problem}")
    return entries


def problem_of(entry: Entry) -> str:
    texts = {"case": entry.case, "owner": entry.owner, "reason": entry.reason}
    if empty := [name for name, text in texts.items() if not isinstance(text, str) or not text.strip()]:
        return f"{empty[0]}: expected a text"
    if control := [name for name, text in texts.items() if not _line(text).isprintable()]:
        return f"{control[0]}: expected printable text, got {texts[control[0]]!r}"
    if not is_link(entry.issue):
        return f"issue: expected a link (https://...), got {entry.issue!r}"
    if type(entry.added) is not date or type(entry.expires) is not date:
        return "added and expires: expected days, such as 2026-12-01 without quotes"
    if not timedelta(0) <= entry.expires - entry.added <= timedelta(days=MAX_DAYS):
        return f"expires: expected at most {MAX_DAYS} days after {entry.added}, got {entry.expires}"
    return ""


def apply(found: Sequence[Finding], today: date, entries: Sequence[Entry]) -> list[Finding]:
    """The findings, the times of entries in force turned into reports. A case that was not measured is not excused."""
    held = {entry.case: entry for entry in entries if entry.expires >= today}
    return [_excused(f, held[f.name]) if f.name in held and f.data.get("parts") else f for f in found]


def _excused(finding: Finding, entry: Entry) -> Finding:
    if finding.exit not in EXCUSED:
        return finding
    exits = [Exit[part["exit"]] for part in finding.data["parts"].values()]
    return replace(
        finding,
        exit=gravest([Exit.PASS, *(code for code in exits if code not in EXCUSED)]),
        verdict=f"quarantined ({finding.verdict})",
        text=f"until {entry.expires}, {entry.owner}: {finding.text}",
    )


def overdue(today: date, entries: Sequence[Entry]) -> list[Finding]:
    """One red finding an entry that has expired, whether or not its case passes."""
    return [
        Finding(
            f"quarantine: {entry.case}", "expired", Exit.FAILED,
            f"expired on {entry.expires}; {entry.owner} mends it or removes the entry ({entry.issue})",
        )
        for entry in entries
        if entry.expires < today
    ]  # fmt: skip


def add(entry: Entry, path: Path = FILE) -> None:
    """Append an entry. BrokenBaseline where it would not load, or the case has one."""
    if problem := problem_of(entry):
        raise BrokenBaseline(problem)
    if any(known.case == entry.case for known in load(path)):
        raise BrokenBaseline(
            f"{entry.case}: is quarantined already; an entry is not prolonged, it is mended or reviewed anew"
        )
    lines = ["", "[[case]]"]
    for name in _names():
        value = getattr(entry, name)
        lines.append(f"{name} = {value.isoformat() if isinstance(value, date) else _quoted(value)}")
    text = (text_of(path) if path.exists() else "") + "\n".join(lines) + "\n"
    _parse(text, path)  # before it is written
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _quoted(text: str) -> str:
    escaped = _line(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _line(text: str) -> str:
    return " ".join(text.split())


def _names() -> list[str]:
    return [field.name for field in fields(Entry)]
