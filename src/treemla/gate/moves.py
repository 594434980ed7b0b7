"""What moving rows costs on this GPU, beside torch's gather and scatter and a plain copy of as many bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from treemla.gate import fingerprint, measure, schema
from treemla.gate.findings import Findings
from treemla.gate.measured import measured
from treemla.gate.report import table
from treemla.kv import move_rows


@dataclass(frozen=True)
class MoveCase:
    """A plan of `moves` from scattered slots into one free run, or a batch's accepted paths of 9 tokens each."""

    moves: int
    layers: int
    row_bytes: int
    accepted: bool = False

    @property
    def id(self) -> str:
        """move-n10000-l60-b1152"""
        kind = "accept" if self.accepted else "move"
        return f"{kind}-n{self.moves}-l{self.layers}-b{self.row_bytes}"

    @property
    def copied_bytes(self) -> int:
        return self.moves * self.layers * self.row_bytes

    def slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Source and destination, int64 [moves], below 4 * moves."""
        random = torch.Generator().manual_seed(self.moves)
        if not self.accepted:
            scattered = 1 + torch.randperm(2 * self.moves, generator=random)[: self.moves]
            return scattered, torch.arange(2 * self.moves + 1, 3 * self.moves + 1)
        first = torch.arange(0, 2 * self.moves, 18)[:, None]  # windows of 18 tree tokens, of which every other is taken
        return (first + 2 * torch.arange(9)).flatten(), (first + torch.arange(9)).flatten()


CASES = (
    MoveCase(10_000, 60, 1152),
    MoveCase(10_000, 60, 576),
    MoveCase(1_000, 60, 1152),
    MoveCase(9, 60, 1152, accepted=True),
    MoveCase(288, 60, 1152, accepted=True),
)


def bench_moves(cases: Sequence[MoveCase], out: Path, commit: str | None) -> Findings:
    """Metrics move_rows, torch and copy: microseconds for all layers. A move that came out wrong is not timed."""
    where = fingerprint.collect(commit)
    made: list[schema.Measurement] = []
    for case in cases:
        print(f"{case.id} ...", flush=True)
        if not (samples := measure_case(case)):
            return measured("bench-moves", made, [f"{case.id}: rows are not where they should be"])
        made += [schema.Measurement.of(case.id, metric, "us", taken, where) for metric, taken in samples.items()]
        schema.dump(out, made)
    print(f"\n{show(cases, made)}\n\n{where.gpu}, driver {where.driver}, treemla {where.treemla}; raw data: {out}")
    return measured("bench-moves", made)


def measure_case(case: MoveCase) -> dict[str, list[float]]:
    """Samples by metric; none where the result is wrong."""
    device = torch.device("cuda", torch.cuda.current_device())
    source, destination = (slots.to(device) for slots in case.slots())
    shape = 4 * case.moves, case.row_bytes
    buffers = [torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for _ in range(case.layers)]
    want = [buffer[source] for buffer in buffers]
    move = partial(move_rows, buffers, source, destination, disjoint=not case.accepted)
    move()
    if not all(torch.equal(buffer[destination], rows) for buffer, rows in zip(buffers, want, strict=True)):
        return {}
    samples = {"move_rows": measure.time_layers([move])}
    samples["torch"] = measure.time_layers([partial(gather_and_scatter, buffers, source, destination)])
    read, written = (torch.zeros(case.copied_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    samples["copy"] = measure.time_layers([partial(written.copy_, read)])
    return samples


def gather_and_scatter(buffers: Sequence[torch.Tensor], source: torch.Tensor, destination: torch.Tensor) -> None:
    """What SGLang's `move_kv_cache` does in each layer."""
    for buffer in buffers:
        buffer[destination] = buffer[source]


def show(cases: Sequence[MoveCase], made: Sequence[schema.Measurement]) -> str:
    """A line a case; bytes are those read and those written."""
    took = {(m.case, m.metric): m.value for m in made}
    rows = []
    for case in cases:
        us, torch_us, copy_us = (took[case.id, metric] for metric in ("move_rows", "torch", "copy"))
        tb_s = 2 * case.copied_bytes / us / 1e6
        rows.append([case.id, f"{us:.1f}", f"{tb_s:.2f}", f"{torch_us:.1f}", f"{copy_us:.1f}", f"{copy_us / us:.0%}"])
    return table(["case", "move_rows us", "TB/s", "torch us", "copy us", "of copy bandwidth"], rows)
