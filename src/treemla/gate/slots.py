"""What ordering the free list costs and brings: stock and ordered allocators of the installed SGLang, on the CPU.

Cost is processor time a call at a million slots; contiguity is the mean run length of what live requests hold, over the
steps of a made-up server. The kernel's time on such slots is another question, for a GPU.
"""

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treemla.gate.exits import Exit, InvalidEnvironment
from treemla.gate.findings import Finding, Findings
from treemla.gate.report import table
from treemla.kv import measure
from treemla.sglang.allocator import compact, free_pages, ordered_allocator_classes
from treemla.sglang.slots import SLOTS_A_CALL

COST_SLOTS = 1_000_000
CALL_SIZES = (1, 16, 256)  # slots a call: one decode token, a reservation, a chunk
PAIR_SIZE = 4096
CHURN_SLOTS = 65_536
BATCHES = (4, 32)  # a pool that the prefix cache fills, and one that requests fill
DRAFTED = 8  # tree tokens: a step keeps 2 * DRAFTED slots behind the committed tokens
SAMPLE_STEPS = 50
BREAK_STEPS = 500


def run(picture: Path, steps: int) -> Findings:
    """Print both tables; draw the churn. A finding a server that was made up."""
    torch.set_num_threads(1)
    kinds = allocator_kinds()
    print(f"a call at {COST_SLOTS:,} slots, microseconds")
    print(table(["call", *kinds, "ordered / stock"], [cost_row(kinds, n) for n in CALL_SIZES]))
    print(f"free and allocate {PAIR_SIZE:,} slots, half of the pool held, microseconds")
    print(table(["allocator", "free", "allocate", "longest allocate"], pair_rows(kinds, PAIR_SIZE)))
    histories = {
        (batch, name): churn(make(CHURN_SLOTS), batch=batch, steps=steps, seed=1)
        for batch, (name, make) in itertools.product(
            BATCHES, (kinds | {"sorted at every call": sorted_always()}).items()
        )
    }
    headers = ["requests", "allocator", "mean run", "runs a request", "mean run, cached", "largest free run"]
    headers += ["call us", "longest us"]
    print(f"after {steps:,} steps of churn at {CHURN_SLOTS:,} slots")
    print(table(headers, [history.row(batch, name) for (batch, name), history in histories.items()]))
    with_breaks = {
        (batch, name): churn(
            make(CHURN_SLOTS), batch=batch, steps=steps, seed=1, break_steps=BREAK_STEPS, compacts=compacts
        )
        for batch in BATCHES
        for name, make, compacts in tiers(kinds)
    }
    print(f"the same with a break after every {BREAK_STEPS} steps, in which all requests finish and the cache stays")
    print(table(headers, [history.row(batch, name) for (batch, name), history in with_breaks.items()]))
    draw_if_possible(with_breaks, picture)
    found = []
    for kind, made in (("", histories), (", with breaks", with_breaks)):
        for (batch, name), history in made.items():
            cells = dict(zip(headers[2:], history.row(batch, name)[2:], strict=True))
            found.append(Finding(f"{batch} requests, {name}{kind}", "measured", Exit.PASS, "", cells))
    return Findings("bench-slots", tuple(found))


def allocator_kinds() -> dict[str, Callable[[int], Any]]:
    """Makers of the page_size 1 allocators, by name; each takes the number of slots."""
    try:
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator as Stock
    except ImportError as error:
        raise InvalidEnvironment(f"no SGLang allocator to measure ({error}); `nox -s unit` installs one") from error
    return {"stock": maker(Stock), "ordered": maker(ordered_allocator_classes()[0])}


def tiers(kinds: dict[str, Callable[[int], Any]]) -> list[tuple[str, Callable[[int], Any], bool]]:
    """(name, maker, whether breaks are used to compact)."""
    return [("stock", kinds["stock"], False), ("Tier 0", kinds["ordered"], False), ("Tier 1", kinds["ordered"], True)]


def maker(kind: type[Any]) -> Callable[[int], Any]:
    return lambda slots: kind(slots, torch.bfloat16, "cpu", None, need_sort=False)


def sorted_always() -> Callable[[int], Any]:
    """For comparison: the list as ordered as it can be, at any price."""

    def alloc(allocator: Any, need_size: int) -> torch.Tensor | None:
        allocator.merge_and_sort_free()
        slots: torch.Tensor | None = ordered.alloc(allocator, need_size)
        return slots

    ordered = ordered_allocator_classes()[0]
    return maker(type("SortedAtEveryCall", (ordered,), {"alloc": alloc}))


def cost_row(kinds: dict[str, Callable[[int], Any]], size: int) -> list[str]:
    """Allocation alone, from a fresh list."""
    calls = min(2000, COST_SLOTS // size)

    def timed(make: Callable[[int], Any]) -> float:
        allocator = make(COST_SLOTS)
        return seconds_a_call(lambda: allocator.alloc(size), calls)

    return [f"alloc({size})", *ratio_of_medians(kinds, timed)]


def pair_rows(kinds: dict[str, Callable[[int], Any]], size: int) -> list[list[str]]:
    """Free a random holding and allocate as much, on a shuffled list, for as long as two sorts take to come."""
    rows = []
    for name, make in kinds.items():
        random = np.random.default_rng(0)
        allocator = make(COST_SLOTS)
        held = [allocator.alloc(size) for _ in range(COST_SLOTS // size)]
        for i in random.permutation(len(held))[::2]:
            allocator.free(held[i])
            held[i] = None
        held = [slots for slots in held if slots is not None]
        frees_us, allocations_us = [], []
        for _ in range(2 * COST_SLOTS // size):
            i = random.integers(len(held))
            begin = time.thread_time()
            allocator.free(held[i])
            freed = time.thread_time()
            held[i] = allocator.alloc(size)
            frees_us.append(1e6 * (freed - begin))
            allocations_us.append(1e6 * (time.thread_time() - freed))
        figures = (statistics.mean(frees_us), statistics.mean(allocations_us), max(allocations_us))
        rows.append([name, *(f"{us:,.1f}" for us in figures)])
    return rows


def seconds_a_call(call: Callable[[], object], calls: int) -> float:
    """Of this thread's processor time, which other load on the machine hardly changes."""
    begin = time.thread_time()
    for _ in range(calls):
        call()
    return (time.thread_time() - begin) / calls


def ratio_of_medians(
    kinds: dict[str, Callable[[int], Any]], timed: Callable[[Callable[[int], Any]], float], rounds: int = 41
) -> list[str]:
    """Median microseconds of each kind, rounds interleaved, and the second over the first."""
    samples: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, make in kinds.items():
            samples[name].append(timed(make))
    stock, ordered = (1e6 * statistics.median(samples[name]) for name in kinds)
    return [f"{stock:.2f}", f"{ordered:.2f}", f"{ordered / stock:.2f}"]


@dataclass(frozen=True)
class History:
    """One allocator through the churn; `mean_runs` of live requests every SAMPLE_STEPS steps, the rest at the end."""

    mean_runs: list[float]
    runs_per_request: float
    cached_run: float
    largest_free_share: float
    call_us: float
    longest_us: float

    def row(self, batch: int, name: str) -> list[str]:
        late = statistics.mean(self.mean_runs[len(self.mean_runs) // 2 :])
        runs = [f"{late:.1f}", f"{self.runs_per_request:.0f}", f"{self.cached_run:.1f}"]
        figures = [*runs, f"{self.largest_free_share:.1%}"]
        return [str(batch), name, *figures, f"{self.call_us:.0f}", f"{self.longest_us:,.0f}"]


class Server:
    """Requests of one batch that draft and finish at random, and a prefix cache that gives way, oldest first."""

    def __init__(self, allocator: Any) -> None:
        self.allocator = allocator
        self.cache: deque[torch.Tensor] = deque()
        self.calls_us: list[float] = []

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """One call for the whole batch, as SGLang makes it, and evictions until it can be served."""
        while self.allocator.available_size() < sum(sizes):
            self.free(self.cache.popleft())
        slots = self.timed(lambda: self.allocator.alloc(sum(sizes)))
        return list(slots.split(list(sizes)))

    def free(self, slots: torch.Tensor) -> None:
        self.timed(lambda: self.allocator.free(slots))

    def compact(self) -> None:
        """What Tier 1 does in a break, until nothing is left to do. No rows are moved: this counts runs."""
        self.cache = deque(slots.clone() for slots in self.cache)  # as a prefix tree keeps them
        while len(compact(self.allocator, list(self.cache), [torch.zeros(CHURN_SLOTS + 1)], SLOTS_A_CALL)):
            pass

    def timed(self, call: Callable[[], Any]) -> Any:
        begin = time.thread_time()
        answer = call()
        self.calls_us.append(1e6 * (time.thread_time() - begin))
        return answer


def churn(
    allocator: Any, *, batch: int, steps: int, seed: int, break_steps: int | None = None, compacts: bool = False
) -> History:
    """Prompts of log-normal length (median 665), outputs of up to 600 tokens in steps that accept 1 to 5 tokens.

    Half of the finished requests leave their prompt in the prefix cache. Same seed, same sizes for every allocator.
    break_steps: after so many steps all requests finish; with `compacts` the cache is then compacted.
    """
    random = np.random.default_rng(seed)
    server = Server(allocator)
    requests: list[torch.Tensor] = []
    left, prompt = np.empty(0, int), np.empty(0, int)
    mean_runs: list[float] = []
    for step in range(steps):
        while len(requests) < batch:
            size = int(min(random.lognormal(6.5, 1.0), CHURN_SLOTS / (2 * batch))) + 1
            requests += server.take([size + 2 * DRAFTED])
            left, prompt = np.append(left, random.integers(20, 600)), np.append(prompt, size)
        accepted = random.integers(1, 6, len(requests))
        more = server.take(accepted.tolist())
        requests = [torch.cat(pair) for pair in zip(requests, more, strict=True)]
        left = left - accepted
        on_break = break_steps is not None and step % break_steps == break_steps // 2 + 1
        left = np.zeros_like(left) if on_break else left
        for i in np.flatnonzero(left <= 0)[::-1]:
            slots = requests.pop(i)
            kept = int(prompt[i]) if random.random() < 0.5 else 0
            server.free(slots[kept:])
            if kept:
                server.cache.append(slots[:kept])
        left, prompt = left[left > 0], prompt[left > 0]
        if on_break and compacts:
            server.compact()
        if step % SAMPLE_STEPS == 0:
            mean_runs.append(measure(as_arrays(requests), np.empty(0, np.int64)).mean_run)
    free = free_pages(allocator).numpy()
    last, cached = (measure(as_arrays(held), free) for held in (requests, server.cache))
    calls = statistics.mean(server.calls_us), max(server.calls_us)
    return History(mean_runs, last.runs_per_request, cached.mean_run, last.largest_free_share, *calls)


def as_arrays(requests: Iterable[torch.Tensor]) -> list[np.ndarray]:
    return [slots.numpy() for slots in requests]


def draw_if_possible(histories: dict[tuple[int, str], History], path: Path) -> None:
    """Write `path` where matplotlib is installed; say so either way."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    mpl.use("Agg")
    draw(histories, path)
    print(f"picture: {path}")


def draw(histories: dict[tuple[int, str], History], path: Path) -> None:
    """Mean run length of live requests over the steps, a panel for each batch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, len(BATCHES))
    for axes, batch in zip(panels, BATCHES, strict=True):
        for (of, name), history in histories.items():
            if of == batch:
                steps = SAMPLE_STEPS * np.arange(len(history.mean_runs))
                axes.plot(steps, history.mean_runs, label=name, linewidth=1.2)
        axes.set(title=f"{batch} requests at once, {CHURN_SLOTS:,} slots", xlabel="decode steps", yscale="log")
        axes.set_ylabel("mean run of live slots")
        axes.grid(alpha=0.3, which="both")
    panels[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
