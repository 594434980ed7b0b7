"""What the backend holds and says, when the scheduler must wait for it, and what it refuses."""

import logging

import pytest
import torch
from runners import (
    attend,
    eagle_input,
    full_mask,
    make_layer,
    make_runner,
    queries,
    view,
)
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from treemla.sglang import compat, make_backend
from treemla.sglang.backend import TreemlaAttnBackend

VERIFY, DECODE = ForwardMode.TARGET_VERIFY, ForwardMode.DECODE
SIBLINGS = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)


def test_graphs_allocate_none_of_triton_s_buffers(eagle):
    _, backend = eagle
    backend.init_cuda_graph_state(4, 12)
    held = {name for name, value in vars(backend).items() if isinstance(value, torch.Tensor) and "cuda_graph" in name}
    assert held == set()


@pytest.mark.parametrize(("algorithm", "tree_tokens"), [("EAGLE", 16), ("EAGLE", 64), ("NGRAM", 64), (None, 1)])
def test_beside_the_workspace_little_memory_is_held_at_batch_64_and_131k(algorithm, tree_tokens, caplog):
    """Every tensor that hangs on the backend counts, those of its base class too; the runner's pools do not."""
    runner = make_runner(64, tree_tokens, max_context=131_072 - tree_tokens, speculative_algorithm=algorithm)
    with caplog.at_level(logging.INFO):
        backend = make_backend(runner)
    backend.init_cuda_graph_state(64, 64 * tree_tokens)
    batch = view(runner, [1000] * 64, DECODE if algorithm is None else VERIFY, spec_info_of(algorithm, tree_tokens))
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    given = {*storages(runner.req_to_token_pool), *storages(runner.token_to_kv_pool)}
    workspaces = {key for state in backend._trees.values() for key in storages(list(state.plan.tensors))}
    held = storages(backend)
    rest = sum(size for key, size in held.items() if key not in given | workspaces)
    assert workspaces <= held.keys() and rest < 64_000_000
    assert f"the rest {backend._held_bytes()[1] / 1e6:.1f} MB" in caplog.text and backend._held_bytes()[1] < 1_000_000


def spec_info_of(algorithm, tree_tokens):
    return None if algorithm is None else eagle_input(torch.ones(1, dtype=torch.bool), tree_tokens)


def storages(held, seen=None):
    """Address and bytes of the storage of every tensor that can be reached from `held`, and is no model's."""
    seen = set() if seen is None else seen
    found = {}
    if isinstance(held, torch.Tensor):
        return {held.untyped_storage().data_ptr(): held.untyped_storage().nbytes()}
    if id(held) in seen:
        return found
    seen.add(id(held))
    if isinstance(held, dict):
        parts = held.values()
    elif isinstance(held, list | tuple):
        parts = held
    else:
        parts = vars(held).values() if hasattr(held, "__dict__") and not callable(held) else ()
    for part in parts:
        found |= storages(part, seen)
    return found


def test_captures_outgrowing_the_request_pool_are_refused(eagle):
    _, backend = eagle
    with pytest.raises(ValueError, match="--cuda-graph-max-bs-decode"):
        backend.init_cuda_graph_state(5, 15)


def test_a_draft_s_graph_is_refused_with_the_flag(eagle):
    runner, backend = eagle
    batch = view(runner, [3], ForwardMode.DRAFT_EXTEND_V2)
    with pytest.raises(ValueError, match="--speculative-draft-attention-backend triton"):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)


def test_a_forward_without_metadata_for_its_batch_is_refused(eagle):
    runner, backend = eagle
    mask = full_mask([3], [SIBLINGS])
    batch, other = (view(runner, [3], VERIFY, eagle_input(mask, 3)) for _ in range(2))
    with pytest.raises(RuntimeError, match="without init_forward_metadata"):
        attend(backend, queries(torch.Generator(), 3), batch)
    backend.init_forward_metadata(other)
    with pytest.raises(RuntimeError, match="without init_forward_metadata"):
        attend(backend, queries(torch.Generator(), 3), batch)


@pytest.mark.parametrize("extra", ["sinks", "score_mod", "aux_tensors"])
def test_attention_with_extras_is_refused(eagle, extra):
    runner, backend = eagle
    batch = view(runner, [3], VERIFY, eagle_input(full_mask([3], [SIBLINGS]), 3))
    backend.init_forward_metadata(batch)
    with pytest.raises(ValueError, match=extra):
        backend.forward_extend(
            queries(torch.Generator(), 3), None, None, make_layer(), batch, False, **{extra: object()}
        )


def test_the_scheduler_waits_for_the_last_layer_before_it_writes_the_tables(monkeypatch):
    from sglang.srt.environ import envs

    monkeypatch.delenv("SGLANG_FORCE_COARSE_WAR_BARRIER", raising=False)
    for algorithm in ("EAGLE", None):
        backend = TreemlaAttnBackend(make_runner(speculative_algorithm=algorithm))
        if hasattr(compat.triton_backend(), "shared_read_ends"):
            assert {backend.shared_read_ends(mode).name for mode in (VERIFY, DECODE)} == {"POST_REPLAY"}
            assert backend.shared_read_ends(ForwardMode.EXTEND).name == "UNKNOWN"
            assert not envs.SGLANG_FORCE_COARSE_WAR_BARRIER.get()
        else:
            assert envs.SGLANG_FORCE_COARSE_WAR_BARRIER.get() is (algorithm is None)


def test_dflash_leaves_its_mask_out():
    from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy

    backend = TreemlaAttnBackend(make_runner(speculative_algorithm="DFLASH"))
    assert resolve_dflash_verify_mask_policy(backend) == ("TreemlaAttnBackend", False)


def test_a_draft_model_keeps_triton_and_the_log_says_so(caplog):
    runner = make_runner(speculative_algorithm="EAGLE")
    runner.is_draft_worker = True
    with caplog.at_level(logging.INFO):
        assert type(make_backend(runner)) is compat.triton_backend()
    assert "draft model's attention stays Triton's" in caplog.text


def test_the_log_says_that_it_serves_and_what_it_holds(caplog):
    with caplog.at_level(logging.INFO):
        make_backend(make_runner(speculative_algorithm="EAGLE"))
    assert "treemla: serves verify and decode" in caplog.text and "MB" in caplog.text
