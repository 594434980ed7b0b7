"""The peers layer: every MLA kernel on this machine beside ours, as data, as a table and as a picture.

One process a peer, so that no library's set-up, allocator or crash touches another's; the same inputs in each. Their
timed replays alternate in short blocks, forwards and backwards, so that drift of the clocks meets all alike.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from treemla.gate import fingerprint, plot, roofline, schema
from treemla.gate.cases import VerifyCase
from treemla.gate.findings import Findings
from treemla.gate.measured import measured
from treemla.gate.peers import BY_METRIC, OURS, PEERS, Session
from treemla.gate.report import table
from treemla.gate.worker import Worker, WorkerFailed

BLOCKS = 6
BLOCK_REPLAYS = 4


def bench_peers(rows: Sequence[VerifyCase], out: Path, commit: str | None) -> Findings:
    """Measure the rows, write them to `out` as JSON lines, print the table, draw them beside `out`.

    A peer that cannot be imported is named and left out. A case that a peer gets wrong, refuses, crashes in or hangs in
    is left out and fails the run, once the rest is measured.
    """
    where = fingerprint.collect(commit)
    workers = {peer.metric: Worker(Session, peer.metric) for peer in PEERS}
    made: list[schema.Measurement] = []
    failures: list[str] = []
    try:
        wheres = {metric: replace(where, peer=version) for metric, version in loaded(workers).items()}
        for row in rows:
            print(f"{row.id} ...", flush=True)
            for case, metric, samples in measure_row(row, workers, failures, {(m.metric, m.case) for m in made}):
                made.append(schema.Measurement.of(case.id, metric, "us", samples, wheres[metric]))
            if made:
                schema.dump(out, made)  # after each row: a run that is cut short leaves what it has
    finally:
        for worker in workers.values():
            worker.stop()
    if OURS.metric not in wheres:
        failures.append("treemla itself could not be loaded")
    if made:
        print(f"\n{show(made, rows)}\n\n{where.gpu}, driver {where.driver}, torch {where.torch}; raw data: {out}")
        pictures = [out.with_suffix(suffix) for suffix in (".png", ".svg")]
        floors = roofline.floors_us(where.gpu, rows)
        plot.draw_if_possible(plot.draw_peers, figures(made, rows), floors, rows, where, pictures)
    return measured("peers", made, failures)


def loaded(workers: dict[str, Worker]) -> dict[str, str | None]:
    """{metric: version} of the peers that are there; the others are named and removed from `workers`."""
    versions = {}
    for metric in list(workers):
        try:
            workers[metric].answer()
            versions[metric] = workers[metric].ask("version")
            print(f"{BY_METRIC[metric].heading}: {versions[metric] or 'loaded'}", flush=True)
        except WorkerFailed as error:
            print(f"{BY_METRIC[metric].heading} is not measured: {error}", flush=True)
            workers.pop(metric).stop()
    return versions


def measure_row(
    row: VerifyCase, workers: dict[str, Worker], failures: list[str], known: set[tuple[str, str]]
) -> list[tuple[VerifyCase, str, list[float]]]:
    """(case, metric, microseconds a layer) of every peer that has something for this row and is not in `known`.

    All prepare side by side; then they take turns. Adds to `failures`; a peer whose process ended leaves `workers`.
    """
    cases = {
        metric: case for metric in workers if (case := BY_METRIC[metric].case(row)) and (metric, case.id) not in known
    }
    for metric, case in cases.items():
        workers[metric].send("prepare", case)
    problems = {metric: answer(metric, row, workers, failures) for metric in cases}
    failures += [f"{metric}: {problem}" for metric, problem in problems.items() if problem]
    samples: dict[str, list[float]] = {metric: [] for metric, problem in problems.items() if problem == ""}
    for block in range(BLOCKS):
        for metric in list(samples)[:: -1 if block % 2 else 1]:
            workers[metric].send("time", BLOCK_REPLAYS)
            taken = answer(metric, row, workers, failures)
            if taken is None:
                del samples[metric]
            else:
                samples[metric] += taken
    return [(cases[metric], metric, taken) for metric, taken in samples.items()]


def answer(metric: str, row: VerifyCase, workers: dict[str, Worker], failures: list[str]) -> Any:
    """What the peer's process answers; None where it failed, which is added to `failures`."""
    try:
        return workers[metric].answer()
    except WorkerFailed as error:
        failures.append(f"{metric}, {row.id}: {error}")
        if not workers[metric].alive:
            del workers[metric]
        return None


Figures = dict[str, dict[str, float]]  # {peer's heading: {row's id: microseconds a layer}}


def figures(made: Sequence[schema.Measurement], rows: Sequence[VerifyCase]) -> Figures:
    """What was measured, by peer and row; a peer with one page size stands in the rows of the others too."""
    values = {(m.metric, m.case): m.value for m in made}
    by_peer = {
        peer.heading: {
            row.id: values[peer.metric, case.id]
            for row in rows
            if (case := peer.case(row)) and (peer.metric, case.id) in values
        }
        for peer in PEERS
    }
    return {heading: times for heading, times in by_peer.items() if times}


def show(made: Sequence[schema.Measurement], rows: Sequence[VerifyCase]) -> str:
    """A line a row: microseconds a layer of every peer under its name and what it lacks, the floor, our share of it."""
    taken = figures(made, rows)
    floors = roofline.floors_us(made[0].where.gpu, rows)
    lines = []
    for row in rows:
        times = [times.get(row.id) for times in taken.values()]
        ours, floor = taken.get(OURS.heading, {}).get(row.id), floors.get(row.id)
        share = f"{100 * floor / ours:.0f}%" if floor and ours else "-"
        cells = [f"{us:.1f}" if us else "-" for us in [*times, floor]]
        lines.append([row.id, *cells, share])
    return table(["microseconds a layer", *taken, "floor", "treemla of roofline"], lines)
