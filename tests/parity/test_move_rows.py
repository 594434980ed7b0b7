"""Rows move as if all were read before one is written: byte for byte what a plain loop over copies gives."""

import pytest
import torch

from treemla.kv import move_rows
from treemla.launch_moves import MOVE_BUFFERS, MOVES_AT_ONCE, groups, slice_chunks

# row bytes, slots, moves. 1,152 and 576: latent rows in bf16 and fp8; 2,048: a draft model's keys; 9,232: 577 chunks,
# a prime that is more than a CTA has threads; 18,432: two slices at least
SHAPES = [
    (1152, 200, 1),
    (1152, 200, 9),
    (1152, 400, 65),
    (1152, 3000, 1153),
    (576, 3000, 2500),
    (2048, 300, 70),
    (16, 5000, MOVES_AT_ONCE),
    (9232, 60, 40),
    (18432, 60, 30),
]


def make_buffer(slots: int, row_bytes: int, device: torch.device, random: torch.Generator, gap: int = 0):
    rows = torch.randint(0, 256, (slots, row_bytes + gap), dtype=torch.uint8, generator=random).to(device)
    return rows[:, :row_bytes]


def permuted(slots: int, moves: int, random: torch.Generator) -> torch.Tensor:
    return torch.randperm(slots, generator=random)[:moves]


def expected(buffer: torch.Tensor, source: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
    before, after = buffer.cpu(), buffer.cpu().clone()
    read = [before[slot].clone() for slot in source.tolist()]
    for slot, row in zip(destination.tolist(), read, strict=True):
        after[slot] = row
    return after


def check(buffers: list[torch.Tensor], source: torch.Tensor, destination: torch.Tensor, **options) -> None:
    want = [expected(buffer, source, destination) for buffer in buffers]
    device = buffers[0].device
    move_rows(buffers, source.to(device), destination.to(device), **options)
    for i, (buffer, rows) in enumerate(zip(buffers, want, strict=True)):
        assert torch.equal(buffer.cpu(), rows), f"buffer {i}"


@pytest.mark.parametrize(("row_bytes", "slots", "moves"), SHAPES)
def test_slots_may_be_source_and_destination(row_bytes: int, slots: int, moves: int, device: torch.device) -> None:
    random = torch.Generator().manual_seed(moves)
    buffers = [make_buffer(slots, row_bytes, device, random) for _ in range(3)]
    check(buffers, permuted(slots, moves, random), permuted(slots, moves, random))


@pytest.mark.parametrize("step", [-1, 1, 40])
def test_a_window_moves_within_itself(step: int, device: torch.device) -> None:
    """What a tree's accepted path does, at its worst: every row but a few is read and written.

    On a GPU so many buffers that not all CTAs run at once: what one of them wrote too early, a later one reads.
    """
    random = torch.Generator().manual_seed(3)
    buffers = [make_buffer(4200, 1152, device, random) for _ in range(24 if device.type == "cuda" else 1)]
    window = torch.arange(100, 4100)
    check(buffers, window, window + step)


@pytest.mark.parametrize(("row_bytes", "moves"), [(1152, 10_000), (576, 10_000), (1152, 64), (18432, 90)])
def test_a_plan_of_any_size_moves_when_no_slot_is_both(row_bytes: int, moves: int, device: torch.device) -> None:
    random = torch.Generator().manual_seed(moves)
    buffers = [make_buffer(2 * moves + 5, row_bytes, device, random) for _ in range(2)]
    source, destination = permuted(2 * moves + 5, 2 * moves, random).split(moves)
    check(buffers, source, destination, disjoint=True)


def test_rows_of_several_sizes_and_distances_move_in_one_call(device: torch.device) -> None:
    random = torch.Generator().manual_seed(2)
    buffers = [
        make_buffer(90, 1152, device, random),
        make_buffer(70, 1152, device, random, gap=16),
        make_buffer(80, 576, device, random),
        make_buffer(75, 1152, device, random).view(torch.int16).view(75, 1, 576),
        make_buffer(71, 2048, device, random).view(torch.int32).view(71, 8, 64),
    ]
    check(buffers, permuted(70, 33, random), permuted(70, 33, random))


def test_what_lies_between_rows_stays(device: torch.device) -> None:
    random = torch.Generator().manual_seed(3)
    buffer = make_buffer(50, 1152, device, random, gap=32)
    whole = torch.as_strided(buffer, (50, 1184), (1184, 1))
    gaps = whole[:, 1152:].clone()
    move_rows([buffer], permuted(50, 20, random).to(device), permuted(50, 20, random).to(device))
    assert torch.equal(whole[:, 1152:], gaps)


def test_more_buffers_than_a_launch_takes(device: torch.device) -> None:
    random = torch.Generator().manual_seed(4)
    check(
        [make_buffer(20, 64, device, random) for _ in range(MOVE_BUFFERS + 3)],
        permuted(20, 7, random),
        permuted(20, 7, random),
    )


def test_no_moves_change_nothing(device: torch.device) -> None:
    buffer = make_buffer(20, 64, device, torch.Generator().manual_seed(5))
    check([buffer], torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))


def test_a_slot_beyond_two_gigabytes_moves(device: torch.device) -> None:
    """Addresses are 64 bits wide. On a CPU a small pool: it has no arithmetic of its own."""
    slots = 2_000_000 if device.type == "cuda" else 2000
    buffer = torch.zeros(slots, 1152, dtype=torch.uint8, device=device)
    buffer[1] = 7
    move_rows([buffer], torch.tensor([1], device=device), torch.tensor([slots - 1], device=device))
    assert int(buffer[slots - 1].sum()) == 7 * 1152 and int(buffer.sum(dtype=torch.int64)) == 2 * 7 * 1152


@pytest.mark.parametrize("moves", [1, 9, 64, 500, 2304, MOVES_AT_ONCE])
@pytest.mark.parametrize("row_chunks", [1, 36, 72, 128, 577, 1152])
def test_one_group_holds_all_moves_unless_they_are_disjoint(row_chunks: int, moves: int) -> None:
    width = slice_chunks(row_chunks, moves, disjoint=False)
    assert row_chunks % width == 0 and groups(moves, width) == 1
    assert slice_chunks(row_chunks, moves, disjoint=True) >= width


def test_whole_rows_of_the_pool_go_to_one_cta() -> None:
    assert [slice_chunks(chunks, 10_000, disjoint=True) for chunks in (72, 36)] == [72, 36]
