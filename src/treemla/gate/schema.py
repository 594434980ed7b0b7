"""A measurement as data. `result.schema.json` beside this file is its schema, for writers and readers alike."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from treemla.gate.records import made_of, parsed, text_of

SCHEMA = Path(__file__).with_name("result.schema.json")


@dataclass(frozen=True)
class Where:
    """The machine and software a measurement came from. None: not there. peer: the library that was timed, where it is
    neither treemla nor SGLang. fingerprint, arch, start: the class of machine, such as sm_90, and
    since when it runs (`machine`).
    """

    gpu: str
    driver: str | None
    cuda: str | None
    torch: str
    triton: str | None
    sglang: str | None
    treemla: str
    date: str
    command: str
    peer: str | None = None
    fingerprint: str | None = None
    arch: str | None = None
    start: str | None = None


@dataclass(frozen=True)
class Measurement:
    """`value` is the median and `mad` the median absolute deviation of `samples`, in `unit`."""

    case: str
    metric: str
    unit: str
    value: float
    mad: float
    samples: tuple[float, ...]
    where: Where

    @classmethod
    def of(cls, case: str, metric: str, unit: str, samples: Sequence[float], where: Where) -> Self:
        """Summarise samples; ValueError unless they are positive, finite and at least one."""
        if not samples or not all(math.isfinite(s) and s > 0 for s in samples):
            raise ValueError(f"samples of {case} {metric}: expected positive finite numbers, got {list(samples)}")
        value = statistics.median(samples)
        mad = statistics.median(abs(s - value) for s in samples)
        return cls(case, metric, unit, value, mad, tuple(samples), where)


def dump(path: Path, measurements: Iterable[Measurement]) -> None:
    """Write one JSON object a line, keys sorted, so that two files compare well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(map(_line, measurements)))


def append(path: Path, measurement: Measurement) -> None:
    """Add a line: of many measurements in a row each is kept at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as held:
        held.write(_line(measurement))


def load(path: Path) -> list[Measurement]:
    """Read what `dump` wrote. ValueError names the line that is no measurement, or the file that holds none."""
    made = []
    for number, line in enumerate(text_of(path).splitlines(), 1):
        try:
            made.append(_parse(parsed(line)))
        except ValueError as error:
            raise ValueError(
                f"{path}:{number}: expected a measurement as in {SCHEMA.name}, got {line[:120]!r}: {error}"
            ) from error
    if not made:
        raise ValueError(f"{path}: expected measurements, got an empty file")
    return made


def _line(measurement: Measurement) -> str:
    return json.dumps(asdict(measurement), sort_keys=True) + "\n"


def _parse(record: object) -> Measurement:
    """Every field and no other, each of its type, and a value that is the samples' median: a record edited by hand does not load."""
    held = made_of(Measurement, record)
    made = Measurement.of(held.case, held.metric, held.unit, held.samples, held.where)
    if made != held:
        raise ValueError(f"value and mad: expected {made.value} and {made.mad} from the samples")
    return made
