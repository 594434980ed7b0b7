"""Tree masks on their way from SGLang's draft stage into words: which layout is asked for, and that any is understood."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from runners import (
    attend,
    capture,
    eagle_input,
    expected,
    fill_pool,
    full_mask,
    make_runner,
    ngram_input,
    queries,
    replay,
    stand_in,
    view,
)
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import eagle_utils, eagle_worker_v2
from sglang.srt.speculative.eagle_utils import organize_draft_results
from sglang.srt.speculative.eagle_worker_common import build_eagle_verify_input

from treemla.sglang import compat
from treemla.sglang.backend import TreemlaAttnBackend
from treemla.tree import tree_from_retrieve_links

VERIFY = ForwardMode.TARGET_VERIFY
SIBLINGS = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
LINE = torch.ones(3, 3, dtype=torch.bool).tril()
TOPK, TREE_TOKENS = 2, 5


@pytest.fixture(autouse=True)
def workers(monkeypatch):
    """What the backend changes in the worker's module is put back; the tree is built by SGLang's Triton kernel."""
    monkeypatch.setattr(eagle_worker_v2, "default_tree_mask_mode", eagle_worker_v2.default_tree_mask_mode)
    if hasattr(eagle_utils, "build_tree_kernel_efficient_func"):
        from sglang.kernels.ops.speculative import spec_tree

        monkeypatch.setattr(eagle_utils, "build_tree_kernel_efficient_func", spec_tree.sgl_build_tree_kernel_triton)
    else:
        kernel = eagle_utils.sgl_build_tree_kernel_triton
        monkeypatch.setattr(eagle_utils, "sgl_build_tree_kernel_efficient", kernel, raising=False)


def make_worker(monkeypatch):
    """SGLang's draft worker as far as it decides on a layout, its attention set up as the scheduler has it done."""
    monkeypatch.setattr(
        eagle_worker_v2, "DraftBackendFactory",
        lambda *_, **__: SimpleNamespace(create_decode_backend=lambda: None, create_draft_extend_backend=lambda: None),
    )  # fmt: skip
    monkeypatch.setattr(eagle_worker_v2, "parse_qsa_profile", lambda config: None, raising=False)  # of 0.5.23
    worker = MagicMock()
    eagle_worker_v2.EagleDraftWorker.init_attention_backend(worker)
    return worker


def draft(runner, backend, worker, batch):
    """Two steps of a random draft, and the verify input that SGLang makes of them."""
    random = torch.Generator().manual_seed(3)
    size, seq_lens = batch.batch_size - batch.num_padding, batch.seq_lens[: batch.batch_size - batch.num_padding]
    first, second = torch.rand(size, TOPK, generator=random), torch.rand(size, TOPK, TOPK, generator=random)
    scores = first.unsqueeze(2) * second
    parents = [torch.arange(-1, TOPK).expand(size, -1), scores.flatten(1).topk(TOPK).indices + TOPK]
    tokens = [torch.randint(100, (size, n), generator=random) for n in (TOPK, TOPK**2)]
    organised = organize_draft_results([first.unsqueeze(1), scores], tokens, parents, TREE_TOKENS)
    asked = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, seq_lens=seq_lens, seq_lens_sum=None,
        req_pool_indices=batch.req_pool_indices, req_to_token_pool=runner.req_to_token_pool,
    )  # fmt: skip
    bonus = torch.zeros(size, dtype=torch.int64)
    runner.attn_backend = backend
    return build_eagle_verify_input(
        asked, SimpleNamespace(bonus_tokens=bonus, draft_probs=None), *organised, None,
        target_worker=SimpleNamespace(model_runner=runner), topk=TOPK, num_steps=2, num_draft_tokens=TREE_TOKENS,
        tree_mask_mode=worker.tree_mask_mode, device="cpu",
    )  # fmt: skip


@pytest.mark.parametrize("seq_lens", [[9, 0, 30, 2], [7], [0, 0]], ids=str)
@pytest.mark.parametrize("num_padding", [None, 0, 2], ids=["eager", "replay", "padded replay"])
def test_the_tree_that_sglang_draws_is_the_tree_that_is_packed(monkeypatch, seq_lens, num_padding):
    runner = make_runner(speculative_algorithm="EAGLE", tree_tokens=TREE_TOKENS, max_batch=6)
    backend = TreemlaAttnBackend(runner)
    padding = num_padding or 0
    batch = view(runner, [*seq_lens, *[0] * padding], VERIFY, eagle_input(None, TREE_TOKENS), padding)
    batch.spec_info = spec_info = draft(runner, backend, make_worker(monkeypatch), batch)
    if num_padding is None:
        backend.init_forward_metadata(batch)
    else:
        static = capture(backend, runner, len(batch.seq_lens), eagle_input(stand_in(TREE_TOKENS), TREE_TOKENS))
        replay(backend, static, batch)
    links = zip(spec_info.retrieve_next_token.numpy(), spec_info.retrieve_next_sibling.numpy(), strict=True)
    words = [word for next_token, sibling in links for word in tree_from_retrieve_links(next_token, sibling).words]
    assert backend._step.words.tolist() == [int(word) for word in words] + [0] * padding * TREE_TOKENS
    assert len(set(words)) > 2


def test_the_draft_stage_s_mask_does_not_grow_with_the_context(monkeypatch):
    runner = make_runner(speculative_algorithm="EAGLE", tree_tokens=TREE_TOKENS)
    backend = TreemlaAttnBackend(runner)
    batch = view(runner, [50, 40], VERIFY, eagle_input(None, TREE_TOKENS))
    mask = draft(runner, backend, make_worker(monkeypatch), batch).custom_mask
    assert mask.numel() == (4 if compat.offers_verify_mask() else 2) * TREE_TOKENS**2


def test_the_scheduler_makes_the_target_s_backend_before_the_draft_worker_decides():
    from sglang.srt.managers.scheduler import Scheduler

    made = []
    target, worker = (SimpleNamespace(init_attention_backends=lambda who=who: made.append(who)) for who in "tw")
    Scheduler.init_all_attention_backends(SimpleNamespace(tp_worker=target, draft_worker=worker))
    assert made == ["t", "w"]


@pytest.mark.parametrize("algorithm", [None, "NGRAM", "DFLASH"])
def test_the_draft_stage_is_left_alone_where_it_draws_no_tree(algorithm):
    before = eagle_worker_v2.default_tree_mask_mode
    backend = TreemlaAttnBackend(make_runner(speculative_algorithm=algorithm))
    assert backend._verify_mask is None and eagle_worker_v2.default_tree_mask_mode is before


@pytest.mark.parametrize("layout", ["whole context", "trees alone"])
@pytest.mark.parametrize("make_input", [eagle_input, ngram_input])
def test_a_mask_is_read_in_the_layout_that_it_has(make_input, layout):
    """Whoever made it: multi-layer EAGLE, FROZEN_KV_MTP and NGRAM lay it over the context whatever is asked for."""
    runner = make_runner(speculative_algorithm="EAGLE")
    backend = TreemlaAttnBackend(runner)
    generator = fill_pool(runner)
    lens, trees = [9, 0, 30, 2], [SIBLINGS, LINE, SIBLINGS, SIBLINGS]
    mask = full_mask(lens, trees) if layout == "whole context" else torch.stack(trees).flatten()
    batch = view(runner, lens, VERIFY, make_input(mask, 3))
    q = queries(generator, 12)
    backend.init_forward_metadata(batch)
    torch.testing.assert_close(attend(backend, q, batch).double(), expected(runner, batch, q, trees), atol=1e-5, rtol=0)
