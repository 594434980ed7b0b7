"""Inputs of a measured case: bf16, KV rows perhaps fp8, slots in random order, DDTree's trees, one KV buffer a layer."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from treemla import MaskLayout, SlotTable, VerifyPlan, VerifyShape, pack_tree_mask, reference
from treemla.ddtree import best_first_tree
from treemla.gate.cases import VerifyCase
from treemla.gate.measure import COLD_BYTES, num_layers
from treemla.problem import FP8
from treemla.tree import DraftTree, full_mask

SM_SCALE = 192**-0.5  # of a model with 128 + 64 dimensional heads
MAX_RELATIVE_ERROR = 2.0**-7  # two roundings to bf16: enough to tell a wrong kernel; tests/compare.py is the judge
MAX_LSE_ERROR = 2.0**-10


@dataclass(frozen=True)
class Inputs:
    """owned: the slots of each request's n_b + T tokens. kv_layers: [S, 576] each. mask: SGLang's FULL layout."""

    case: VerifyCase
    q: torch.Tensor
    kv_layers: Sequence[torch.Tensor]
    owned: Sequence[torch.Tensor]
    slots: SlotTable
    seq_lens: torch.Tensor
    mask: torch.Tensor
    words: torch.Tensor
    plan: VerifyPlan

    def plan_step(self) -> None:
        """What a step does once, before its layers."""
        pack_tree_mask(self.mask, self.seq_lens, self.words, MaskLayout.FULL)
        self.plan.update(self.seq_lens, self.slots)

    def empty_out(self) -> torch.Tensor:
        """[B*T, H, 512] of NaN, for a kernel to fill."""
        return self.q.new_full((*self.q.shape[:2], 512), torch.nan)

    def error_of(self, out: torch.Tensor, lse: torch.Tensor | None, *, causal: bool = False) -> str:
        """What is wrong with the last request's rows as computed on the last layer; empty where nothing is.

        causal: the result should be that of a chain, not of the tree.
        """
        tokens = self.case.tree_tokens
        one = [self.owned[-1]], [self.case.contexts[-1]], None if causal else self.words[-tokens:]
        want, want_lse = reference.verify_reference(self.q[-tokens:], self.kv_layers[-1], *one, sm_scale=SM_SCALE)
        got = out[-tokens:].double()
        relative = float((got - want).norm() / want.norm())
        if not relative <= MAX_RELATIVE_ERROR:
            return f"{self.case.id}: relative error {relative:.2e} against float64, at most {MAX_RELATIVE_ERROR:.2e} allowed"
        off = 0.0 if lse is None else float((lse[-tokens:].double() - want_lse).abs().max())
        if not off <= MAX_LSE_ERROR:
            return f"{self.case.id}: lse off by {off:.2e} against float64, at most {MAX_LSE_ERROR:.2e} allowed"
        return ""


def shuffled(random: np.random.Generator, pages: int) -> np.ndarray:
    """Every page on its own."""
    return random.permutation(pages)


def make_inputs(
    case: VerifyCase,
    device: torch.device,
    cold_bytes: int = COLD_BYTES,
    path: str | None = None,
    order_pages: Callable[[np.random.Generator, int], np.ndarray] = shuffled,
) -> Inputs:
    """The same at every call on a device; pools of `cold_bytes` in all. The words are packed and the plan is made.

    path: the verify kernel, a name in `tiles.PATHS`; default: the GPU's first. order_pages: all pages of a pool in the
    order in which requests take them.
    """
    seed = zlib.crc32(case.id.encode())
    numpy_random, random = np.random.default_rng(seed), torch.Generator(device).manual_seed(seed)
    pages = [-(-(n + case.tree_tokens) // case.page_size) for n in case.contexts]
    layers = num_layers(sum(case.contexts) * case.row_bytes, cold_bytes)
    pool_pages = max(sum(pages), -(-cold_bytes // (layers * case.row_bytes * case.page_size)))
    order = order_pages(numpy_random, pool_pages)[: sum(pages), None] * case.page_size + np.arange(case.page_size)
    held = np.split(order, np.cumsum(pages)[:-1])
    owned = [
        torch.from_numpy(slots.reshape(-1)[: n + case.tree_tokens]).to(device)
        for slots, n in zip(held, case.contexts, strict=True)
    ]
    table = torch.zeros(case.batch, max(map(len, owned)), dtype=torch.int32, device=device)
    for row, slots in zip(table, owned, strict=True):
        row[: len(slots)] = slots.int()

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=random, device=device, dtype=torch.bfloat16)

    kv_dtype = FP8 if case.fp8_kv else torch.bfloat16
    shape = VerifyShape(case.heads, case.tree_tokens, page_size=case.page_size, kv_dtype=kv_dtype)
    trees = [random_tree(case.tree_tokens, numpy_random) for _ in range(case.batch)]
    made = Inputs(
        case=case,
        q=randn(case.batch * case.tree_tokens, case.heads, 576),
        kv_layers=[randn(pool_pages * case.page_size, 576).to(kv_dtype) for _ in range(layers)],
        owned=owned,
        slots=SlotTable(table, torch.arange(case.batch, dtype=torch.int32, device=device)),
        seq_lens=torch.tensor(case.contexts, dtype=torch.int32, device=device),
        mask=torch.from_numpy(full_mask(trees, case.contexts)).to(device),
        words=torch.zeros(case.batch * case.tree_tokens, dtype=torch.int64, device=device),
        plan=VerifyPlan(shape, case.batch, device, path=path),
    )
    made.plan_step()
    return made


def random_tree(tree_tokens: int, random: np.random.Generator) -> DraftTree:
    """DDTree's tree for random marginals: 16 positions of 8 tokens each."""
    logits = 2.0 * np.sort(random.standard_normal((16, 8)), axis=1)[:, ::-1]
    return best_first_tree(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)), tree_tokens - 1)[0]
