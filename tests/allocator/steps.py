"""The steps that the machine's rules take: what one `Serving` does, with what it must find. False: there was no room."""

import torch
from serving import COLUMNS, Node, Request, Serving, launches_first

from treemla.sglang.allocator import CheckedFrees, free_pages


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
