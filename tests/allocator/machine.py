"""What servers do to allocators, as rules that hypothesis strings together: the same steps on ours and on stock."""

from collections import Counter
from collections.abc import Callable

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from serving import COLUMNS, ROWS, Node, Request, Serving, launches_first

from treemla.sglang.allocator import CheckedFrees, free_pages

PICK = st.integers(0, 999)  # which of however many there are
some_requests = precondition(lambda self: len(self.one.requests) > 1)
some_trees = precondition(lambda self: any(request.tree for request in self.one.requests))
some_without_reservation = precondition(lambda self: any(map(without_reservation, self.one.requests)))


class Machine(RuleBasedStateMachine):
    """`make` returns allocators to be driven in lockstep; `fired` counts the rules over all examples."""

    make: Callable[[], list]
    fired: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.all = [Serving(allocator) for allocator in type(self).make()]
        self.one = self.all[0]
        self.name = ""

    def fire(self, name: str, step: Callable[[Serving], object]) -> None:
        """One step on every allocator: same answers, same free counts, every invariant kept."""
        self.name = name
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
        """Index of a request that `wanted` takes; None where there is none."""
        fit = [i for i, request in enumerate(self.one.requests) if wanted(request)]
        return fit[pick % len(fit)] if fit else -1

    @initialize(sizes=st.lists(st.integers(4, 30), max_size=6))
    def start(self, sizes: list[int]) -> None:
        for n in sizes:
            self.fire("admit", lambda serving, n=n: admit(serving, n))

    # slots that come

    @precondition(lambda self: len(self.one.requests) < ROWS)
    @rule(n=st.integers(1, 30))
    def admit(self, n: int) -> None:
        self.fire("admit", lambda serving: admit(serving, n))

    @some_without_reservation
    @rule(pick=PICK, n=st.integers(1, 12))
    def extend(self, pick: int, n: int) -> None:
        i = self.which(pick, lambda r: without_reservation(r) and r.allocated + n <= COLUMNS)
        if i >= 0:
            self.fire("extend", lambda serving: extend(serving, [serving.requests[i]], n))

    @some_without_reservation
    @rule()
    def decode(self) -> None:
        fit = [i for i, r in enumerate(self.one.requests) if without_reservation(r) and r.allocated < COLUMNS]
        if fit:
            self.fire("decode", lambda serving: decode(serving, [serving.requests[i] for i in fit]))

    @some_requests
    @rule(steps=st.integers(1, 3), topk=st.integers(1, 3), tree_tokens=st.integers(1, 6))
    def speculate(self, steps: int, topk: int, tree_tokens: int) -> None:
        reserve = 2 * max(steps * topk, tree_tokens)
        fit = [i for i, r in enumerate(self.one.requests) if len(r.tokens) + reserve <= COLUMNS and not r.tree]
        if fit:
            self.fire(
                "speculate",
                lambda serving: speculate(serving, [serving.requests[i] for i in fit], reserve, tree_tokens),
            )

    @some_trees
    @rule(pick=PICK, chosen=st.sets(st.integers(0, 5), min_size=1))
    def accept_path(self, pick: int, chosen: set[int]) -> None:
        i = self.which(pick, lambda r: len(r.tree) > 0)
        if i >= 0:
            path = sorted({node % len(self.one.requests[i].tree) for node in chosen})
            self.fire("accept_path", lambda serving: serving.accept(serving.requests[i], path))

    @some_trees
    @rule(pick=PICK)
    def reject_all(self, pick: int) -> None:
        i = self.which(pick, lambda r: len(r.tree) > 0)
        if i >= 0:
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
            self.fire("finish_with_a_reserved_tail", lambda serving: reserve_and_finish(serving, i, tree_tokens))

    @some_requests
    @rule(pick=PICK)
    def retract(self, pick: int) -> None:
        """Out of memory: a request loses its slots and is computed anew."""
        i = self.which(pick, lambda r: len(r.tokens) > r.shared)
        if i >= 0:
            self.fire("retract", lambda serving: retract(serving, serving.requests[i]))

    @some_requests
    @rule(picks=st.lists(PICK, min_size=2, max_size=4), keep=st.booleans())
    def free_group(self, picks: list[int], keep: bool) -> None:
        self.fire("free_group", lambda serving: finish_in_group(serving, picks, keep))

    @precondition(lambda self: len(self.one.requests) > 2)
    @rule(first=st.integers(1, 4), second=st.integers(1, 4))
    def nested_free_group(self, first: int, second: int) -> None:
        """A public bug: in 0.5.16 a second begin forgets what the first group holds; 0.5.23 asserts."""
        if self.one.allocator.available_size() >= (first + second) * self.one.page:
            self.fire("nested_free_group", lambda serving: nest_groups(serving, first, second))

    @precondition(lambda self: hasattr(self.one.allocator, "backup_state"))
    @rule(pages=st.integers(1, 8))
    def borrow_and_restore(self, pages: int) -> None:
        """0.5.16: draft tokens take slots, and the state before is restored."""
        self.fire("borrow_and_restore", lambda serving: borrow(serving, pages * serving.page))

    @some_requests
    @rule()
    def exhaust(self) -> None:
        """A public bug: with pages, free slots that are not merged yet are counted and cannot be had."""
        self.fire("exhaust", exhaust)

    @precondition(lambda self: len(self.one.requests) + len(self.one.nodes) > 4)
    @rule()
    def clear(self) -> None:
        self.fire("clear", Serving.reset)

    # the prefix tree

    @precondition(lambda self: self.one.nodes and len(self.one.requests) < ROWS)
    @rule(pick=PICK, cut=PICK, n=st.integers(1, 12))
    def radix_hit(self, pick: int, cut: int, n: int) -> None:
        i = pick % len(self.one.nodes)
        self.fire("radix_hit", lambda serving: hit(serving, i, cut, n))

    @precondition(lambda self: any(node.users == 0 for node in self.one.nodes))
    @rule(pick=PICK)
    def evict(self, pick: int) -> None:
        fit = [i for i, node in enumerate(self.one.nodes) if node.users == 0]
        self.fire("evict", lambda serving: serving.evict(serving.nodes[fit[pick % len(fit)]]))

    @some_requests
    @rule(budget=st.integers(0, 64))
    def compact(self, budget: int) -> None:
        self.fire("compact", lambda serving: serving.compact(budget))


def without_reservation(request: Request) -> bool:
    return request.allocated == len(request.tokens) and not request.tree and request.allocated > 0


def admit(serving: Serving, n: int, node: Node | None = None) -> bool:
    request = serving.add(node)
    if not serving.take([(request, n)]):
        serving.finish(request, keep=False)
        return False
    serving.commit(request, n)
    return True


def extend(serving: Serving, requests: list[Request], n: int) -> bool:
    if not serving.take([(request, n) for request in requests]):
        return False
    for request in requests:
        serving.commit(request, n)
    return True


def decode(serving: Serving, requests: list[Request]) -> bool:
    if not serving.take_one_each(requests):
        return False
    for request in requests:
        serving.commit(request, 1)
    return True


def speculate(serving: Serving, requests: list[Request], reserve: int, tree_tokens: int) -> bool:
    """Reserve behind the committed tokens what is not reserved yet, for the whole batch, and draft."""
    short = [(request, len(request.tokens) + reserve - request.allocated) for request in requests]
    short = [(request, n) for request, n in short if n > 0]
    if short and not serving.take(short):
        return False
    for request in requests:
        serving.draft(request, tree_tokens)
    return True


def reserve_and_finish(serving: Serving, i: int, tree_tokens: int) -> bool:
    request = serving.requests[i]
    own_before = serving.allocator.available_size() + whole_pages(request.allocated - request.shared, serving.page)
    taken = speculate(serving, [request], 2 * tree_tokens, tree_tokens)
    serving.finish(request, keep=False)
    assert serving.allocator.available_size() == own_before, "the tail of a reservation was not freed"
    return taken


def whole_pages(n: int, page: int) -> int:
    return -(-n // page) * page


def retract(serving: Serving, request: Request) -> bool:
    node, n = request.node, len(request.tokens) - request.shared
    if node is not None:
        node.users += 1  # nobody evicts it meanwhile
    serving.finish(request, keep=False)
    again = admit(serving, n, node)
    if node is not None:
        node.users -= 1
    return again


def finish_in_group(serving: Serving, picks: list[int], keep: bool) -> None:
    before = serving.allocator.available_size()
    serving.allocator.free_group_begin()
    for pick in picks:
        if serving.requests:
            serving.finish(serving.requests[pick % len(serving.requests)], keep=keep)
    assert serving.allocator.available_size() == before, "a free of an open group took effect"
    serving.allocator.free_group_end()


def nest_groups(serving: Serving, first: int, second: int) -> None:
    """Whatever nesting does, what was freed and not forgotten is free afterwards, once."""
    allocator, before = serving.allocator, serving.allocator.available_size()
    lost, kept = allocator.alloc(first * serving.page), allocator.alloc(second * serving.page)
    assert lost is not None and kept is not None, "slots that count as free cannot be had"
    allocator.free_group_begin()
    allocator.free(lost)
    forgets = hasattr(allocator, "backup_state") and not isinstance(allocator, CheckedFrees)
    refused = False
    try:
        allocator.free_group_begin()
    except (AssertionError, ValueError):
        refused = True
    assert refused != forgets, "a nested group was expected to be refused, but where stock forgets"
    allocator.free(kept)
    allocator.free_group_end()
    assert allocator.available_size() == before - (len(lost) if forgets else 0), "a nested group freed something else"
    if forgets:
        allocator.free(lost)


def borrow(serving: Serving, n: int) -> bool:
    allocator = serving.allocator
    before, state = set(free_pages(allocator).tolist()), allocator.backup_state()
    taken = allocator.alloc(n) is not None
    allocator.restore_state(state)
    assert set(free_pages(allocator).tolist()) == before, "restore_state left other slots free"
    return taken


def exhaust(serving: Serving) -> None:
    """All that is free can be had at once, by either way, and then nothing."""
    allocator, free = serving.allocator, serving.allocator.available_size()
    everything = allocator.alloc(free)
    assert everything is not None and len(everything) == free, "slots that count as free cannot be had"
    assert allocator.alloc(serving.page) is None, "more slots came than were free"
    allocator.free(everything)
    if serving.page == 1 or free == 0:
        return
    nothing, all_of_it = torch.tensor([0]), torch.tensor([free])
    everything = allocator.alloc_extend(nothing, nothing, all_of_it, all_of_it, torch.tensor([-1]), free)
    assert everything is not None and len(set(everything.tolist())) == free, "slots that count as free cannot be had"
    if not launches_first(allocator):
        assert allocator.alloc_decode(torch.tensor([1]), torch.tensor([1]), torch.tensor([-1])) is None
    allocator.free(everything)


def hit(serving: Serving, i: int, cut: int, n: int) -> bool:
    """A request whose prompt begins as the node's path does, up to a page that `cut` picks."""
    node = serving.nodes[i]
    length = (1 + cut % (len(node.tokens) // serving.page)) * serving.page
    if length < len(node.tokens):
        node = serving.split(node, length)
    path_length, part = 0, node
    while part is not None:
        path_length, part = path_length + len(part.tokens), part.parent
    return path_length + n <= COLUMNS and admit(serving, n, node)
