"""Reads machine code as cuobjdump prints it: opcodes, loops, and what the loop that does the arithmetic is made of."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

TENSOR = ("HMMA", "HGMMA", "QMMA", "OMMA", "IMMA")

# What a loop is counted by: a name, and the opcodes (with modifiers, as regular expressions) that belong to it.
CLASSES = {
    "tensor": "|".join(TENSOR),
    "ldmatrix": r"LDSM\b",
    "stmatrix": r"STSM\b",
    "cp.async 16 B": r"LDGSTS\b.*\.128",
    "cp.async less": r"LDGSTS\b(?!.*\.128)",
    "global load": r"LDG\b",
    "global store": r"STG\b",
    "shared load": r"LDS\b",
    "shared store": r"STS\b",
    "local": r"(LDL|STL)\b",
    "barrier": r"BAR\b",
    "mbarrier": r"(SYNCS|ARRIVES)\b",
    "mufu": r"MUFU\b",
    "shuffle": r"(SHFL|REDUX|CREDUX|VOTE)\b",
}


class UnreadableOutput(RuntimeError):
    """A tool said something that these parsers do not know: a gate must not pass on it."""


@dataclass(frozen=True)
class Instruction:
    """opcode with its modifiers, such as LDG.E.128; target: of a branch, in bytes from the kernel's start. is_illegal:
    its memory descriptor is not a pair of uniform registers, which a GPU stops at (ptxas 13.0 makes such copies)."""

    address: int
    opcode: str
    target: int | None = None
    is_illegal: bool = False

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]


def parse_sass(said: str) -> dict[str, list[Instruction]]:
    """{kernel: its instructions in order} from cuobjdump -sass."""
    kernels: dict[str, list[Instruction]] = {}
    kernel = None
    for line in said.splitlines():
        if found := re.search(r"^\s*Function : (\S+)", line):
            kernel = found.group(1)
            kernels[kernel] = []
        elif found := re.search(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9.a-z_]*)([^;]*)", line):
            if kernel is None:
                raise UnreadableOutput(f"cuobjdump -sass: an instruction outside any kernel: {line.strip()!r}")
            address, opcode, operands = found.groups()
            target = re.search(r"0x([0-9a-f]+)\s*$", operands) if opcode.startswith("BRA") else None
            descriptor = re.search(r"desc\[UR(\d+)\]", operands)
            kernels[kernel].append(
                Instruction(
                    int(address, 16),
                    opcode,
                    int(target.group(1), 16) if target else None,
                    descriptor is not None and int(descriptor.group(1)) % 2 == 1,
                )
            )
    empty = [name for name, found in kernels.items() if not found]
    if not kernels or empty:
        raise UnreadableOutput(f"cuobjdump -sass: expected kernels with instructions, got {empty or said[:200]!r}")
    return kernels


def tensor_loops(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    """The innermost loops that hold tensor-core instructions, in order; a kernel has one for each role that multiplies.

    A loop is what lies between a backward branch and its target. Behind the last EXIT the compiler puts what is seldom
    run, such as a barrier's second try: branches from there go back without being loops.
    """
    last_exit = max((i.address for i in instructions if i.name == "EXIT"), default=0)
    spans = {(i.target, i.address) for i in instructions if i.target is not None and i.target < i.address < last_exit}
    bodies = []
    for begin, end in sorted(spans):
        body = [i for i in instructions if begin <= i.address <= end]
        if any(i.name in TENSOR for i in body):
            bodies.append(body)
    return [body for body in bodies if not any(_holds(body, other) for other in bodies)]


def mix(instructions: Sequence[Instruction]) -> dict[str, int]:
    """How many instructions of each class there are; `all` counts every one."""
    counts = Counter(all=len(instructions))
    for instruction in instructions:
        for name, pattern in CLASSES.items():
            counts[name] += bool(re.match(pattern, instruction.opcode))
    return {name: counts[name] for name in ("all", *CLASSES)}


def _holds(outer: Sequence[Instruction], inner: Sequence[Instruction]) -> bool:
    """`inner` is a smaller loop inside `outer`."""
    return len(inner) < len(outer) and outer[0].address <= inner[0].address and inner[-1].address <= outer[-1].address
