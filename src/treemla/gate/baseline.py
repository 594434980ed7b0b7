"""Stored figures of record: one file a case, metric and class of machine, written by `bless` alone.

`baseline.schema.json` beside this file is their schema. A file whose figures do not follow from its sessions, or that
lies where another belongs, does not load.
"""

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Self

from treemla.gate.decide import MIN_SESSIONS
from treemla.gate.fingerprint import REPO
from treemla.gate.records import made_of, parsed, text_of

SCHEMA = Path(__file__).with_name("baseline.schema.json")
ROOT = REPO / "perf_baselines"
FOLDERS = {  # by metric
    "verify": "kernel",
    "plan": "plan",
    "triton_ratio": "ratio",
    "engine": "engine",
    "engine_ratio": "engine_ratio",
}
UNITS = {"verify": "us", "plan": "us", "triton_ratio": "ratio", "engine": "ms", "engine_ratio": "ratio"}
BY_ARCH = ("triton_ratio", "engine_ratio")  # the others by class of machine


class BrokenBaseline(ValueError):
    """A stored file that cannot be trusted; the message says why."""


@dataclass(frozen=True)
class Session:
    """One recorded run: the median of its processes. start: of the machine; runs of one start are not independent."""

    value: float
    start: str
    commit: str
    date: str


@dataclass(frozen=True)
class Baseline:
    """machine: the fingerprint, or for a ratio the architecture. anchor: the best session median ever blessed.

    blessed: the id of the line in blessings.jsonl. valid_until: the day after which the figures need a new look.
    """

    case: str
    metric: str
    unit: str
    machine: str
    median: float
    mad: float
    sessions: tuple[Session, ...]
    anchor: float
    blessed: str
    valid_until: str

    @classmethod
    def of(
        cls, case: str, metric: str, unit: str, machine: str, sessions: Sequence[Session], *, anchor: float, blessed: str,
        valid_until: str,
    ) -> Self:  # fmt: skip
        if unit != UNITS[metric]:
            raise BrokenBaseline(f"unit of {case} {metric}: expected {UNITS[metric]}, got {unit}")
        values = [session.value for session in sessions]
        if not values or not all(0 < value < float("inf") for value in values):
            raise BrokenBaseline(f"sessions of {case} {metric}: expected positive finite values, got {values}")
        median = statistics.median(values)
        mad = statistics.median(abs(value - median) for value in values)
        return cls(case, metric, unit, machine, median, mad, tuple(sessions), anchor, blessed, valid_until)

    @property
    def values(self) -> list[float]:
        return [session.value for session in self.sessions]

    @property
    def why_advisory(self) -> str:
        """Why these figures must not block; empty where they may."""
        starts = len({session.start for session in self.sessions})
        return f"{starts} of {MIN_SESSIONS} machine starts recorded" if starts < MIN_SESSIONS else ""

    def days_overdue(self, today: date) -> int:
        return (today - date.fromisoformat(self.valid_until)).days

    def path(self, root: Path = ROOT) -> Path:
        return path_of(self.metric, self.machine, self.case, root)

    def dump(self, root: Path = ROOT) -> Path:
        path = self.path(root)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1, sort_keys=True, allow_nan=False) + "\n")
        return path


def path_of(metric: str, machine: str, case: str, root: Path = ROOT) -> Path:
    """BrokenBaseline for a machine or a case that is no name, and so might lead out of `root`."""
    for name, text in (("machine", machine), ("case", case)):
        if not is_name(text):
            raise BrokenBaseline(f"{name}: expected a name of letters, digits and _.-, got {text!r}")
    return root / FOLDERS[metric] / machine / f"{case}.json"


def find(metric: str, machine: str, case: str, root: Path = ROOT) -> Baseline | None:
    """What is stored; None where nothing is. BrokenBaseline where it cannot be trusted."""
    path = path_of(metric, machine, case, root)
    return load(path, root) if path.is_file() else None


def load(path: Path, root: Path = ROOT) -> Baseline:
    try:
        held = _parse(parsed(text_of(path)))
    except (KeyError, ValueError) as error:
        raise BrokenBaseline(f"{path}: expected a baseline as in {SCHEMA.name}: {error}") from error
    if held.path(root) != path:
        raise BrokenBaseline(f"{path}: holds the figures of {held.path(root)}")
    return held


def _parse(record: object) -> Baseline:
    held = made_of(Baseline, record)
    date.fromisoformat(held.valid_until)
    made = Baseline.of(
        held.case, held.metric, held.unit, held.machine, held.sessions, anchor=held.anchor, blessed=held.blessed,
        valid_until=held.valid_until,
    )  # fmt: skip
    if made != held:
        raise BrokenBaseline(f"median and mad: expected {made.median} and {made.mad} from the sessions")
    if not 0 < made.anchor < float("inf"):
        raise BrokenBaseline(f"anchor: expected a positive number, got {made.anchor}")
    return made


def is_name(text: str) -> bool:
    """Whether a text can be a file's or a folder's name here: neither "..", nor with a slash."""
    return bool(re.fullmatch(r"\w[\w.-]*", text, re.ASCII))


def is_link(text: object) -> bool:
    """Whether a text is where something was discussed."""
    return isinstance(text, str) and text.isprintable() and bool(re.fullmatch(r"https://\S+", text))


def today() -> date:
    """In UTC, as the dates of results are."""
    return datetime.now(UTC).date()
