"""What a verb that measures has found, from its measurements and from what went wrong."""

from collections.abc import Sequence

from treemla.gate import schema
from treemla.gate.exits import Exit
from treemla.gate.findings import Finding, Findings


def measured(title: str, made: Sequence[schema.Measurement], failures: Sequence[str] = ()) -> Findings:
    """A finding a measurement, and a red one a failure; neither is exit 3."""
    found = [
        Finding(
            f"{run.case} {run.metric}",
            "measured",
            Exit.PASS,
            "",
            {"median": f"{run.value:,.5g}", "spread": f"{run.mad:.2g}", "unit": run.unit},
            {"value": run.value, "mad": run.mad, "unit": run.unit},
        )
        for run in made
    ]
    wrong = [Finding(title, "failed", Exit.FAILED, failure) for failure in failures]
    return Findings(title, (*found, *wrong))
