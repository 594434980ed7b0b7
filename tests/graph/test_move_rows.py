"""The row mover on a GPU: recorded in a graph, and what it refuses or leaves out there."""

import pytest
import torch

from treemla.kv import move_rows
from treemla.launch_moves import MOVES_AT_ONCE


def pool(rows: int, width: int = 576) -> torch.Tensor:
    return torch.randn(rows, width, device="cuda").bfloat16()


def test_a_replay_moves_what_source_and_destination_say_then() -> None:
    buffers = [pool(200) for _ in range(3)]
    source, destination = torch.arange(9, device="cuda"), torch.arange(1, 10, device="cuda")
    move_rows(buffers, source, destination)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        move_rows(buffers, source, destination)
    for seed in range(3):
        random = torch.Generator().manual_seed(seed)
        source.copy_(torch.randperm(200, generator=random)[:9])
        destination.copy_(torch.randperm(200, generator=random)[:9])
        want = [buffer.clone() for buffer in buffers]
        for rows, buffer in zip(want, buffers, strict=True):
            rows[destination] = buffer[source]
        graph.replay()
        for rows, buffer in zip(want, buffers, strict=True):
            assert torch.equal(rows, buffer)


@pytest.mark.parametrize("outside", [-1, 50, 2**32 + 1, 2**62])
def test_a_move_from_or_to_a_slot_of_no_buffer_is_left_out(outside: int) -> None:
    buffers = [pool(60), pool(50)]
    before = [buffer.clone() for buffer in buffers]
    source = torch.tensor([outside, 2, 3], device="cuda")
    destination = torch.tensor([7, outside, 8], device="cuda")
    move_rows(buffers, source, destination)
    for buffer, old in zip(buffers, before, strict=True):
        old[8] = old[3].clone()
        assert torch.equal(buffer, old)


def test_asked_to_it_checks_the_slots_on_a_gpu_too() -> None:
    slots = torch.tensor([50], device="cuda")
    with pytest.raises(ValueError, match=r"source: expected slots 0..49.*got \[50\]"):
        move_rows([pool(50)], slots, slots - 1, check_values=True)


def test_more_moves_than_a_cta_holds_need_the_callers_word() -> None:
    slots = torch.arange(MOVES_AT_ONCE + 1, device="cuda")
    with pytest.raises(ValueError, match=f"source: expected {MOVES_AT_ONCE} moves unless disjoint"):
        move_rows([pool(len(slots))], slots, slots)


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (lambda: pool(20, 12), r"buffers\[0\]: expected rows in steps of 16 bytes on a GPU, got '24 bytes every 24'"),
        (lambda: pool(20, 580)[:, :576], "rows in steps of 16 bytes on a GPU, got '1152 bytes every 1160'"),
        (lambda: pool(20)[:, 4:12], r"buffers\[0\]: expected data aligned to 16 bytes"),
    ],
)
def test_rows_that_are_not_whole_chunks_are_refused(buffer, message: str) -> None:
    slots = torch.tensor([1], device="cuda")
    with pytest.raises(ValueError, match=message):
        move_rows([buffer()], slots, slots + 1)


def test_slots_on_the_cpu_are_refused() -> None:
    slots = torch.tensor([1])
    with pytest.raises(ValueError, match="source: expected device cuda:0, got 'cpu'"):
        move_rows([pool(20)], slots, slots)
