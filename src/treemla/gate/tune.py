"""What `python -m treemla tune` decides: measures the cost model's constants, and what its choice is worth on the performance table.

A dozen timed launches (`probes`) give the constants (`fit`). Then each row of the table is timed with every tiling that
`cost` considers and with other overheads, and the choice is compared with the best of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
import torch

from treemla import cost
from treemla.gate.cases import PEER_CASES, VerifyCase
from treemla.gate.report import table
from treemla.problem import FP8, VerifyShape
from treemla.tiles import ROW_TILE, KernelPath

ROWS = tuple(case for case in PEER_CASES if case.page_size == 1)
MOST_OFF = 0.02  # of the choice from the best of the sweep
PULL = 0.002  # of the defaults on a constant that no probe shows, beside relative errors of some percent

Timer = Callable[[VerifyCase, cost.Tiling], float]  # median microseconds of a layer
Probe = tuple[VerifyCase, cost.Tiling]
Cut = tuple[object, ...]


@dataclass(frozen=True)
class Gpu:
    """Where a kernel is tuned."""

    kernel: KernelPath
    num_sms: int

    def estimate(self, constants: cost.Constants, case: VerifyCase, tiling: cost.Tiling) -> cost.Estimate:
        return cost.estimate(constants, self.kernel, shape_of(case), case.contexts, tiling, self.num_sms)

    def choose(self, constants: cost.Constants, case: VerifyCase, steps: cost.Steps) -> cost.Tiling:
        """What a plan made for these steps does in the case."""
        tiling = cost.choose(constants, self.kernel, shape_of(case), self.num_sms, steps)
        return tiling.in_step(case.contexts, case.tree_tokens, self.kernel)


@dataclass(frozen=True)
class Row:
    """A row of the table: microseconds of every tiling that was timed."""

    case: VerifyCase
    us: Mapping[cost.Tiling, float]

    @property
    def best(self) -> cost.Tiling:
        return min(self.us, key=self.us.__getitem__)

    def off(self, tiling: cost.Tiling) -> float:
        """How much longer it takes than the best, as a fraction."""
        return self.us[tiling] / self.us[self.best] - 1


def cut_of(gpu: Gpu, case: VerifyCase, tiling: cost.Tiling) -> Cut:
    """What a launch does: tilings that differ may cut a case alike."""
    made = tiling.schedule(case.contexts, case.tree_tokens, gpu.kernel)
    return tiling.block_rows, tiling.parts, *(a.tobytes() for a in (made.pieces, made.part_ptr, made.shares))


def shape_of(case: VerifyCase) -> VerifyShape:
    return VerifyShape(
        case.heads, case.tree_tokens, page_size=case.page_size, kv_dtype=FP8 if case.fp8_kv else torch.bfloat16
    )


def probes(gpu: Gpu) -> list[Probe]:
    """Launches in which each constant is a good part of the time: one to 31 tiles an SM, one or many pieces, few or many
    rows, few or all SMs, one block or several."""
    kernel, sms, high = gpu.kernel, gpu.num_sms, gpu.kernel.max_block_rows // ROW_TILE

    def probe(
        tokens: int, sm_tiles: float, *, batch: int = 1, blocks: int = 1, busy: int = sms, overhead: int = 4
    ) -> Probe:
        """sm_tiles: of the kernel, on each busy SM, the last of them a tile short: the tree takes a tile of its own."""
        parts = busy // blocks
        context = (
            int(parts * sm_tiles * kernel.tile_tokens) // batch // kernel.tile_tokens * kernel.tile_tokens
            - kernel.tile_tokens
        )
        case = VerifyCase((context,) * batch, tokens, ROW_TILE)
        return case, cost.Tiling(blocks, kernel.block_height(shape_of(case), blocks), parts, overhead)

    return [
        *(probe(high, sm_tiles) for sm_tiles in (1, 2, 8)),
        *(probe(high, sm_tiles, busy=sms // 2) for sm_tiles in (1, 16)),
        *(probe(1, sm_tiles) for sm_tiles in (2, 8)),
        probe(1, 31, busy=sms // 4),  # memory waits for arithmetic
        probe(4 * high, 31, blocks=4),
        *(probe(tokens, 16, batch=batch) for tokens in (1, high) for batch in (2 * sms, 8 * sms)),
    ]  # fmt: skip


def fit(gpu: Gpu, measured: Sequence[tuple[Probe, float]]) -> cost.Constants:
    """The constants with the least squared relative errors, and the defaults where the probes do not tell."""
    from scipy.optimize import least_squares

    start = np.log(astuple(cost.DEFAULTS[gpu.kernel.name]))

    def errors(logs: np.ndarray) -> list[float]:
        constants = cost.Constants(*np.exp(logs).tolist())
        relative = [np.log(gpu.estimate(constants, *probe).us / us) for probe, us in measured]
        return [*relative, *(PULL * (logs - start))]

    return cost.Constants(*np.exp(least_squares(errors, start, diff_step=1e-3).x).tolist())


def sweep(gpu: Gpu, case: VerifyCase, timer: Timer, made: Sequence[cost.Constants]) -> Row:
    """Time a case with every tiling that any constants could choose of those considered, once where two cut it alike."""
    tilings = dict.fromkeys(
        tiling for constants in made for tiling in cost.tilings(constants, gpu.kernel, shape_of(case), gpu.num_sms)
    )
    tilings |= dict.fromkeys(replace(tiling, overhead_tiles=tiles) for tiling in tilings for tiles in cost.OVERHEADS)
    tilings |= dict.fromkeys(
        tiling.by_shares(shares)
        for tiling in tilings
        if tiling.blocks <= cost.MOST_SHARED_BLOCKS
        for shares in range(2, gpu.kernel.usable_shares(shape_of(case), tiling.block_rows, tiling.parts) + 1)
    )
    us: dict[cost.Tiling, float] = {}
    timed: dict[Cut, float] = {}
    for tiling in tilings:
        cut = cut_of(gpu, case, tiling)
        if cut not in timed:
            timed[cut] = timer(case, tiling)
        us[tiling] = timed[cut]
    return Row(case, us)


def worst_off(gpu: Gpu, constants: cost.Constants, rows: Sequence[Row]) -> float:
    """Of the tilings that the constants choose for each row's own lengths."""
    return max(row.off(gpu.choose(constants, row.case, (row.case.contexts,))) for row in rows)


def show_fit(gpu: Gpu, constants: cost.Constants, measured: Sequence[tuple[Probe, float]]) -> str:
    """A line a probe."""
    lines = []
    for (case, tiling), us in measured:
        said = gpu.estimate(constants, case, tiling).us
        lines.append([case.id, tiling, f"{us:.1f}", f"{said:.1f}", f"{100 * (said / us - 1):+.1f}%"])
    return table(["probe", "tiling", "us", "model", "off"], lines)


def show_rows(gpu: Gpu, constants: cost.Constants, rows: Sequence[Row]) -> str:
    """A line a row: what is chosen where its lengths are known, the best of the sweep, and what a plan takes that does
    not know them; below, why."""
    lines, why = [], []
    for row in rows:
        chosen = gpu.choose(constants, row.case, (row.case.contexts,))
        plan = gpu.choose(constants, row.case, cost.design_steps(row.case.batch))
        lines.append(
            [row.case.id, chosen, f"{row.us[chosen]:.1f}", row.best, f"{row.us[row.best]:.1f}", f"{100 * row.off(chosen):.1f}%",
             plan, f"{row.us[plan]:.1f}"]
        )  # fmt: skip
        why.append(f"{row.case.id}\n    {chosen}: {gpu.estimate(constants, row.case, chosen)}")
        others = [t for t in row.us if t.blocks != chosen.blocks]
        if others:
            other = min(others, key=lambda t: gpu.estimate(constants, row.case, t).us)
            why[-1] += f"\n    {other}: {gpu.estimate(constants, row.case, other)}"
    headers = ["row", "chosen", "us", "best of sweep", "us", "off", "of a plan for any length", "us"]
    return "\n".join(
        [table(headers, lines), "\nWhy, by the model; below each the best of another number of blocks:\n", *why]
    )
