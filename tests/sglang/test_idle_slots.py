"""Compaction inside an idle SGLang, on its real trees, allocators and pools: cached content stays what it was."""

import logging
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from idle_server import CACHING, TREES, IdleServer

from treemla.kv import measure
from treemla.sglang import compat, holders, slots
from treemla.sglang.allocator import free_pages
from treemla.sglang.holders import Holders
from treemla.sglang.slots import IdleSlots, Mode


@pytest.fixture(autouse=True)
def first_rank(monkeypatch):
    monkeypatch.setattr(compat, "tensor_parallel_rank", lambda: 0)


def scattered(tree: str, page_size: int = 1, **options) -> IdleServer:
    server = IdleServer(tree, page_size, **options)
    assert serve_in_pieces(server, [3] * 11)
    return server


def serve_in_pieces(server: IdleServer, tokens: list[int]) -> bool:
    """A conversation of one page a turn, while others take every other page, and leave."""
    others = []
    for length in range(server.page, len(tokens) + 1, server.page):
        others.append(server.take(server.page))
        server.serve(tokens[:length])
    for held in others:
        if held is not None:
            server.token_to_kv_pool_allocator.free(held)
    return len(others) > 1


def runs(server: IdleServer) -> int:
    return measure(server.reads(), np.empty(0, np.int64)).runs


def idle_until_settled(server: IdleServer, mode: Mode = Mode.COMPACT) -> IdleSlots:
    idle = IdleSlots(server, mode)
    for _ in range(50):
        idle.turn()
        if idle.is_settled():
            return idle
    raise AssertionError("it moves slots for ever")


TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=24)
STEPS = st.lists(
    st.one_of(
        *(st.tuples(st.just("serve"), TOKENS) for _ in range(3)),
        *(st.tuples(st.just("serve in pieces"), TOKENS) for _ in range(4)),
        *(st.tuples(st.just("evict"), st.integers(1, 30)) for _ in range(2)),
        *(st.tuples(st.just("idle"), st.integers(1, 40)) for _ in range(3)),
        st.tuples(st.just("session"), TOKENS),
        st.tuples(st.just("flush"), st.none()),
    ),
    min_size=5,
    max_size=40,
)


class Past:
    """One server's past, and how often each step did something."""

    def __init__(self, tree: str, page_size: int, did: Counter[str]) -> None:
        self.server = IdleServer(tree, page_size, session=True, drafts=True, debug=True)
        self.idle, self.did, self.prompts = IdleSlots(self.server, Mode.COMPACT), did, []

    def step(self, name: str, what) -> None:
        server = self.server
        if name.startswith("serve"):
            self.did[name] += server.serve(what) if name == "serve" else serve_in_pieces(server, what)
            self.prompts.append(what)
        elif name == "evict":
            before = server.tree.evictable_size()
            server.evict(what)
            self.did[name] += server.tree.evictable_size() < before
        elif name == "session" and len(server.sessions) < 3:
            self.did[name] += server.keep_session(f"session {len(server.sessions)}", what)
        elif name == "flush" and not server.sessions:
            server.flush()
            self.did[name] += 1
        elif name == "idle":
            self.turn(what)
        server.check(self.prompts)

    def turn(self, budget: int) -> None:
        before, held = runs(self.server), [slots_.tolist() for slots_ in self.server.held()]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(slots, "SLOTS_A_CALL", budget)
            self.idle.turn()
        moved = sum(
            a != b for a, b in zip(held, self.server.held(), strict=True) for a, b in zip(a, b.tolist(), strict=True)
        )
        assert runs(self.server) < before if moved else runs(self.server) == before
        assert moved <= 2 * budget  # a session may hold a slot that the tree holds too
        self.did["compaction"] += moved > 0


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("tree", CACHING)
def test_what_is_cached_keeps_its_content_and_no_slot_is_lost(tree: str, page_size: int) -> None:
    did: Counter[str] = Counter()

    @settings(max_examples=100)
    @given(steps=STEPS)
    def play(steps) -> None:
        past = Past(tree, page_size, did)
        for step in steps:
            past.step(*step)

    play()
    assert did["serve"] > 200 and min(did["compaction"], did["evict"], did["session"], did["flush"]) > 20, dict(did)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("tree", CACHING)
def test_scattered_prompts_become_fewer_runs_and_it_comes_to_an_end(tree: str, page_size: int) -> None:
    server = scattered(tree, page_size)
    before, evictable = runs(server), server.tree.evictable_size()
    idle_until_settled(server)
    assert runs(server) < before
    assert server.tree.evictable_size() == evictable
    server.check([[3] * 11])
    server.evict(1000)  # the tree frees what it holds now
    assert len(free_pages(server.token_to_kv_pool_allocator)) == 96 // page_size


@pytest.mark.parametrize("tree", CACHING)
def test_two_servers_with_the_same_past_make_the_same_moves(tree: str) -> None:
    one, other = scattered(tree), scattered(tree)
    idle_until_settled(one)
    idle_until_settled(other)
    assert [held.tolist() for held in one.held()] == [held.tolist() for held in other.held()]


@pytest.mark.parametrize("tree", CACHING)
def test_a_dry_run_says_what_it_would_move_and_gain_and_moves_nothing(tree: str, caplog) -> None:
    server = scattered(tree)
    before = [held.clone() for held in server.held()], [rows.clone() for rows in server.rows]
    with caplog.at_level(logging.INFO):
        idle_until_settled(server, Mode.DRY_RUN)
    assert "would move" in caplog.text and "mean run" in caplog.text
    assert all(map(torch.equal, server.held(), before[0])) and all(map(torch.equal, server.rows, before[1]))


def test_what_a_compaction_says_it_gained_is_what_it_gained(caplog) -> None:
    server = scattered(TREES[0])
    idle, shown = IdleSlots(server, Mode.COMPACT), []
    idle.figures.show = lambda now, moved=0: shown.append(now)
    idle.turn()
    free = free_pages(server.token_to_kv_pool_allocator).numpy()
    assert shown == [measure(server.reads(), free)]


@pytest.mark.parametrize("tree", TREES)
def test_a_turn_without_a_change_looks_at_nothing(tree: str, monkeypatch) -> None:
    server = scattered(tree) if tree in CACHING else IdleServer(tree)
    idle = idle_until_settled(server)
    monkeypatch.setattr(Holders, "slots", lambda self: pytest.fail("it looked"))
    idle.turn()
    server.serve_uncached([1, 2])
    with pytest.raises(pytest.fail.Exception, match="it looked"):
        idle.turn()


def test_nothing_is_touched_while_a_request_is_in_flight(monkeypatch) -> None:
    server = scattered(TREES[0])
    idle, server.idle = IdleSlots(server, Mode.COMPACT), False
    monkeypatch.setattr(Holders, "slots", lambda self: pytest.fail("it looked"))
    idle.turn()


@pytest.mark.parametrize("tree", CACHING)
def test_slots_of_an_unknown_holder_stop_it_and_are_said(tree: str, caplog) -> None:
    server = scattered(tree)
    server.take(1)
    before = [held.clone() for held in server.held()]
    with caplog.at_level(logging.INFO):
        idle_until_settled(server)
    assert "nothing moved: 95 of 96 pages are free, cached or a session's" in caplog.text
    assert all(map(torch.equal, server.held(), before))


@pytest.mark.parametrize("tree", CACHING)
def test_a_session_that_is_left_out_stops_it(tree: str, monkeypatch, caplog) -> None:
    server = scattered(tree, session=True)
    server.keep_session("kept", [1, 1, 1])
    monkeypatch.setattr(Holders, "session_rows", lambda self: [])
    with caplog.at_level(logging.WARNING):
        idle_until_settled(server)
    assert "nothing moved: 93 of 96" in caplog.text


@pytest.mark.parametrize("tree", CACHING)
def test_nodes_are_looked_for_a_few_ids_a_turn(tree: str, monkeypatch) -> None:
    server = scattered(tree)
    monkeypatch.setattr(holders, "IDS_A_CALL", 2)
    found = Holders(server)
    turns = 1
    while found.slots() is None:
        turns += 1
    assert turns > 2 or tree == "radix"
    whole = torch.cat(server.held() if tree == "radix" else found.slots()).sort().values
    assert torch.equal(whole, server.tree.all_values_flatten().sort().values)


@pytest.mark.parametrize("mode", Mode)
def test_without_metrics_the_figures_are_a_line_in_the_log(mode: Mode, caplog) -> None:
    with caplog.at_level(logging.INFO):
        idle_until_settled(scattered(TREES[0]), mode)
    assert "11 held slots: mean_run " in caplog.text and "largest_free_share" in caplog.text


def test_on_other_ranks_the_log_is_silent(monkeypatch, caplog) -> None:
    monkeypatch.setattr(compat, "tensor_parallel_rank", lambda: 1)
    with caplog.at_level(logging.INFO):
        idle_until_settled(scattered(TREES[0]))
    assert "treemla" not in caplog.text
