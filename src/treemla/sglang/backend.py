"""The attention backend: tree verify and decode through treemla, everything else Triton's.

A step, as SGLang's runner drives it: the draft stage writes a tree mask; `init_forward_metadata_out_graph` packs it into
static words before the graph replays; inside the graph `init_forward_metadata_in_graph` plans from the runner's own
seq_lens and req_to_token, and every layer verifies. Nothing is read on the host and nothing is copied per layer.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from treemla import MaskLayout, SlotTable, VerifyPlan, VerifyShape, pack_tree_mask, verify_attention
from treemla.sglang import compat
from treemla.sglang.startup import expect_plain_layer, expect_servable

DETERMINISTIC_SPLIT_TOKENS = 4096  # a request's cuts under --enable-deterministic-inference

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TreeState:
    """What steps of T tree tokens share: the plan, and words [max_batch * T] int64 that captured graphs point at."""

    plan: VerifyPlan
    words: torch.Tensor


@dataclass(frozen=True)
class Step:
    """What the layers of one forward read. words: None where every tree is a chain."""

    plan: VerifyPlan
    slots: SlotTable
    seq_lens: torch.Tensor
    words: torch.Tensor | None
    tail: int
    num_padding: int


class TreemlaAttnBackend(TritonAttnBackend):  # type: ignore[misc] # sglang is untyped
    """Every public method overrides one of SGLang's and has its parameters; compat.override_changes compares them."""

    def __init__(self, model_runner: Any) -> None:
        expect_servable(model_runner)
        super().__init__(model_runner)
        compat.skip_dflash_mask(type(self))
        algorithm = compat.speculative_algorithm(model_runner)
        compat.fence_tables(algorithm)
        config = model_runner.model_config
        self._latent_rope = config.kv_lora_rank, config.qk_rope_head_dim
        self._dtypes = {"dtype": model_runner.dtype, "kv_dtype": model_runner.kv_cache_dtype}
        self._max_batch = model_runner.req_to_token_pool.size
        self._trees: dict[int, TreeState] = {}
        self._step: Step | None = None
        self._captured_words: dict[tuple[int, int], bool] = {}  # (T, batch) -> its graph reads words
        self._verify_mask: Any = None  # the name that SGLang's own backend keeps it under
        self._verifies = not algorithm.is_none()
        self._tree_state(1)
        if self._verifies:
            self._tree_state(self.num_draft_tokens)
        if algorithm.is_eagle() or algorithm.is_standalone():
            self._ask_for_tree_masks()
        workspace, rest = self._held_bytes()
        shape = self._shape(self.num_draft_tokens if self._verifies else 1)
        message = "treemla: serves verify and decode, %s; workspace %.1f MB, the rest %.1f MB"
        logger.info(message, shape, workspace / 1e6, rest / 1e6)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Eager forwards."""
        self._step = None
        if not _is_served(forward_batch):
            super().init_forward_metadata(forward_batch)
            return
        self._step = self._begin(forward_batch)
        self._pack(self._step, forward_batch)
        self._plan(self._step)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a capture, and before every replay."""
        if not _is_served(forward_batch):
            mode = forward_batch.forward_mode.name
            remedy = "a draft model's graphs need --speculative-draft-attention-backend triton"
            raise ValueError(f"treemla: expected a TARGET_VERIFY or DECODE graph, got {mode}; {remedy}")
        self._step = step = self._begin(forward_batch)
        key = step.plan.shape.tree_tokens, step.slots.batch
        if in_capture:  # the mask here is a stand-in of the runner's; every replay packs the real one
            self._captured_words[key] = step.words is not None
            if step.words is not None:
                step.words.zero_()
            return
        captured = self._captured_words.get(key)
        if captured is not (step.words is not None):
            known = {True: "with tree words", False: "for chains", None: "not at all"}[captured]
            raise RuntimeError(f"treemla: graph of (T, batch) {key} was captured {known}, the mask now says otherwise")
        self._pack(step, forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Recorded: plan from the lengths that are in the runner's buffers when the graph replays."""
        if _is_served(forward_batch) and self._step is not None:
            self._plan(self._step)

    def init_cuda_graph_state(
        self,
        max_bs: int,
        max_num_tokens: int,
        kv_indices_buf: torch.Tensor | None = None,
        cuda_graph_num_kv_splits_buf: torch.Tensor | None = None,
    ) -> None:
        """None of Triton's graph buffers: no kv_indices, no split logits, no mask. Words and plans exist already."""
        del max_num_tokens, kv_indices_buf, cuda_graph_num_kv_splits_buf
        if max_bs > self._max_batch:
            limit = f"at most {self._max_batch} (--max-running-requests)"
            raise ValueError(f"--cuda-graph-max-bs-decode: expected {limit}, got {max_bs}")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Verify 0: a padded request has zero words and no context, so it reads no slot and its output is 0.

        Decode 1, as every backend of SGLang says: the padded token sees itself, and warm-ups extend by this many.
        """
        return 0 if self._verifies else 1

    @property
    def verify_mask(self) -> Any:
        """The buffer of [T, T] masks that the draft stage fills, in versions that ask for it."""
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """The plan stream packed before the draft stage had written the mask: pack again. Eager forwards pack later."""
        if cuda_graph_bs is not None and self._step is not None:
            self._pack_mask(self._step, spec_info.custom_mask)

    def shared_read_ends(self, fm: Any) -> Any:
        """Layers read req_to_token while the graph replays."""
        return compat.read_tables_until_replay_ends(fm, super().shared_read_ends)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Any = None,
        score_mod: Any = None,
        aux_tensors: Any = None,
    ) -> torch.Tensor:
        if forward_batch.forward_mode.is_target_verify():
            _expect_no_extras(sinks, score_mod, aux_tensors)
            return self._attend(q, k, v, layer, forward_batch, save_kv_cache)
        extras = {"sinks": sinks, "score_mod": score_mod, "aux_tensors": aux_tensors}
        out: torch.Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **extras)
        return out

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Any = None,
        score_mod: Any = None,
        aux_tensors: Any = None,
    ) -> torch.Tensor:
        _expect_no_extras(sinks, score_mod, aux_tensors)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        """Write this forward's rows to the pool, then attention over them and all before. [tokens, H * latent]."""
        step = self._step
        if step is None or not _same_memory(step.slots.req_pool_indices, forward_batch.req_pool_indices):
            raise RuntimeError("treemla: a forward without init_forward_metadata for its batch")
        expect_plain_layer(layer, f"layer {layer.layer_id}")
        if save_kv_cache and k is not None:
            stored = k if layer.k_scale is None else k / layer.k_scale
            self.token_to_kv_pool.set_kv_buffer(layer, compat.write_location(forward_batch), stored, v)
        k_scale, v_scale = scales(layer)
        out, _ = verify_attention(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            step.slots,
            step.words,
            step.plan,
            sm_scale=layer.scaling,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _begin(self, forward_batch: Any) -> Step:
        """The step that a batch, or the runner's view of one, asks for. Verify lengths exclude the tree, decode's
        include the current token."""
        is_verify = forward_batch.forward_mode.is_target_verify()
        spec_info = forward_batch.spec_info if is_verify else None
        batch, tree_tokens = len(forward_batch.req_pool_indices), self._tree_tokens(spec_info)
        state = self._tree_state(tree_tokens)
        has_mask = spec_info is not None and spec_info.custom_mask is not None
        return Step(
            plan=state.plan,
            slots=SlotTable(self.req_to_token, forward_batch.req_pool_indices),
            seq_lens=forward_batch.seq_lens,
            words=state.words[: batch * tree_tokens] if has_mask else None,
            tail=0 if is_verify else 1,
            num_padding=getattr(forward_batch, "num_padding", 0),  # only the runner's view of a replay pads
        )

    def _tree_tokens(self, spec_info: Any) -> int:
        return 1 if spec_info is None else int(spec_info.draft_token_num)

    def _pack(self, step: Step, forward_batch: Any) -> None:
        if step.words is not None:
            self._pack_mask(step, forward_batch.spec_info.custom_mask)

    def _pack_mask(self, step: Step, mask: torch.Tensor | None) -> None:
        """The layout is its producer's, and its size tells: [T, T] a request, or more for the context before it.

        Where no request has a context the two layouts are one. The buffer that we offered is [T, T], however long.
        """
        if (mask is None) is not (step.words is None):
            raise RuntimeError("treemla: the tree mask came or went between planning and the draft stage")
        if mask is None or step.words is None:
            return
        ours = self._verify_mask is not None and _same_memory(mask, self._verify_mask.buffer)
        real, tree_tokens = step.slots.batch - step.num_padding, step.plan.shape.tree_tokens
        trees_alone = ours or mask.numel() == real * tree_tokens**2
        layout = MaskLayout.QLEN_ONLY if trees_alone else MaskLayout.FULL
        pack_tree_mask(mask, step.seq_lens, step.words, layout, num_padding=step.num_padding)

    def _plan(self, step: Step) -> None:
        step.plan.update(step.seq_lens, step.slots, tail=step.tail)

    def _tree_state(self, tree_tokens: int) -> TreeState:
        """The state for T, made when T is first seen: at start-up, except where speculation varies it."""
        if tree_tokens not in self._trees:
            split = {}
            if self.enable_deterministic:
                split = {"fixed_split_tokens": DETERMINISTIC_SPLIT_TOKENS, "max_context": self.max_context_len}
            plan = VerifyPlan(self._shape(tree_tokens), self._max_batch, self.device, **split)
            words = torch.zeros(self._max_batch * tree_tokens, dtype=torch.int64, device=plan.device)
            self._trees[tree_tokens] = TreeState(plan, words)
        return self._trees[tree_tokens]

    def _shape(self, tree_tokens: int) -> VerifyShape:
        """Slot tables hold token slots whatever --page-size is, so the shape's pages are single tokens."""
        return VerifyShape(self.num_head, tree_tokens, *self._latent_rope, **self._dtypes)

    def _ask_for_tree_masks(self) -> None:
        """[T, T] masks of the draft stage, without the context: into a buffer of ours, or by its worker's choice."""
        if compat.offers_verify_mask():
            device = self._trees[1].plan.device
            self._verify_mask = compat.make_verify_mask(self._max_batch, self.num_draft_tokens, device)
        else:
            compat.ask_for_tree_masks()

    def _held_bytes(self) -> tuple[int, int]:
        """Device memory this backend holds: the plans' workspace, and tree words and masks."""
        workspace = sum(state.plan.workspace_bytes for state in self._trees.values())
        words = sum(state.words.nbytes for state in self._trees.values())
        return workspace, words + (0 if self._verify_mask is None else self._verify_mask.buffer.nbytes)


def _is_served(forward_batch: Any) -> bool:
    """Verify, and decode of the target model (a draft's decode brings its own indices)."""
    mode, spec_info = forward_batch.forward_mode, forward_batch.spec_info
    brings_indices = getattr(spec_info, "kv_indptr", None) is not None
    return bool(mode.is_target_verify() or (mode.is_decode() and not brings_indices))


def scales(layer: Any) -> tuple[float, float]:
    """Of keys and values, as Triton's backend takes them: both or none."""
    has_scales = layer.k_scale is not None and layer.v_scale is not None
    return (layer.k_scale_float, layer.v_scale_float) if has_scales else (1.0, 1.0)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr()


def _expect_no_extras(sinks: Any, score_mod: Any, aux_tensors: Any) -> None:
    for name, value in (("sinks", sinks), ("score_mod", score_mod), ("aux_tensors", aux_tensors)):
        if value is not None:
            raise ValueError(f"treemla: attention with {name} is not served; use --attention-backend triton")
