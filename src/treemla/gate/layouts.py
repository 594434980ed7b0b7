"""How much of verify's time the order of slots costs: the same cases with slots in longer and shorter runs."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from treemla.gate import fingerprint, measure, schema
from treemla.gate.bench import WrongResult, verify_layers
from treemla.gate.cases import VerifyCase
from treemla.gate.findings import Findings
from treemla.gate.inputs import make_inputs
from treemla.gate.measured import measured
from treemla.gate.report import table

CASES = tuple(VerifyCase((context,), 9, 8) for context in (4096, 16384, 65536))


def runs_of(random: np.random.Generator, pages: int, *, mean: float) -> np.ndarray:
    """All pages, cut into runs of geometric lengths (mean 1: single pages), the runs shuffled.

    Runs that lie beside each other by chance join, so with short ones the mean is a little more.
    """
    ends = 1 + np.flatnonzero(random.random(pages - 1) < 1 / mean)
    runs = np.split(np.arange(pages), ends)
    return np.concatenate([runs[i] for i in random.permutation(len(runs))])


def whole_runs(random: np.random.Generator, pages: int, *, length: int) -> np.ndarray:
    """All pages in runs of `length`, shuffled; what is left over comes last."""
    whole = pages // length
    runs = random.permutation(whole)[:, None] * length + np.arange(length)
    return np.concatenate([runs.ravel(), np.arange(whole * length, pages)])


def one_run(_: np.random.Generator, pages: int) -> np.ndarray:
    return np.arange(pages)


# Means of the churn with 32 requests and breaks (docs/fragmentation.md): live requests under stock and Tier 0, the cache
# under Tier 1.
LAYOUTS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "one": one_run,
    "runs_64": partial(whole_runs, length=64),
    "runs_16": partial(whole_runs, length=16),
    "tier1": partial(runs_of, mean=37.4),
    "tier0": partial(runs_of, mean=1.7),
    "stock": partial(runs_of, mean=1.1),
    "random": partial(runs_of, mean=1),
}


def bench_layouts(out: Path, commit: str | None) -> Findings:
    """Metrics verify_LAYOUT, microseconds a layer, taken in turns. A result that differs from float64 is not timed."""
    where = fingerprint.collect(commit)
    made: list[schema.Measurement] = []
    for case in CASES:
        print(f"{case.id} ...", flush=True)
        try:
            samples = measure_case(case)
        except WrongResult as error:
            return measured("bench-layouts", made, [str(error)])
        made += [schema.Measurement.of(case.id, f"verify_{name}", "us", us, where) for name, us in samples.items()]
        schema.dump(out, made)
        torch.cuda.empty_cache()
    print(f"\n{show(made)}\n\n{where.gpu}, driver {where.driver}, treemla {where.treemla}; raw data: {out}")
    return measured("bench-layouts", made)


def measure_case(case: VerifyCase, rounds: int = 5) -> dict[str, list[float]]:
    """Samples by layout. Each layout's graph stays, and their replays take turns, so that clocks drift for all alike."""
    device = torch.device("cuda", torch.cuda.current_device())
    graphs = {}
    for name, order in LAYOUTS.items():
        inputs = make_inputs(case, device, order_pages=order)
        graphs[name] = measure.LayerGraph(verify_layers(inputs, inputs.kv_layers))
    samples: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    for _ in range(rounds):
        for name, graph in graphs.items():
            samples[name] += graph.sample_us(5)
    return samples


def show(made: list[schema.Measurement]) -> str:
    """A line a case; below each time what it is over that of one run."""
    took = {(m.case, m.metric): m.value for m in made}
    rows = []
    for case in dict.fromkeys(m.case for m in made):
        one = took[case, "verify_one"]
        rows.append([case, *(f"{took[case, f'verify_{name}']:.1f}" for name in LAYOUTS)])
        rows.append(["over one run", *(f"{took[case, f'verify_{name}'] / one - 1:+.1%}" for name in LAYOUTS)])
    return table(["case, us", *LAYOUTS], rows)
