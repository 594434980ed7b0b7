"""`treemla report`: what verbs and test layers left, merged into one verdict. What is missing or short is red."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

from treemla.gate import schema
from treemla.gate.exits import Exit, gravest
from treemla.gate.findings import Finding, Findings
from treemla.gate.records import text_of

MAX_BYTES = 64 * 1024 * 1024


def merge(sources: Sequence[Path], expected: Mapping[str, int]) -> Findings:
    """A finding a source, named as the file is. expected: {name: tests a layer must have run}; one without a source is red."""
    readers = {".xml": lambda path: _junit(path, expected.get(path.stem)), ".jsonl": _measurements}
    found = [readers.get(path.suffix, _verb)(path) for path in sources]
    absent = [
        Finding(name, "missing", Exit.NOTHING_MEASURED, f"expected a report of {count} tests or more, got none")
        for name, count in expected.items()
        if name not in {path.stem for path in sources}
    ]
    return Findings("report", (*found, *absent))


def _measurements(path: Path) -> Finding:
    try:
        made = schema.load(path)
    except ValueError as error:
        return Finding(path.stem, "missing", Exit.NOTHING_MEASURED, str(error))
    return Finding(path.stem, "read", Exit.PASS, "", {"found": str(len(made))})


def _verb(path: Path) -> Finding:
    try:
        made = Findings.from_json(text_of(path))
    except ValueError as error:
        return Finding(path.stem, "missing", Exit.NOTHING_MEASURED, f"{path}: {error}")
    wrong = [f"{f.name}: {f.text or f.verdict}" for f in made.gravest_first if f.exit is not Exit.PASS]
    return Finding(path.stem, made.exit.name.lower(), made.exit, "; ".join(wrong), {"found": str(len(made.found))})


def _junit(path: Path, least: int | None) -> Finding:
    """Cases are counted, never a suite's attributes: those say what was meant to run."""
    try:
        cases = list(_parsed(path).iter("testcase"))
    except (OSError, ValueError) as error:
        return Finding(path.stem, "missing", Exit.NOTHING_MEASURED, f"{path}: {error}")
    names = [f"{case.get('classname')}::{case.get('name')}" for case in cases]
    wrong = {
        name
        for name, case in zip(names, cases, strict=True)
        if any(case.find(tag) is not None for tag in ("failure", "error"))
    }
    skipped = {name for name, case in zip(names, cases, strict=True) if case.find("skipped") is not None}
    ran = len(set(names) - skipped)
    exits, texts = [Exit.PASS], []
    if wrong:
        exits.append(Exit.FAILED)
        texts.append(f"{len(wrong)} failed, {min(wrong)} first")
    if not ran or ran < (least or 0):
        exits.append(Exit.NOTHING_MEASURED)
        texts.append(f"{ran} tests ran, {least or 'at least one'} expected")
    if skipped:
        exits.append(Exit.NOTHING_MEASURED)
        texts.append(f"{len(skipped)} skipped: a skipped test proves nothing")
    code = gravest(exits)
    cells = {"found": str(ran), "failed": str(len(wrong))}
    return Finding(path.stem, code.name.lower(), code, "; ".join(texts), cells)


def _parsed(path: Path) -> ET.Element:
    """ValueError for what is not a JUnit report. A document type, which entities need, is refused before it is parsed."""
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"expected at most {MAX_BYTES} bytes")
    text = path.read_bytes()
    if b"\0" in text or b"<!DOCTYPE" in text or b"<!ENTITY" in text:
        raise ValueError("expected UTF-8 without a document type or entities")
    try:
        root = ET.fromstring(text)
    except ET.ParseError as error:
        raise ValueError(f"not XML: {error}") from error
    if root.tag not in {"testsuites", "testsuite"}:
        raise ValueError(f"expected JUnit's testsuites, got {root.tag}")
    return root
