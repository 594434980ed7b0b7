"""What the tests of the gate share: a case, its times, stored figures of it, and where a finding is."""

from datetime import date

from treemla.gate import baseline
from treemla.gate.baseline import Baseline, Session
from treemla.gate.cases import GATED_CASES

TODAY = date(2026, 12, 1)
CASE = GATED_CASES[2]
US = {"head": 50.0, "base": 50.0, "triton": 12500.0}


def stored(metric, machine, value, starts=12, *, case=CASE, anchor=None, until="2027-01-01", spread=0.002):
    sessions = [Session(value * (1 + spread * (-1) ** n), f"{n:012x}", "a" * 40, "2026-11-01") for n in range(starts)]
    return Baseline.of(
        case.id,
        metric,
        baseline.UNITS[metric],
        machine,
        sessions,
        anchor=anchor or value,
        blessed="b-0001",
        valid_until=until,
    )


def finding(made, name=CASE.id):
    return next(f for f in made["found"] if f["name"] == name)
