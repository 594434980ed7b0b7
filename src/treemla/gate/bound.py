"""What bounds a verify kernel, from its instructions alone: tensor cores, shared memory, issue or DRAM, in microseconds.

A model of one tile: each unit at its peak, all of them at once, and a fixed part for launches, first loads and combine.
`error` says how far it is from what was measured; only a model that is near may judge.
"""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from treemla import VerifyShape, cost, tiles
from treemla.gate import mix, roofline, schema
from treemla.gate.cases import CASES, GATED_KERNELS, VerifyCase
from treemla.gate.exits import Exit
from treemla.gate.findings import Finding
from treemla.gate.kernelcode import KernelCode
from treemla.gate.report import table
from treemla.problem import FP8

NEAR = 0.15  # median error up to which a predicted slowdown is red
SLOWER = 0.03
FIXED_US = 10.0  # H200, e53c3a3: what is left of the shortest case of docs/measured.md (batch 1 at 4k) above its floor
SHARED_BYTES_A_CLOCK = 128
SCHEDULERS = 4


@dataclass(frozen=True)
class Gpu:
    """name: part of the one that CUDA reports. flops_a_clock: bf16 tensor cores of a multiprocessor."""

    name: str
    arch: str
    multiprocessors: int
    clock_hz: float
    flops_a_clock: int


GPUS = (
    Gpu("H200", "sm_90a", 132, 1.83e9, 4096),
    Gpu("RTX PRO 6000", "sm_120a", 188, 2.62e9, 1024),
)


@dataclass(frozen=True)
class Tile:
    """What an iteration works on, and how many warps run each tensor-core loop, in the order of their addresses."""

    tokens: int
    warps: tuple[int, ...]


TILES = {
    "mma": Tile(tiles.MMA.tile_tokens, (8,)),
    "wgmma": Tile(tiles.WGMMA.tile_tokens, (8, 4)),
}  # consumers; two accumulators, then the scorer


@dataclass(frozen=True)
class Prediction:
    """us: microseconds a layer. by: those of each unit without the fixed part."""

    us: float
    by: Mapping[str, float]

    @property
    def limiter(self) -> str:
        return max(self.by, key=lambda unit: self.by[unit])


def predict(case: VerifyCase, gpu: Gpu, code: Mapping[str, KernelCode]) -> Prediction | None:
    """With the target's default kernel; None where its loops are not those that TILES describes."""
    path = tiles.TARGETS[gpu.arch].paths[0]
    shape = VerifyShape(case.heads, case.tree_tokens, kv_dtype=FP8 if case.fp8_kv else torch.bfloat16)
    steps = cost.design_steps(case.batch)
    tiling = cost.choose(cost.DEFAULTS[path.name], path, shape, gpu.multiprocessors, steps)
    kernel, tile = code.get(path.kernel_name(tiling.block_rows, case.fp8_kv)), TILES.get(path.name)
    if kernel is None or tile is None:
        return None
    loops = whole_block(kernel, tiling.block_rows)
    if len(loops) != len(tile.warps):
        return None
    waves = -(-tiling.blocks * tiling.parts // gpu.multiprocessors)
    tiles_in_turn = sum(case.contexts) * waves / (tiling.parts * tile.tokens)
    us = {unit: 1e6 * clocks * tiles_in_turn / gpu.clock_hz for unit, clocks in clocks_a_tile(loops, tile, gpu).items()}
    ceiling = roofline.CEILINGS[gpu.name]
    us["DRAM"] = 1e6 * roofline.traffic_bytes(case) / ceiling.bytes_per_s
    return Prediction(FIXED_US + max(us.values()), us)


def whole_block(kernel: KernelCode, block_rows: int) -> list[Mapping[str, int]]:
    """The loops that work on all rows of a block: a wgmma kernel has others for shares of it, with fewer columns."""
    columns = re.compile(rf"HGMMA\.\d+x{block_rows}x")
    return [
        loop
        for loop in kernel.loops
        if not any(opcode.startswith("HGMMA") for opcode in loop) or any(map(columns.match, loop))
    ]


def clocks_a_tile(loops: Sequence[Mapping[str, int]], tile: Tile, gpu: Gpu) -> dict[str, float]:
    """Of a multiprocessor, for each unit in it."""
    flops = shared = issued = 0.0
    for warps, loop in zip(tile.warps, loops, strict=True):
        issued += warps * sum(loop.values())
        for opcode, count in loop.items():
            flops += warps * count * tensor_flops(opcode)
            shared += warps * count * shared_bytes(opcode)
    shared += tile.tokens * 1152  # written once as it arrives
    return {
        "tensor cores": flops / gpu.flops_a_clock,
        "shared memory": shared / SHARED_BYTES_A_CLOCK,
        "issue": issued / SCHEDULERS,
    }


def tensor_flops(opcode: str) -> float:
    """Of a warp's instruction; four warps share one of wgmma. HMMA.16816 is m16 n8 k16."""
    if found := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)\b", opcode):
        m, n, k = map(int, found.groups())
        return 2 * m * n * k / 4
    if found := re.match(r"[HQ]MMA\.(16)(8)(16|32)\b", opcode):
        m, n, k = map(int, found.groups())
        return 2 * m * n * k
    return 0.0


def shared_bytes(opcode: str) -> float:
    """Moved by a warp's instruction; wgmma reads both operands from shared memory."""
    if found := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)\b", opcode):
        m, n, k = map(int, found.groups())
        return 2 * k * (m + n) / 4
    kind, _, width = mix.class_of(opcode).rpartition(" ")
    if kind in {"ldmatrix", "stmatrix"}:
        return 128 * int(width.lstrip("x"))
    return 32 * int(width) / 8 if kind in {"shared load", "shared store"} else 0.0


def is_default(run: schema.Measurement, gpu: Gpu) -> bool:
    """A time of the verify kernel that the GPU takes unasked."""
    name = tiles.TARGETS[gpu.arch].paths[0].name
    return gpu.name in run.where.gpu and run.metric in {"verify", f"verify_{name}"}


def errors(made: Sequence[schema.Measurement], code: Mapping[str, Mapping[str, KernelCode]]) -> dict[str, float]:
    """{case: predicted / measured - 1} of measured verify times on GPUs that the model knows. code: {arch: {kernel: ..}}"""
    cases = {case.id: case for case in CASES}
    found = {}
    for run in made:
        gpu = next((gpu for gpu in GPUS if gpu.name in run.where.gpu), None)
        if gpu and is_default(run, gpu) and run.case in cases:
            predicted = predict(cases[run.case], gpu, code.get(gpu.arch, {}))
            if predicted:
                found[run.case] = predicted.us / run.value - 1
    return found


def median_error(found: Mapping[str, float]) -> float | None:
    return statistics.median(map(abs, found.values())) if found else None


def shown(code: Mapping[str, Mapping[str, KernelCode]], made: Sequence[schema.Measurement]) -> str:
    """Predictions of the gated cases on each GPU, beside what was measured, and how far the model is from that."""
    rows = []
    for case in GATED_KERNELS:
        for gpu in GPUS:
            predicted = predict(case, gpu, code[gpu.arch])
            said = [f"{predicted.us:.1f}", predicted.limiter] if predicted else ["-", "-"]
            was = next((run.value for run in made if run.case == case.id and is_default(run, gpu)), None)
            rows.append([case.id, gpu.name, *said, f"{was:.1f}" if was else "-"])
    error = median_error(errors(made, code))
    if error is None:
        verdict = "No measurement to compare the model with: it reports, it does not judge."
    else:
        judges = "a predicted slowdown of more than 3% is red" if error <= NEAR else "too far to judge: it reports"
        verdict = f"Median error {100 * error:.0f}% over {len(errors(made, code))} measured cases: {judges}."
    return f"{table(['case', 'GPU', 'predicted us', 'bound by', 'measured us'], rows)}\n{verdict}"


def slowed(
    old: Mapping[str, Mapping[str, KernelCode]],
    new: Mapping[str, Mapping[str, KernelCode]],
    made: Sequence[schema.Measurement],
) -> list[Finding]:
    """A red finding a gated case that the model predicts to be slower, where the model is near enough to judge."""
    error = median_error(errors(made, old))
    if error is None or error > NEAR:
        return []
    found = []
    for case in GATED_KERNELS:
        for gpu in GPUS:
            before, after = (predict(case, gpu, code.get(gpu.arch, {})) for code in (old, new))
            if before and after and after.us > before.us * (1 + SLOWER):
                text = f"{before.us:.1f} -> {after.us:.1f} us predicted, bound by {after.limiter}"
                found.append(Finding(f"{gpu.name} {case.id}", "predicted slower", Exit.FAILED, text))
    return found
