"""One program on the GPU, and blocks that a slowdown of the GPU fell into are not counted."""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from treemla.gate import nvml
from treemla.gate.exits import InvalidEnvironment

MIN_CLOCK = 0.9  # of the median block's
SETTLE_S = 5.0  # until the driver has forgotten a process that ended
MAX_DROPPED = 0.25  # of the rounds; a gate that drops more says so instead of judging what is left


@contextmanager
def lease(uuid: str, wait_s: float, folder: Path | None = None) -> Iterator[None]:
    """Hold the GPU alone among the programs that ask for it so; InvalidEnvironment names the holder after `wait_s`.

    The lock is a file named by UUID and ends with the process, however that ends.
    """
    try:
        from filelock import FileLock, Timeout
    except ImportError as error:
        raise InvalidEnvironment(f"filelock: not installed ({error}); pip install filelock") from error
    path = (folder or Path(tempfile.gettempdir())) / f"treemla-{uuid}.lock"
    holder = path.with_suffix(".json")
    lock = FileLock(path, mode=0o666)
    try:
        lock.acquire(timeout=wait_s)
    except Timeout:
        by = holder.read_text().strip() if holder.is_file() else "an unknown process"
        raise InvalidEnvironment(
            f"{uuid}: held by {by} for longer than {wait_s:.0f} s; wait for it or stop it"
        ) from None
    try:
        holder.write_text(json.dumps({"pid": os.getpid(), "user": os.getuid()}) + "\n")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


@contextmanager
def alone(gauge: nvml.Gauge | None) -> Iterator[None]:
    """Nothing computes on the GPU before the first and after the last process of ours; InvalidEnvironment otherwise."""
    _expect_idle(gauge, "before")
    yield
    _expect_idle(gauge, "after")


def _expect_idle(gauge: nvml.Gauge | None, when: str) -> None:
    begin = time.monotonic()
    while pids := gauge.compute_pids() if gauge else None:
        if time.monotonic() > begin + SETTLE_S:
            raise InvalidEnvironment(
                f"the GPU is busy {when} the measurement: processes {pids}; end them and start again"
            )
        time.sleep(SETTLE_S / 10)


def expect_whole(gauge: nvml.Gauge | None) -> None:
    """A slice of a GPU (MIG) has neither its clocks nor its memory to itself; InvalidEnvironment."""
    if gauge is not None and gauge.facts()["mig"]:
        raise InvalidEnvironment("MIG is on: a slice's times say nothing about the GPU; nvidia-smi -mig 0")


def unsound(readings: Sequence[Sequence[nvml.Reading | None]]) -> list[bool]:
    """Of blocks, each with the readings around it: whether the GPU was in trouble or clocked far below the others."""
    clocks = [[r.sm_mhz for r in block if r is not None and r.sm_mhz is not None] for block in readings]
    known = [min(block) for block in clocks if block]
    least = MIN_CLOCK * statistics.median(known) if known else 0.0
    slowed = [any(r is not None and r.slowdowns for r in block) for block in readings]
    return [slow or bool(block and min(block) < least) for slow, block in zip(slowed, clocks, strict=True)]
