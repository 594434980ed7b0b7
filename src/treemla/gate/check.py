"""`treemla check`: every layer this machine can run, then one table and one exit code."""

from collections.abc import Mapping

from treemla.gate import layers
from treemla.gate.exits import Exit, gravest
from treemla.gate.report import table


def check() -> Exit:
    """Run the layers in order. One that this machine cannot run is listed as not run: neither passed nor failed."""
    outcomes = {}
    for name, layer in layers.LAYERS.items():
        print(f"\n=== {name} ===", flush=True)
        outcomes[name] = outcome = layers.run(layer)
        if not outcome.ran:
            print(f"not run: {outcome.why}", flush=True)
    print(f"\n{summary(outcomes)}\n")
    exit_code = overall(outcomes)
    ran = [name for name, outcome in outcomes.items() if outcome.ran]
    print(
        f"{'PASS' if exit_code is Exit.PASS else exit_code.name}: {len(ran)} of {len(outcomes)} layers ran here ({', '.join(ran)})"
    )
    return exit_code


def overall(outcomes: Mapping[str, layers.Outcome]) -> Exit:
    """The gravest outcome of what ran; failures first. Nothing run is not a pass."""
    return gravest(outcome.exit for outcome in outcomes.values() if outcome.ran)


def summary(outcomes: Mapping[str, layers.Outcome]) -> str:
    rows = []
    for name, outcome in outcomes.items():
        ran = [outcome.passed, outcome.failed, f"{outcome.seconds:.0f}"] if outcome.ran else ["-", "-", "-"]
        rows.append([name, verdict(outcome), *ran, outcome.why])
    return table(["layer", "result", "passed", "failed", "seconds", "why"], rows)


def verdict(outcome: layers.Outcome) -> str:
    if not outcome.ran:
        return "not run"
    return "passed" if outcome.exit is Exit.PASS else f"FAILED (exit {outcome.exit.value})"
