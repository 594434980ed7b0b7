"""From times to findings: each case beside the base, beside the peer, beside what is stored. Pure."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date

from treemla.gate import decide
from treemla.gate.baseline import Baseline
from treemla.gate.decide import RULE, Decision, Rule, Verdict
from treemla.gate.exits import Exit, gravest
from treemla.gate.findings import Finding
from treemla.gate.pairs import HEAD, Taken

BASE, PEER = "base", "triton"
RATIO_RULE = Rule(suspicious=0.04, regression=0.06, noticed=0.12)  # moves with the ratio of memory and SM clocks too
FASTER_THAN_POSSIBLE = 0.9  # of the floor, whose bandwidth is what the best programs reach
GRACE_DAYS = 14
ADVISED = "advised"  # the verdict where stored figures speak against a case that nothing else fails
EXITS = {
    Verdict.SAME: Exit.PASS,
    Verdict.FASTER: Exit.PASS,
    Verdict.REGRESSION: Exit.FAILED,
    Verdict.AMBIGUOUS: Exit.AMBIGUOUS,
    Verdict.MORE: Exit.AMBIGUOUS,
}
PROBLEMS = {HEAD: Exit.FAILED, BASE: Exit.BASELINE_MISSING}  # others: the machine lacks something


@dataclass(frozen=True)
class Known:
    """What a case is judged by; None: not there. stored_here: the stored figures are of this class of machine."""

    ratio: Baseline | None = None
    stored: Baseline | None = None
    floor_us: float | None = None
    today: date = date.min


@dataclass(frozen=True)
class Part:
    """One comparison of a case. advises: whatever it says, the case does not fail for it."""

    exit: Exit
    verdict: str
    text: str
    cell: str
    advises: bool = False


def judge(case: str, taken: Taken, sides: Sequence[str], known: Known) -> Finding:
    """The finding of a case: the gravest of its parts, and the texts of all that do not pass."""
    if taken.problem is not None:
        exit_code = PROBLEMS.get(taken.problem.side, Exit.INVALID_ENVIRONMENT)
        return Finding(case, "not measured", exit_code, f"{taken.problem.side}: {taken.problem.text}")
    parts = {column: part for column, judged in PARTS.items() if (part := judged(taken, sides, known))}
    grave = gravest(part.exit for part in parts.values())
    said = [part for part in parts.values() if part.exit is grave]
    verdict = next((part.verdict for part in said if part.verdict != Verdict.SAME), said[0].verdict)
    data = {
        "us": {side: taken.us(side) for side in sides},
        "log_ratios": {side: taken.log_ratios(side) for side in sides if side != HEAD},
        "dropped_rounds": sum(launch.dropped for launch in taken.launches),
        "processes": len(taken.launches),
        "parts": {column: {**vars(part), "exit": part.exit.name} for column, part in parts.items()},
    }
    cells = {"us": f"{statistics.median(taken.us(HEAD)):.1f}", **{column: part.cell for column, part in parts.items()}}
    texts = [part.text for part in parts.values() if part.text]
    return Finding(case, verdict, grave, "; ".join(texts), cells, data)


def unsettled(taken: Taken, sides: Sequence[str], known: Known) -> bool:
    """Whether more processes are needed for one of the comparisons."""
    if decide.decide(taken.log_ratios(BASE)).verdict is Verdict.MORE:
        return True
    if PEER in sides and known.ratio and over_peer(taken, known.ratio).verdict is Verdict.MORE:
        return True
    return bool(known.stored and not known.stored.why_advisory and beside_stored(taken, known.stored) is Verdict.MORE)


def over_peer(taken: Taken, stored: Baseline) -> Decision:
    """Head / peer, beside the stored ratio of the two."""
    return decide.decide([ratio - math.log(stored.median) for ratio in taken.log_ratios(PEER)], RATIO_RULE)


def beside_stored(taken: Taken, stored: Baseline) -> Verdict:
    """Three processes are a session."""
    us = taken.us(HEAD)
    sessions = [statistics.median(us[n : n + 3]) for n in range(0, len(us), 3)]
    first = decide.decide_absolute(stored.values, sessions[:1])
    return first if first is Verdict.SAME or len(sessions) < 3 else decide.decide_absolute(stored.values, sessions)


def smallest_detectable(takens: Sequence[Taken]) -> float | None:
    """The slowdown that would be noticed today in the noisiest case."""
    found = [decide.decide(taken.log_ratios(BASE)).detectable for taken in takens if taken.problem is None]
    return max(found, default=None)


def _beside_base(taken: Taken, _: Sequence[str], __: Known) -> Part:
    made = decide.decide(taken.log_ratios(BASE))
    said = f"{percent(made.change)} beside the base ({percent(made.low)} to {percent(made.high)}, {made.processes} processes)"
    if made.verdict is Verdict.REGRESSION:
        text = f"{said}, allowed {percent(RULE.regression)}"
    elif EXITS[made.verdict] is Exit.AMBIGUOUS:
        text = f"{said}: too noisy to tell; a slowdown below {percent(made.detectable)} would not be noticed"
    else:
        text = ""
    return Part(
        EXITS[made.verdict], made.verdict, text, f"{percent(made.change)} ({percent(made.low)}..{percent(made.high)})"
    )


def _beside_peer(taken: Taken, sides: Sequence[str], known: Known) -> Part | None:
    if PEER not in sides:
        return None
    ratio = math.exp(statistics.fmean(taken.log_ratios(PEER)))
    cell = f"{1 / ratio:.1f}x faster"
    if known.ratio is None:
        text = "no ratio to Triton is stored for this architecture: python -m treemla bless"
        return Part(Exit.BASELINE_MISSING, "no baseline", text, cell)
    made = over_peer(taken, known.ratio)
    wrong = EXITS[made.verdict] is not Exit.PASS
    text = (
        f"{1 / ratio:.2f}x faster than Triton, {1 / known.ratio.median:.2f}x is stored ({percent(made.change)})"
        if wrong
        else ""
    )
    return Part(EXITS[made.verdict], made.verdict, text, cell)


def _beside_stored(taken: Taken, _: Sequence[str], known: Known) -> Part | None:
    if (stored := known.stored) is None:
        return None
    verdict = beside_stored(taken, stored)
    us = statistics.median(taken.us(HEAD))
    creep = decide.creep(us, stored.anchor)
    texts = []
    if verdict is not Verdict.SAME:
        texts.append(
            f"{us:.1f} us, {decide.limit(stored.values):.1f} allowed by {len(stored.sessions)} stored sessions"
        )
    if creep > decide.MAX_CREEP:
        verdict = Verdict.REGRESSION
        texts.append(f"{percent(creep)} beside the best that was blessed: small steps have added up")
    if (overdue := stored.days_overdue(known.today)) > 0:
        texts.append(f"stored figures are {overdue} days past {stored.valid_until}: measure and bless anew")
    text, cell = "; ".join(texts), percent(us / stored.median - 1)
    if stored.why_advisory:
        advisory = f" (advisory: {stored.why_advisory})"
        verdict_said = ADVISED if texts else Verdict.SAME
        return Part(Exit.PASS, verdict_said, text and text + advisory, cell + advisory, advises=True)
    code = Exit.BASELINE_MISSING if overdue > GRACE_DAYS and EXITS[verdict] is Exit.PASS else EXITS[verdict]
    return Part(code, verdict, text, cell)


def _possible(taken: Taken, _: Sequence[str], known: Known) -> Part | None:
    us = statistics.median(taken.us(HEAD))
    if known.floor_us is None:
        return None
    share = f"{100 * known.floor_us / us:.0f}%"
    if us < FASTER_THAN_POSSIBLE * known.floor_us:
        text = f"{us:.1f} us where the bytes alone take {known.floor_us:.1f}: what was timed is not the work"
        return Part(Exit.FAILED, "invalid", text, share)
    return Part(Exit.PASS, Verdict.SAME, "", share)


PARTS: dict[str, Callable[[Taken, Sequence[str], Known], Part | None]] = {
    "vs base": _beside_base,
    "vs Triton": _beside_peer,
    "vs stored": _beside_stored,
    "of roofline": _possible,
}


def percent(change: float) -> str:
    return f"{100 * change:+.1f}%"
