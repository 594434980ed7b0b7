"""Shadow serving, `--attention-backend treemla-shadow`: is treemla right with this model's own weights and prompts?

treemla serves. In every EVERY-th step each layer also runs through SGLang's Triton kernels, and both results are held
against the float64 oracle by the table of treemla.tolerance. The oracle reads the words that were packed and Triton
the mask itself, so a wrong kernel shows as treemla's error and a misread mask, length or slot as Triton's.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from treemla import reference
from treemla.sglang.backend import Step, TreemlaAttnBackend, scales
from treemla.sglang.startup import expect_comparable
from treemla.tolerance import TOLERANCES, cosine_difference

EVERY = 16  # steps

logger = logging.getLogger(__name__)


@dataclass
class Comparison:
    """What a compared step showed: for each backend and layer, the share of the tolerance that it used up."""

    step: int
    shares: dict[str, dict[int, float]] = field(default_factory=lambda: {"treemla": {}, "Triton": {}})

    def beyond(self) -> Iterator[str]:
        for who, layers in self.shares.items():
            wrong = {layer: share for layer, share in layers.items() if not share <= 1}
            if wrong:
                worst = max(wrong, key=lambda layer: wrong[layer])
                yield f"{who} in {len(wrong)} layers, most in layer {worst}: {wrong[worst]:.2f}"

    def __str__(self) -> str:
        worst = ", ".join(f"{who} {max(layers.values()):.2f}" for who, layers in self.shares.items())
        return f"step {self.step}, {len(self.shares['treemla'])} layers, largest shares of the tolerance: {worst}"


class ShadowBackend(TreemlaAttnBackend):
    """TreemlaAttnBackend, bit for bit, and a line in the log for every compared step. Decode and verify run eagerly."""

    def __init__(self, model_runner: Any) -> None:
        expect_comparable(model_runner)
        super().__init__(model_runner)
        self.steps = 0  # served so far
        self.wrong_steps = 0  # compared ones with a layer beyond the tolerance
        self._comparison: Comparison | None = None
        logger.info("treemla: in every %d-th step all layers are compared with Triton and float64", EVERY)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.report()
        super().init_forward_metadata(forward_batch)
        if self._step is None:
            return
        if self.steps % EVERY == 0:
            TritonAttnBackend.init_forward_metadata(self, forward_batch)
            self._comparison = Comparison(self.steps)
        self.steps += 1

    def report(self) -> None:
        """Log what the last compared step showed; the next step does, when it begins."""
        made, self._comparison = self._comparison, None
        if made is None or not made.shares["treemla"]:
            return
        logger.info("treemla: compared %s", made)
        if beyond := list(made.beyond()):
            self.wrong_steps += 1
            message = "treemla: beyond the tolerance in step %d (%d such steps so far): %s; serve with "
            message += "--attention-backend triton and report it"
            logger.warning(message, made.step, self.wrong_steps, "; ".join(beyond))

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        out = super()._attend(q, k, v, layer, forward_batch, save_kv_cache)
        if self._comparison is not None and self._step is not None:
            triton = TritonAttnBackend
            attend = triton.forward_decode if forward_batch.forward_mode.is_decode() else triton.forward_extend
            beside = attend(self, q, k, v, layer, forward_batch, save_kv_cache=False)
            shares = self._shares(self._step, q, layer, {"treemla": out, "Triton": beside})
            for who, share in shares.items():
                self._comparison.shares[who][layer.layer_id] = share
        return out

    def _shares(self, step: Step, q: torch.Tensor, layer: Any, outs: dict[str, torch.Tensor]) -> dict[str, float]:
        """The largest share that each of `outs` uses up of the elementwise or the cosine tolerance; nan for nan."""
        tree_tokens, heads = step.plan.shape.tree_tokens, layer.tp_q_head_num
        committed = (step.seq_lens - step.tail).clamp(min=0).tolist()
        table, rows = step.slots.req_to_token, step.slots.req_pool_indices.tolist()
        slots = [table[row, : n + tree_tokens].long() for row, n in zip(rows, committed, strict=True)]
        kv = self.token_to_kv_pool.get_key_buffer(layer.layer_id)[:, 0]
        k_scale, v_scale = scales(layer)
        parts = reference.attention_rows(
            q.view(-1, heads, layer.qk_head_dim), kv, slots, committed, step.words, latent_dim=layer.v_head_dim,
            sm_scale=layer.scaling, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        exact, magnitude = (q.new_zeros(len(q) * heads, layer.v_head_dim, dtype=torch.float64) for _ in range(2))
        for part in parts:
            exact[part.rows] = part.probs @ part.values
            magnitude[part.rows] = part.probs @ part.values.abs()
        tolerance = TOLERANCES[q.dtype]
        bound = tolerance.elementwise * tolerance.unit_roundoff * magnitude
        shares = {}
        for who, out in outs.items():
            error = (out.view_as(exact).double() - exact).abs()
            largest = float(torch.where(error == 0, 0.0, error / bound).max())
            angle = cosine_difference(out.view_as(exact).double(), exact) / tolerance.cosine
            shares[who] = math.nan if math.isnan(largest) else max(largest, angle)
        return shares

    def _ask_for_tree_masks(self) -> None:
        """Triton reads masks over the whole context alone."""
