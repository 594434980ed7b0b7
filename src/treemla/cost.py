"""What a layer costs: a model of verify and combine with eight constants a GPU and kernel, and the tiling it says to use.

    us      = layer + busiest SM + partial bytes / partial rate
    SM      = sum over its pieces of tiles * tile + piece, + ragged where masks are needed; its first piece's `piece`
              is in `layer`
    tile    = (arithmetic^4 + memory^4)^(1/4): neither hides all of the other
    memory  = bytes of the tiles that all SMs read at once / memory rate; row blocks of a part read one tile

`python -m treemla tune` measures the constants (`treemla.gate.tune`); docs/kernel.md says how well they did on an H200.
"""

import functools
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from treemla import schedule
from treemla.problem import VerifyShape
from treemla.tiles import MAX_PARTS, KernelPath

DESIGN_CONTEXTS = (4096, 16384, 65536)  # committed tokens that a plan is made for where its caller says nothing
DESIGN_BATCHES = (1, 4, 16, 64)  # as far as a plan takes them; more requests than SMs fill any tiling
# CTAs of a launch, as a multiple of the SMs; the first of equals is chosen. Half before three quarters: fewer share L2.
WAVES = (1, 1 / 2, 3 / 4, 1 / 4, 2, 3, 4)
Steps = tuple[tuple[int, ...], ...]  # the committed lengths of each
ALIKE = 0.01  # of a time: less than the model is wrong by
ALWAYS = 2**30  # tiles
MOST_SHARED_BLOCKS = 2  # more gain next to nothing, and a kernel that knows shares is 1 to 3% slower where they do not
# Of a step's time, for each CTA of a block beyond the first: a launch of as low blocks is so much quicker.
SHARE_COST = 0.02
MOST_SHARED_PART_TILES = 16  # of each part, before memory and arithmetic are all that counts
MOST_BLOCKS = 2  # times the fewest: more would read every KV row that often from L2
OVERHEADS = (1, 2, 3, 4, 6)


@dataclass(frozen=True)
class Constants:
    """One verify kernel on one GPU. A block has R query rows; the tile is the kernel's (`KernelPath.tile_tokens`).

    layer_us: launches, first loads, last stores. tile_us + R * tile_row_us: a tile's arithmetic.
    piece_us + R * piece_row_us: a further piece of an SM. R * ragged_row_us: a piece that ends inside a tile or tree.
    memory_bytes_per_us: KV rows into all SMs. partial_bytes_per_us: partials written and read again.
    """

    layer_us: float
    tile_us: float
    tile_row_us: float
    piece_us: float
    piece_row_us: float
    ragged_row_us: float
    memory_bytes_per_us: float
    partial_bytes_per_us: float


# docs/kernel.md says from which times. wgmma: of an H200. mma: its loop there, an RTX PRO 6000's memory, older others.
DEFAULTS = {
    "wgmma": Constants(5.22, 1.09, 0.0110, 1.00, 0.0413, 0.0216, 4.44e6, 2.01e6),
    "mma": Constants(7.22, 1.12, 0.0148, 1.3, 0.136, 0.0184, 1.79e6, 2.80e6),
}


@dataclass(frozen=True)
class Tiling:
    """How a launch is cut: row blocks of block_rows, parts of the KV, and what a request counts beside its tiles when
    parts are made equal. In steps of at most halved_tiles, overhead counted, two CTAs share a row block, of at most
    third_tiles three, and there are as many times fewer parts: each CTA has more of the KV and fewer rows."""

    blocks: int
    block_rows: int
    parts: int
    overhead_tiles: int
    halved_tiles: int = 0
    third_tiles: int = 0

    def __str__(self) -> str:
        shared = "".join(
            f", {by}" + (f" up to {tiles} tiles" if tiles < ALWAYS else "")
            for by, tiles in (("by thirds", self.third_tiles), ("by halves", self.halved_tiles))
            if tiles
        )
        return f"{self.blocks}x{self.block_rows} rows, {self.parts} parts, overhead {self.overhead_tiles}{shared}"

    def by_shares(self, shares: int) -> "Tiling":
        """With row blocks shared by so many CTAs in every step."""
        return replace(self, halved_tiles=ALWAYS * (shares == 2), third_tiles=ALWAYS * (shares == 3))

    def of_shares(self, kernel: KernelPath, shares: int) -> "Tiling":
        """What a step of such shares is cut like."""
        rows = kernel.share_rows(self.block_rows, shares)
        return Tiling(shares * self.blocks, rows, self.parts // shares, self.overhead_tiles)

    def in_step(self, contexts: Sequence[int], tree_tokens: int, kernel: KernelPath) -> "Tiling":
        """The tiling that shares blocks always or never and cuts a step with these lengths as this one does."""
        return self.by_shares(int(self.schedule(contexts, tree_tokens, kernel).shares[0]))

    def schedule(self, contexts: Sequence[int], tree_tokens: int, kernel: KernelPath) -> schedule.Schedule:
        """Of a step with these committed lengths."""
        committed = np.array(contexts, np.int32)
        return schedule.balanced_schedule(
            committed,
            tree_tokens=tree_tokens,
            parts=self.parts,
            overhead=self.overhead_tiles,
            tile_tokens=kernel.tile_tokens,
            halved_tiles=self.halved_tiles,
            third_tiles=self.third_tiles,
        )


@dataclass(frozen=True)
class Estimate:
    """Microseconds of a layer; tiles and pieces are those of the busiest SM, memory_share what memory has of a tile."""

    layer_us: float
    busiest_us: float
    partials_us: float
    tiles: int
    pieces: int
    memory_share: float

    @property
    def us(self) -> float:
        return self.layer_us + self.busiest_us + self.partials_us

    def __str__(self) -> str:
        bound = "memory" if self.memory_share > 1 / 2 else "arithmetic"
        return (
            f"{self.us:.1f} us: fixed {self.layer_us:.1f}, busiest SM {self.busiest_us:.1f} (tiles {self.tiles}, "
            f"pieces {self.pieces}, bound by {bound}), partials {self.partials_us:.1f}"
        )


def estimate(
    constants: Constants, kernel: KernelPath, shape: VerifyShape, contexts: Sequence[int], tiling: Tiling, num_sms: int
) -> Estimate:
    """One layer of a step whose requests have these committed lengths."""
    made = tiling.schedule(contexts, shape.tree_tokens, kernel)
    if (shares := int(made.shares[0])) > 1:
        return estimate(constants, kernel, shape, contexts, tiling.of_shares(kernel, shares), num_sms)
    rows, tile_tokens = tiling.block_rows, kernel.tile_tokens
    request, begin, end, slot = made.pieces.T
    piece_tiles = -(-(end - begin) // tile_tokens)
    ragged = ((end - begin) % tile_tokens != 0) | (end > made.committed[request])
    tiles, pieces = _by_part(made, piece_tiles), _by_part(made, np.ones_like(piece_tiles))

    row_bytes = shape.head_dim * shape.kv_dtype.itemsize + 4  # and its slot
    streams = min(int((tiles > 0).sum()), num_sms / tiling.blocks)
    memory_us = streams * tile_tokens * row_bytes / constants.memory_bytes_per_us
    arithmetic_us = constants.tile_us + rows * constants.tile_row_us
    both = arithmetic_us**4 + memory_us**4
    piece_us = constants.piece_us + rows * constants.piece_row_us
    part_us = tiles * both**0.25 + pieces * piece_us + _by_part(made, ragged) * (rows * constants.ragged_row_us)

    sm = _sm_of_ctas(np.repeat(part_us, tiling.blocks), num_sms)
    sm_us = np.bincount(sm, np.repeat(part_us, tiling.blocks))
    busiest = int(sm_us.argmax())
    here = np.repeat(np.stack([tiles, pieces]), tiling.blocks, axis=1)[:, sm == busiest].sum(axis=1)
    partial_bytes = int((slot >= 0).sum()) * shape.rows * 3 * shape.latent_dim
    return Estimate(
        layer_us=constants.layer_us,
        busiest_us=float(sm_us[busiest]) - piece_us,
        partials_us=partial_bytes / constants.partial_bytes_per_us,
        tiles=int(here[0]),
        pieces=int(here[1]),
        memory_share=memory_us**4 / both,
    )


def overhead_tiles(constants: Constants, block_rows: int) -> int:
    """What a further request costs a CTA, in tiles that memory does not delay."""
    tile_us = constants.tile_us + block_rows * constants.tile_row_us
    piece_us = constants.piece_us + block_rows * constants.piece_row_us
    return round(piece_us / tile_us)


def tilings(constants: Constants, kernel: KernelPath, shape: VerifyShape, num_sms: int) -> list[Tiling]:
    """Every tiling that is considered: fewest blocks first, for each a wave of CTAs first."""
    fewest = -(-shape.rows // kernel.max_block_rows)
    heights: dict[int, int] = {}  # the least number of blocks of each height
    for blocks in range(fewest, MOST_BLOCKS * fewest + 1):
        heights.setdefault(kernel.block_height(shape, blocks), blocks)
    made = []
    for block_rows, blocks in heights.items():
        overhead = overhead_tiles(constants, block_rows)
        parts = [min(MAX_PARTS, max(1, int(waves * num_sms) // blocks)) for waves in WAVES]
        made += [Tiling(blocks, block_rows, count, overhead) for count in dict.fromkeys(parts)]
    return made


def design_steps(max_batch: int, contexts: Sequence[int] = DESIGN_CONTEXTS) -> Steps:
    """The steps that a plan is made for: each context in batches from one request to max_batch."""
    most = min(max_batch, DESIGN_BATCHES[-1])
    batches = sorted({most, *(batch for batch in DESIGN_BATCHES if batch < most)})
    return tuple((context,) * batch for context in contexts for batch in batches)


@functools.cache
def choose(constants: Constants, kernel: KernelPath, shape: VerifyShape, num_sms: int, steps: Steps) -> Tiling:
    """The tiling that is never far from the best: its largest ratio to the best tiling of a step is the least. Of those
    that the model hardly tells apart the first: fewest blocks, a wave of CTAs, the overhead of a piece.

    A plan is captured before lengths are known, so one tiling serves all its steps. Of a single step they are known: no
    block need be shared then where a launch of lower blocks does the same.
    """

    def us_of(tiling: Tiling, step: tuple[int, ...]) -> float:
        us = estimate(constants, kernel, shape, step, tiling, num_sms).us
        shares = tiling.schedule(step, shape.tree_tokens, kernel).shares[0] if len(steps) == 1 else 1
        return us * (1 + SHARE_COST * (shares - 1))

    def best_of(considered: Sequence[Tiling]) -> Tiling:
        us = np.array([[us_of(tiling, step) for step in steps] for tiling in considered])
        worst = (us / us.min(axis=0)).max(axis=1)
        return considered[int((worst <= worst.min() * (1 + ALIKE)).argmax())]

    best = best_of(
        [with_shares(constants, kernel, shape, num_sms, t) for t in tilings(constants, kernel, shape, num_sms)]
    )
    if not all(len(step) == 1 for step in steps):
        best = best_of([best, *(replace(best, overhead_tiles=tiles) for tiles in OVERHEADS)])
    return best


def with_shares(constants: Constants, kernel: KernelPath, shape: VerifyShape, num_sms: int, whole: Tiling) -> Tiling:
    """`whole`, and up to how many tiles of a lone request shares of its blocks are the quicker."""
    most = kernel.usable_shares(shape, whole.block_rows, whole.parts)
    if most == 1 or whole.blocks > MOST_SHARED_BLOCKS:
        return whole
    cuts = [whole.of_shares(kernel, shares) for shares in range(1, most + 1)]
    up_to = [0, 0]
    step = max(1, whole.parts // 6)  # so that whole parts, halves' and thirds' are all looked at when they are full
    for tiles in range(step, MOST_SHARED_PART_TILES * whole.parts, step):
        lone = (tiles * kernel.tile_tokens - shape.tree_tokens,)
        us = [estimate(constants, kernel, shape, lone, cut, num_sms).us for cut in cuts]
        if min(us[1:]) > us[0]:
            break
        if us[1] <= us[0]:
            up_to[0] = tiles
        if up_to[1] == tiles - step and us[-1] * (1 + ALIKE) <= min(us[:-1]):
            up_to[1] = tiles
    return replace(whole, halved_tiles=up_to[0], third_tiles=up_to[1] if most == 3 else 0)


def _by_part(made: schedule.Schedule, of_piece: npt.NDArray[np.generic]) -> npt.NDArray[np.int64]:
    """[parts] sums over the pieces of each part."""
    return np.diff(np.concatenate([[0], np.cumsum(of_piece, dtype=np.int64)])[made.part_ptr])


def _sm_of_ctas(cta_us: npt.NDArray[np.float64], num_sms: int) -> npt.NDArray[np.int64]:
    """[CTAs] the SM of each: one CTA an SM at a time, in order, each to the SM that is free first."""
    sm = np.arange(len(cta_us))
    free = [(float(us), int(i)) for i, us in enumerate(cta_us[:num_sms])]
    heapq.heapify(free)
    for cta in range(num_sms, len(cta_us)):
        until, sm[cta] = free[0]
        heapq.heapreplace(free, (until + float(cta_us[cta]), int(sm[cta])))
    return sm
