"""The gate's verbs of the command line: each makes `Findings`, which `showing` prints, writes and returns."""

import argparse
import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from treemla.gate import schema
from treemla.gate.baseline import today
from treemla.gate.cases import GATED_CASES, GATED_ENGINES, AnyCase, chosen
from treemla.gate.exits import BaselineMissing, Exit
from treemla.gate.findings import Finding, Findings
from treemla.gate.records import text_of
from treemla.gate.showing import Unusable, Verbs, add_verb

SESSIONS = Path("build/gate/sessions.jsonl")
E2E = Path("build/e2e/e2e.jsonl")
FINDINGS = Path("build/gate/gate.json")


def add(verbs: Verbs) -> None:
    words = "time this checkout beside a base, in turns, and judge it"
    verb = add_verb(verbs, "gate", run_gate, words, writes=lambda given: {"--out": given.out / SESSIONS.name})
    words = "a commit, or the folder of a checkout or unpacked build; default: where this checkout left origin/main"
    verb.add_argument("--base", help=words)
    add_cases(verb)
    add_measuring(verb)
    verb.add_argument("--out", type=Path, default=SESSIONS.parent, help="folder; default: %(default)s")
    verb.add_argument("--no-triton", action="store_true", help="judge no case by its ratio to SGLang's Triton kernel")

    words = "time this checkout beside itself: the gate must say same"
    verb = add_verb(verbs, "selfcheck", run_selfcheck, words, writes=lambda given: {"--out": given.out / SESSIONS.name})
    add_cases(verb)
    add_measuring(verb)
    verb.add_argument("--out", type=Path, default=Path("build/selfcheck"), help="folder; default: %(default)s")

    verb = add_verb(verbs, "static", run_static, "build the cubins and judge what the compiler made of the kernels")
    verb.add_argument(
        "--against", metavar="BASE", help="a commit or folder that is compiled too; default: what is stored"
    )
    verb.add_argument("--bless", metavar="REASON", help="store what the kernels are now")

    words = "judge tokens a second of SGLang's Engine that gpu-e2e measured"
    verb = add_verb(verbs, "engine", run_engine, words, writes=lambda given: {"--out": given.out / SESSIONS.name})
    verb.add_argument(
        "--from", dest="sources", type=Path, nargs="+", default=[E2E], help=f"one file a session; default: {E2E}"
    )
    verb.add_argument("--commit", help="treemla's commit, where this copy has no git history")
    verb.add_argument("--out", type=Path, default=Path("build/engine"), help="folder; default: %(default)s")

    verb = add_verb(verbs, "compare", run_compare, "judge recorded runs beside others")
    verb.add_argument("--base", type=Path, nargs="+", required=True, help="files of runs")
    verb.add_argument("--head", type=Path, nargs="+", required=True, help="files of runs")

    verb = add_verb(verbs, "explain", run_explain, "every figure behind the verdict on a case")
    verb.add_argument("case", help="part of its id")
    verb.add_argument(
        "--from", dest="source", type=Path, default=FINDINGS, help="what gate --json wrote; default: %(default)s"
    )

    verb = add_verb(verbs, "bless", run_bless, "make recorded runs the stored baseline of a case")
    verb.add_argument("case")
    verb.add_argument("--from", dest="sources", type=Path, nargs="+", required=True, help="sessions.jsonl of gate runs")
    verb.add_argument("--machine", required=True, help="the class of machine, as gate prints it")
    verb.add_argument("--reason", required=True)
    verb.add_argument("--issue", help="where a slowdown was accepted")

    verb = add_verb(verbs, "history", run_history, "recorded runs of a case over time, and where they step")
    verb.add_argument("case", help="part of its id")
    verb.add_argument("--from", dest="sources", type=Path, nargs="+", default=[SESSIONS], help=f"default: {SESSIONS}")

    verb = add_verb(verbs, "quarantine", run_quarantine, "list the cases that do not block, or add one")
    verb.add_argument("case", nargs="?", help="add this one")
    for name in ("owner", "reason", "issue"):
        verb.add_argument(f"--{name}")
    verb.add_argument("--days", type=int, default=14)

    verb = add_verb(verbs, "report", run_report, "merge what other verbs and test layers left into one verdict")
    verb.add_argument(
        "sources", type=Path, nargs="+", help="JSON of verbs, JUnit of layers, JSON lines of measurements"
    )
    verb.add_argument("--html", type=Path, metavar="PATH", help="write a page of all that they hold, with charts")
    verb.add_argument(
        "--expect", metavar="NAME=TESTS", action="append", default=[], help="a layer's least number of tests"
    )


def add_cases(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--case", action="append", metavar="TEXT", help="only cases whose id contains TEXT; repeatable")


def add_measuring(verb: argparse.ArgumentParser) -> None:
    """What every verb takes that has a GPU alone."""
    verb.add_argument("--commit", help="treemla's commit, where this copy has no git history")
    verb.add_argument(
        "--wait", type=float, default=600.0, metavar="S", help="for the GPU, in seconds; default: %(default)s"
    )


def run_gate(given: argparse.Namespace) -> Findings:
    from treemla.gate.gating import gate

    cases = chosen_of(GATED_CASES, given.case)
    return gate(cases, given.base, given.commit, given.out, given.wait, triton=not given.no_triton)


def run_selfcheck(given: argparse.Namespace) -> Findings:
    from treemla.gate.gating import selfcheck

    return selfcheck(chosen_of(GATED_CASES, given.case), given.commit, given.out, given.wait)


def run_static(given: argparse.Namespace) -> Findings:
    from treemla.gate.static_gate import STORED, bless, static_gate

    if given.bless is not None and not given.bless.strip():
        raise Unusable("--bless: expected a reason")
    if given.bless and given.against:
        raise Unusable("--against: expected none beside --bless, which compares with nothing that could refuse it")
    return bless(given.bless) if given.bless else static_gate(given.against or STORED)


def run_engine(given: argparse.Namespace) -> Findings:
    from treemla.gate.engine import engine

    return engine(given.sources, given.commit, given.out)


def run_compare(given: argparse.Namespace) -> Findings:
    from treemla.gate.history import compare

    return compare(_runs(given.base), _runs(given.head))


def run_explain(given: argparse.Namespace) -> Findings:
    from treemla.gate.explain import explain

    return explain(_findings(given.source), given.case)


def run_bless(given: argparse.Namespace) -> Findings:
    from treemla.gate.bless import Refused, bless, problem_of

    _gated(given.case)
    if problem := problem_of(given.machine, given.reason, given.issue):
        raise Unusable(problem)
    try:
        made = bless(given.case, _runs(given.sources), given.reason, today(), machine=given.machine, issue=given.issue)
    except Refused as error:
        return Findings("bless", (Finding(given.case, "refused", Exit.FAILED, str(error)),))
    return Findings("bless", tuple(
        Finding(f"{b.case} {b.metric}", "blessed", Exit.PASS, "", {"old": f"{b.old or 0:.4g}", "new": f"{b.new:.4g}", "id": b.id})
        for b in made
    ))  # fmt: skip


def run_history(given: argparse.Namespace) -> Findings:
    from treemla.gate.history import history

    return history(_runs(given.sources), given.case)


def run_quarantine(given: argparse.Namespace) -> Findings:
    from treemla.gate import quarantine

    if given.case is not None:
        _gated(given.case)
        if not 0 <= given.days <= quarantine.MAX_DAYS:
            raise Unusable(f"--days: expected at most {quarantine.MAX_DAYS}, got {given.days}")
        until = today() + timedelta(days=given.days)
        entry = quarantine.Entry(given.case, given.owner or "", given.reason or "", given.issue or "", today(), until)
        if problem := quarantine.problem_of(entry):
            raise Unusable(f"--{problem}")
        quarantine.add(entry)
    entries = quarantine.load()
    held = [Finding(e.case, "quarantined", Exit.PASS, "", {"until": str(e.expires), "owner": e.owner, "reason": e.reason})
            for e in entries if e.expires >= today()]  # fmt: skip
    none = [] if entries else [Finding("quarantine", "empty", Exit.PASS)]
    return Findings("quarantine", (*held, *none, *quarantine.overdue(today(), entries)))


def run_report(given: argparse.Namespace) -> Findings:
    from treemla.gate.merge import merge

    expected = {}
    for pair in given.expect:
        name, _, count = pair.partition("=")
        if not name or not re.fullmatch(r"[0-9]{1,9}", count):
            raise Unusable(f"--expect: expected NAME=TESTS, got {pair!r}")
        expected[name] = int(count)
    return merge(given.sources, expected)


def chosen_of(cases: Sequence[AnyCase], texts: Sequence[str] | None) -> list[AnyCase]:
    """Those that the texts choose; Unusable where there is none."""
    if found := chosen(cases, texts):
        return found
    raise Unusable(f"--case: expected part of one of {', '.join(case.id for case in cases)}, got {texts}")


def _gated(case: str) -> None:
    ids = [known.id for known in (*GATED_CASES, *GATED_ENGINES)]
    if case not in ids:
        raise Unusable(f"case: expected one of {', '.join(ids)}, got {case!r}")


def _runs(paths: Sequence[Path]) -> list[schema.Measurement]:
    try:
        return [run for path in paths for run in schema.load(path)]
    except ValueError as error:
        raise BaselineMissing(str(error)) from error


def _findings(path: Path) -> Findings:
    if not path.exists():
        raise BaselineMissing(f"{path}: not there; gate --json {path} writes it")
    try:
        return Findings.from_json(text_of(path))
    except ValueError as error:
        raise BaselineMissing(f"{path}: {error}") from error
