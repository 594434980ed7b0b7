"""`treemla check`: every layer this machine can run and the static gate, then one verdict and one page."""

import time
from collections.abc import Mapping
from pathlib import Path

from treemla.gate import layers
from treemla.gate.baseline import BrokenBaseline
from treemla.gate.exits import BaselineMissing, Exit, InvalidEnvironment
from treemla.gate.findings import Finding, Findings
from treemla.gate.fingerprint import REPO, checkout_problem

STATIC = "static-gate"  # its findings, beside the layer of the same subject
PAGE = "build/report.html"


def check() -> Findings:
    """Run the layers in order, then the static gate. In a checkout build/ holds a page of it all afterwards."""
    outcomes = {}
    for name, layer in layers.LAYERS.items():
        print(f"\n=== {name} ===", flush=True)
        outcomes[name] = layers.run(layer)
        told(outcomes[name])
    print(f"\n=== {STATIC} ===", flush=True)
    outcomes[STATIC] = static_gate(REPO / f"build/{STATIC}.json")
    told(outcomes[STATIC])
    verdict = findings(outcomes)
    if not checkout_problem():
        from treemla.gate import page

        page.write(REPO / PAGE, verdict, sources(outcomes))
        print(f"report: {PAGE}\n")
    return verdict


def told(outcome: layers.Outcome) -> None:
    if not outcome.ran:
        print(f"not run: {outcome.why}", flush=True)


def static_gate(out: Path) -> layers.Outcome:
    """What the kernels are, beside those stored; its findings go to `out`, which is gone otherwise."""
    from treemla.gate import static_gate as gate

    out.unlink(missing_ok=True)
    if problem := checkout_problem():
        return layers.Outcome(Exit.INVALID_ENVIRONMENT, why=problem, ran=False)
    begin = time.monotonic()
    try:
        made = gate.static_gate()
    except InvalidEnvironment as error:
        return layers.Outcome(Exit.INVALID_ENVIRONMENT, why=str(error), ran=False)
    except (BaselineMissing, BrokenBaseline) as error:
        return layers.Outcome(Exit.BASELINE_MISSING, why=str(error))
    made.write(out, None, None)
    print(made.problems(), flush=True)
    failed = sum(finding.exit is not Exit.PASS for finding in made.found)
    why = "" if made.exit is Exit.PASS else "see above"
    return layers.Outcome(made.exit, len(made.found) - failed, failed, time.monotonic() - begin, why)


def findings(outcomes: Mapping[str, layers.Outcome]) -> Findings:
    """A finding each that ran: nothing run is no pass. One that this machine cannot run is a note: it is neither passed
    nor failed.
    """
    ran = {name: outcome for name, outcome in outcomes.items() if outcome.ran}
    notes = [f"{name}: not run: {outcome.why}" for name, outcome in outcomes.items() if not outcome.ran]
    return Findings("check", tuple(finding(name, outcome) for name, outcome in ran.items()), tuple(notes))


def finding(name: str, outcome: layers.Outcome) -> Finding:
    if not outcome.ran:
        return Finding(name, "not run", outcome.exit, outcome.why)
    verdict = "passed" if outcome.exit is Exit.PASS else f"FAILED (exit {outcome.exit.value})"
    counts = {"passed": str(outcome.passed), "failed": str(outcome.failed), "seconds": f"{outcome.seconds:.0f}"}
    return Finding(name, verdict, outcome.exit, outcome.why, counts)


def sources(outcomes: Mapping[str, layers.Outcome]) -> list[Path]:
    """What the page is made of: what this run left, and the committed measurements."""
    left = [REPO / layers.LAYERS[name].results for name, outcome in outcomes.items() if outcome.ran and name != STATIC]
    measured = sorted((REPO / "docs/measured").glob("*.jsonl"))
    return [path for path in (*left, REPO / f"build/{STATIC}.json", *measured) if path.is_file()]
