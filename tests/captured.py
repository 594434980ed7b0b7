"""A step recorded once into a CUDA graph over static inputs, as a server records it, and replayed over other values."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from cases import SM_SCALE, make_tree
from compare import Agreement, assert_matches, expected_attention

from treemla import MaskLayout, SlotRanges, SlotTable, VerifyPlan, VerifyShape, pack_tree_mask, verify_attention
from treemla.tree import batch_words, visible_from_words

POISON = 2.0**15  # in outputs before a run: finite, so that a NaN is a result and never a leftover; exact in bf16


@dataclass(frozen=True)
class Setup:
    """What a recording fixes: everything but the values."""

    heads: int = 8
    tree_tokens: int = 9
    batch: int = 4
    layout: MaskLayout = MaskLayout.FULL
    ranges: bool = False
    index_dtype: torch.dtype = torch.int64
    fixed_split: int = 0
    layers: int = 2
    max_context: int = 65_536
    pool_slots: int = 140_000
    path: str = ""  # the verify kernel; "": the device's default
    fp8_kv: bool = False

    @property
    def id(self) -> str:
        kind = "ranges" if self.ranges else "table"
        bits = 8 * self.index_dtype.itemsize
        return f"h{self.heads}-t{self.tree_tokens}-b{self.batch}-{self.layout.value}-{kind}{bits}-split{self.fixed_split}{self.path and '-' + self.path}{'-fp8' if self.fp8_kv else ''}"

    def rerun(self, device_type: str) -> str:
        return f"python -m pytest tests/graph --device {device_type} -k {self.id}"


class Captured:
    """Static inputs, the plan and outputs of a recording, and a second plan and outputs for eager runs of the same."""

    def __init__(self, setup: Setup, device: torch.device) -> None:
        self.setup, self.device = setup, device
        kv_dtype = torch.float8_e4m3fn if setup.fp8_kv else torch.bfloat16
        shape = VerifyShape(setup.heads, setup.tree_tokens, kv_dtype=kv_dtype)
        tokens, columns = setup.batch * setup.tree_tokens, setup.max_context + setup.tree_tokens
        mask_columns = setup.pool_slots + tokens if setup.layout is MaskLayout.FULL else tokens
        split = {"fixed_split_tokens": setup.fixed_split, "max_context": setup.max_context} if setup.fixed_split else {}

        def zeros(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.q = [zeros(tokens, setup.heads, 576) for _ in range(setup.layers)]
        self.kv = [zeros(setup.pool_slots, 576, dtype=kv_dtype) for _ in range(setup.layers)]
        self.seq_lens = zeros(setup.batch, dtype=setup.index_dtype)
        self.mask = zeros(setup.tree_tokens * mask_columns, dtype=torch.bool)
        self.words = zeros(tokens, dtype=torch.int64)
        self.slots: SlotTable | SlotRanges
        if setup.ranges:
            indices = zeros(setup.pool_slots + tokens, dtype=setup.index_dtype)
            self.slots = SlotRanges(zeros(setup.batch + 1, dtype=setup.index_dtype), indices)
        else:
            table = zeros(2 * setup.batch, columns, dtype=torch.int32)
            self.slots = SlotTable(table, zeros(setup.batch, dtype=setup.index_dtype))
        self.plan, self.eager_plan = (
            VerifyPlan(shape, setup.batch, device, path=setup.path or None, **split) for _ in range(2)
        )
        self.outputs, self.eager_outputs = (
            [
                (zeros(tokens, setup.heads, 512), zeros(tokens, setup.heads, dtype=torch.float32))
                for _ in range(setup.layers)
            ]
            for _ in range(2)
        )
        self.graph = torch.cuda.CUDAGraph()
        self.lengths: list[int] = []
        self.owned: list[torch.Tensor] = []
        self.expected_words = self.words

    @property
    def static_inputs(self) -> dict[str, torch.Tensor]:
        """Every tensor that a replay reads and a server rewrites between replays."""
        slots = self.slots
        if isinstance(slots, SlotTable):
            where = {"req_to_token": slots.req_to_token, "req_pool_indices": slots.req_pool_indices}
        else:
            where = {"kv_indptr": slots.kv_indptr, "kv_indices": slots.kv_indices}
        layers = {f"{name}[{i}]": held[i] for name, held in (("q", self.q), ("kv", self.kv)) for i in range(len(held))}
        return {"seq_lens": self.seq_lens, "mask": self.mask} | where | layers

    def load(self, lengths: Sequence[int], seed: int, tree: str = "random") -> None:
        """Write a step's values into the static inputs: the last B - len(lengths) requests are padding.

        Slots are scattered over the pool, and every row that no request owns is NaN.
        """
        setup, device = self.setup, self.device
        tree_tokens, padding = setup.tree_tokens, setup.batch - len(lengths)
        random = torch.Generator(device).manual_seed(seed)
        held = [n + tree_tokens for n in lengths]
        order = 1 + torch.randperm(setup.pool_slots - 1, generator=random, device=device)
        self.lengths = [*lengths, *[0] * padding]
        unowned = order[sum(held) : sum(held) + tree_tokens]  # what a padded request's table row names
        self.owned = [*order[: sum(held)].split(held), *[unowned] * padding]
        for kv in self.kv:
            kv.fill_(torch.nan)
            rows = torch.randn(sum(held), 576, generator=random, device=device).to(kv.dtype)
            kv.view(torch.uint8)[order[: sum(held)]] = rows.view(torch.uint8)
        for q in self.q:
            q.copy_(torch.randn(q.shape, generator=random, device=device))
        self.seq_lens.copy_(torch.tensor(self.lengths))
        self._write_slots(random)
        words = batch_words([make_tree(tree, tree_tokens, seed + b) for b in range(setup.batch)], tree_tokens)
        words[len(lengths) * tree_tokens :] = 0
        self._write_mask(torch.from_numpy(visible_from_words(words, tree_tokens)))
        self.expected_words = torch.from_numpy(words).to(device)

    def _write_slots(self, random: torch.Generator) -> None:
        if isinstance(self.slots, SlotRanges):
            ends = torch.tensor([0] + [len(slots) for slots in self.owned]).cumsum(0)
            self.slots.kv_indptr.copy_(ends)
            self.slots.kv_indices.zero_()
            self.slots.kv_indices[: int(ends[-1])] = torch.cat(self.owned).to(self.setup.index_dtype)
            return
        rows = torch.randperm(2 * self.setup.batch, generator=random, device=self.device)[: self.setup.batch]
        self.slots.req_pool_indices.copy_(rows)
        self.slots.req_to_token.zero_()
        for row, slots in zip(rows.tolist(), self.owned, strict=True):
            self.slots.req_to_token[row, : len(slots)] = slots.int()

    def _write_mask(self, visible: torch.Tensor) -> None:
        tree_tokens, begin = self.setup.tree_tokens, 0
        self.mask.fill_(True)
        for own, n in zip(visible.view(-1, tree_tokens, tree_tokens).to(self.device), self.lengths, strict=True):
            width = tree_tokens + (n if self.setup.layout is MaskLayout.FULL else 0)
            block = self.mask[begin : begin + tree_tokens * width].view(tree_tokens, width)
            block[:, width - tree_tokens :] = own
            begin += tree_tokens * width

    def run(self, plan: VerifyPlan, outputs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """One step: pack, plan, every layer."""
        pack_tree_mask(self.mask, self.seq_lens, self.words, self.setup.layout)
        plan.update(self.seq_lens, self.slots)
        for q, kv, (out, lse) in zip(self.q, self.kv, outputs, strict=True):
            verify_attention(q, kv, self.slots, self.words, plan, sm_scale=SM_SCALE, out=out, lse=lse)

    def capture(self) -> None:
        """Record `run`; once eagerly before, which loads the kernels."""
        self.run(self.plan, self.outputs)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            self.run(self.plan, self.outputs)

    def replay(self) -> list[torch.Tensor]:
        """Results of a replay into poisoned outputs, words and workspace."""
        return self._fresh(self.plan, self.outputs, self.graph.replay)

    def eager(self) -> list[torch.Tensor]:
        """Results of the same step without a graph, through a plan of its own."""
        return self._fresh(self.eager_plan, self.eager_outputs, lambda: self.run(self.eager_plan, self.eager_outputs))

    def _fresh(
        self, plan: VerifyPlan, outputs: list[tuple[torch.Tensor, torch.Tensor]], run: Callable[[], None]
    ) -> list[torch.Tensor]:
        results = [tensor for pair in outputs for tensor in pair]
        for written in (*results, plan.partial_out, plan.partial_lse):
            written.fill_(POISON)
        self.words.fill_(-1)
        run()
        return [tensor.clone() for tensor in results]

    def check_against_oracle(self, results: list[torch.Tensor]) -> list[Agreement]:
        """Every layer's out and lse against float64, and the packed words against the trees'."""
        assert torch.equal(self.words, self.expected_words), self.setup.rerun("cuda")
        agreements = []
        for q, kv, out, lse in zip(self.q, self.kv, results[::2], results[1::2], strict=True):
            expected = expected_attention(q, kv, self.owned, self.lengths, self.expected_words, sm_scale=SM_SCALE)
            agreements.append(assert_matches(out, lse, expected, self.setup))
        return agreements


def assert_same_bits(got: list[torch.Tensor], expected: list[torch.Tensor], where: str) -> None:
    """Equal results, NaN for NaN."""
    for i, (mine, its) in enumerate(zip(got, expected, strict=True)):
        differs = ~((mine == its) | (mine.isnan() & its.isnan()))
        assert not differs.any(), (
            f"{where}: {('out', 'lse')[i % 2]} of layer {i // 2} differs at {differs.nonzero()[0].tolist()}"
        )


def allocations() -> tuple[int, int]:
    """Allocations and segments that torch's allocator has made so far."""
    stats = torch.cuda.memory_stats()
    return stats["allocation.all.allocated"], stats["segment.all.allocated"]


@contextmanager
def host_reads_raise() -> Iterator[None]:
    """Inside, a call that makes the host wait for the device is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
