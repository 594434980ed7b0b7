"""A model of what a server does with slots: requests, a prefix tree, and a pool that remembers every write.

`Serving` drives one real SGLang allocator. What each slot must hold is kept in plain lists of token numbers, and every
token is written once to the pool's buffers, so a slot that two tokens share is seen as a wrong read.
"""

from dataclasses import dataclass, field
from itertools import count

import torch

from treemla.kv import measure, move_rows
from treemla.sglang.allocator import Ordered, compact, free_pages, waiting_frees

ROWS = 12  # requests at once
COLUMNS = 96  # slots a request may hold


@dataclass(eq=False)
class Node:
    """A stretch of cached tokens; `slots` is what the prefix tree holds and compaction rewrites."""

    slots: torch.Tensor
    tokens: list[int]
    parent: "Node | None"
    users: int = 0  # requests and child nodes


@dataclass(eq=False)
class Request:
    """Row of the slot table: the first `shared` columns belong to `node` and its parents, the rest to the request."""

    row: int
    shared: int
    node: Node | None
    tokens: list[int]  # committed
    allocated: int
    tree: list[int] = field(default_factory=list)  # written behind the committed tokens, not accepted yet


class Serving:
    def __init__(self, allocator) -> None:
        self.allocator = allocator
        self.page = allocator.page_size
        self.pages = allocator.size // self.page
        rows = allocator.size + self.page
        self.buffers = [torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, 2)]  # target pool, draft pool
        self.table = torch.zeros(ROWS, COLUMNS, dtype=torch.int32)
        self.requests: list[Request] = []
        self.nodes: list[Node] = []
        self.token = count(1)

    # what a server asks for

    def take(self, wanted: list[tuple[Request, int]]) -> bool:
        """Allocate `n` more slots for each request at once, as a prefill or a reservation does; False for None."""
        before = torch.tensor([request.allocated for request, _ in wanted])
        after = before + torch.tensor([n for _, n in wanted])
        total = int((after - before).sum())
        if self.page == 1:
            slots = self.allocator.alloc(total)
        elif self.must_not_ask(before, after):
            slots = None
        else:
            slots = self.allocator.alloc_extend(before, before, after, after, self.last_slots(wanted), total)
        return self.hand_out(wanted, slots)

    def take_one_each(self, requests: list[Request]) -> bool:
        """Allocate one slot for each request, as a decode step does."""
        wanted = [(request, 1) for request in requests]
        after = torch.tensor([request.allocated + 1 for request in requests])
        if self.page == 1:
            slots = self.allocator.alloc(len(requests))
        elif self.must_not_ask(after - 1, after):
            slots = None
        else:
            slots = self.allocator.alloc_decode(after, after, self.last_slots(wanted))
        return self.hand_out(wanted, slots)

    def must_not_ask(self, before: torch.Tensor, after: torch.Tensor) -> bool:
        """Whether the answer is None and finding it out would read past the free list."""
        pages = (after + self.page - 1) // self.page - (before + self.page - 1) // self.page
        return launches_first(self.allocator) and int(pages.sum()) * self.page > self.allocator.available_size()

    def last_slots(self, wanted: list[tuple[Request, int]]) -> torch.Tensor:
        last = [self.table[r.row, r.allocated - 1] if r.allocated else -1 for r, _ in wanted]
        return torch.tensor([int(slot) for slot in last])

    def hand_out(self, wanted: list[tuple[Request, int]], slots: torch.Tensor | None) -> bool:
        if slots is None:
            return False
        total = sum(n for _, n in wanted)
        assert len(slots) == total, f"alloc: {total} slots were asked for, {len(slots)} came"
        for (request, n), mine in zip(wanted, slots.split([n for _, n in wanted]), strict=True):
            self.table[request.row, request.allocated : request.allocated + n] = mine
            request.allocated += n
        return True

    def add(self, node: Node | None = None) -> Request:
        """A request without slots of its own; it reads those of `node` and its parents."""
        path = []
        while node is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        free_rows = set(range(ROWS)) - {request.row for request in self.requests}
        tokens = [token for part in path for token in part.tokens]
        request = Request(min(free_rows), len(tokens), path[-1] if path else None, tokens, len(tokens))
        if path:
            path[-1].users += 1
            self.table[request.row, : len(tokens)] = torch.cat([part.slots for part in path]).int()
        self.requests.append(request)
        return request

    def write(self, request: Request, first: int, tokens: list[int]) -> None:
        """What a forward does: new content in the columns from `first` on."""
        slots = self.table[request.row, first : first + len(tokens)].long()
        for buffer in self.buffers:
            buffer[slots] = as_rows(buffer, tokens)

    def commit(self, request: Request, n: int) -> None:
        """A forward over `n` new tokens whose slots are allocated."""
        new = [next(self.token) for _ in range(n)]
        self.write(request, len(request.tokens), new)
        request.tokens += new

    def draft(self, request: Request, tree_tokens: int) -> None:
        request.tree = [next(self.token) for _ in range(tree_tokens)]
        self.write(request, len(request.tokens), request.tree)

    def accept(self, request: Request, path: list[int]) -> None:
        """Move the rows of the tree's nodes in `path` behind the committed ones, last pair first."""
        slots = self.table[request.row, len(request.tokens) : request.allocated].long()
        source = torch.tensor(path[::-1])
        move_rows(self.buffers, slots[source], slots[torch.arange(len(path)).flip(0)])
        request.tokens += [request.tree[node] for node in path]
        request.tree = []

    # what a server gives back

    def finish(self, request: Request, *, keep: bool) -> None:
        """Free all the request's own slots, with the tail of its reservation; with `keep`, cache whole pages."""
        kept = len(request.tokens) // self.page * self.page if keep else request.shared
        own = self.table[request.row, request.shared : kept].long()
        if kept > request.shared:
            self.nodes.append(Node(own, request.tokens[request.shared : kept], request.node))
        elif request.node is not None:
            request.node.users -= 1
        self.allocator.free(self.table[request.row, kept : request.allocated].long())
        self.requests.remove(request)

    def split(self, node: Node, length: int) -> Node:
        """Cut a node after `length` tokens, whole pages; returns the first part, which becomes the other's parent."""
        first = Node(node.slots[:length].clone(), node.tokens[:length], node.parent, users=1)
        node.slots, node.tokens, node.parent = node.slots[length:].clone(), node.tokens[length:], first
        self.nodes.append(first)
        return first

    def evict(self, node: Node) -> None:
        self.allocator.free(node.slots)
        if node.parent is not None:
            node.parent.users -= 1
        self.nodes.remove(node)

    def reset(self) -> None:
        self.requests, self.nodes = [], []
        self.allocator.clear()

    def compact(self, budget: int) -> None:
        before = self.runs()
        compact(self.allocator, self.holders(), self.buffers, budget)
        assert all(new <= old for new, old in zip(self.runs(), before, strict=True)), "compact scattered a holder"

    # what must hold

    def holders(self) -> list[torch.Tensor]:
        return [self.table[r.row, : r.allocated] for r in self.requests] + [node.slots for node in self.nodes]

    def runs(self) -> list[int]:
        nothing = torch.empty(0).numpy()
        return [measure([holder.numpy()], nothing).runs for holder in self.holders()]

    def owned_pages(self) -> list[int]:
        own = [self.table[r.row, r.shared : r.allocated] for r in self.requests] + [node.slots for node in self.nodes]
        return [page for slots in own for page in (slots[:: self.page] // self.page).tolist()]

    def check(self) -> None:
        """Every invariant, each with its name in the message."""
        owned, free = self.owned_pages(), free_pages(self.allocator).tolist()
        assert len(set(owned)) == len(owned), f"owned twice: {repeated(owned)}"
        assert 0 not in owned and 0 not in free, "slot 0 is not to be handed out"
        assert len(set(free)) == len(free), f"free twice: {repeated(free)}"
        assert not set(owned) & set(free), f"owned and free: {sorted(set(owned) & set(free))}"
        assert len(owned) + len(free) == self.pages, f"free {len(free)} + owned {len(owned)} is not {self.pages}"
        assert self.allocator.available_size() == len(free) * self.page, "available_size is not what is free"
        for request in self.requests:
            self.check_content(self.table[request.row], request.tokens + request.tree)
        for node in self.nodes:
            self.check_content(node.slots, node.tokens)
        assert waiting_frees(self.allocator) is None, "a free group is open"

    def check_content(self, slots: torch.Tensor, tokens: list[int]) -> None:
        for buffer in self.buffers:
            read = buffer[slots[: len(tokens)].long()]
            assert torch.equal(read, as_rows(buffer, tokens)), f"a live token reads another's row: {tokens}, {read}"


def as_rows(buffer: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """The content of each token's row in `buffer`."""
    rows = torch.tensor(tokens, dtype=buffer.dtype)
    return rows if buffer.ndim == 1 else rows[:, None] * torch.tensor([1, -1])


def launches_first(allocator) -> bool:
    """Stock 0.5.16 with pages launches its kernel on a list that may be too short, and only then counts."""
    return hasattr(allocator, "backup_state") and allocator.page_size > 1 and not isinstance(allocator, Ordered)


def repeated(pages: list[int]) -> list[int]:
    return sorted({page for page in pages if pages.count(page) > 1})
