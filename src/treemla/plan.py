"""VerifyPlan: the split schedule of a step and the workspace that the partials go through."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from treemla import cost, cubins, launch, schedule, tiles, tuned
from treemla.checks import expect, expect_device, expect_int, expect_slots, expect_tensor
from treemla.problem import MAX_TREE_TOKENS, Slots, SlotTable, VerifyShape

MAX_CONTEXT = 2**30  # tokens of a request
MAX_OVERHEAD_TILES = 1024
CPU_PARTS = 8  # a CPU has no SMs to fill; a few pieces keep the combine step in use


class VerifyPlan:
    """Owns the schedule and the workspace of verify calls of one shape and at most `max_batch` requests.

    `update` alone writes the schedule; `verify_attention` alone writes the partials. On a CUDA device both only
    enqueue kernels, so they record into a CUDA graph and replay with other lengths.

    contexts: committed tokens of a request that the plan is made fast for; it serves any. From them follows how a
    launch is cut (`cost.choose`), by constants of this GPU where `python -m treemla tune` has measured them.
    block_rows, parts, overhead_tiles, halved_tiles, third_tiles: cut a launch so instead (`cost.Tiling`). block_rows: a
    height of the path's; another than the model's is not shared unless halved_tiles or third_tiles says so. One of these
    alone leaves the other 0.
    path: the verify kernel, a name in `tiles.PATHS`; default: the GPU's first. On a CPU it only sets block heights.
    fixed_split_tokens: cut each request at multiples of it instead, so that a request's result does not depend on
    the rest of the batch; needs `max_context`, the longest committed context in tokens, to size the workspace.
    """

    def __init__(
        self,
        shape: VerifyShape,
        max_batch: int,
        device: torch.device | str,
        *,
        contexts: Sequence[int] = cost.DESIGN_CONTEXTS,
        block_rows: int | None = None,
        parts: int | None = None,
        overhead_tiles: int | None = None,
        halved_tiles: int | None = None,
        third_tiles: int | None = None,
        path: str | None = None,
        fixed_split_tokens: int | None = None,
        max_context: int | None = None,
    ) -> None:
        if not isinstance(shape, VerifyShape):
            raise TypeError(f"shape: expected a VerifyShape, got {type(shape).__name__}")
        expect_int("max_batch", max_batch, 1, tiles.MAX_BATCH)
        expect(len(contexts) > 0, "contexts", "at least one length", contexts)
        for context in contexts:
            expect_int("contexts", context, 0, MAX_CONTEXT)
        self.shape = shape
        self.max_batch = max_batch
        self.device = expect_device("device", device)
        self.path = self._path(path)
        self.fixed_split_tokens = fixed_split_tokens
        self.fixed_split = fixed_split_tokens is not None
        cut = self._cut(self._tiling(contexts), block_rows, parts, overhead_tiles, halved_tiles, third_tiles)
        self.blocks, self.block_rows, self.parts = cut.blocks, cut.block_rows, cut.parts
        self.overhead_tiles, self.halved_tiles, self.third_tiles = cut.overhead_tiles, cut.halved_tiles, cut.third_tiles
        self.by_shares = self.halved_tiles > 0 or self.third_tiles > 0
        max_slots, max_pieces = self._workspace(max_context)
        self.max_context = max_context
        self.batch = 0  # requests of the last update; verify takes no other number

        on_gpu = self.device.type == "cuda"

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        self.committed = zeros(max_batch)
        self.pieces = zeros(max_pieces, 4)
        self.part_work = zeros(self.parts, schedule.PART_WORK_INTS)
        self.request_ptr = zeros(max_batch + 1)
        # The kernels keep three bytes of each float32, in an order of their own.
        row, dtype = (3 * shape.latent_dim // 2, torch.bfloat16) if on_gpu else (shape.latent_dim, torch.float32)
        self.partial_out = zeros(max_slots, self.blocks, self.block_rows, row, dtype=dtype)
        # Of a row: its lse or, as the kernels keep it, the reference of its weights and their sum.
        of_a_row = (2,) if on_gpu else ()
        self.partial_lse = zeros(max_slots, self.blocks, self.block_rows, *of_a_row, dtype=torch.float32)

    @classmethod
    def from_tensors(
        cls,
        shape: VerifyShape,
        batch: int,
        path: str,
        fixed_split: bool,
        by_shares: bool,
        committed: torch.Tensor,
        pieces: torch.Tensor,
        part_work: torch.Tensor,
        request_ptr: torch.Tensor,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
    ) -> "VerifyPlan":
        """The plan that these tensors of another belong to, as far as verify reads it (see `tensors`)."""
        plan = cls.__new__(cls)
        plan.shape, plan.batch, plan.device = shape, batch, committed.device
        plan.max_batch, plan.parts = len(committed), len(part_work)
        plan.blocks, plan.block_rows = partial_out.shape[1], partial_out.shape[2]
        plan.path, plan.fixed_split, plan.by_shares = tiles.PATHS[path], fixed_split, by_shares
        plan.committed, plan.pieces, plan.part_work, plan.request_ptr = committed, pieces, part_work, request_ptr
        plan.partial_out, plan.partial_lse = partial_out, partial_lse
        return plan

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The schedule (committed, pieces, part_work, request_ptr) and the workspace (partial_out, partial_lse)."""
        return *(getattr(self, name) for name in schedule.ON_DEVICE), self.partial_out, self.partial_lse

    @property
    def workspace_bytes(self) -> int:
        """Bytes this plan holds on its device, schedule and partials together."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def update(self, seq_lens: torch.Tensor, slots: Slots, tail: int = 0) -> None:
        """Plan a step: request b has n_b = max(0, seq_lens[b] - tail) committed tokens and then its tree.

        seq_lens: [B] int32 or int64 on the plan's device, B <= max_batch. tail: 0 where seq_lens exclude the tree
        (SGLang's verify), 1 where they include the current token (its decode, T = 1).
        A request longer than its slots, or than `max_context` under fixed split, is a ValueError on a CPU; on a GPU,
        where the host does not read lengths, nothing of it is read and its output rows and lse are NaN.
        """
        batch = self._check_update(seq_lens, slots, tail)
        if self.device.type == "cuda":
            launch.plan(self, seq_lens, slots, tail)
            self.batch = batch
            return
        lengths = seq_lens.numpy()
        committed = schedule.committed_tokens(
            lengths, self._capacity(slots, batch), tail=tail, tree_tokens=self.shape.tree_tokens
        )
        overlong = (committed == schedule.OVERLONG).nonzero()[0]
        if len(overlong):
            b = int(overlong[0])
            got = f"seq_lens[{b}] = {lengths[b]} with tail {tail}"
            room = int(self._capacity(slots, batch)[b])
            raise ValueError(
                f"seq_lens: expected n_b + {self.shape.tree_tokens} tree tokens <= {room} slots, got {got}"
            )
        self.load(self.mirror(committed))

    def mirror(self, committed: npt.NDArray[np.int32]) -> schedule.Schedule:
        """What `update` writes for these committed lengths [B], computed on the host."""
        tree_tokens, split_tokens = self.shape.tree_tokens, self.fixed_split_tokens
        if split_tokens is None:
            return schedule.balanced_schedule(
                committed,
                tree_tokens=tree_tokens,
                parts=self.parts,
                overhead=self.overhead_tiles,
                tile_tokens=self.path.tile_tokens,
                halved_tiles=self.halved_tiles,
                third_tiles=self.third_tiles,
            )
        return schedule.fixed_schedule(committed, tree_tokens=tree_tokens, parts=self.parts, split_tokens=split_tokens)

    def load(self, made: schedule.Schedule) -> None:
        """Take a schedule made on the host (copies to the plan's device; for tests and the portable path).

        A request's only piece has slot DIRECT, and several pieces have distinct slots of the workspace.
        """
        expect(
            len(made.committed) <= self.max_batch, "schedule", f"at most {self.max_batch} requests", len(made.committed)
        )
        expect(len(made.part_ptr) == self.parts + 1, "schedule", f"{self.parts} parts", len(made.part_ptr) - 1)
        expect(len(made.pieces) <= len(self.pieces), "schedule", f"at most {len(self.pieces)} pieces", len(made.pieces))
        highest_slot = int(made.pieces[:, 3].max(initial=schedule.DIRECT))
        expect(highest_slot < len(self.partial_out), "schedule", f"slots below {len(self.partial_out)}", highest_slot)
        for name in schedule.ON_DEVICE:
            array = getattr(made, name)
            getattr(self, name)[: len(array)].copy_(torch.from_numpy(array))
        self.batch = len(made.committed)

    def _path(self, name: str | None) -> tiles.KernelPath:
        held = cubins.target_of(self.device).paths if self.device.type == "cuda" else tuple(tiles.PATHS.values())
        if name is None:
            return held[0]
        names = [path.name for path in held]
        expect(name in names, "path", f"one of {names} on {self.device}", name)
        return tiles.PATHS[name]

    def _tiling(self, contexts: Sequence[int]) -> cost.Tiling:
        if self.device.type != "cuda":
            blocks, rows = self.path.row_blocks(self.shape)
            overhead = cost.overhead_tiles(cost.DEFAULTS[self.path.name], rows)
            return cost.Tiling(blocks, rows, CPU_PARTS, overhead)
        num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        constants, steps = tuned.constants(self.device, self.path), cost.design_steps(self.max_batch, contexts)
        return cost.choose(constants, self.path, self.shape, num_sms, steps)

    def _cut(
        self,
        chosen: cost.Tiling,
        block_rows: int | None,
        parts: int | None,
        overhead_tiles: int | None,
        halved_tiles: int | None,
        third_tiles: int | None,
    ) -> cost.Tiling:
        """`chosen` but for what the caller says."""
        if block_rows is None:
            block_rows = chosen.block_rows
        if parts is None:
            parts = chosen.parts
        if overhead_tiles is None:
            overhead_tiles = chosen.overhead_tiles
        # A block of more rows than a tree has tokens counts on several heads: it has words for so many tokens only.
        heights = [rows for rows in self.path.block_heights if self.shape.num_heads > 1 or rows <= MAX_TREE_TOKENS]
        expect(
            type(block_rows) is int and block_rows in heights,
            "block_rows",
            f"one of {heights} ({self.path.name})",
            block_rows,
        )
        expect_int("parts", parts, 1, tiles.MAX_PARTS)
        expect_int("overhead_tiles", overhead_tiles, 0, MAX_OVERHEAD_TILES)
        # Under fixed split a request's result may not depend on what else the step holds.
        most = 1 if self.fixed_split else self.path.usable_shares(self.shape, block_rows, parts)
        where = f"{self.path.name}, {block_rows} rows, {parts} parts{', fixed split' * self.fixed_split}"
        if halved_tiles is None and third_tiles is None and block_rows == chosen.block_rows:
            halved_tiles = chosen.halved_tiles if most >= 2 else 0
            third_tiles = chosen.third_tiles if most >= 3 else 0
        up_to = [0 if up_to is None else up_to for up_to in (halved_tiles, third_tiles)]
        for shares, name, up_to_tiles in ((2, "halved_tiles", up_to[0]), (3, "third_tiles", up_to[1])):
            expect_int(name, up_to_tiles, 0, MAX_CONTEXT)
            expect(shares <= most or up_to_tiles == 0, name, f"0 ({where}: no such shares)", up_to_tiles)
        return cost.Tiling(-(-self.shape.rows // block_rows), block_rows, parts, overhead_tiles, *up_to)

    def _workspace(self, max_context: int | None) -> tuple[int, int]:
        """(slots of partials, pieces) that a step takes at most."""
        split_tokens = self.fixed_split_tokens
        if split_tokens is None:
            expect(max_context is None, "max_context", "None without fixed_split_tokens", max_context)
            return max(1, 2 * (self.parts - 1)), self.max_batch + self.parts - 1
        expect_int("fixed_split_tokens", split_tokens, tiles.TILE_TOKENS, MAX_CONTEXT)
        whole_tiles = split_tokens % tiles.TILE_TOKENS == 0
        expect(whole_tiles, "fixed_split_tokens", f"a multiple of {tiles.TILE_TOKENS}", split_tokens)
        if max_context is None:
            raise ValueError("max_context: expected a length beside fixed_split_tokens, got None")
        expect_int("max_context", max_context, 0, MAX_CONTEXT)
        count = self.max_batch * max(1, -(-max_context // split_tokens))
        return count, count

    def _check_update(self, seq_lens: torch.Tensor, slots: Slots, tail: int) -> int:
        expect_int("tail", tail, 0, 1)
        expect_slots(slots, self.device)
        batch = slots.batch
        expect_tensor("seq_lens", seq_lens, shape=(batch,), dtypes=(torch.int32, torch.int64), device=self.device)
        expect(1 <= batch <= self.max_batch, "seq_lens", f"1..{self.max_batch} requests (max_batch)", batch)
        return batch

    def _capacity(self, slots: Slots, batch: int) -> npt.NDArray[np.int64]:
        """Slots each request has, tree included. Host side."""
        if isinstance(slots, SlotTable):
            held = torch.full((batch,), slots.req_to_token.shape[1], dtype=torch.int64)
        else:
            held = slots.kv_indptr.to("cpu", torch.int64).diff()
            expect(bool((held >= 0).all()), "slots.kv_indptr", "ascending values", slots.kv_indptr.tolist())
        if self.max_context is not None:
            held = held.clamp(max=self.max_context + self.shape.tree_tokens)
        return held.numpy()
