"""Finds the cubin for a GPU, in the installed package or built from csrc/, and loads kernels from it."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from treemla import nvcc
from treemla.tiles import TARGETS, Target

if TYPE_CHECKING:
    from cuda.core import Kernel, ObjectCode

PACKAGED = Path(__file__).parent / "_cubins"  # only in a built wheel
CSRC = Path(__file__).parents[2] / "csrc"  # only in a source checkout


def target_of(device: torch.device) -> Target:
    """The target whose cubin runs on `device`; RuntimeError for a GPU that has none."""
    capability = torch.cuda.get_device_capability(device)
    for target in TARGETS.values():
        if target.compute_capability == capability:
            return target
    have = ", ".join(
        f"{t.arch} (compute capability {t.compute_capability[0]}.{t.compute_capability[1]})" for t in TARGETS.values()
    )
    name = torch.cuda.get_device_name(device)
    raise RuntimeError(f"device: expected a GPU for {have}, got {name} ({capability[0]}.{capability[1]})")


def cubin_path(arch: str) -> Path:
    """The cubin of `arch`, a key of `tiles.TARGETS`, with the compiler's log beside it.

    A wheel carries its cubins. In a checkout they come from the cache, built there with nvcc when csrc/ is new;
    a cubin packaged into the checkout counts only while its recorded hash is that of csrc/.
    RuntimeError says what to do where there is neither a cubin nor a compiler.
    """
    if arch not in TARGETS:
        raise ValueError(f"arch: expected one of {', '.join(TARGETS)}, got {arch!r}")
    packaged, has_source = PACKAGED / f"{arch}.cubin", (CSRC / nvcc.UNIT).is_file()
    if packaged.is_file() and (not has_source or _recorded_hash(packaged) == nvcc.source_hash(CSRC, arch)):
        return packaged
    if has_source:
        return nvcc.build(CSRC, arch)
    raise RuntimeError(
        f"no cubin for {arch}: this treemla was installed on a machine that could not compile it. "
        f"Install a wheel that has cubins, or reinstall where nvcc works: {nvcc.REMEDY}"
    )


@cache
def kernel(name: str, device: torch.device) -> "Kernel":
    """The kernel `name` of the target's `kernel_names`, loaded for `device` (a CUDA device with an index).

    Loading is host work: ask for a kernel once before a CUDA graph is captured.
    """
    return _load(target_of(device).arch).get_kernel(name)


@cache
def _load(arch: str) -> "ObjectCode":
    path = cubin_path(arch)
    try:
        from cuda.core import ObjectCode
    except ImportError as error:
        raise RuntimeError(f"{arch}: launching needs cuda-core 1.x: pip install 'cuda-core>=1,<2'") from error
    return ObjectCode.from_cubin(str(path))


def _recorded_hash(packaged: Path) -> str:
    record = packaged.with_suffix(".source")
    return record.read_text().strip() if record.is_file() else ""
