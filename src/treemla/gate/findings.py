"""What a command found, as a value: one verdict, and the same facts as text, JSON, JUnit and Markdown."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from xml.etree import ElementTree as ET

from treemla.gate.exits import Exit, gravest
from treemla.gate.records import made_of, parsed
from treemla.gate.report import table

MARKER = "<!-- treemla-gate:v1 -->"  # by which a bot finds the comment that it wrote before
MAX_MARKDOWN = 60_000  # characters; GitHub refuses comments of more than 65,536
MAX_ROWS = 12  # shown before the fold
SIGNS = {Exit.PASS: "✅", Exit.AMBIGUOUS: "❔"}


@dataclass(frozen=True)
class Finding:
    """`exit`: what the command would end with if this were all. cells: {column: text}; data: numbers for programs."""

    name: str
    verdict: str
    exit: Exit
    text: str = ""
    cells: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Findings:
    """notes: a sentence each, true of all findings. None found is exit 3."""

    title: str
    found: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def exit(self) -> Exit:
        return gravest(finding.exit for finding in self.found)

    @property
    def verdict(self) -> str:
        """One line, and the last that a command prints."""
        counts: dict[str, int] = {}
        for finding in self.found:
            counts[finding.verdict] = counts.get(finding.verdict, 0) + 1
        said = " · ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "nothing was measured"
        return f"{self.title}: {self.exit.name} ({said})"

    @property
    def gravest_first(self) -> list[Finding]:
        return sorted(self.found, key=lambda finding: finding.exit is Exit.PASS)

    def text(self) -> str:
        shown = [self.table(self.found)] if self.found else []
        return "\n".join([*shown, "", *self.notes, self.problems()])

    def problems(self) -> str:
        """A line for each that does not pass, then the verdict."""
        wrong = [f"{f.exit.name}: {f.name}: {f.text}" for f in self.gravest_first if f.exit is not Exit.PASS]
        return "\n".join([*wrong, self.verdict])

    def table(self, found: Sequence[Finding]) -> str:
        columns = self.columns()
        rows = [[f.name, *(f.cells.get(column, "-") for column in columns), f.verdict] for f in found]
        return table(["case", *columns, "verdict"], rows)

    def columns(self) -> list[str]:
        return list(dict.fromkeys(column for finding in self.found for column in finding.cells))

    def as_json(self) -> str:
        found = [{**vars(f), "exit": f.exit.name} for f in self.found]
        return json.dumps(
            {"title": self.title, "exit": self.exit.name, "found": found, "notes": self.notes},
            indent=1,
            allow_nan=False,
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `as_json` wrote; ValueError for anything else, an exit that does not follow from the findings too."""
        try:
            held = parsed(text)
            found = [{**f, "exit": Exit[f["exit"]]} for f in held["found"]]
            made = made_of(cls, {"title": held["title"], "found": found, "notes": held["notes"]})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"expected findings as JSON, got {text[:80]!r}: {error}") from error
        if held.get("exit") != made.exit.name:
            raise ValueError(f"exit: expected {made.exit.name} from the findings, got {held.get('exit')!r}")
        return made

    def as_junit(self) -> str:
        """A test case a finding. A regression is a failure; what could not be told is an error. Neither is a pass."""
        suite = ET.Element("testsuite", name=self.title, tests=str(len(self.found)))
        for finding in self.found:
            case = ET.SubElement(suite, "testcase", classname=self.title, name=finding.name)
            if finding.exit is not Exit.PASS:
                tag = "failure" if finding.exit is Exit.FAILED else "error"
                ET.SubElement(case, tag, message=f"{finding.verdict}: {finding.text}", type=finding.exit.name)
        if not self.found:
            case = ET.SubElement(suite, "testcase", classname=self.title, name="anything")
            ET.SubElement(case, "error", message="nothing was measured", type=self.exit.name)
            suite.set("tests", "1")
        for tag in ("failure", "error"):
            suite.set(f"{tag}s", str(len(suite.findall(f"testcase/{tag}"))))
        root = ET.Element("testsuites")
        root.append(suite)
        return ET.tostring(root, encoding="unicode")

    def as_markdown(self) -> str:
        """For a pull request: the verdict, what is wrong, at most MAX_ROWS rows, the others behind a fold."""
        columns = self.columns()
        head = ["| " + " | ".join(["case", *columns, "verdict"]) + " |", "|---" * (len(columns) + 2) + "|"]
        rows = [
            "| " + " | ".join(map(escape, [f.name, *(f.cells.get(c, "-") for c in columns), f.verdict])) + " |"
            for f in self.gravest_first
        ]
        wrong = [f"* {escape(f.name)}: {escape(f.text)}" for f in self.gravest_first if f.exit is not Exit.PASS]
        lines = [MARKER, f"### {SIGNS.get(self.exit, '❌')} {escape(self.verdict)}", ""]
        lines += [*head, *rows[:MAX_ROWS], "", *wrong, "", *map(_note, self.notes)]
        if len(rows) > MAX_ROWS:
            lines += ["", "<details><summary>all cases</summary>", "", *head, *rows[MAX_ROWS:], "", "</details>"]
        text = "\n".join(lines) + "\n"
        if len(text) > MAX_MARKDOWN:
            return text[:MAX_MARKDOWN].rpartition("\n")[0] + "\n\n(cut here: the report has the rest)\n"
        return text

    def write(self, json_path: Path | None, junit: Path | None, markdown: Path | None) -> None:
        """Each form to the file that was asked for."""
        for path, made in ((json_path, self.as_json), (junit, self.as_junit), (markdown, self.as_markdown)):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(made())


def _note(text: str) -> str:
    """A sentence as it is; a table behind a fold, each line as it is."""
    title, _, rest = text.partition("\n")
    if not rest:
        return escape(text)
    fenced = rest.strip("\n").replace("`", "'")
    return f"<details><summary>{escape(title)}</summary>\n\n```text\n{fenced}\n```\n\n</details>"


def escape(text: str) -> str:
    """Text that Markdown shows as it is: no table, tag, link or mention comes out of a case's name or a message."""
    line = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{c}" if c in "|`*_[]\\" else c for c in line).replace("@", "@\u200b")
