"""What the compiled kernels say about themselves, without a GPU: registers, spills, stack, shared memory.

Two witnesses that must agree: the compiler's log that lies beside each cubin, and cuobjdump's reading of the cubin.
The log alone knows spills and warnings; the cubin alone is what ships.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from treemla import cubins, launch_moves, nvcc, tiles
from treemla.gate import sass
from treemla.gate.exits import InvalidEnvironment

RESERVED_SHARED_BYTES = 1024  # the system keeps these of every block's shared memory; cuobjdump counts them as static


@dataclass(frozen=True)
class KernelResources:
    """One kernel of one cubin. Bytes are per thread for spills and stack, per block for shared memory."""

    name: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared_bytes: int
    local_accesses: int  # LDL and STL instructions: a spill or an array in local memory, whatever the log says
    instructions: int
    narrow_copies: int = 0  # cp.async of fewer than 16 bytes
    illegal_instructions: int = 0  # that the compiler made and no GPU executes
    loops: tuple[dict[str, int], ...] = ()  # of each role that uses the tensor cores: instructions by class


@dataclass(frozen=True)
class StaticReport:
    """`problems`: one sentence each, empty where the cubin passes."""

    arch: str
    kernels: tuple[KernelResources, ...]
    problems: tuple[str, ...]


def report(arch: str) -> StaticReport:
    """Build or find the cubin of `arch` and read it."""
    return report_on(cubins.cubin_path(arch), tiles.TARGETS[arch], tiles.TARGETS[arch].kernel_names)


def report_on(cubin: Path, target: tiles.Target, expected: tuple[str, ...]) -> StaticReport:
    """Read one cubin and the log beside it; `expected` are the kernels it must hold."""
    log = nvcc.log_path(cubin).read_text()
    logged, warnings = parse_ptxas_log(log)
    usage = parse_resource_usage(cuobjdump_says("-res-usage", cubin))
    code = sass.parse_sass(cuobjdump_says("-sass", cubin))
    if not set(logged) == set(usage) == set(code):
        raise sass.UnreadableOutput(
            f"{cubin}: log, resource usage and SASS name different kernels: "
            f"{sorted(logged)}, {sorted(usage)}, {sorted(code)}"
        )
    kernels = tuple(
        KernelResources(
            name=name,
            registers=usage[name]["REG"],
            spill_bytes=logged[name],
            stack_bytes=usage[name]["STACK"],
            static_shared_bytes=max(0, usage[name]["SHARED"] - RESERVED_SHARED_BYTES),
            local_accesses=sass.mix(code[name])["local"],
            instructions=len(code[name]),
            narrow_copies=sass.mix(code[name])["cp.async less"],
            illegal_instructions=sum(instruction.is_illegal for instruction in code[name]),
            loops=tuple(sass.mix(loop) for loop in sass.tensor_loops(code[name])),
        )
        for name in sorted(usage)
    )
    return StaticReport(target.arch, kernels, (*warnings, *_problems(kernels, target, expected)))


def _problems(kernels: tuple[KernelResources, ...], target: tiles.Target, expected: tuple[str, ...]) -> list[str]:
    names = {kernel.name for kernel in kernels}
    verify_kernels = {name: path.registers for name, (path, _) in target.verify_kernels.items()}
    found = [f"{name}: missing from the cubin" for name in expected if name not in names]
    for kernel in kernels:
        if kernel.name not in expected:
            found.append(f"{kernel.name}: not one of the target's kernel_names")
        faults = (
            (kernel.spill_bytes, "spills {} bytes"),
            (kernel.stack_bytes, "{} bytes of stack"),
            (kernel.local_accesses, "{} local memory instructions"),
            (kernel.narrow_copies, "{} copies of fewer than 16 bytes"),
            (kernel.illegal_instructions, "{} instructions that no GPU executes"),
        )
        found += [f"{kernel.name}: {said.format(count)}" for count, said in faults if count]
        expected_registers = verify_kernels.get(kernel.name, kernel.registers)
        if kernel.registers != expected_registers:
            # its warps trade registers, and their claims assume what one CTA a multiprocessor is launched with
            found.append(f"{kernel.name}: {kernel.registers} registers a thread, expected {expected_registers}")
        if kernel.name in verify_kernels and not kernel.loops:
            found.append(f"{kernel.name}: no loop uses the tensor cores")
        shared = kernel.static_shared_bytes + dynamic_shared_bytes(kernel.name, target)
        if shared > target.shared_memory_limit_bytes:
            found.append(f"{kernel.name}: {shared} bytes of shared memory, {target.shared_memory_limit_bytes} allowed")
    return found


def dynamic_shared_bytes(name: str, target: tiles.Target) -> int:
    """What the host asks for at launch: fixed for a verify kernel, none or little for the others."""
    if name in target.verify_kernels:
        return target.verify_kernels[name][1]
    return launch_moves.MOVE_SHARED_BYTES if name == "treemla_move_rows" else 0


def parse_ptxas_log(log: str) -> tuple[dict[str, int], list[str]]:
    """({kernel: bytes spilled, stores and loads}, warnings) from what nvcc -Xptxas -v printed."""
    spills: dict[str, int] = {}
    entry = None
    for line in log.splitlines():
        if found := re.search(r"Compiling entry function '([^']+)'", line):
            entry = found.group(1)
        elif found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            if entry is None:
                continue  # a device function that was not inlined; its spills show in cuobjdump's stack
            spills[entry] = spills.get(entry, 0) + int(found.group(1)) + int(found.group(2))
            entry = None
    warnings = [line.strip() for line in log.splitlines() if re.search(r"\bwarning\b|Potential Performance Loss", line)]
    return spills, warnings


def parse_resource_usage(said: str) -> dict[str, dict[str, int]]:
    """{kernel: {"REG": 40, "STACK": 0, "SHARED": 1024, ...}} from cuobjdump -res-usage."""
    blocks = re.findall(r"Function (\S+):\s*\n\s*(REG:.*)", said)
    if not blocks:
        raise sass.UnreadableOutput(f"cuobjdump -res-usage: expected kernels, got {said[:200]!r}")
    return {name: {key: int(value) for key, value in re.findall(r"\b([A-Z]+):(\d+)", line)} for name, line in blocks}


def cuobjdump_says(option: str, cubin: Path) -> str:
    tool = cuobjdump()
    done = subprocess.run([tool, option, cubin], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise InvalidEnvironment(f"{tool} {option} {cubin}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def cuobjdump() -> Path:
    """The tool beside nvcc, else on PATH."""
    try:
        beside = nvcc.find().with_name("cuobjdump")
        if beside.is_file():
            return beside
    except nvcc.NvccError:
        pass
    if on_path := shutil.which("cuobjdump"):
        return Path(on_path)
    raise InvalidEnvironment(
        "cuobjdump: not found; pip install 'nvidia-cuda-cuobjdump==13.2.*' 'nvidia-cuda-nvdisasm==13.2.*'"
    )
