"""What was compiled, as it is compared: one value a kernel, from the compiler's log and the cubin."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from treemla import combine, launch, launch_moves, nvcc, tiles
from treemla.gate import sass, static
from treemla.gate.baseline import ROOT, BrokenBaseline
from treemla.gate.records import parsed, text_of

SCHEMA = Path(__file__).with_name("static.schema.json")
SM_SHARED_BYTES = {"sm_90a": 233_472, "sm_120a": 102_400}  # of a multiprocessor, CUDA's programming guide
SM_WARPS = {"sm_90a": 64, "sm_120a": 48}
SM_REGISTERS = 65_536
REGISTER_UNIT = 256  # registers are given to a warp in such pieces
MAX_CTAS = {"sm_90a": 32, "sm_120a": 24}
THREADS = {
    "treemla_plan": launch.PLAN_THREADS,
    "treemla_pack_mask": launch.PACK_THREADS,
    "treemla_combine": 32 * combine.CTA_WARPS,
    "treemla_move_rows": launch_moves.MOVE_THREADS,
}


@dataclass(frozen=True)
class KernelCode:
    """sha256: of its instructions, addresses and operands included. opcodes: {opcode with modifiers: how many}, of the
    kernel; loops: of each loop that uses the tensor cores. ctas: that fit a multiprocessor; None: block size unknown.
    """

    arch: str
    kernel: str
    compiler: str
    sha256: str
    registers: int
    barriers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    ctas: int | None
    opcodes: Mapping[str, int]
    loops: tuple[Mapping[str, int], ...]

    @property
    def instructions(self) -> int:
        return sum(self.opcodes.values())

    def dump(self, root: Path = ROOT) -> None:
        path = path_of(self.arch, self.kernel, root)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n")


def read(cubin: Path, target: tiles.Target, compiler: str) -> dict[str, KernelCode]:
    """{kernel: its code} of a cubin with the compiler's log beside it."""
    log = nvcc.log_path(cubin).read_text()
    spills, _ = static.parse_ptxas_log(log)
    usage = static.parse_resource_usage(static.cuobjdump_says("-res-usage", cubin))
    listing = static.cuobjdump_says("-sass", cubin)
    texts, code, barriers = listings(listing), sass.parse_sass(listing), parse_barriers(log)
    if not set(spills) == set(usage) == set(code) == set(texts) == set(barriers):
        raise sass.UnreadableOutput(f"{cubin}: log, resource usage and SASS name different kernels")
    made = {}
    for name, instructions in code.items():
        shared = max(0, usage[name]["SHARED"] - static.RESERVED_SHARED_BYTES) + static.dynamic_shared_bytes(
            name, target
        )
        made[name] = KernelCode(
            arch=target.arch,
            kernel=name,
            compiler=compiler,
            sha256=hashlib.sha256(texts[name].encode()).hexdigest(),
            registers=usage[name]["REG"],
            barriers=barriers[name],
            spill_bytes=spills[name],
            stack_bytes=usage[name]["STACK"],
            shared_bytes=shared,
            ctas=ctas(target.arch, threads(name, target), usage[name]["REG"], shared),
            opcodes=_counted(instructions),
            loops=tuple(_counted(loop) for loop in sass.tensor_loops(instructions)),
        )
    return made


def listings(said: str) -> dict[str, str]:
    """{kernel: its instructions with operands, without encodings} from cuobjdump -sass."""
    found = re.split(r"^\s*Function : (\S+)\s*$", said, flags=re.MULTILINE)[1:]
    lines = re.compile(r"^\s*(/\*[0-9a-f]{4,}\*/[^;]*;)", flags=re.MULTILINE)
    return {name: "\n".join(lines.findall(text)) for name, text in zip(found[::2], found[1::2], strict=True)}


def parse_barriers(log: str) -> dict[str, int]:
    """{kernel: hardware barriers} from what nvcc -Xptxas -v printed."""
    made = {}
    entry = None
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '([^']+)'", line):
            entry = found.group(1)
        elif entry and "Used " in line:
            barriers = re.search(r"used (\d+) barriers", line)
            made[entry] = int(barriers.group(1)) if barriers else 0
            entry = None
    return made


def threads(name: str, target: tiles.Target) -> int | None:
    """Of a block of the kernel; None for one that treemla does not launch."""
    held = target.verify_kernels.get(name)
    return held[0].threads if held else THREADS.get(name)


def ctas(arch: str, block_threads: int | None, registers: int, shared_bytes: int) -> int | None:
    """Blocks that a multiprocessor holds at once: bound by warps, registers, shared memory."""
    if block_threads is None:
        return None
    warps = -(-block_threads // 32)
    registers_a_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    by_shared = SM_SHARED_BYTES[arch] // (shared_bytes + static.RESERVED_SHARED_BYTES)
    return min(MAX_CTAS[arch], SM_WARPS[arch] // warps, SM_REGISTERS // (registers_a_warp * warps), by_shared)


def path_of(arch: str, kernel: str, root: Path = ROOT) -> Path:
    return root / "static" / arch / f"{kernel}.json"


def load_all(arch: str, root: Path = ROOT) -> dict[str, KernelCode]:
    """What is stored of an architecture; BrokenBaseline names a file that cannot be trusted."""
    return {path.stem: _load(path, arch) for path in sorted((root / "static" / arch).glob("*.json"))}


def _load(path: Path, arch: str) -> KernelCode:
    try:
        made = _parse(parsed(text_of(path)))
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise BrokenBaseline(f"{path}: expected a kernel as in {SCHEMA.name}: {error}") from error
    if (made.arch, made.kernel) != (arch, path.stem):
        raise BrokenBaseline(f"{path}: holds {made.arch} {made.kernel}")
    return made


def _parse(record: dict[str, Any]) -> KernelCode:
    if set(record) != {field.name for field in fields(KernelCode)}:
        raise ValueError("fields missing or unknown")
    numbers = ("registers", "barriers", "spill_bytes", "stack_bytes", "shared_bytes")
    counts = [count for held in (record["opcodes"], *record["loops"]) for count in held.values()]
    if not counts or not all(type(n) is int and n >= 0 for n in [*counts, *(record[name] for name in numbers)]):
        raise ValueError("expected counts")
    return KernelCode(**{**record, "loops": tuple(record["loops"])})


def _counted(instructions: Sequence[sass.Instruction]) -> dict[str, int]:
    return dict(sorted(Counter(i.opcode for i in instructions).items()))
