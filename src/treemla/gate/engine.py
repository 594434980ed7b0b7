"""`treemla engine`: tokens a second of SGLang's Engine, as tests/e2e measured them, beside Triton's and stored ones.

Judged are milliseconds a token, of which less is better: 1000 over the tokens a second that are shown.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from treemla.gate import baseline, decide, schema
from treemla.gate.baseline import Baseline
from treemla.gate.cases import GATED_ENGINES, EngineCase
from treemla.gate.decide import Verdict
from treemla.gate.exits import BaselineMissing, Exit, gravest
from treemla.gate.findings import Finding, Findings
from treemla.gate.gating import this_machine
from treemla.gate.judge import EXITS, percent

OURS, PEER = "treemla", "triton"
METRIC, UNIT = "decode", "tokens/s"  # as tests/e2e/report.py names them
ALLOWED = 0.08  # starts of the same Engine differ by more than replays of a kernel do


@dataclass(frozen=True)
class Session:
    """A run of tests/e2e: milliseconds a token each time it was measured."""

    ours_ms: tuple[float, ...]
    peer_ms: tuple[float, ...]

    @property
    def ms(self) -> float:
        return statistics.median(self.ours_ms)

    @property
    def ratio(self) -> float:
        """Time over Triton's."""
        return self.ms / statistics.median(self.peer_ms)


def engine(files: Sequence[Path], commit: str | None, out: Path) -> Findings:
    """A finding a gated context. files: one a session, the newest last; a single session over its limit asks for two more.

    Writes out/sessions.jsonl, what `bless` and `history` read. BaselineMissing, InvalidEnvironment.
    """
    where = this_machine(commit).where
    runs = [_runs(path, where) for path in files]
    found, kept = [], []
    for case in GATED_ENGINES:
        held = [session for session in (session_of(case, taken) for taken in runs) if session]
        if len(held) < len(files):
            text = f"{len(files) - len(held)} of {len(files)} files lack {METRIC} of {OURS} or {PEER}: run gpu-e2e to its end"
            found.append(Finding(case.id, "not measured", Exit.NOTHING_MEASURED, text))
            continue
        stored = baseline.find("engine", str(where.fingerprint), case.id)
        found.append(judge(case, held, baseline.find("engine_ratio", str(where.arch), case.id), stored))
        measured = partial(schema.Measurement.of, case.id, where=where)
        kept += [measured("engine", "ms", held[-1].ours_ms), measured("engine_ratio", "ratio", [held[-1].ratio])]
    if kept:
        schema.dump(out / "sessions.jsonl", kept)
    note = (
        f"{where.gpu}, driver {where.driver}, machine class {where.fingerprint}; {ALLOWED:.0%} a session are allowed."
    )
    return Findings("engine", tuple(found), (note,))


def session_of(case: EngineCase, runs: Sequence[schema.Measurement]) -> Session | None:
    """What a file holds of a case; None where either side is missing."""
    held = {
        run.case: tuple(1000 / rate for rate in run.samples)
        for run in runs
        if (run.metric, run.unit) == (METRIC, UNIT) and run.case.startswith(case.id)
    }
    names = [f"{case.id}-{side}" for side in (OURS, PEER)]
    return Session(*(held[name] for name in names)) if all(name in held for name in names) else None


def judge(case: EngineCase, sessions: Sequence[Session], ratio: Baseline | None, stored: Baseline | None) -> Finding:
    """The graver of two comparisons: time over Triton's in the same run, and time itself; stored times may only advise."""
    newest = sessions[-1]
    cells = {"tokens/s": f"{1000 / newest.ms:.1f}", "vs Triton": f"{1 / newest.ratio:.2f}x faster"}
    data = {"ms": [session.ms for session in sessions], "ratios": [session.ratio for session in sessions]}
    texts, codes = [], []
    if ratio is None:
        texts.append("no ratio to Triton is stored for this architecture: python -m treemla bless")
        codes.append(Exit.BASELINE_MISSING)
    else:
        verdict = beside(ratio, data["ratios"])
        codes.append(EXITS[verdict])
        if verdict is not Verdict.SAME:
            texts.append(
                f"{_said(verdict)}: {1 / newest.ratio:.2f}x faster than Triton, {1 / ratio.median:.2f}x is stored"
            )
    if stored is not None:
        verdict, advisory = beside(stored, data["ms"]), stored.why_advisory
        codes.append(Exit.PASS if advisory else EXITS[verdict])
        cells["vs stored"] = percent(newest.ms / stored.median - 1) + (f" (advisory: {advisory})" if advisory else "")
        if verdict is not Verdict.SAME:
            texts.append(f"{_said(verdict)}: {1000 / newest.ms:.1f} tokens/s, {1000 / stored.median:.1f} are stored")
    code = gravest(codes)
    words = {Exit.PASS: "same", Exit.FAILED: "regression", Exit.BASELINE_MISSING: "no baseline"}
    return Finding(case.id, words.get(code, "ambiguous"), code, "; ".join(texts), cells, data)


def beside(stored: Baseline, measured: Sequence[float]) -> Verdict:
    """REGRESSION by the median of three sessions or more, or where small steps have added up beside the best blessed."""
    if len(measured) > 2 and decide.creep(statistics.median(measured), stored.anchor) > ALLOWED:
        return Verdict.REGRESSION
    first = decide.decide_absolute(stored.values, measured[-1:], ALLOWED)
    return first if len(measured) < 3 else decide.decide_absolute(stored.values, measured, ALLOWED)


def _said(verdict: Verdict) -> str:
    return "slower" if verdict is Verdict.REGRESSION else "over the limit, two more sessions decide"


def _runs(path: Path, here: schema.Where) -> list[schema.Measurement]:
    """BaselineMissing where they do not load or come from another GPU or driver."""
    try:
        runs = schema.load(path)
    except ValueError as error:
        raise BaselineMissing(str(error)) from error
    mine, foreign = (here.gpu, here.driver), {(run.where.gpu, run.where.driver) for run in runs}
    if foreign - {mine}:
        raise BaselineMissing(f"{path}: expected runs of this machine, {mine}, got some of {sorted(foreign, key=str)}")
    return runs
