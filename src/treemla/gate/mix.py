"""What a kernel's instructions do, by class and width of access, and how two kernels differ in it."""

import re
from collections import Counter
from collections.abc import Mapping

ACCESSES = {
    "LDG": "global load", "STG": "global store", "LDS": "shared load", "STS": "shared store",
    "LDGSTS": "async copy", "LDL": "local load", "STL": "local store",
}  # fmt: skip
OTHERS = {
    "tensor": r"(HMMA|HGMMA|QMMA|QGMMA|OMMA|IMMA)\b",
    "bulk copy": r"(UBLKCP|UBLKRED|UTMA\w*)\b",
    "barrier": r"BAR\b",
    "mbarrier": r"(SYNCS|ARRIVES)\b",
    "mufu": r"MUFU\b",
    "shuffle": r"(SHFL|REDUX|CREDUX|VOTE)\b",
}
MATRICES = {"LDSM": "ldmatrix", "STSM": "stmatrix"}


def class_of(opcode: str) -> str:
    """Such as "global load 128", its bits a thread; "ldmatrix x4"; "other" for arithmetic and control."""
    name, *modifiers = opcode.split(".")
    if name in ACCESSES:
        widths = [int(found.group(1)) for m in modifiers if (found := re.fullmatch(r"[US]?(8|16|32|64|128)", m))]
        return f"{ACCESSES[name]} {widths[-1] if widths else 32}"
    if name in MATRICES:
        return f"{MATRICES[name]} x{modifiers[-1] if modifiers and modifiers[-1] in {'2', '4'} else '1'}"
    return next((label for label, pattern in OTHERS.items() if re.match(pattern, opcode)), "other")


def by_class(opcodes: Mapping[str, int]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for opcode, count in opcodes.items():
        counts[class_of(opcode)] += count
    return dict(sorted(counts.items()))


def accesses(opcodes: Mapping[str, int], access: str) -> tuple[int, float]:
    """(number, mean bits a thread) of a label of ACCESSES, or of MATRICES, there in matrices; (0, 0.0): none."""
    found = [
        (int(name.rpartition(" ")[2].lstrip("x")), count)
        for name, count in by_class(opcodes).items()
        if name.rpartition(" ")[0] == access
    ]
    total = sum(count for _, count in found)
    return total, sum(width * count for width, count in found) / total if total else 0.0


def difference(old: Mapping[str, int], new: Mapping[str, int], most: int = 6) -> str:
    """The opcodes whose number changed most: "LDG.E.128 64 -> 32, LDG.E.64 0 -> 64"; memory and tensor cores first."""
    changed = [name for name in {*old, *new} if old.get(name, 0) != new.get(name, 0)]
    changed.sort(key=lambda name: (class_of(name) == "other", -abs(new.get(name, 0) - old.get(name, 0)), name))
    said = [f"{name} {old.get(name, 0)} -> {new.get(name, 0)}" for name in changed[:most]]
    return ", ".join(said) + (f" and {len(changed) - most} more" if len(changed) > most else "")
