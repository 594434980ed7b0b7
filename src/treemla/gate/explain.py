"""`treemla explain`: every figure behind the verdict on a case, process by process."""

from treemla.gate.exits import BaselineMissing, Exit
from treemla.gate.findings import Finding, Findings
from treemla.gate.judge import percent


def explain(findings: Findings, case: str) -> Findings:
    """The findings whose names contain `case`, each with the figures it rests on as notes. Their exits are kept."""
    exact = tuple(finding for finding in findings.found if case == finding.name)
    chosen = exact or tuple(finding for finding in findings.found if case in finding.name)
    if not chosen:
        names = ", ".join(finding.name for finding in findings.found)
        return Findings("explain", (Finding(case, "unknown", Exit.USAGE, f"expected part of one of {names}"),))
    try:
        lines = tuple(line for finding in chosen for line in figures(finding))
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise BaselineMissing(f"{case}: expected the figures that gate writes: {error!r}") from error
    return Findings("explain", chosen, lines)


def figures(finding: Finding) -> list[str]:
    """One line a comparison with its verdict, one a side with the microseconds of each process."""
    lines = [f"{finding.name}: {finding.verdict} ({finding.exit.name}) {finding.text}".rstrip()]
    for column, part in finding.data.get("parts", {}).items():
        lines.append(f"    {column}: {part['verdict']} {part['cell']} {part['text']}".rstrip())
    for side, times in finding.data.get("us", {}).items():
        lines.append(f"    {side}: {' '.join(f'{us:.2f}' for us in times)} us a process")
    for side, ratios in finding.data.get("log_ratios", {}).items():
        lines.append(f"    head / {side}: {' '.join(percent(ratio) for ratio in ratios)} a process")
    if "dropped_rounds" in finding.data:
        lines.append(f"    rounds dropped for clocks or temperature: {finding.data['dropped_rounds']}")
    return lines
