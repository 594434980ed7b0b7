"""Where the time of a step goes, from a Kineto trace: kernels and microseconds by group, and the time no kernel ran.

A step is one CUDA graph launch and everything until the next one's first kernel.
"""

import gzip
import itertools
import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
GRAPH_LAUNCH = "cudaGraphLaunch"
GROUPS = {  # beginnings of kernel names; what has none of them is the rest
    "verify attention": ("treemla_verify", "treemla_combine", "_fwd_kernel", "_fwd_grouped_kernel"),
    "plan and pack": ("treemla_plan", "treemla_pack_mask"),
}
WARM_STEPS = 2  # the first steps of a trace pay for it
LISTED = 12


@dataclass(frozen=True)
class Work:
    name: str
    begin_us: float
    duration_us: float
    in_graph: bool
    launch: int


def summarise(path: Path) -> dict[str, Any]:
    """Medians over the steps of a trace. ValueError where it has too few of them."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    steps = split(json.loads(raw)["traceEvents"])
    if len(steps) <= WARM_STEPS:
        raise ValueError(f"{path.name}: {len(steps)} whole steps, expected more than {WARM_STEPS}")
    steps = steps[WARM_STEPS:]
    groups = {group: [total(step.work, group) for step in steps] for group in ("verify attention", "plan and pack",
                                                                              "rest of the graph", "outside it")}  # fmt: skip
    return {
        "steps": len(steps),
        "step_us": statistics.median(step.length_us for step in steps),
        "idle_us": statistics.median(step.length_us - busy_us(step.work) for step in steps),
        "groups": {
            group: {"kernels": statistics.median(n for n, _ in held), "us": statistics.median(us for _, us in held)}
            for group, held in groups.items()
        },
        "longest": longest(steps),
    }


@dataclass(frozen=True)
class Step:
    work: list[Work]
    length_us: float


def split(events: Iterable[dict[str, Any]]) -> list[Step]:
    """The whole steps, in order: the last launch has no end."""
    held = list(events)
    graphs = {e["args"]["correlation"] for e in held if e.get("name") == GRAPH_LAUNCH and "correlation" in e["args"]}
    work = [
        Work(e["name"], float(e["ts"]), float(e["dur"]), e["args"].get("correlation") in graphs,
             int(e["args"].get("correlation", -1)))
        for e in held if e.get("cat") in GPU
    ]  # fmt: skip
    work.sort(key=lambda w: w.begin_us)
    begins: dict[int, float] = {}
    for one in work:
        if one.in_graph:
            begins.setdefault(one.launch, one.begin_us)
    edges = sorted(begins.values())
    return [
        Step([w for w in work if begin <= w.begin_us < end], end - begin) for begin, end in itertools.pairwise(edges)
    ]


def group_of(work: Work) -> str:
    for group, names in GROUPS.items():
        if work.name.startswith(names):
            return group
    return "rest of the graph" if work.in_graph else "outside it"


def total(work: Iterable[Work], group: str) -> tuple[int, float]:
    held = [w for w in work if group_of(w) == group]
    return len(held), busy_us(held)


def busy_us(work: Iterable[Work]) -> float:
    """Time in which something ran: overlapping work counts once."""
    busy = until = 0.0
    for one in work:
        end = one.begin_us + one.duration_us
        busy += max(0.0, end - max(until, one.begin_us))
        until = max(until, end)
    return busy


def longest(steps: list[Step]) -> list[dict[str, Any]]:
    """The kernel names that take most of a step, with their group, count and microseconds a step."""
    held: dict[tuple[str, str], list[float]] = {}
    for step in steps:
        for work in step.work:
            held.setdefault((group_of(work), work.name[:100]), []).append(work.duration_us)
    order = sorted(held.items(), key=lambda item: -sum(item[1]))[:LISTED]
    return [
        {"group": group, "kernel": name, "count": len(us) / len(steps), "us": sum(us) / len(steps)}
        for (group, name), us in order
    ]
