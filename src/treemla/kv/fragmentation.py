"""How scattered a pool is. Slots are 1-D integer arrays in the order in which a kernel reads them.

A *run* is a maximal stretch in which every slot is the one before it plus 1: what one contiguous copy can fetch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def run_starts(slots: np.ndarray) -> np.ndarray:
    """Positions at which a run begins; int64 [runs], empty for no slots."""
    if len(slots) == 0:
        return np.empty(0, np.int64)
    return np.concatenate(([0], 1 + np.flatnonzero(np.diff(slots) != 1)))


def run_lengths(slots: np.ndarray) -> np.ndarray:
    """Length of each run in slots; int64 [runs]."""
    return np.diff(run_starts(slots), append=len(slots))


def largest_run_share(free: np.ndarray) -> float:
    """Share of the free slots, in any order, that their largest run holds; 1 where nothing is free."""
    return float(run_lengths(np.sort(free)).max() / len(free)) if len(free) else 1.0


def copies(slots: np.ndarray, tile_rows: int) -> int:
    """Contiguous copies that fetch `slots` in tiles of `tile_rows`: runs, cut where a tile ends."""
    tiles = np.arange(0, len(slots), tile_rows)
    return len(np.union1d(run_starts(slots), tiles))


@dataclass(frozen=True)
class Fragmentation:
    """Figures of one moment. `rows_per_copy` is the mean over all copies that fetch every request once in tiles."""

    tokens: int
    runs: int
    mean_run: float  # slots; 0 where nothing is live
    runs_per_request: float
    largest_free_share: float
    rows_per_copy: float


def measure(requests: Sequence[np.ndarray], free: np.ndarray, *, tile_rows: int = 64) -> Fragmentation:
    """Fragmentation of `requests`, each its slots in token order, and of the free slots in any order."""
    tokens = sum(len(slots) for slots in requests)
    runs = sum(len(run_starts(slots)) for slots in requests)
    fetches = sum(copies(slots, tile_rows) for slots in requests)
    return Fragmentation(
        tokens=tokens,
        runs=runs,
        mean_run=tokens / runs if runs else 0.0,
        runs_per_request=runs / len(requests) if requests else 0.0,
        largest_free_share=largest_run_share(free),
        rows_per_copy=tokens / fetches if fetches else 0.0,
    )
