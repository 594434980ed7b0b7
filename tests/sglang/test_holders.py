"""What compaction cannot rewrite is refused at the start, by name; what it must not forget is noticed when forgotten."""

from types import SimpleNamespace

import pytest
import torch
from idle_server import CACHING, IdleServer
from test_idle_slots import first_rank, idle_until_settled, scattered  # noqa: F401 # a fixture

from treemla.sglang import allocator, holders
from treemla.sglang.holders import OUTSIDE, Holders, Unreachable
from treemla.sglang.slots import IdleSlots, Mode

VALUES = {"radix_cache_backend": "flexkv", "disaggregation_mode": "decode", "kv_canary": "log", "dllm_algorithm": "x"}


def refusal(server: IdleServer) -> str:
    with pytest.raises(Unreachable) as refused:
        Holders(server)
    return str(refused.value)


@pytest.mark.parametrize("field", OUTSIDE)
def test_a_setting_under_which_somebody_else_holds_slots_is_refused(field: str) -> None:
    server = IdleServer()
    if not hasattr(server.server_args, field):
        assert field == "enable_unified_cache_external_linker"  # of one version alone
        return
    server = IdleServer(**{field: VALUES.get(field, 2 if field.endswith("_size") else True)})
    assert OUTSIDE[field] in refusal(server)


def test_all_that_is_wrong_is_named_at_once() -> None:
    message = refusal(IdleServer(enable_hierarchical_cache=True, pp_size=2))
    assert "--enable-hierarchical-cache" in message and "--pp-size" in message


@pytest.mark.parametrize("algorithm", ["DFLASH", "FROZEN_KV_MTP"])
def test_drafts_whose_kv_lies_elsewhere_are_refused(algorithm: str) -> None:
    server = IdleServer(speculative_algorithm=algorithm)
    assert f"--speculative-algorithm {algorithm}: its draft's KV" in refusal(server)


@pytest.mark.parametrize("algorithm", [None, "NGRAM"])
def test_without_a_draft_model_the_rows_are_the_targets(algorithm: str | None) -> None:
    server = IdleServer(speculative_algorithm=algorithm)
    server.draft_worker = SimpleNamespace()  # NGRAM's worker has no model
    assert Holders(server).buffers == list(server.pool.kv_buffer)


def test_the_drafts_rows_move_too() -> None:
    server = IdleServer(drafts=True)
    assert len(Holders(server).buffers) == len(server.rows) > len(server.pool.kv_buffer)


def test_stock_allocators_are_refused() -> None:
    server = IdleServer()
    (stock,) = (
        base for base in type(server.token_to_kv_pool_allocator).__mro__ if base.__name__ == "TokenToKVPoolAllocator"
    )
    server.token_to_kv_pool_allocator = stock(96, torch.float32, "cpu", server.pool, False)
    assert "the free list, a TokenToKVPoolAllocator" in refusal(server)


def test_another_tree_is_refused() -> None:
    server = IdleServer()
    server.tree_cache = type("HiRadixCache", (type(server.tree),), {"__init__": lambda self: None})()
    assert "the prefix tree, a HiRadixCache" in refusal(server)


def test_a_tree_with_copies_on_the_host_is_refused() -> None:
    server = IdleServer()
    server.tree.cache_controller = object()
    assert "the prefix tree's copies on the host" in refusal(server)


@pytest.mark.parametrize("pool", ["target", "draft"])
def test_another_pool_is_refused(pool: str) -> None:
    server = IdleServer(drafts=True)
    other = SimpleNamespace()
    if pool == "target":
        server.token_to_kv_pool_allocator.get_kvcache = lambda: other
        assert "the KV pool, a SimpleNamespace" in refusal(server)
    else:
        server.draft_worker.draft_worker.draft_runners[0].token_to_kv_pool = other
        assert "the draft model's KV pool, a SimpleNamespace" in refusal(server)


@pytest.mark.parametrize("layout", ["use_hnd", "k_scale_buffer"])
def test_a_draft_pool_of_more_than_rows_is_refused(layout: str) -> None:
    server = IdleServer(drafts=True)
    setattr(server.draft_worker.draft_worker.draft_runners[0].token_to_kv_pool, layout, [torch.ones(1)])
    assert "the draft model's KV pool, a MHATokenToKVPool" in refusal(server)


@pytest.mark.parametrize("mode", [Mode.COMPACT, Mode.DRY_RUN])
def test_the_start_ends_with_what_to_do(mode: Mode) -> None:
    with pytest.raises(Unreachable, match=f"TREEMLA_SLOTS={mode.value}: .*--enable-lmcache.*TREEMLA_SLOTS=ordered"):
        IdleSlots(IdleServer(enable_lmcache=True), mode)


def test_ordered_slots_need_no_holders(caplog) -> None:
    with caplog.at_level("INFO"):
        IdleSlots(IdleServer(enable_lmcache=True), Mode.ORDERED).turn()
    assert "no figures of held slots: cannot rewrite --enable-lmcache" in caplog.text


@pytest.mark.parametrize("tree", CACHING)
def test_a_tree_that_does_not_add_up_ends_compaction_and_says_so(tree: str, monkeypatch, caplog) -> None:
    if tree == "radix":
        return  # its nodes are walked
    server = scattered(tree)
    idle = IdleSlots(server, Mode.COMPACT)
    monkeypatch.setattr(type(server.tree.tree_core), "total_size", lambda self: (1000, 0))
    monkeypatch.setattr(holders, "IDS_AT_MOST", 3 * holders.IDS_A_CALL)
    with caplog.at_level("ERROR"):
        for _ in range(4):
            idle.turn()
    assert "left as they are from now on: the prefix tree: it holds 1000 tokens, of which 11 were found" in caplog.text
    assert idle.holders is None


def forgets_draft(monkeypatch) -> None:
    monkeypatch.setattr(holders, "draft_pools", lambda scheduler: [])


def forgets_a_holder(monkeypatch) -> None:
    relocate = allocator.relocate

    def forgetful(moves, buffers, held, free, adopt_free) -> None:
        relocate(moves, buffers, held[1:], free, adopt_free)

    monkeypatch.setattr(allocator, "relocate", forgetful)


def forgets_the_free_list(monkeypatch) -> None:
    monkeypatch.setattr(allocator, "adopt_free_pages", lambda allocator, pages: None)


def rewrites_copies(monkeypatch) -> None:
    slots = Holders.slots
    monkeypatch.setattr(Holders, "slots", lambda self: [held.clone() for held in slots(self)])


@pytest.mark.parametrize("fault", [forgets_draft, forgets_a_holder, forgets_the_free_list, rewrites_copies])
@pytest.mark.parametrize("tree", CACHING)
def test_a_planted_fault_is_noticed(tree: str, fault, monkeypatch) -> None:
    server = scattered(tree, drafts=True)
    fault(monkeypatch)

    def play() -> None:
        idle_until_settled(server)
        server.check([[3] * 11])

    with pytest.raises((AssertionError, ValueError)):
        play()
