"""`treemla static`: what the compiled kernels are, what is wrong with them, and what became worse. Needs no GPU."""

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from treemla import cubins, nvcc, tiles
from treemla.gate import bound, kernelcode, mix, sass, schema, static, trees
from treemla.gate.baseline import ROOT, BrokenBaseline, today
from treemla.gate.exits import BaselineMissing, Exit, InvalidEnvironment
from treemla.gate.findings import Finding, Findings
from treemla.gate.fingerprint import REPO
from treemla.gate.kernelcode import KernelCode
from treemla.gate.report import table

STORED = "stored"
LEDGER = "static_blessings.jsonl"
MORE_INSTRUCTIONS = 0.03  # of a loop
KERNEL_WIDTH = 0.8  # of the mean width of a kernel's accesses, its set-up included
MUST_NOT_GROW: dict[str, Callable[[KernelCode], int]] = {
    "registers": lambda code: code.registers,
    "spilled bytes": lambda code: code.spill_bytes,
    "stack bytes": lambda code: code.stack_bytes,
    "shared bytes": lambda code: code.shared_bytes,
    "barriers": lambda code: code.barriers,
}


def static_gate(against: str = STORED) -> Findings:
    """A finding a kernel of both architectures. against: "stored", or a base's commit or folder, which is compiled too.

    InvalidEnvironment without a compiler; BaselineMissing where the base has no source that compiles.
    """
    times = measured()
    loops: list[list[object]] = []
    before: dict[str, dict[str, KernelCode]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        base = None if against == STORED else trees.find(against, Path(scratch))
        reports, code, found = compile_all()
        for arch, report in reports.items():
            target = tiles.TARGETS[arch]
            before[arch] = _base(base, target) if base else kernelcode.load_all(arch)
            found += broken(arch, report.problems, judge_all(target, code[arch], before[arch], stored=base is None))
            loops += [[arch, k.name, *loop.values()] for k in report.kernels for loop in k.loops]
    notes = [f"Loops that use the tensor cores:\n\n{table(['arch', 'kernel', 'all', *sass.CLASSES], loops)}\n"]
    if len(code) == len(tiles.TARGETS):
        found += bound.slowed(before, code, times)
        notes.append(f"What the instructions allow, by a model of one tile:\n\n{bound.shown(code, times)}\n")
    return Findings("static", tuple(found), tuple(notes))


def compile_all() -> tuple[dict[str, static.StaticReport], dict[str, dict[str, KernelCode]], list[Finding]]:
    """({arch: report}, {arch: its kernels}, a red finding an architecture that does not compile) of this checkout."""
    reports, code, found = {}, {}, []
    for arch, target in tiles.TARGETS.items():
        try:
            reports[arch], code[arch] = static.report(arch), compiled(target)
        except nvcc.NvccMissing as error:
            raise InvalidEnvironment(str(error)) from error
        except (nvcc.NvccError, sass.UnreadableOutput) as error:
            found.append(Finding(arch, "broken", Exit.FAILED, str(error)))
    return reports, code, found


def broken(arch: str, problems: Sequence[str], found: Sequence[Finding]) -> list[Finding]:
    """The findings, red where `static`'s rules hold a problem that names the kernel; one of its own for any other."""
    left, made = list(problems), []
    for finding in found:
        name = finding.name.split()[-1]
        mine = [problem for problem in left if re.search(rf"\b{name}\b", problem)]
        left = [problem for problem in left if problem not in mine]
        text = "; ".join([*mine, *filter(None, [finding.text])])
        made.append(replace(finding, verdict="broken", exit=Exit.FAILED, text=text) if mine else finding)
    return [*made, *(Finding(arch, "broken", Exit.FAILED, problem) for problem in left)]


def measured() -> list[schema.Measurement]:
    """The newest committed times of kernels. BrokenBaseline names a file of them that does not load."""
    try:
        files = [schema.load(path) for path in (REPO / "docs/measured").glob("*-gpu-pe*.jsonl")]  # perf's and peers'
    except ValueError as error:
        raise BrokenBaseline(str(error)) from error
    return max(files, key=lambda runs: runs[0].where.date, default=[])


def bless(reason: str, root: Path = ROOT) -> Findings:
    """Store what the sources compile to now, for every architecture, with a line in the ledger.

    Nothing is stored where one does not compile or a kernel breaks the rules: those findings are red.
    """
    reports, code, found = compile_all()
    for arch, report in reports.items():
        found += broken(arch, report.problems, judge_all(tiles.TARGETS[arch], code[arch], None))
    if refused := [finding for finding in found if finding.exit is not Exit.PASS]:
        return Findings("static", tuple(refused), ("Nothing was stored.",))
    stored, found = {arch: kernelcode.load_all(arch, root) for arch in code}, []
    for arch, old in stored.items():
        for name in set(old) - set(code[arch]):
            kernelcode.path_of(arch, name, root).unlink()
        for name, held in code[arch].items():
            held.dump(root)
            verdict, _, text = judge(old[name], held) if name in old else ("new", Exit.PASS, "")
            found.append(Finding(f"{arch} {name}", f"blessed ({verdict})", Exit.PASS, text))
    said = [f"{finding.name}: {finding.text}" for finding in found if finding.text]
    line = {"date": today().isoformat(), "reason": reason, "compiler": nvcc.version(nvcc.find()), "changes": said}
    with (root / LEDGER).open("a") as ledger:
        ledger.write(json.dumps(line, sort_keys=True) + "\n")
    return Findings("static", tuple(found))


def compiled(target: tiles.Target) -> dict[str, KernelCode]:
    """What this checkout's kernels are: of the cubin that is loaded, and shipped."""
    return kernelcode.read(cubins.cubin_path(target.arch), target, nvcc.version(nvcc.find()))


def _base(tree: Path, target: tiles.Target) -> dict[str, KernelCode]:
    """Of the base's sources; what the host asks for at launch is this checkout's `tiles`."""
    try:
        return kernelcode.read(nvcc.build(tree / "csrc", target.arch), target, nvcc.version(nvcc.find()))
    except nvcc.NvccMissing:
        raise
    except (nvcc.NvccError, OSError) as error:
        raise BaselineMissing(f"{tree}: its kernels do not compile: {error}") from error


def judge_all(
    target: tiles.Target, code: Mapping[str, KernelCode], old: Mapping[str, KernelCode] | None, *, stored: bool = True
) -> list[Finding]:
    """Every kernel that is, should be, or was. old: None compares with nothing. stored: `old` is what was blessed, which
    must name the same kernels; a base's may differ.
    """
    unnamed = Exit.BASELINE_MISSING if stored else Exit.PASS
    found = []
    for name in sorted({*target.kernel_names, *code, *(old or {})}):
        label, before = f"{target.arch} {name}", (old or {}).get(name)
        if name not in code:
            expected = name in target.kernel_names
            verdict = ("missing", Exit.FAILED) if expected else ("stale" if stored else "removed", unnamed)
            text = (
                "not in the cubin" if expected else "stored, and no longer a kernel: python -m treemla static --bless"
            )
            found.append(Finding(label, *verdict, text))
        elif old is None:
            found.append(Finding(label, "compiled", Exit.PASS, "", cells(None, code[name])))
        elif before is None:
            text = "nothing is stored of it: python -m treemla static --bless" if stored else ""
            found.append(Finding(label, "no baseline" if stored else "new", unnamed, text, cells(None, code[name])))
        else:
            data = {"old": asdict(before), "new": asdict(code[name])} if before.sha256 != code[name].sha256 else {}
            found.append(Finding(label, *judge(before, code[name]), cells(before, code[name]), data))
    return found


def judge(old: KernelCode, new: KernelCode) -> tuple[str, Exit, str]:
    """(verdict, exit, what changed and why). The same instructions are the same kernel, whatever was edited."""
    if old.compiler != new.compiler:
        text = f"stored of compiler {old.compiler}, this is {new.compiler}: python -m treemla static --bless"
        return "foreign", Exit.BASELINE_MISSING, text
    worse = [f"{name} {count(old)} -> {count(new)}" for name, count in MUST_NOT_GROW.items() if count(new) > count(old)]
    if old.ctas is not None and (new.ctas or 0) < old.ctas:
        worse.append(f"CTAs an SM {old.ctas} -> {new.ctas}")
    if len(old.loops) != len(new.loops):
        worse.append(f"tensor-core loops {len(old.loops)} -> {len(new.loops)}")
    else:
        for before, after in zip(old.loops, new.loops, strict=True):
            worse += worse_loop(before, after)
    worse += narrower(old.opcodes, new.opcodes, KERNEL_WIDTH)
    why = mix.difference(old.opcodes, new.opcodes)
    if worse:
        return "worse", Exit.FAILED, "; ".join(dict.fromkeys(worse)) + (f" ({why})" if why else "")
    if old.sha256 == new.sha256:
        return "same", Exit.PASS, ""
    return "changed", Exit.PASS, why or "operands or order alone"


def worse_loop(old: Mapping[str, int], new: Mapping[str, int]) -> list[str]:
    """What an iteration of a loop does more of, or in smaller pieces."""
    before, after = sum(old.values()), sum(new.values())
    worse = [f"loop of {before} instructions -> {after}"] if after > before * (1 + MORE_INSTRUCTIONS) else []
    classes = mix.by_class(old), mix.by_class(new)
    for name in ("tensor", "barrier", "bulk copy"):
        few, many = (held.get(name, 0) for held in classes)
        if many > few:
            worse.append(f"{name} in a loop {few} -> {many}")
    return worse + narrower(old, new, 1.0)


def narrower(old: Mapping[str, int], new: Mapping[str, int], least: float) -> list[str]:
    """More memory accesses whose mean width fell below `least` of what it was, and local memory that was not there."""
    worse = []
    for name in (*mix.ACCESSES.values(), *mix.MATRICES.values()):
        (few, before), (many, after) = mix.accesses(old, name), mix.accesses(new, name)
        if name.startswith("local"):
            if many and not few:
                worse.append(f"{name} instructions 0 -> {many}")
        elif many > few and after < least * before:
            unit = "bits" if name in mix.ACCESSES.values() else "matrices"
            worse.append(f"{name} narrower: {few} of {before:.4g} {unit} -> {many} of {after:.4g}")
    return worse


def cells(old: KernelCode | None, new: KernelCode) -> dict[str, str]:
    def moved(count: Callable[[KernelCode], int | None]) -> str:
        before, after = count(old) if old else None, count(new)
        return str(after) if before in {None, after} else f"{before} -> {after}"

    held = {name: moved(count) for name, count in MUST_NOT_GROW.items()}
    return {**held, "CTAs an SM": moved(lambda c: c.ctas), "instructions": moved(lambda c: c.instructions)}
