"""The backend under SGLang's runner, in CUDA graphs of every batch size. Needs SGLang as tests/sglang does.

tests/sglang/test_served.py makes the same checks on a CPU; here are also those that only a GPU can fail.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from captured import allocations, host_reads_raise

sys.path.append(str(Path(__file__).parents[1] / "sglang"))

if importlib.util.find_spec("sgl_kernel") is None:  # the light wheels of SGLang go without
    from sglang.test.test_utils import maybe_stub_sgl_kernel

    maybe_stub_sgl_kernel()

import served_checks as checks
from served import Served, Setting

SETTINGS = (
    Setting(on_gpu=True, max_context=4096),
    Setting("NGRAM", tree_tokens=33, on_gpu=True, max_context=4096),
    Setting("EAGLE", tree_tokens=16, on_gpu=True, max_context=4096),
    Setting("EAGLE", tree_tokens=4, masked=False, on_gpu=True, max_context=4096),
    Setting(None, tree_tokens=1, on_gpu=True, max_context=4096),
)
LENGTHS = (*checks.LENGTHS, [4096], [4000, 1], [33, 2048, 0], [4096, 1000, 0, 65])


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda setting: setting.id)
def served(request: pytest.FixtureRequest, device: torch.device) -> Served:
    return Served(request.param, device)


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: "_".join(map(str, lengths)))
def test_replays_are_right_and_equal_eager(served: Served, lengths: list[int]) -> None:
    checks.replays_are_right(served, lengths)


@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE"])
def test_trees_change_between_replays(device: torch.device, algorithm: str) -> None:
    checks.trees_change_between_replays(Served(Setting(algorithm, on_gpu=True), device))


def test_no_state_leaks_from_one_replay_into_the_next(served: Served) -> None:
    checks.no_state_leaks(served)


def test_every_static_input_is_read_at_replay(served: Served) -> None:
    checks.every_static_input_is_read(served)


def test_no_pointer_moves(served: Served) -> None:
    checks.pointers_stay(served)


@pytest.mark.timeout(180, method="thread")
def test_a_thousand_replays_of_changing_steps(served: Served) -> None:
    checks.many_replays(served, 1000)


def test_a_step_allocates_nothing_and_the_host_reads_nothing(served: Served) -> None:
    """What precedes a replay, and the replay; the mask is its producer's."""
    served.load([300, 5, 64], seed=2)
    served.replay()
    batch = served.batch(served.size, served.spec_info(served.step["mask"]), served.size - 3)
    torch.cuda.synchronize()
    before = allocations()
    with host_reads_raise():
        served.backend.init_forward_metadata_out_graph(batch)
        served.graphs[served.size]()
    torch.cuda.synchronize()
    assert allocations() == before
    served.check(served.results())


def test_memory_freed_between_replays_may_be_scribbled_over(served: Served) -> None:
    """The step's mask among it: it is packed before the replay and gone during it."""
    served.load([500, 64], seed=4)
    first = served.replay()
    for kilobytes in (1, 64, 2048):
        served.prepare()
        blocks = [torch.full((kilobytes * 256,), torch.nan, device=served.device) for _ in range(8)]
        del blocks
        served.graphs[served.size]()
        assert all(torch.equal(a, b) for a, b in zip(served.results(), first, strict=True))


def test_a_step_follows_the_stream_it_is_run_on(served: Served) -> None:
    """The mask and all static inputs are written late on a side stream, where the step is prepared and replayed."""
    served.load([400, 3], seed=6)
    expected = served.replay()
    served.load([1, 7], seed=7)
    served.replay()
    served.load([400, 3], seed=6)
    mask, late = served.step["mask"], torch.zeros_like(served.step["mask"])
    served.step["mask"] = late
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late.copy_(mask)
        results = served.replay()
    side.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_replay_beside_work_on_another_stream(served: Served) -> None:
    served.load([2000, 300], seed=5)
    expected = served.replay()
    factor = torch.randn(2048, 2048, device=served.device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        product = factor
        for _ in range(200):
            product = product @ factor * 1e-2
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(served.replay(), expected, strict=True))
    torch.cuda.synchronize()


@pytest.mark.parametrize("barrier", ["the scheduler's", "none"])
def test_a_finished_request_s_row_may_be_reused_while_its_last_step_replays(served: Served, barrier: str) -> None:
    """The scheduler hands the row on right after the launch. Its own barrier must hold the write back until the last
    layer has read the table. Without one the write may land before the layers read, as is made sure of here, and the
    test sees it.
    """
    served.load([900, 60], seed=9)
    expected, row = served.replay(), int(served.step["rows"][0])
    torch.cuda.synchronize()
    forward, schedule = torch.cuda.Stream(), torch.cuda.Stream()
    forward.wait_stream(torch.cuda.current_stream())
    schedule.wait_stream(torch.cuda.current_stream())
    before_replay, written, after_replay = torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Event()
    with torch.cuda.stream(forward):
        served.prepare()
        before_replay.record()
    if barrier == "none":
        schedule.wait_event(before_replay)
        hand_on(served, row, schedule, written)
        forward.wait_event(written)
    with torch.cuda.stream(forward):
        torch.cuda._sleep(100_000_000)  # 50 ms and more: a write that nothing held back would be done
        served.graphs[served.size]()
        after_replay.record()
    if barrier != "none":
        checks.scheduler_waits(served, schedule, forward, before_replay, after_replay)
        hand_on(served, row, schedule, written)
    torch.cuda.synchronize()
    results = served.results()
    unharmed = all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert unharmed is (barrier != "none")


def hand_on(served: Served, row: int, schedule: torch.cuda.Stream, written: torch.cuda.Event) -> None:
    """The finished request's row goes to another one, whose slots are not this step's."""
    with torch.cuda.stream(schedule):
        served.table[row].fill_(served.step["unowned"])
        written.record()
