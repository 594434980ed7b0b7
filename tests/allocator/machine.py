"""What servers do to allocators, as rules that hypothesis strings together: the same steps on ours and on stock."""

from collections import Counter
from collections.abc import Callable

import steps
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from serving import COLUMNS, ROWS, Request, Serving

PICK = st.integers(0, 999)  # which of however many there are
PATH = st.sets(st.integers(0, 5))  # nodes of a tree
some_requests = precondition(lambda self: len(self.one.requests) > 1)
some_trees = precondition(lambda self: any(request.tree for request in self.one.requests))
some_without_reservation = precondition(lambda self: any(map(steps.without_reservation, self.one.requests)))


class Machine(RuleBasedStateMachine):
    """`make` returns allocators to be driven in lockstep; `fired` counts the rules over all examples."""

    make: Callable[[], list]
    fired: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.all = [Serving(allocator) for allocator in type(self).make()]
        self.one = self.all[0]

    def fire(self, name: str, step: Callable[[Serving], object]) -> None:
        """One step on every allocator: same answers, same free counts, every invariant kept."""
        try:
            answers = [step(serving) for serving in self.all]
            assert all(answer == answers[0] for answer in answers), f"ours and stock answer {answers}"
            for serving in self.all:
                serving.check()
            sizes = [serving.allocator.available_size() for serving in self.all]
            assert len(set(sizes)) == 1, f"ours and stock have {sizes} slots free"
        except AssertionError as error:
            raise AssertionError(f"rule {name}: {error}") from error
        type(self).fired[name] += 1
        if answers[0] is False:
            type(self).fired["(of which None)"] += 1

    def which(self, pick: int, wanted: Callable[[Request], bool] = lambda _: True) -> int:
        """Index of a request that `wanted` takes; -1 where there is none."""
        fit = [i for i, request in enumerate(self.one.requests) if wanted(request)]
        return fit[pick % len(fit)] if fit else -1

    @initialize(sizes=st.lists(st.integers(4, 30), max_size=6))
    def start(self, sizes: list[int]) -> None:
        for n in sizes:
            self.fire("admit", lambda serving, n=n: steps.admit(serving, n))

    # slots that come

    @precondition(lambda self: len(self.one.requests) < ROWS)
    @rule(n=st.integers(1, 30))
    def admit(self, n: int) -> None:
        self.fire("admit", lambda serving: steps.admit(serving, n))

    @some_without_reservation
    @rule(pick=PICK, n=st.integers(1, 12))
    def extend(self, pick: int, n: int) -> None:
        i = self.which(pick, lambda r: steps.without_reservation(r) and r.allocated + n <= COLUMNS)
        if i >= 0:
            self.fire("extend", lambda serving: steps.extend(serving, [serving.requests[i]], n))

    @some_without_reservation
    @rule()
    def decode(self) -> None:
        fit = [i for i, r in enumerate(self.one.requests) if steps.without_reservation(r) and r.allocated < COLUMNS]
        if fit:
            self.fire("decode", lambda serving: steps.decode(serving, [serving.requests[i] for i in fit]))

    @some_requests
    @rule(depth=st.integers(1, 3), topk=st.integers(1, 3), tree_tokens=st.integers(1, 6))
    def speculate(self, depth: int, topk: int, tree_tokens: int) -> None:
        reserve = 2 * max(depth * topk, tree_tokens)
        fit = [i for i, r in enumerate(self.one.requests) if len(r.tokens) + reserve <= COLUMNS and not r.tree]
        if fit:
            self.fire(
                "speculate",
                lambda serving: steps.speculate(serving, [serving.requests[i] for i in fit], reserve, tree_tokens),
            )

    @some_requests
    @rule(tree_tokens=st.integers(1, 6), paths=st.lists(PATH, min_size=1, max_size=4))
    def verify(self, tree_tokens: int, paths: list[set[int]]) -> None:
        """A whole speculative step: every request drafts, then accepts a path or, where it is empty, nothing."""
        self.speculate(depth=1, topk=1, tree_tokens=tree_tokens)
        for i, request in enumerate(self.one.requests):
            path = paths[i % len(paths)]
            if request.tree and path:
                self.accept(i, path)
            elif request.tree:
                self.reject(i)

    @some_trees
    @rule(pick=PICK, path=PATH.filter(len))
    def accept_path(self, pick: int, path: set[int]) -> None:
        self.accept(self.which(pick, lambda r: len(r.tree) > 0), path)

    @some_trees
    @rule(pick=PICK)
    def reject_all(self, pick: int) -> None:
        self.reject(self.which(pick, lambda r: len(r.tree) > 0))

    def accept(self, i: int, path: set[int]) -> None:
        nodes = sorted({node % len(self.one.requests[i].tree) for node in path})
        self.fire("accept_path", lambda serving: serving.accept(serving.requests[i], nodes))

    def reject(self, i: int) -> None:
        self.fire("reject_all", lambda serving: serving.requests[i].tree.clear())

    # slots that go

    @some_requests
    @rule(pick=PICK, keep=st.booleans())
    def finish(self, pick: int, keep: bool) -> None:
        i = self.which(pick)
        if i >= 0:
            self.fire("finish", lambda serving: serving.finish(serving.requests[i], keep=keep))

    @some_requests
    @rule(pick=PICK, tree_tokens=st.integers(1, 6))
    def finish_with_a_reserved_tail(self, pick: int, tree_tokens: int) -> None:
        """A public bug: the reservation is longer than what was committed, and the rest is never freed."""
        i = self.which(pick, lambda r: len(r.tokens) + 2 * tree_tokens <= COLUMNS and not r.tree)
        if i >= 0:
            self.fire("finish_with_a_reserved_tail", lambda serving: steps.reserve_and_finish(serving, i, tree_tokens))

    @some_requests
    @rule(pick=PICK)
    def retract(self, pick: int) -> None:
        """Out of memory: a request loses its slots and is computed anew."""
        i = self.which(pick, lambda r: len(r.tokens) > r.shared)
        if i >= 0:
            self.fire("retract", lambda serving: steps.retract(serving, serving.requests[i]))

    @some_requests
    @rule(picks=st.lists(PICK, min_size=2, max_size=4), keep=st.booleans())
    def free_group(self, picks: list[int], keep: bool) -> None:
        self.fire("free_group", lambda serving: steps.finish_in_group(serving, picks, keep))

    @some_requests
    @rule(first=st.integers(1, 4), second=st.integers(1, 4))
    def nested_free_group(self, first: int, second: int) -> None:
        """A public bug: in 0.5.16 a second begin forgets what the first group holds; 0.5.23 asserts."""
        if self.one.allocator.available_size() >= (first + second) * self.one.page:
            self.fire("nested_free_group", lambda serving: steps.nest_groups(serving, first, second))

    @precondition(lambda self: hasattr(self.one.allocator, "backup_state"))
    @rule(pages=st.integers(1, 8))
    def borrow_and_restore(self, pages: int) -> None:
        """0.5.16: draft tokens take slots, and the state before is restored."""
        self.fire("borrow_and_restore", lambda serving: steps.borrow(serving, pages * serving.page))

    @some_requests
    @rule()
    def exhaust(self) -> None:
        """A public bug: with pages, free slots that are not merged yet are counted and cannot be had."""
        self.fire("exhaust", steps.exhaust)

    @precondition(lambda self: len(self.one.requests) + len(self.one.nodes) > 4)
    @rule()
    def clear(self) -> None:
        self.fire("clear", Serving.reset)

    # the prefix tree

    @precondition(lambda self: self.one.nodes and len(self.one.requests) < ROWS)
    @rule(pick=PICK, cut=PICK, n=st.integers(1, 12))
    def radix_hit(self, pick: int, cut: int, n: int) -> None:
        i = pick % len(self.one.nodes)
        self.fire("radix_hit", lambda serving: steps.hit(serving, i, cut, n))

    @precondition(lambda self: any(node.users == 0 for node in self.one.nodes))
    @rule(pick=PICK)
    def evict(self, pick: int) -> None:
        fit = [i for i, node in enumerate(self.one.nodes) if node.users == 0]
        self.fire("evict", lambda serving: serving.evict(serving.nodes[fit[pick % len(fit)]]))

    @some_requests
    @rule(budget=st.integers(0, 64))
    def compact(self, budget: int) -> None:
        self.fire("compact", lambda serving: serving.compact(budget))
