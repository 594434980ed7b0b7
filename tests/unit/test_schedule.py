"""The two cutting rules, over random lengths: what every schedule must keep, and what each rule promises."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from treemla.schedule import (
    DIRECT,
    MIN_PART_TOKENS,
    OVERLONG,
    Schedule,
    balanced_schedule,
    committed_tokens,
    fixed_schedule,
)
from treemla.tiles import PATHS, TILE_TOKENS

EDGES = [OVERLONG, 0, 1, TILE_TOKENS - 1, TILE_TOKENS, TILE_TOKENS + 1, 2 * TILE_TOKENS, 4095, 4096, 65_536]
length = st.one_of(st.sampled_from(EDGES), st.integers(0, 300), st.integers(0, 70_000))
lengths = st.one_of(st.lists(length, min_size=1, max_size=8), st.lists(length, min_size=1, max_size=300))
tree_tokens = st.one_of(st.sampled_from([1, 2, 9, 32, 33, 63, 64]), st.integers(1, 64))
parts = st.one_of(st.integers(1, 8), st.sampled_from([66, 132, 188, 500, 3000]))
OVERHEAD = 6
tile_tokens = st.sampled_from(sorted({path.tile_tokens for path in PATHS.values()}))
split_tiles = st.one_of(st.sampled_from([1, 2, 16]), st.integers(1, 300))


def balanced(
    lengths: list[int], tree_tokens: int, parts: int, tile_tokens: int, halved_tiles: int = 0, third_tiles: int = 0
) -> Schedule:
    committed = np.array(lengths, np.int32)
    return balanced_schedule(
        committed,
        tree_tokens=tree_tokens,
        parts=parts,
        overhead=OVERHEAD,
        tile_tokens=tile_tokens,
        halved_tiles=halved_tiles,
        third_tiles=third_tiles,
    )


def fixed(lengths: list[int], tree_tokens: int, parts: int, split_tiles: int) -> Schedule:
    split_tokens = split_tiles * TILE_TOKENS
    return fixed_schedule(np.array(lengths, np.int32), tree_tokens=tree_tokens, parts=parts, split_tokens=split_tokens)


def pieces_of(schedule: Schedule, request: int) -> list[list[int]]:
    return schedule.pieces[schedule.request_ptr[request] : schedule.request_ptr[request + 1]].tolist()


def check_covers_every_token_once(schedule: Schedule, lengths: list[int], tree_tokens: int) -> None:
    """Pieces of a request join end to end from 0 to n + T, none is empty, and each names its request."""
    assert len(schedule.request_ptr) == len(lengths) + 1
    assert schedule.request_ptr[0] == 0
    assert schedule.request_ptr[-1] == len(schedule.pieces)
    for request, n in enumerate(lengths):
        pieces = pieces_of(schedule, request)
        if n == OVERLONG:
            assert pieces == []
            continue
        assert [piece[0] for piece in pieces] == [request] * len(pieces)
        begins, ends = [piece[1] for piece in pieces], [piece[2] for piece in pieces]
        assert [*begins, n + tree_tokens] == [0, *ends]
        assert all(begin < end for begin, end in zip(begins, ends, strict=True))


def check_cuts_at_tiles_outside_the_tree(schedule: Schedule, lengths: list[int], tile_tokens: int) -> None:
    """So the tree is whole, in the last piece."""
    for request, n in enumerate(lengths):
        for _, begin, _, _ in pieces_of(schedule, request)[1:]:
            assert begin % tile_tokens == 0
            assert begin <= n


def check_slots(schedule: Schedule, num_requests: int, max_slots: int) -> None:
    """A request's only piece writes the output; the others have slots of their own, inside the workspace."""
    used = []
    for request in range(num_requests):
        slots = [piece[3] for piece in pieces_of(schedule, request)]
        if len(slots) == 1:
            assert slots == [DIRECT]
        used += slots if len(slots) > 1 else []
    assert len(set(used)) == len(used)
    assert all(0 <= slot < max_slots for slot in used)


def check_parts_share_all_pieces(schedule: Schedule, parts: int) -> None:
    assert len(schedule.part_ptr) == parts + 1
    assert schedule.part_ptr[0] == 0
    assert schedule.part_ptr[-1] == len(schedule.pieces)
    assert (np.diff(schedule.part_ptr) >= 0).all()
    check_work(schedule)


def check_work(schedule: Schedule) -> None:
    """A CTA reads its part's range of pieces and the first of them; neighbours that share blocks read the same, and each
    its own share."""
    shares = int(schedule.shares[0])
    for cta, (*first, begin, end, of, share) in enumerate(schedule.part_work.tolist()):
        part = cta // shares
        assert (begin, end) == tuple(schedule.part_ptr[part : part + 2])
        assert first == (schedule.pieces[begin].tolist() if begin < end else [0, 0, 0, 0])
        assert (of, share) == (shares, cta - part * shares)


@given(lengths, tree_tokens, parts, tile_tokens)
@example([OVERLONG, 100], 9, 4, 64)  # the first cut meets a request without pieces
@example([0], 1, 3000, 32)  # more parts than tokens
def test_balanced_schedule_is_well_formed(lengths: list[int], tree_tokens: int, parts: int, tile_tokens: int) -> None:
    schedule = balanced(lengths, tree_tokens, parts, tile_tokens)
    check_covers_every_token_once(schedule, lengths, tree_tokens)
    check_cuts_at_tiles_outside_the_tree(schedule, lengths, tile_tokens)
    check_slots(schedule, len(lengths), max_slots=2 * (parts - 1))
    check_parts_share_all_pieces(schedule, parts)
    assert len(schedule.pieces) <= len(lengths) + parts - 1


@given(lengths, tree_tokens, parts, split_tiles)
def test_fixed_schedule_is_well_formed(lengths: list[int], tree_tokens: int, parts: int, split_tiles: int) -> None:
    schedule = fixed(lengths, tree_tokens, parts, split_tiles)
    check_covers_every_token_once(schedule, lengths, tree_tokens)
    check_cuts_at_tiles_outside_the_tree(schedule, lengths, TILE_TOKENS)
    check_slots(schedule, len(lengths), max_slots=len(schedule.pieces))
    check_parts_share_all_pieces(schedule, parts)


@given(lengths, tree_tokens, parts, tile_tokens)
def test_balanced_part_costs_at_most_its_share_and_one_tree(
    lengths: list[int], tree_tokens: int, parts: int, tile_tokens: int
) -> None:
    """A part's tiles, and the overhead between its requests, exceed the equal share by no more than a tree's tiles."""
    schedule = balanced(lengths, tree_tokens, parts, tile_tokens)
    held = sum(-(-(n + tree_tokens) // tile_tokens) for n in lengths if n != OVERLONG)
    share = max(MIN_PART_TOKENS // tile_tokens, -(-(held + OVERHEAD * (len(lengths) - 1)) // parts))
    atom = -(-(tile_tokens - 1 + tree_tokens) // tile_tokens) - 1  # tiles that a cut inside the tree moves over
    for first, end in zip(schedule.part_ptr[:-1], schedule.part_ptr[1:], strict=True):
        tiles = [-(-(piece[2] - piece[1]) // tile_tokens) for piece in schedule.pieces[first:end].tolist()]
        assert sum(tiles) + OVERHEAD * max(0, len(tiles) - 1) <= share + atom


@given(lengths, tree_tokens, parts, tile_tokens)
def test_balanced_cuts_are_those_of_counting_tile_by_tile(
    lengths: list[int], tree_tokens: int, parts: int, tile_tokens: int
) -> None:
    """Walk the line one tile at a time; a tile at x belongs to part x // share, the tree's tiles go together."""
    total = sum(-(-(n + tree_tokens) // tile_tokens) for n in lengths if n != OVERLONG)
    share = max(MIN_PART_TOKENS // tile_tokens, -(-(total + OVERHEAD * (len(lengths) - 1)) // parts))
    expected: list[tuple[int, int, int]] = []  # part, request, first token
    position = 0
    for request, n in enumerate(lengths):
        held = 0 if n == OVERLONG else -(-(n + tree_tokens) // tile_tokens)
        for tile in range(held):
            part = (position + (held - 1 if tile >= n // tile_tokens else tile)) // share
            if not expected or expected[-1][:2] != (part, request):
                expected.append((part, request, tile * tile_tokens))
        position += held + OVERHEAD
    schedule = balanced(lengths, tree_tokens, parts, tile_tokens)
    part_of_piece = np.repeat(np.arange(parts), np.diff(schedule.part_ptr)).tolist()
    pieces = [(part, *piece[:2]) for part, piece in zip(part_of_piece, schedule.pieces.tolist(), strict=True)]
    assert pieces == expected


@given(
    lengths,
    tree_tokens,
    st.one_of(st.integers(3, 9), st.sampled_from([66, 133])),
    tile_tokens,
    st.integers(0, 3000),
    st.integers(0, 3000),
)
def test_a_schedule_of_shared_blocks_is_that_of_as_many_times_fewer_parts(
    lengths: list[int], tree_tokens: int, parts: int, tile_tokens: int, halved_tiles: int, third_tiles: int
) -> None:
    """Parts behind the last have no pieces; a step that costs more is cut as if there were no shares."""
    schedule = balanced(lengths, tree_tokens, parts, tile_tokens, halved_tiles, third_tiles)
    held = sum(-(-(n + tree_tokens) // tile_tokens) for n in lengths if n != OVERLONG)
    total = held + OVERHEAD * (len(lengths) - 1)
    shares = 3 if third_tiles > 0 and total <= third_tiles else 2 if halved_tiles > 0 and total <= halved_tiles else 1
    plain = balanced(lengths, tree_tokens, parts // shares, tile_tokens)
    assert schedule.shares.tolist() == [shares]
    assert schedule.pieces.tolist() == plain.pieces.tolist()
    assert schedule.request_ptr.tolist() == plain.request_ptr.tolist()
    assert schedule.part_ptr.tolist() == plain.part_ptr.tolist() + [len(plain.pieces)] * (
        parts - len(plain.part_ptr) + 1
    )
    check_work(schedule)


@given(st.integers(0, 200_000), tree_tokens, parts, tile_tokens)
def test_balanced_single_request_is_cut_into_equal_pieces(
    n: int, tree_tokens: int, parts: int, tile_tokens: int
) -> None:
    """Every piece but the last two is exactly the share; the last cut may move down to spare the tree."""
    schedule = balanced([n], tree_tokens, parts, tile_tokens)
    held = -(-(n + tree_tokens) // tile_tokens)
    share = max(MIN_PART_TOKENS // tile_tokens, -(-held // parts))
    sizes = [(end - begin) for _, begin, end, _ in schedule.pieces.tolist()]
    assert all(size == share * tile_tokens for size in sizes[:-2])
    assert all(size <= share * tile_tokens for size in sizes[:-1])
    assert len(sizes) >= n // tile_tokens // share


@given(lengths, tree_tokens, parts, split_tiles)
def test_fixed_cuts_of_a_request_ignore_the_others(
    lengths: list[int], tree_tokens: int, parts: int, split_tiles: int
) -> None:
    together = fixed(lengths, tree_tokens, parts, split_tiles)
    for request, n in enumerate(lengths):
        alone = fixed([n], tree_tokens, 7, split_tiles)
        assert [p[1:3] for p in pieces_of(together, request)] == [p[1:3] for p in pieces_of(alone, 0)]


@given(lengths, tree_tokens, parts, split_tiles)
def test_fixed_cuts_lie_at_multiples_of_the_split(
    lengths: list[int], tree_tokens: int, parts: int, split_tiles: int
) -> None:
    schedule = fixed(lengths, tree_tokens, parts, split_tiles)
    for request, n in enumerate(lengths):
        begins = [piece[1] for piece in pieces_of(schedule, request)]
        assert begins == ([] if n == OVERLONG else list(range(0, max(n, 1), split_tiles * TILE_TOKENS)))


@given(lengths, tree_tokens, parts, split_tiles)
def test_fixed_parts_hold_equally_many_pieces(
    lengths: list[int], tree_tokens: int, parts: int, split_tiles: int
) -> None:
    counts = np.diff(fixed(lengths, tree_tokens, parts, split_tiles).part_ptr)
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize(
    ("seq_len", "tail", "capacity", "expected"),
    [(0, 0, 9, 0), (0, 1, 9, 0), (-5, 0, 9, 0), (7, 0, 16, 7), (7, 0, 15, OVERLONG), (8, 1, 16, 7), (2**40, 0, 99, -1)],
)
def test_committed_tokens(seq_len: int, tail: int, capacity: int, expected: int) -> None:
    """n_b = max(0, seq_len - tail), and OVERLONG as soon as the tree no longer fits the slots."""
    got = committed_tokens(np.array([seq_len]), np.array([capacity]), tail=tail, tree_tokens=9)
    assert got.tolist() == [expected]
    assert got.dtype == np.int32


def test_schedule_arrays_are_int32() -> None:
    """The device reads them as they are."""
    for schedule in (balanced([5, 70], 3, 4, 32), fixed([5, 70], 3, 4, 1)):
        for array in (schedule.committed, schedule.pieces, schedule.part_ptr, schedule.request_ptr):
            assert array.dtype == np.int32
