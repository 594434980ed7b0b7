"""Which GPU a test process uses, and that no measurement is made beside it."""

import os
import subprocess
from collections.abc import Mapping
from contextlib import AbstractContextManager


def own_gpu(environment: Mapping[str, str], present: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of this process: worker k of xdist gets the (k mod count)-th GPU of those that the caller sees.

    present: how many the machine has. None where there is nothing to choose: without xdist, or of one GPU.
    """
    worker, visible = environment.get("PYTEST_XDIST_WORKER", ""), environment.get("CUDA_VISIBLE_DEVICES")
    listed = [str(n) for n in range(present)] if visible is None else [part for part in visible.split(",") if part]
    if not worker.startswith("gw") or len(listed) < 2:
        return None
    return listed[int(worker.removeprefix("gw")) % len(listed)]


def present() -> int:
    """GPUs of this machine, asked in another process: CUDA reads CUDA_VISIBLE_DEVICES once, when it is first used."""
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in said.splitlines())


def choose() -> None:
    """Before CUDA is used: make the worker's GPU the only one it sees."""
    if "PYTEST_XDIST_WORKER" in os.environ and (mine := own_gpu(os.environ, present())) is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = mine


def shared_lease() -> AbstractContextManager[None]:
    """Of the current GPU: suites share it, `gate` and `selfcheck` wait until none is left, and the other way round."""
    from treemla.gate import hygiene, machine

    return hygiene.share(machine.gpu_uuid(), wait_s=1200.0)
