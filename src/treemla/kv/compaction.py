"""Plans that move live slots together; `relocation` carries them out.

A plan moves whole runs of one holder into a run of free slots, where they become one run. Destinations are free and
sources are live, so no move reads what another one writes: the order of moves does not matter, and until the holders
are rewritten every live row is still where they say. Plans are host arithmetic on integers: the same holders and the
same free slots give the same plan on every tensor-parallel rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from treemla.checks import expect
from treemla.kv.fragmentation import run_lengths, run_starts


@dataclass(frozen=True)
class Moves:
    """Row `source[i]` goes to row `destination[i]`; int64 [moves] each, all 2 * moves slots distinct."""

    source: np.ndarray
    destination: np.ndarray

    def __post_init__(self) -> None:
        both = np.concatenate((self.source, self.destination))
        expect(len(self.source) == len(self.destination), "moves", "as many sources as destinations", len(both))
        expect(not (again := repeated(both)), "moves", "distinct slots", again)

    def __len__(self) -> int:
        return len(self.source)

    def in_slots(self, page_size: int) -> Self:
        """The moves of pages as moves of their slots."""
        within = np.arange(page_size)
        pages = (self.source, self.destination)
        return type(self)(*((page[:, None] * page_size + within).ravel() for page in pages))

    def remap(self, num_slots: int) -> np.ndarray:
        """New slot of every old one: int64 [num_slots], the identity but for sources."""
        new_slot = np.arange(num_slots)
        new_slot[self.source] = self.destination
        return new_slot


def plan_moves(holders: Sequence[np.ndarray], free: np.ndarray, budget: int) -> Moves:
    """At most `budget` moves that put holders' runs together, the most scattered holder first.

    `holders` are 1-D slots (or pages) in the order in which they are read; two may hold the same slot. No holder ends
    up with more runs than before. `free` is in any order. ValueError: a slot is free and held, or twice in a holder.
    """
    expect(budget >= 0, "budget", "at least 0 moves", budget)
    held = check_holders(holders, free)
    uses = np.bincount(held)
    new_slot = np.arange(len(uses))
    moved = np.zeros(len(uses), bool)
    room_starts, room = free_runs(free)
    source, destination = [], []
    runs = [len(run_starts(slots)) for slots in holders]
    for holder in sorted(range(len(holders)), key=lambda i: (-runs[i], i)):
        slots = np.asarray(holders[holder])
        if runs[holder] < 2:
            break
        place = smallest_that_fits(room, min(len(slots), budget))
        if place is None:
            break
        start, length = int(room_starts[place]), int(room[place])
        window = slots[best_window(slots, min(length, budget))]
        if len(window) < 2 or moved[window].any():
            continue
        target = np.arange(start, start + len(window))
        if uses[window].max() > 1 and scatters_another(holders, new_slot, window, target):
            continue
        new_slot[window], moved[window] = target, True
        room_starts[place], room[place] = start + len(window), length - len(window)
        budget -= len(window)
        source.append(window)
        destination.append(target)
    nothing = np.empty(0, np.int64)
    return Moves(np.concatenate((nothing, *source)), np.concatenate((nothing, *destination)))


def check_holders(holders: Sequence[np.ndarray], free: np.ndarray) -> np.ndarray:
    """All held slots, concatenated; ValueError for a plan that could not be right."""
    for i, slots in enumerate(holders):
        expect(not (again := repeated(np.asarray(slots))), f"holders[{i}]", "distinct slots", again)
    held = np.concatenate((np.empty(0, np.int64), *holders)).astype(np.int64)
    both = np.unique(held[np.isin(held, free, kind="table")]) if len(free) else held[:0]
    expect(len(both) == 0, "free", "slots that nobody holds", both.tolist())
    expect(not (again := repeated(free)), "free", "distinct slots", again)
    expect(not np.any(free <= 0), "free", "slots above 0, the padding slot", free[free <= 0].tolist())
    return held


def repeated(slots: np.ndarray) -> list[int]:
    """Slots that occur more than once. Sorts: np.unique takes ten times as long on a large shuffled pool."""
    ordered = np.sort(slots)
    found: list[int] = np.unique(ordered[1:][np.diff(ordered) == 0]).tolist()
    return found


def free_runs(free: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of the runs of free slots, ascending; int64 [runs] each."""
    ordered = np.sort(free)
    return ordered[run_starts(ordered)], run_lengths(ordered)


def smallest_that_fits(room: np.ndarray, size: int) -> int | None:
    """Index of the shortest free run that takes `size` slots, else of the longest; None where fewer than 2 fit."""
    if len(room) == 0 or size < 2:
        return None
    fits = room >= size
    place = int(np.where(fits, room, room.max() + 1).argmin() if fits.any() else room.argmax())
    return place if room[place] >= 2 else None


def best_window(slots: np.ndarray, limit: int) -> slice:
    """Positions of the most neighbouring whole runs that `limit` slots hold; the fewest slots among equals.

    Empty where no two neighbouring runs fit. Whole runs only: cutting one would add a break.
    """
    bounds = np.append(run_starts(slots), len(slots))
    begin = np.arange(len(bounds) - 1)
    end = np.searchsorted(bounds, bounds[begin] + limit, side="right") - 1
    sizes = bounds[end] - bounds[begin]
    if len(begin) == 0 or (end - begin).max() < 2:
        return slice(0, 0)
    best = int(np.lexsort((begin, sizes, begin - end))[0])
    return slice(int(bounds[best]), int(bounds[end[best]]))


def scatters_another(
    holders: Sequence[np.ndarray], new_slot: np.ndarray, window: np.ndarray, target: np.ndarray
) -> bool:
    """Whether moving `window` to `target` gives some holder more runs than it has after the moves so far."""
    trial = new_slot.copy()
    trial[window] = target
    return any(len(run_starts(trial[slots])) > len(run_starts(new_slot[slots])) for slots in holders)
