"""The switch for ordered slots (Tier 0) and for compaction while idle (Tier 1), and the figures of both.

SGLang calls plug-ins without arguments, in every process, so the switch is an environment variable: TREEMLA_SLOTS is
unset, `ordered`, `dry-run` (ordered, and a line that says what compaction would move and gain) or `compact`.
"""

import enum
import functools
import importlib
import logging
import os
import time
from typing import Any

import numpy as np
import torch

from treemla.kv import Fragmentation, Moves, measure
from treemla.sglang import SWITCH, compat
from treemla.sglang.allocator import Ordered, compact, free_list, free_pages, ordered_allocator_classes
from treemla.sglang.holders import Holders, Unreachable

SLOTS_A_CALL = 8192  # moved in one idle turn, so that a request that comes meanwhile waits for little
ALLOCATORS = ("token.TokenToKVPoolAllocator", "paged.PagedTokenToKVPoolAllocator")
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
GAUGES = {
    "mean_run": "Mean length of runs of held KV slots, in slots.",
    "rows_per_copy": "Mean KV rows that one contiguous copy fetches, in tiles of 64.",
    "largest_free_share": "Share of the free KV slots in their longest run.",
}

logger = logging.getLogger(__name__)


class Mode(enum.Enum):
    ORDERED = "ordered"
    DRY_RUN = "dry-run"
    COMPACT = "compact"


@functools.cache
def install() -> None:
    """Register the hooks; `load_plugins` applies them. The switch's value is checked when a scheduler starts: of that
    SGLang does not swallow the errors.
    """
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    for name, ordered in zip(ALLOCATORS, ordered_allocator_classes(), strict=True):
        hooks.HookRegistry.register(f"sglang.srt.mem_cache.allocator.{name}", ordered, hooks.HookType.REPLACE)
    hooks.HookRegistry.register(f"{SCHEDULER}.__init__", start, hooks.HookType.AFTER)
    hooks.HookRegistry.register(f"{SCHEDULER}.on_idle", on_idle, hooks.HookType.BEFORE)


def expect_ordered(allocator: Any) -> None:
    """RuntimeError where the switch is set and SGLang did not take the allocator: it logs a failed hook, and goes on."""
    if os.environ.get(SWITCH) and not isinstance(allocator, Ordered):
        raise RuntimeError(f"{SWITCH}: expected an ordered allocator, got {type(allocator).__name__}; unset {SWITCH}")


def start(_: None, scheduler: Any, *_arguments: Any, **_options: Any) -> None:
    """After Scheduler.__init__: raise ValueError for what cannot be done, before anything is served."""
    value = os.environ.get(SWITCH)
    modes = [mode.value for mode in Mode]
    if value not in modes:
        raise ValueError(f"{SWITCH}: expected one of {', '.join(modes)}, got {value!r}")
    expect_ordered(scheduler.token_to_kv_pool_allocator)
    scheduler.treemla_slots = IdleSlots(scheduler, Mode(value))


def on_idle(scheduler: Any) -> None:
    """Before Scheduler.on_idle, whose own check of the pool then sees the result."""
    scheduler.treemla_slots.turn()


class IdleSlots:
    """What is done to one scheduler's slots while it has no request: figures after every change, and compaction.

    Decisions follow from the state of the slots alone and never from time, so that all tensor-parallel ranks, which
    go through the same turns with the same state, make the same moves.
    """

    def __init__(self, scheduler: Any, mode: Mode) -> None:
        self.scheduler, self.mode = scheduler, mode
        self.allocator = scheduler.token_to_kv_pool_allocator
        self.figures = Figures(scheduler)
        self.settled: tuple[Any, ...] = ()  # the free list when there was nothing left to do
        self.holders: Holders | None = None
        try:
            self.holders = Holders(scheduler)
        except ValueError as error:
            if mode is not Mode.ORDERED:
                drop = f"drop what holds them, or set {SWITCH}={Mode.ORDERED.value}"
                raise type(error)(f"{SWITCH}={mode.value}: {error}; {drop}") from error
            logger.info("treemla: ordered free list; no figures of held slots: %s", error)

    def turn(self) -> None:
        """One idle turn. A state that does not add up is left alone, and said once."""
        if self.holders is None or not self.scheduler.is_fully_idle() or self.is_settled():
            return
        synchronize(self.allocator.device)
        try:
            held = self.holders.slots()
        except Unreachable as error:
            self.holders = None
            self.figures.log(logging.ERROR, f"treemla: slots are left as they are from now on: {error}")
            return
        if held is not None and (self.is_incomplete(held) or self.improve(self.holders, held)):
            self.settled = free_list(self.allocator)

    def improve(self, holders: Holders, held: list[torch.Tensor]) -> bool:
        """Show the figures and, by the mode, compact. Whether nothing is left to do in this state."""
        begin = time.perf_counter()
        reads, free = holders.reads(), free_pages(self.allocator).cpu().numpy()
        before = measure(reads, free)
        if self.mode is Mode.ORDERED:
            self.figures.show(before)
            return True
        dry_run, budget = self.mode is Mode.DRY_RUN, SLOTS_A_CALL // self.allocator.page_size
        moves = compact(self.allocator, held, holders.buffers, budget, reads=reads, dry_run=dry_run)
        synchronize(self.allocator.device)
        after = predicted(reads, free, moves, self.allocator.page_size)
        if len(moves):
            did = "would move" if dry_run else "moved"
            took_ms = 1e3 * (time.perf_counter() - begin)
            line = f"treemla: {did} {len(moves)} of {before.tokens} held slots in {took_ms:.1f} ms: mean run"
            self.figures.log(logging.INFO, f"{line} {before.mean_run:.1f} -> {after.mean_run:.1f}")
        self.figures.show(before if dry_run else after, moved=0 if dry_run else len(moves))
        return dry_run or len(moves) == 0

    def is_incomplete(self, held: list[torch.Tensor]) -> bool:
        """Whether somebody else holds slots too: then nothing may move."""
        page = self.allocator.page_size
        pages = torch.cat([self.allocator.free_pages[:0], *(slots.long() // page for slots in held)]).unique()
        total, known = self.allocator.size // page, len(pages) + len(free_pages(self.allocator))
        if known != total:
            self.figures.log(
                logging.WARNING, f"treemla: nothing moved: {known} of {total} pages are free, cached or a session's"
            )
        return bool(known != total)

    def is_settled(self) -> bool:
        now = free_list(self.allocator)
        return len(now) == len(self.settled) and all(a is b for a, b in zip(now, self.settled, strict=True))


def predicted(reads: list[np.ndarray], free: np.ndarray, moves: Moves, page_size: int) -> Fragmentation:
    """Figures after `moves`."""
    last = max([0, *(int(slots.max()) for slots in reads), *moves.destination.tolist()])
    new_slot = moves.remap(last + 1)
    freed, taken = (slots[::page_size] // page_size for slots in (moves.source, moves.destination))
    return measure([new_slot[slots] for slots in reads], np.union1d(np.setdiff1d(free, taken), freed))


def synchronize(device: Any) -> None:
    """Idle streams still have an order: nothing of a forward may be left when rows move, nor the other way round."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


class Figures:
    """Fragmentation of held slots while idle, in SGLang's Prometheus metrics where they are on."""

    def __init__(self, scheduler: Any) -> None:
        self.speaks = compat.tensor_parallel_rank() == 0
        collector = getattr(scheduler, "metrics_collector", None)
        self.gauges: dict[str, Any] = {}
        if collector is not None:
            metrics = importlib.import_module("prometheus_client")  # SGLang has set its directory by now
            names, values = collector.labels.keys(), collector.labels.values()
            made = {"labelnames": names, "multiprocess_mode": "mostrecent"}
            for name, text in (GAUGES | {"moved_slots": "KV slots moved by the last compaction."}).items():
                self.gauges[name] = metrics.Gauge(f"treemla:{name}", text, **made).labels(*values)

    def show(self, now: Fragmentation, moved: int = 0) -> None:
        """Set the gauges; without metrics a line in the log."""
        if not self.gauges:
            shown = ", ".join(f"{name} {getattr(now, name):.3g}" for name in GAUGES)
            self.log(logging.INFO, f"treemla: {now.tokens} held slots: {shown}")
            return
        for name in GAUGES:
            self.gauges[name].set(getattr(now, name))
        self.gauges["moved_slots"].set(moved)

    def log(self, level: int, line: str) -> None:
        """Once a group of ranks: they all do the same."""
        if self.speaks:
            logger.log(level, line)
