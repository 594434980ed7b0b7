"""`treemla report --html`: one file for people, the verdict first. It loads nothing, so it works wherever it lies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree.ElementTree import Element

from treemla.gate import bless, chart, history, mix, schema, times, trend
from treemla.gate.baseline import ROOT
from treemla.gate.chart import Mark, Series
from treemla.gate.exits import Exit
from treemla.gate.findings import Finding, Findings
from treemla.gate.judge import percent
from treemla.gate.kernelcode import KernelCode
from treemla.gate.markup import Part, document, grid, listed, node
from treemla.gate.records import made_of, text_of

STYLE = Path(__file__).with_name("page.css")
CLASSES = {Exit.PASS: "pass", Exit.AMBIGUOUS: "doubt"}
DRAWN_RUNS = 3  # fewer are no line


@dataclass(frozen=True)
class Material:
    """What the sources of a report hold: {file: what a verb found}, {file: measurements}; blessings, or why there are
    none to draw.
    """

    verbs: Mapping[Path, Findings]
    runs: Mapping[Path, Sequence[schema.Measurement]]
    blessings: Sequence[bless.Blessing]
    problem: str = ""


def gather(sources: Sequence[Path], root: Path = ROOT) -> Material:
    """Of the sources what can be read: what cannot is red in the verdict, which names it."""
    verbs, runs = {}, {}
    for path in sources:
        try:
            if path.suffix == ".jsonl":
                runs[path] = schema.load(path)
            elif path.suffix != ".xml":
                verbs[path] = Findings.from_json(text_of(path))
        except ValueError:
            continue
    try:
        return Material(verbs, runs, bless.read_ledger(root / bless.LEDGER))
    except bless.Refused as error:
        return Material(verbs, runs, (), f"Blessings are not drawn: {error}")


def write(path: Path, verdict: Findings, sources: Sequence[Path], root: Path = ROOT) -> None:
    """The page of what the sources hold."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(verdict, gather(sources, root)), encoding="utf-8")


def page(verdict: Findings, held: Material) -> str:
    """The document. verdict: what `merge` found of the same sources."""
    runs = [run for taken in held.runs.values() for run in taken]
    parts = [node("h1", "treemla report"), node("p", verdict.verdict, class_=f"verdict {_colour(verdict.exit)}")]
    if wrong := [f"{f.name}: {f.exit.name}: {f.text or f.verdict}" for f in verdict.gravest_first if f.exit]:
        parts.append(listed(wrong))
    parts += [*map(_note, verdict.notes), _table(verdict, why=False)]
    if runs:
        parts += [*times.section(runs), *_history(runs, held)]
    for path, findings in held.verbs.items():
        parts += [node("h2", path.stem), node("p", findings.verdict, class_=_colour(findings.exit)), _table(findings)]
        parts += [part for finding in findings.found for part in _changed(finding)]
        parts += map(_note, findings.notes)
    if runs:
        parts += [node("h2", "Where the measurements come from"), _origins(held.runs)]
    return document(verdict.verdict, STYLE.read_text(), parts)


def _colour(code: Exit) -> str:
    return CLASSES.get(code, "fail")


def _table(findings: Findings, *, why: bool = True) -> Element:
    """why: with the texts of what does not pass."""
    columns = findings.columns()
    texts = ["why"] if why and any(finding.text and finding.exit for finding in findings.found) else []
    rows: list[list[Part]] = []
    for finding in findings.gravest_first:
        said = [node("div", finding.text if finding.exit else "")] if texts else []
        verdict = node("span", finding.verdict, class_=_colour(finding.exit))
        rows.append([finding.name, *(finding.cells.get(column, "-") for column in columns), verdict, *said])
    return grid(["case", *columns, "verdict", *texts], rows)


def _note(text: str) -> Element:
    """A sentence, or a title with a table as it was printed."""
    title, _, rest = text.partition("\n")
    if not rest:
        return node("p", text, class_="soft")
    return node("div", node("h3", title.rstrip(":")), node("pre", rest.strip("\n"), tabindex=0))


def _changed(finding: Finding) -> list[Element]:
    """Of a kernel that is not the one it was compared with, which instructions became more or fewer."""
    try:
        old, new = (made_of(KernelCode, finding.data[side]) for side in ("old", "new"))
    except (KeyError, ValueError):
        return []
    pairs = [("kernel", old.opcodes, new.opcodes)]
    if len(old.loops) == len(new.loops):
        pairs += [(f"loop {n}", *loops) for n, loops in enumerate(zip(old.loops, new.loops, strict=True), 1)]
    rows = []
    for where, before, after in pairs:
        by_class = mix.by_class(before), mix.by_class(after)
        for kind, counts in (("class", by_class), ("opcode", (before, after))):
            for name in sorted({*counts[0], *counts[1]}):
                few, many = (side.get(name, 0) for side in counts)
                if few != many:
                    rows.append([where, kind, name, str(few), str(many), f"{many - few:+d}"])
    title = node("h3", f"{finding.name}: instructions that changed")
    return [title, grid(["in", "by", "instruction", "before", "now", "change"], rows)] if rows else []


def _history(runs: Sequence[schema.Measurement], held: Material) -> list[Element]:
    lines = [line for line in history.lines(runs, "") if len(line.runs) > 1]
    parts = [node("h2", "History")]
    if held.problem:
        parts.append(node("p", held.problem, class_="fail"))
    if not lines:
        return [*parts, node("p", "Every case was measured once: there is nothing to compare over time.")]
    drawn = [_line(line, held.blessings) for line in lines if len(line.runs) >= DRAWN_RUNS]
    if drawn:
        said = "Upright lines: red where the level steps, green and dashed where a figure was blessed."
        parts += [node("p", said, class_="soft"), node("div", *drawn, class_="charts")]
    kept = [run for line in lines for run in line.runs]
    return [*parts, _table(history.history(kept, ""))]


def _line(line: history.Line, blessings: Sequence[bless.Blessing]) -> Element:
    values, dates = [run.value for run in line.runs], [run.where.date[:10] for run in line.runs]
    last = len(values) - 1
    marks = []
    for step in trend.steps(values):
        text = f"{percent(step.change)} from {line.runs[step.index].where.treemla[:12]} on"
        marks.append(Mark(step.index - 0.5, text, "step"))
    for held in blessings:
        machines = {line.machine, line.runs[0].where.arch}
        if (held.case, held.metric) == (line.case, line.metric) and held.machine in machines:
            place = sum(date <= held.date for date in dates) - 0.5
            text = f"blessed {held.id}, {held.date}: {held.new:.4g}: {held.reason}"
            marks.append(Mark(min(max(place, 0.0), float(last)), text, "blessing"))
    x = chart.Axis("by date", 0.0, float(last), {0.0: dates[0], float(last): dates[-1]})
    y = chart.linear_axis(line.runs[0].unit, values, zero=False)
    points = [(float(n), value) for n, value in enumerate(values)]
    figure = chart.lines(
        f"{line.case} {line.metric}, {line.runs[0].unit}", [Series(line.machine, points, 0)], x, y, marks
    )
    if marks:
        figure.append(listed(mark.text for mark in marks))
    return figure


def _origins(runs: Mapping[Path, Sequence[schema.Measurement]]) -> Element:
    rows: list[list[Part]] = []
    for path, taken in runs.items():
        where = taken[0].where
        known = [where.gpu, where.driver, where.torch, where.treemla[:12], where.date[:10]]
        rows.append([path.name, str(len(taken)), *(value or "-" for value in known), node("div", where.command)])
    return grid(["file", "measurements", "GPU", "driver", "torch", "commit", "date", "command"], rows)
