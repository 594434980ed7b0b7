"""`treemla bless`: recorded runs become a stored baseline, with a reason, and never quietly a looser one."""

import getpass
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from pathlib import Path

from treemla.gate import baseline, decide, schema
from treemla.gate.baseline import Baseline, Session
from treemla.gate.records import made_of, parsed, text_of

LEDGER = "blessings.jsonl"
MIN_RUNS = 3  # of different starts of the machine
KEPT = 20  # sessions
VALID_DAYS = 120


class Refused(ValueError):
    """These runs must not become a baseline; the message says why."""


@dataclass(frozen=True)
class Blessing:
    """A line of the ledger. old: the median before, None where there was none. creep: the new median beside the anchor."""

    id: str
    date: str
    by: str
    case: str
    metric: str
    machine: str
    old: float | None
    new: float
    creep: float
    runs: int
    reason: str
    issue: str | None


def bless(
    case: str,
    runs: Sequence[schema.Measurement],
    reason: str,
    today: date,
    *,
    machine: str,
    issue: str | None = None,
    root: Path = baseline.ROOT,
) -> list[Blessing]:
    """Store what the runs of `case` say of each metric; its lines are appended to the ledger.

    machine: the fingerprint that the runs must carry. issue: a link. Sessions of the same level are added to those stored; a loosened
    baseline starts anew. Refused where runs are few, foreign or of one start; where the reason is missing; and where
    the figure is MAX_CREEP above the best ever blessed and no issue says why.
    """
    if problem := problem_of(machine, reason, issue):
        raise Refused(problem)
    chosen = {metric: [run for run in runs if (run.case, run.metric) == (case, metric)] for metric in baseline.FOLDERS}
    if not any(chosen.values()):
        raise Refused(f"{case}: none of the {len(runs)} runs is of this case")
    ledger = root / LEDGER
    made: list[Blessing] = []
    stored: list[Baseline] = []
    for metric, taken in chosen.items():
        if taken:
            number = f"b-{len(read_ledger(ledger)) + len(made) + 1:04}"
            new, old = _baseline(metric, taken, today, machine, issue, root, number)
            stored.append(new)
            made.append(
                Blessing(
                    number, today.isoformat(), getpass.getuser(), case, metric, new.machine, old.median if old else None,
                    new.median, decide.creep(new.median, new.anchor), len(taken), reason.strip(), issue,
                )
            )  # fmt: skip
    for new in stored:  # all of them or none
        new.dump(root)
    with ledger.open("a") as held:
        held.writelines(json.dumps(asdict(blessing), sort_keys=True) + "\n" for blessing in made)
    return made


def problem_of(machine: str, reason: str, issue: str | None) -> str:
    """What is wrong with the arguments, whatever the runs are; empty where nothing is."""
    if not baseline.is_name(machine):
        return f"--machine: expected a class as gate prints it, got {machine!r}"
    if not reason.strip():
        return "--reason: expected a text: who reads the ledger in a year asks why"
    if issue is not None and not baseline.is_link(issue):
        return f"--issue: expected a link (https://...), got {issue!r}"
    return ""


def read_ledger(path: Path) -> list[Blessing]:
    """Refused names the line that is no blessing."""
    try:
        lines = text_of(path).splitlines() if path.exists() else []
    except ValueError as error:
        raise Refused(str(error)) from error
    made = []
    for number, line in enumerate(lines, 1):
        try:
            made.append(made_of(Blessing, parsed(line)))
        except ValueError as error:
            raise Refused(f"{path}:{number}: expected a blessing, got {line[:80]!r}: {error}") from error
    return made


def _baseline(
    metric: str,
    runs: Sequence[schema.Measurement],
    today: date,
    machine: str,
    issue: str | None,
    root: Path,
    number: str,
) -> tuple[Baseline, Baseline | None]:
    """(new, old)"""
    case, unit = runs[0].case, baseline.UNITS[metric]
    if units := sorted({run.unit for run in runs} - {unit}):
        raise Refused(f"{case} {metric}: expected runs in {unit}, got some in {', '.join(units)}")
    foreign = sorted({str(run.where.fingerprint) for run in runs} - {machine})
    if foreign:
        raise Refused(f"{case} {metric}: expected runs of machine class {machine}, got some of {', '.join(foreign)}")
    if any(None in (run.where.start, run.where.arch) or run.where.treemla.endswith("-dirty") for run in runs):
        raise Refused(f"{case} {metric}: expected runs that gate recorded, of a commit, got some of neither")
    starts = {run.where.start for run in runs}
    if len(starts) < MIN_RUNS:
        raise Refused(f"{case} {metric}: expected runs of {MIN_RUNS} machine starts or more, got {len(starts)}")
    where = str(runs[0].where.arch) if metric in baseline.BY_ARCH else machine
    old = baseline.find(metric, where, case, root)
    sessions = [Session(run.value, str(run.where.start), run.where.treemla, run.where.date) for run in runs]
    fresh = Baseline.of(
        case,
        metric,
        unit,
        where,
        sessions,
        anchor=min(s.value for s in sessions),
        blessed=number,
        valid_until="9999-01-01",
    )
    anchor = fresh.median
    if old is not None:
        anchor = min(old.anchor, fresh.median)
        creep = decide.creep(fresh.median, anchor)
        if creep > decide.MAX_CREEP:
            if issue is None:
                raise Refused(
                    f"{case} {metric}: {fresh.median:.4g} is {100 * creep:.1f}% above the best ever blessed ({anchor:.4g}): "
                    "give the --issue in which that was accepted"
                )
            anchor = fresh.median
        if abs(fresh.median / old.median - 1) <= decide.RULE.suspicious:
            known = {(s.start, s.date) for s in sessions}
            sessions = [*(s for s in old.sessions if (s.start, s.date) not in known), *sessions][-KEPT:]
    until = (today + timedelta(days=VALID_DAYS)).isoformat()
    return Baseline.of(case, metric, unit, where, sessions, anchor=anchor, blessed=number, valid_until=until), old
