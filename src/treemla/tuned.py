"""Constants of the cost model that `python -m treemla tune` measured on this machine, one file a GPU, kernel and cubin,
in the user's private cache directory. A GPU that was not tuned has `cost.DEFAULTS`.
"""

import functools
import hashlib
import json
import math
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from treemla import cost, cubins, nvcc
from treemla.tiles import KernelPath


@dataclass(frozen=True)
class Fingerprint:
    """What the constants hold for. cubin: sha256 of the kernels, so that constants of older ones are not found."""

    gpu: str
    sms: int
    memory_bytes: int
    kernel: str
    cubin: str

    @property
    def path(self) -> Path:
        """Of the file, whether it exists or not."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:24]
        return nvcc.cache_root() / "treemla" / f"tuned-{self.kernel}-{digest}.json"


@functools.cache
def fingerprint(device: torch.device, kernel: KernelPath) -> Fingerprint:
    """Of a CUDA device and the kernels that run there; builds the cubin where it is missing."""
    properties = torch.cuda.get_device_properties(device)
    cubin = cubins.cubin_path(cubins.target_of(device).arch).read_bytes()
    sms, memory_bytes = properties.multi_processor_count, properties.total_memory
    return Fingerprint(properties.name, sms, memory_bytes, kernel.name, hashlib.sha256(cubin).hexdigest())


@functools.cache
def constants(device: torch.device, kernel: KernelPath) -> cost.Constants:
    """Those of the file, else the defaults; read once a process, so that equal plans in it are cut alike."""
    return load(fingerprint(device, kernel)) or cost.DEFAULTS[kernel.name]


def load(of: Fingerprint) -> cost.Constants | None:
    """None where there is no file. ValueError where it does not hold constants, NvccError where others can write it."""
    try:
        if not of.path.exists():
            return None
    except RuntimeError:  # a user without a home directory, who has tuned nothing
        return None
    nvcc.private_directory(of.path.parent)
    try:
        return _parse(json.loads(of.path.read_text()), of)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{of.path}: expected what `python -m treemla tune` wrote, got {error!r}; delete it or tune again"
        ) from error


def _parse(record: Any, of: Fingerprint) -> cost.Constants:
    if record["fingerprint"] != asdict(of):
        raise ValueError(f"fingerprint {record['fingerprint']}")
    for name, value in record["constants"].items():
        if not isinstance(value, float) or not 0 < value < math.inf:
            raise ValueError(f"{name} {value!r}, no positive number")
    return cost.Constants(**record["constants"])


def store(of: Fingerprint, made: cost.Constants, date: str, command: str) -> Path:
    """Write the file whole or not at all. Plans of this process may still have what was there before."""
    folder = nvcc.private_directory(of.path.parent)
    record = {"fingerprint": asdict(of), "constants": asdict(made), "date": date, "command": command}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        written = Path(scratch, of.path.name)
        written.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
        written.replace(of.path)
    return of.path
