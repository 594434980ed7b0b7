"""One program on the GPU, and blocks that a slowdown of the GPU fell into are not counted."""

import contextlib
import fcntl
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from treemla.gate import nvml
from treemla.gate.exits import InvalidEnvironment

MIN_CLOCK = 0.9  # of the median block's
SETTLE_S = 5.0  # until the driver has forgotten a process that ended
POLL_S = 0.2
MAX_DROPPED = 0.25  # of the rounds; a gate that drops more says so instead of judging what is left


@contextmanager
def lease(uuid: str, wait_s: float, folder: Path | None = None) -> Iterator[None]:
    """Hold the GPU alone among the programs that ask for it so; InvalidEnvironment names the holder after `wait_s`.

    The lock is a file named by UUID and ends with the process, however that ends.
    """
    path = _lock_path(uuid, folder)
    holder = path.with_suffix(".json")
    with path.open("a") as lock:
        if not _locked(lock, fcntl.LOCK_EX, wait_s):
            by = holder.read_text().strip() if holder.is_file() else "a test suite"
            raise InvalidEnvironment(f"{uuid}: held by {by} for longer than {wait_s:.0f} s; wait for it or stop it")
        try:
            holder.write_text(json.dumps({"pid": os.getpid(), "user": os.getuid()}) + "\n")
            yield
        finally:
            holder.unlink(missing_ok=True)


@contextmanager
def share(uuid: str, wait_s: float, folder: Path | None = None) -> Iterator[None]:
    """Use the GPU beside others who share it, and beside nobody who holds its lease; InvalidEnvironment after `wait_s`."""
    with _lock_path(uuid, folder).open("a") as lock:
        if not _locked(lock, fcntl.LOCK_SH, wait_s):
            raise InvalidEnvironment(f"{uuid}: measured on for longer than {wait_s:.0f} s; wait for that or stop it")
        yield


def _locked(lock: IO[str], mode: int, wait_s: float) -> bool:
    """Whether the open file could be locked; closing it ends that."""
    begin = time.monotonic()
    while True:
        try:
            fcntl.flock(lock, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > begin + wait_s:
                return False
            time.sleep(POLL_S)
        else:
            return True


def wait_until_free(uuid: str, gauge: nvml.Gauge | None, wait_s: float, folder: Path | None = None) -> None:
    """Until nobody holds or shares the GPU's lease and nothing computes on it; InvalidEnvironment after `wait_s`."""
    begin = time.monotonic()
    with lease(uuid, wait_s, folder):
        while pids := gauge.compute_pids() if gauge else None:
            if time.monotonic() > begin + wait_s:
                raise InvalidEnvironment(f"{uuid}: busy for longer than {wait_s:.0f} s: processes {pids}; end them")
            time.sleep(POLL_S)


def _lock_path(uuid: str, folder: Path | None) -> Path:
    path = (folder or Path(tempfile.gettempdir())) / f"treemla-{uuid}.lock"
    with contextlib.suppress(OSError):  # another user's, who made it for all
        path.touch(mode=0o666)
        path.chmod(0o666)
    return path


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
