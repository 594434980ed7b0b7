"""Tier 0: SGLang's slot allocators with an ordered free list, so that what is handed out is contiguous.

Stock SGLang appends freed slots to the list that it hands out from, unless `need_sort` is set, which it is for
prefill-decode disaggregation alone. Requests finish in any order, so the list is soon a shuffle. With `need_sort`,
freed slots wait beside the list, and both are sorted together when the list runs short. One sort then costs what was
handed out since the last sort or is handed out now, plus what was freed since, times a logarithm: amortised constant
a slot. Sorting earlier costs more and fragments more, because freed slots have had less time to meet their neighbours
(docs/fragmentation.md). So Tier 0 turns `need_sort` on, and never sorts for a request that fails all the same.

Sizes are known on the host, so none of this waits for the GPU; lists are rebound and never sorted in place, because
what was handed out is a view of them. `debug` classes check every free and do wait.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from treemla.checks import expect
from treemla.kv.compaction import Moves, plan_moves
from treemla.kv.relocation import relocate

if TYPE_CHECKING:
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator as Stock
else:
    Stock = object  # mixed into whichever classes the installed SGLang has


@functools.cache
def ordered_allocator_classes(*, debug: bool = False) -> tuple[type[Any], type[Any]]:
    """Ordered TokenToKVPoolAllocator and PagedTokenToKVPoolAllocator of the installed SGLang: same arguments, same
    slot counts, None at the same moments. With `debug`, a free that is wrong is a ValueError that changes nothing.
    """
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    checks = (CheckedFrees,) if debug else ()
    stock_token, stock_paged = map(stock_class, (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator))
    token = type("OrderedTokenToKVPoolAllocator", (*checks, OrderedToken, stock_token), {})
    paged = type("OrderedPagedTokenToKVPoolAllocator", (*checks, OrderedPaged, stock_paged), {})
    return token, paged


def stock_class(installed: type[Any]) -> type[Any]:
    """SGLang's class, where its name already stands for ours (treemla.sglang.slots)."""
    return next(kind for kind in installed.__mro__ if not issubclass(kind, Ordered))


class Ordered(Stock):  # type: ignore[misc] # sglang is untyped
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.need_sort = True


class OrderedToken(Ordered):
    free_pages: torch.Tensor

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Written out, because a call of stock's would cost a fifth of what stock costs."""
        if need_size > len(self.free_pages):
            if need_size > self.available_size():
                return None
            self.merge_and_sort_free()
        slots = self.free_pages[:need_size]
        self.free_pages = self.free_pages[need_size:]
        return slots


class OrderedPaged(Ordered):
    """In 0.5.16 stock launches its kernel before it knows that there are enough pages, and reads past the list."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        pages = need_size // self.page_size
        if pages > len(self.free_pages) and pages > free_pages_count(self):
            return None
        slots: torch.Tensor | None = super().alloc(need_size)
        return slots

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        at_most = extend_num_tokens // self.page_size + len(prefix_lens) + 1
        if at_most > free_pages_count(self):
            if num_new_pages is None:
                num_new_pages = new_pages(self, seq_lens_cpu, prefix_lens=prefix_lens_cpu)
            if num_new_pages > free_pages_count(self):
                return None
        slots: torch.Tensor | None = super().alloc_extend(
            prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages
        )
        return slots

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        pages = free_pages_count(self)
        if len(seq_lens) > pages and new_pages(self, seq_lens_cpu, decode=True) > pages:
            return None
        slots: torch.Tensor | None = super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)
        return slots


class CheckedFrees(Stock):  # type: ignore[misc] # as above
    """`protected`, where set, returns the slots that nobody may free now, such as those a radix tree has locked."""

    protected: Callable[[], torch.Tensor] | None = None

    def free(self, free_index: torch.Tensor) -> None:
        refuse(self, free_index, free_index // self.page_size)
        super().free(free_index)

    def free_page_ids(self, page_ids: torch.Tensor) -> None:
        refuse(self, page_ids * self.page_size, page_ids)
        super().free_page_ids(page_ids)

    def free_group_begin(self) -> None:
        waiting = waiting_frees(self)
        lost = [] if waiting is None else waiting.tolist()
        expect(waiting is None, "free_group_begin", "no open group, whose slots would be lost", lost)
        super().free_group_begin()


def refuse(allocator: Any, slots: torch.Tensor, pages: torch.Tensor) -> None:
    """ValueError naming those of `slots`, which lie in `pages`, that must not be freed now."""
    last = allocator.size // allocator.page_size
    waiting = waiting_frees(allocator)
    _, index, count = torch.unique(slots, return_inverse=True, return_counts=True)
    faults = {
        "padding": pages == 0,
        "foreign": (pages < 0) | (pages > last),
        "already free": torch.isin(pages, free_pages(allocator)),
        "twice in one call": count[index] > 1,
    }
    if waiting is not None:
        faults["already freed in this group"] = torch.isin(slots, waiting)
    if allocator.protected is not None:
        faults["protected"] = torch.isin(slots, allocator.protected())
    found = {fault: torch.unique(slots[wrong]).tolist() for fault, wrong in faults.items() if bool(wrong.any())}
    expect(not found, "free_index", "slots in use, each once", found)


def new_pages(allocator: Any, seq_lens_cpu: torch.Tensor, **which: Any) -> int:
    from sglang.srt.utils import get_num_new_pages

    return int(get_num_new_pages(seq_lens=seq_lens_cpu, page_size=allocator.page_size, **which))


def free_pages_count(allocator: Any) -> int:
    return int(allocator.available_size()) // int(allocator.page_size)


def free_pages(allocator: Any) -> torch.Tensor:
    """All free pages (slots where page_size is 1) of a stock or an ordered allocator; int64, in any order."""
    return torch.cat(free_list(allocator))


def free_list(allocator: Any) -> tuple[torch.Tensor, ...]:
    """The tensors that make up the free list. Every allocation and every free replaces one or adds one."""
    beside = getattr(allocator, "staged_pages", None)  # 0.5.23, paged
    return (allocator.free_pages, *([allocator.release_pages] if beside is None else beside))


def waiting_frees(allocator: Any) -> torch.Tensor | None:
    """Slots freed in the open group; None where no group is open."""
    group = allocator.free_group
    if getattr(allocator, "is_not_in_free_group", group is None):  # 0.5.16 has the flag; its closed group keeps a list
        return None
    pages = torch.cat([allocator.free_pages[:0], *getattr(allocator, "free_page_ids_group", ())])
    within = torch.arange(allocator.page_size, device=pages.device)
    return torch.cat([*group, (pages[:, None] * allocator.page_size + within).flatten()])


def adopt_free_pages(allocator: Any, pages: torch.Tensor) -> None:
    """Make `pages`, ascending, the allocator's free list, and nothing else free."""
    nothing = pages[:0].clone()
    if hasattr(allocator, "staged_pages"):
        allocator.free_pages, allocator.staged_pages, allocator.num_staged_pages = pages, [], 0
    else:
        allocator.free_pages, allocator.release_pages = pages, nothing


def compact(
    allocator: Any,
    holders: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
    budget: int,
    *,
    reads: Sequence[np.ndarray] | None = None,
    dry_run: bool = False,
) -> Moves:
    """Move at most `budget` pages of what `holders` hold into runs, and rewrite holders and free list.

    holders: 1-D slots in token order, views that are rewritten in place; together they hold every slot that is not
             free, and each starts on a page. buffers: as in `relocate`.
    reads:   the same slots in the order in which requests read them, which is what shall lie together; each starts on
             a page. None: as the holders hold them.
    Only where no request is in flight: it copies holders to the host. Returns the moves in slots; with `dry_run` that
    is all it does.
    """
    expect(waiting_frees(allocator) is None, "allocator", "no open free group", "an open one")
    size = allocator.page_size
    in_order = [holder.cpu().long().numpy() for holder in holders] if reads is None else reads
    free = free_pages(allocator)
    moves = plan_moves([slots[::size] // size for slots in in_order], free.cpu().numpy(), budget)
    in_slots = moves.in_slots(size)
    if not dry_run:
        slots = (free[:, None] * size + torch.arange(size, device=free.device)).flatten()
        relocate(in_slots, buffers, holders, slots, lambda now: adopt_free_pages(allocator, now[::size] // size))
    return in_slots
