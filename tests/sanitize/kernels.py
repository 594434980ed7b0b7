"""Every kernel at every row-block height, over memory that nobody initialised but where the contract says so.

Runs under compute-sanitizer (see run.py), so it is small and launches no kernel but treemla's: inputs come by copies
from the host, and outputs, words, plan and workspace are left as the driver hands them out. Each result is compared
with the portable path on the CPU.
"""

import os
from dataclasses import dataclass

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # an allocation a tensor, so that the tool knows its bounds

import numpy as np
import torch

from treemla import (
    MaskLayout,
    SlotRanges,
    SlotTable,
    VerifyPlan,
    VerifyShape,
    combine,
    cubins,
    pack_tree_mask,
    verify_attention,
)
from treemla.cost import Tiling
from treemla.kv import move_rows
from treemla.problem import CUDA_KV_DTYPES
from treemla.tiles import MAX_PARTS, KernelPath

POOL_SLOTS = 1600
PAGE = 16
TOLERANCE = 0.05  # enough to tell a right answer from garbage; tests/parity says how right


@dataclass(frozen=True)
class SanitizeCase:
    heads: int
    tree_tokens: int
    lengths: tuple[int, ...] = (400, 0, 33)
    num_padding: int = 0
    layout: MaskLayout = MaskLayout.FULL
    ranges: bool = False
    index_dtype: torch.dtype = torch.int64
    fixed_split: int = 0
    parts: int = 4
    chain: bool = False


CASES = (
    SanitizeCase(8, 1, chain=True),
    SanitizeCase(8, 2, ranges=True, index_dtype=torch.int32),
    SanitizeCase(3, 8, layout=MaskLayout.QLEN_ONLY, lengths=(400, 37, 0), num_padding=1),
    SanitizeCase(8, 4, fixed_split=32),
    SanitizeCase(5, 8, ranges=True, layout=MaskLayout.QLEN_ONLY),
    SanitizeCase(6, 8, index_dtype=torch.int32),
    SanitizeCase(7, 8),
    SanitizeCase(8, 9, index_dtype=torch.int32),
    SanitizeCase(1, 64, lengths=(65,), layout=MaskLayout.QLEN_ONLY, ranges=True, fixed_split=32),
    SanitizeCase(8, 1, lengths=(1500,), parts=40, chain=True),
)

# Row bytes, moves, disjoint: whole rows, slices of a row, one chunk of a row, several groups.
MOVES = ((1152, 20, False), (576, 150, False), (80, 1200, False), (1152, 70, True))


def run(case: SanitizeCase, path: KernelPath, kv_dtype: torch.dtype, shares: int) -> None:
    """One step on the GPU and on the CPU."""
    random = torch.Generator().manual_seed(1)
    shape = VerifyShape(case.heads, case.tree_tokens, kv_dtype=kv_dtype)
    batch, tokens = len(case.lengths), len(case.lengths) * case.tree_tokens
    owned = _owned_slots(case, random)
    kv = torch.zeros(POOL_SLOTS, 576, dtype=kv_dtype)
    kv_on_gpu = torch.empty_like(kv, device="cuda")
    for slots in owned[: batch - case.num_padding]:
        for page in slots.split(PAGE):  # a copy a page: a slot that nobody owns stays uninitialised
            first, end = int(page[0]), int(page[-1]) + 1
            kv[first:end] = torch.randn(end - first, 576, generator=random).to(kv_dtype)
            kv_on_gpu[first:end].copy_(kv[first:end])
    q = torch.randn(tokens, case.heads, 576, generator=random).bfloat16()
    seq_lens = torch.tensor(case.lengths, dtype=case.index_dtype)
    mask = _mask(case)
    cut = case, path, shape, shares
    expected = _step(*cut, q, kv, _slots(case, owned, "cpu"), seq_lens, mask)
    result = _step(*cut, q.cuda(), kv_on_gpu, _slots(case, owned, "cuda"), seq_lens.cuda(), mask.cuda())
    print(path.name, kv_dtype, shares, case, flush=True)
    for got, want in zip(result, expected, strict=True):  # words, out, lse
        torch.testing.assert_close(got.cpu(), want, atol=TOLERANCE, rtol=0)


def _step(
    case: SanitizeCase,
    path: KernelPath,
    shape: VerifyShape,
    shares: int,
    q: torch.Tensor,
    kv: torch.Tensor,
    slots: SlotTable | SlotRanges,
    seq_lens: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Words, out and lse."""
    split = {"fixed_split_tokens": case.fixed_split, "max_context": 512} if case.fixed_split else {}
    _, rows = path.row_blocks(shape)
    tiling = Tiling(1, rows, shares * case.parts + shares - 1, 0).by_shares(shares)  # CTAs of no part, too
    cut = {name: getattr(tiling, name) for name in ("block_rows", "parts", "halved_tiles", "third_tiles")}
    plan = VerifyPlan(shape, len(case.lengths), q.device, path=path.name, **cut, **split)
    for name in ("committed", "pieces", "part_work", "request_ptr", "partial_out", "partial_lse"):
        setattr(plan, name, torch.empty_like(getattr(plan, name)))
    words = torch.empty(len(q), dtype=torch.int64, device=q.device)
    pack_tree_mask(mask, seq_lens, words, case.layout, case.num_padding)
    plan.update(seq_lens, slots)
    out, lse = verify_attention(q, kv, slots, None if case.chain else words, plan, sm_scale=192**-0.5)
    if int(plan.request_ptr.cpu()[len(case.lengths)]) <= len(case.lengths):
        raise SystemExit(f"{case}: no request was cut, so nothing was combined")
    return words, out, lse


def _owned_slots(case: SanitizeCase, random: torch.Generator) -> list[torch.Tensor]:
    """Whole pages in random order; the end of a request's last page belongs to nobody."""
    pages = torch.randperm(POOL_SLOTS // PAGE, generator=random).tolist()
    owned = []
    for n in case.lengths:
        held = n + case.tree_tokens
        mine = [pages.pop() for _ in range(-(-held // PAGE))]
        owned.append(torch.cat([page * PAGE + torch.arange(PAGE) for page in mine])[:held])
    return owned


def _slots(case: SanitizeCase, owned: list[torch.Tensor], device: str) -> SlotTable | SlotRanges:
    if case.ranges:
        indptr = torch.tensor([0] + [len(slots) for slots in owned]).cumsum(0).to(case.index_dtype)
        return SlotRanges(indptr.to(device), torch.cat(owned).to(case.index_dtype).to(device))
    table = torch.zeros(len(owned), max(map(len, owned)), dtype=torch.int32)
    for row, slots in zip(table, owned, strict=True):
        row[: len(slots)] = slots
    return SlotTable(table.to(device), torch.arange(len(owned), dtype=case.index_dtype).to(device))


def _mask(case: SanitizeCase) -> torch.Tensor:
    """A comb: odd tokens are leaves on a spine of even ones."""
    token = torch.arange(case.tree_tokens)
    tree = (token[:, None] >= token) & ((token % 2 == 0) | (token == token[:, None]))
    committed = case.lengths if case.layout is MaskLayout.FULL else [0] * len(case.lengths)
    return torch.cat([torch.cat([tree.new_ones(len(tree), n), tree], dim=1).flatten() for n in committed])


def run_moves(row_bytes: int, moves: int, *, disjoint: bool) -> None:
    """Rows that are no source stay uninitialised, and so does what no row is written to."""
    random = torch.Generator().manual_seed(moves)
    slots = torch.randperm(2 * moves + 3, generator=random)
    source, destination = slots[:moves], slots[moves if disjoint else moves // 2 :][:moves]
    rows = torch.randint(0, 256, (len(slots), row_bytes), dtype=torch.uint8, generator=random)
    on_gpu = [torch.empty_like(rows, device="cuda") for _ in range(2)]
    for buffer in on_gpu:
        for slot in source.tolist():
            buffer[slot].copy_(rows[slot])
    move_rows(on_gpu, source.cuda(), destination.cuda(), disjoint=disjoint)
    for buffer in on_gpu:
        for old, new in zip(source.tolist(), destination.tolist(), strict=True):
            if not torch.equal(buffer[new].cpu(), rows[old]):
                raise SystemExit(f"move_rows: row {old} did not come to {new}")


def has_warps_that_meet(case: SanitizeCase) -> bool:
    """In combine: by some request's pieces, and by what the launch has warps for."""
    plan = VerifyPlan(VerifyShape(case.heads, case.tree_tokens), len(case.lengths), "cpu", parts=case.parts)
    pieces = np.diff(plan.mirror(np.array(case.lengths, np.int32)).request_ptr).max()
    alone = combine.LANE_PIECES << combine.MOST_PIECE_SHIFT
    return pieces > alone and combine.most_shift(plan, len(case.lengths)) > combine.MOST_PIECE_SHIFT


def main() -> None:
    paths = cubins.target_of(torch.device("cuda")).paths
    if not any(map(has_warps_that_meet, CASES)):
        raise SystemExit("no case has so many pieces that warps of combine share them")
    for path in paths:
        heights = {path.row_blocks(VerifyShape(case.heads, case.tree_tokens))[1] for case in CASES}
        if missing := set(path.block_heights) - heights:
            raise SystemExit(f"{path.name}: no case has row blocks of height {sorted(missing)}")
        for case in CASES:
            rows = path.row_blocks(VerifyShape(case.heads, case.tree_tokens))[1]
            most = (
                1
                if case.fixed_split
                else path.usable_shares(VerifyShape(case.heads, case.tree_tokens), rows, MAX_PARTS)
            )
            for kv_dtype in CUDA_KV_DTYPES:
                for shares in range(1, most + 1):
                    run(case, path, kv_dtype, shares)
    for row_bytes, moves, disjoint in MOVES:
        run_moves(row_bytes, moves, disjoint=disjoint)
    print(f"{len(CASES)} cases ran on {len(paths)} kernels, each with {len(CUDA_KV_DTYPES)} dtypes of KV rows")


if __name__ == "__main__":
    main()
