"""`treemla history` and `treemla compare`: recorded runs over time, and two sets of them beside each other."""

from collections.abc import Sequence
from dataclasses import dataclass

from treemla.gate import schema, trend
from treemla.gate.decide import RULE, Verdict, decide_unpaired
from treemla.gate.exits import Exit
from treemla.gate.findings import Finding, Findings
from treemla.gate.judge import EXITS, percent


@dataclass(frozen=True)
class Line:
    """One metric of one case on one class of machine, over time."""

    case: str
    metric: str
    machine: str
    runs: tuple[schema.Measurement, ...]


def lines(runs: Sequence[schema.Measurement], case: str) -> list[Line]:
    """What the runs hold of the cases whose id contains `case`, each line by date."""
    held: dict[tuple[str, str, str], list[schema.Measurement]] = {}
    for run in sorted(runs, key=lambda run: run.where.date):
        if case in run.case:
            held.setdefault((run.case, run.metric, run.where.fingerprint or run.where.gpu), []).append(run)
    return [Line(*key, tuple(taken)) for key, taken in held.items()]


def history(runs: Sequence[schema.Measurement], case: str) -> Findings:
    """A finding a line, with the steps in it. Steps do not fail: they are what a person looks at."""
    found = []
    for line in lines(runs, case):
        values = [run.value for run in line.runs]
        steps = trend.steps(values)
        said = [f"{percent(step.change)} at {line.runs[step.index].where.treemla[:12]} ({line.runs[step.index].where.date})"
                for step in steps]  # fmt: skip
        cells = {
            "machine": line.machine, "runs": str(len(values)), "first": f"{values[0]:,.5g}",
            "best": f"{min(values):,.5g}", "last": f"{values[-1]:,.5g}", "unit": line.runs[0].unit, "steps": "; ".join(said) or "none",
        }  # fmt: skip
        verdict = "stepped" if steps else "level"
        found.append(
            Finding(f"{line.case} {line.metric}", verdict, Exit.PASS, "; ".join(said), cells, {"values": values})
        )
    return Findings("history", tuple(found))


def compare(base: Sequence[schema.Measurement], head: Sequence[schema.Measurement]) -> Findings:
    """Each case and metric that either side has. A run is one process's word, however many samples it holds."""
    sides = [_by_case(runs) for runs in (base, head)]
    found = [_compared(key, *(side.get(key, []) for side in sides)) for key in sorted({*sides[0], *sides[1]})]
    note = "Runs of different moments, not in turns: drift of the machine looks like a change. `gate` takes turns."
    return Findings("compare", tuple(found), (note,))


def _compared(key: tuple[str, str], base: list[schema.Measurement], head: list[schema.Measurement]) -> Finding:
    name = " ".join(key)
    if not base or not head:
        missing = "base" if not base else "head"
        code = Exit.BASELINE_MISSING if not base else Exit.NOTHING_MEASURED
        return Finding(name, "missing", code, f"not among the runs of the {missing}")
    machines = {(run.where.fingerprint, run.where.gpu, run.unit) for run in (*base, *head)}
    if len(machines) > 1:
        return Finding(
            name, "foreign", Exit.BASELINE_MISSING, f"expected one class of machine and one unit, got {machines}"
        )
    few = min(len(base), len(head))
    if few < RULE.first:
        text = f"{few} runs a side cannot tell: runs of one program differ by more than the samples in them; {RULE.first} can"
        return Finding(name, Verdict.AMBIGUOUS, Exit.AMBIGUOUS, text)
    power = -1 if base[0].unit == "tokens/s" else 1  # of these, more is better
    made = decide_unpaired([run.value**power for run in base], [run.value**power for run in head])
    said = f"{percent(made.change)} slower ({percent(made.low)} to {percent(made.high)})"
    code = EXITS[made.verdict]
    return Finding(name, made.verdict, code, "" if code is Exit.PASS else said, {"change": said, "runs": str(few)})


def _by_case(runs: Sequence[schema.Measurement]) -> dict[tuple[str, str], list[schema.Measurement]]:
    held: dict[tuple[str, str], list[schema.Measurement]] = {}
    for run in runs:
        held.setdefault((run.case, run.metric), []).append(run)
    return held
