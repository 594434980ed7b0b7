"""The split schedule of one step and the host mirror of the device planner (csrc/plan.cuh), integer for integer.

A request's KV is its n_b committed tokens and then T tree tokens. It is cut into *pieces* at multiples of a tile,
never inside the tree. Two rules:

* balanced (default): lay the requests end to end, one unit a tile of the kernel and `overhead` between requests,
  and cut the line into equal `parts`. A cut that falls into the overhead moves to the next request's start,
  one that falls behind the last whole committed tile moves to that tile's end. Few, long pieces; a request's cuts
  depend on its neighbours.
* fixed split: cut every request at multiples of `fixed_split_tokens`. Cuts, and so results, depend on the
  request alone.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

MIN_PART_TOKENS = 64  # (device) a shorter piece costs more in partials than it saves
DIRECT = -1  # slot of a piece that is its request's only one: it writes the output itself
OVERLONG = -1  # committed count of a request whose slots do not hold it: its outputs are NaN, nothing is read

PART_WORK_INTS = 8  # (device) a CTA's record
ON_DEVICE = "committed", "pieces", "part_work", "request_ptr"  # what kernels read of a schedule

Ints = npt.NDArray[np.signedinteger]
Piece = tuple[int, int, int, int]  # request, kv_begin, kv_end, partial slot


@dataclass(frozen=True)
class Schedule:
    """committed [B]; pieces [K, 4] of (request, kv_begin, kv_end, partial slot); part p walks pieces
    part_ptr[p] .. part_ptr[p+1]-1; request b owns pieces request_ptr[b] .. request_ptr[b+1]-1; shares [1]: of a row block,
    in a step of so many times fewer parts, behind which part_ptr repeats its end. All int32.
    """

    committed: npt.NDArray[np.int32]
    pieces: npt.NDArray[np.int32]
    part_ptr: npt.NDArray[np.int32]
    request_ptr: npt.NDArray[np.int32]
    shares: npt.NDArray[np.int32] = field(default_factory=lambda: np.ones(1, np.int32))

    @property
    def part_work(self) -> npt.NDArray[np.int32]:
        """[parts, 8] int32, what the CTAs of each part read (PartWork of csrc/tile.cuh): the part's first piece, the range
        of its pieces, the shares of a row block and which is the CTA's. As many neighbours have the same part."""
        parts = len(self.part_ptr) - 1
        part, share = np.divmod(np.arange(parts), self.shares[0])
        begin, end = self.part_ptr[part], self.part_ptr[part + 1]
        work = np.zeros((parts, PART_WORK_INTS), np.int32)
        work[:, 4], work[:, 5], work[:, 6], work[:, 7] = begin, end, self.shares[0], share
        work[begin < end, :4] = self.pieces[begin[begin < end]]
        return work


def committed_tokens(seq_lens: Ints, capacity: Ints, *, tail: int, tree_tokens: int) -> npt.NDArray[np.int32]:
    """n_b = max(0, seq_lens - tail), or OVERLONG where n_b + T exceeds the slots the request has. [B] int32."""
    committed = np.maximum(0, seq_lens.astype(np.int64) - tail)
    too_long = committed > capacity - tree_tokens  # a difference: lengths may be any int64
    return np.where(too_long, OVERLONG, committed).astype(np.int32)


def balanced_schedule(
    committed: npt.NDArray[np.int32],
    *,
    tree_tokens: int,
    parts: int,
    overhead: int,
    tile_tokens: int,
    halved_tiles: int = 0,
    third_tiles: int = 0,
) -> Schedule:
    """Cut the concatenated KV into `parts` of equal cost. committed: [B] int32, OVERLONG allowed. overhead: of a
    request, in tiles. tile_tokens: of the kernel, a power of two up to MIN_PART_TOKENS. halved_tiles, third_tiles: row
    blocks are taken by two, or by three, CTAs where the step costs at most so many; parts: then at least as many."""
    batch = len(committed)
    held = np.where(committed == OVERLONG, 0, -(-(committed + tree_tokens) // tile_tokens))
    begin = np.concatenate([[0], np.cumsum(held + overhead)])
    total = int(begin[batch]) - overhead
    most_parts, shares = parts, _shares(total, halved_tiles, third_tiles)
    parts = parts // shares
    part_tiles = max(MIN_PART_TOKENS // tile_tokens, -(-total // parts))

    cuts = (
        [(0, 0)] + [_cut(p * part_tiles, begin, held, committed // tile_tokens) for p in range(1, parts)] + [(batch, 0)]
    )
    effective = [0 < p < parts and cuts[p][1] > 0 and cuts[p] != cuts[p - 1] for p in range(parts + 1)]

    pieces: list[Piece] = []
    part_ptr: list[int] = []
    request_ptr = [0]
    inner: list[list[int]] = [[] for _ in range(batch + 1)]
    for (request, tile), is_effective in zip(cuts, effective, strict=True):
        if is_effective:
            inner[request].append(tile * tile_tokens)
    rank = 0
    for request in range(batch):
        if committed[request] != OVERLONG:
            edges = [0, *inner[request], int(committed[request]) + tree_tokens]
            for i in range(len(edges) - 1):
                slot = DIRECT if len(edges) == 2 else (2 * rank if i == 0 else 2 * (rank + i - 1) + 1)
                pieces.append((request, edges[i], edges[i + 1], slot))
            rank += len(edges) - 2
        request_ptr.append(len(pieces))
    for request, tile in cuts:
        part_ptr.append(request_ptr[request] + sum(edge <= tile * tile_tokens for edge in inner[request]))
    part_ptr += [len(pieces)] * (most_parts - parts)
    return _schedule(committed, pieces, part_ptr, request_ptr, shares)


def fixed_schedule(committed: npt.NDArray[np.int32], *, tree_tokens: int, parts: int, split_tokens: int) -> Schedule:
    """Cut each request at multiples of `split_tokens`; deal pieces out by count."""
    pieces: list[Piece] = []
    request_ptr = [0]
    for request, n in enumerate(committed.tolist()):
        count = 0 if n == OVERLONG else max(1, -(-n // split_tokens))
        for i in range(count):
            end = (i + 1) * split_tokens if i + 1 < count else n + tree_tokens
            pieces.append((request, i * split_tokens, end, DIRECT if count == 1 else len(pieces)))
        request_ptr.append(len(pieces))
    part_ptr = [p * len(pieces) // parts for p in range(parts + 1)]
    return _schedule(committed, pieces, part_ptr, request_ptr)


def _shares(total: int, halved_tiles: int, third_tiles: int) -> int:
    if third_tiles > 0 and total <= third_tiles:
        return 3
    return 2 if halved_tiles > 0 and total <= halved_tiles else 1


def _cut(position: int, begin: Ints, held: Ints, whole: Ints) -> tuple[int, int]:
    """(request, tile) at `position` of the line; (batch, 0) behind its end."""
    request = int(np.searchsorted(begin, position, side="right")) - 1
    if request >= len(whole):
        return len(whole), 0
    tile = position - int(begin[request])
    if tile >= held[request]:
        return request + 1, 0
    return request, min(tile, int(whole[request]))


def _schedule(
    committed: Ints, pieces: list[Piece], part_ptr: list[int], request_ptr: list[int], shares: int = 1
) -> Schedule:
    return Schedule(
        committed=np.asarray(committed, np.int32),
        pieces=np.asarray(pieces, np.int32).reshape(-1, 4),
        part_ptr=np.asarray(part_ptr, np.int32),
        request_ptr=np.asarray(request_ptr, np.int32),
        shares=np.array([shares], np.int32),
    )
