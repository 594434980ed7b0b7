"""What must hold of a backend under SGLang's runner, with graphs on a GPU and without on a CPU."""

from types import SimpleNamespace
from typing import Any

import torch
from served import SIZES, Served, reachable

from treemla.sglang import compat

LENGTHS = (  # longer and shorter than at capture, requests without context, batches below a captured size
    [100], [1], [0], [31, 33], [0, 200], [64, 63, 65], [200, 0, 1], [32, 31, 33, 64], [1, 1, 1, 1], [0, 0, 150, 0],
)  # fmt: skip


def replays_are_right(served: Served, lengths: list[int]) -> None:
    served.load(lengths, seed=sum(lengths) + len(lengths))
    replayed = served.replay()
    served.check(replayed)
    served.check(served.eager())
    if len(lengths) in SIZES:  # without padding the plan is the same, and so are the bits
        assert all(torch.equal(a, b) for a, b in zip(replayed, served.eager(), strict=True))


def trees_change_between_replays(served: Served) -> None:
    seen = []
    for tree in ("chain", "star", "comb", "random"):
        served.load([40, 3, 90], seed=7, tree=tree)
        seen.append(served.replay())
        served.check(seen[-1])
    assert not torch.equal(seen[0][0], seen[1][0])


def no_state_leaks(served: Served) -> None:
    """A, B, A: the bits of the first."""
    served.load([60, 5], seed=1)
    first = served.replay()
    served.load([1, 200, 30, 7], seed=2)
    served.replay()
    served.load([60, 5], seed=1)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(served.replay(), first, strict=True))


def every_static_input_is_read(served: Served) -> None:
    """Poison one after another between preparation and replay: the answer changes; unpoisoned it is right again."""
    for name in served.static_inputs:
        served.load([90, 40], seed=4)
        served.check(served.replay())
        served.load([90, 40], seed=4)
        served.prepare()
        right = served.step["owned"][0]
        poison(served, name, int(right[0]))
        served.graphs[served.size]()
        poisoned = served.results()
        served.load([90, 40], seed=4)
        clean = served.replay()
        served.check(clean)
        took = any(not torch.equal(a, b) for a, b in zip(poisoned, clean, strict=True))  # NaN is never equal
        assert took, f"{name} was poisoned and the replay did not notice: {served.setting.rerun(served.device.type)}"


def poison(served: Served, name: str, owned: int) -> None:
    """Other values that are still safe to read."""
    held = served.static_inputs[name]
    if held.is_floating_point():
        held.fill_(torch.nan)
    elif name == "rows":
        held[:2] = held[:2].flip(0)
    elif name == "seq_lens":
        held.fill_(3)
    else:
        held.fill_(owned)


def pointers_stay(served: Served) -> None:
    """Of every tensor that hangs on the backend, over replays of every size."""
    for lengths in ([8], [8, 9], [8, 9, 10], [8, 9, 10, 11]):
        served.load(lengths, seed=3)
        served.replay()
        before = {path: tensor.data_ptr() for path, tensor in reachable(served.backend)}
        assert any("partial_out" in path for path in before) and any("words" in path for path in before)
        served.load([2 * n for n in lengths], seed=5)
        served.replay()
        assert {path: tensor.data_ptr() for path, tensor in reachable(served.backend)} == before


def many_replays(served: Served, count: int) -> None:
    """Batch sizes, lengths and trees change every time, and every answer is its own."""
    random = torch.Generator().manual_seed(8)
    steps = []
    for seed in range(12):
        size = seed % SIZES[-1] + 1
        longest = served.setting.max_context // 2
        lengths = torch.randint(0, longest, (size,), generator=random).tolist()
        served.load(lengths, seed)
        results = served.replay()
        served.check(results)
        state = {"table": served.table.clone(), "pool": served.pool.clone()}
        steps.append((lengths, served.step, state, results))
    for i in range(count):
        lengths, step, state, results = steps[i * 7 % len(steps)]
        served.lengths, served.step = lengths, step
        served.table.copy_(state["table"])
        served.pool.copy_(state["pool"])
        for got, wanted in zip(served.replay(), results, strict=True):
            assert torch.equal(got, wanted), f"replay {i} with {lengths}: {served.setting.rerun(served.device.type)}"


def scheduler_waits(served: Served, schedule: Any, forward: Any, before_replay: Any, after_replay: Any) -> None:
    """Run the scheduler's own barrier, with the event that its runner publishes for this forward.

    0.5.16 publishes before the replay of a decode, and for verify by NGRAM and EAGLE nothing here; 0.5.23 what the
    backend declares.
    """
    from sglang.srt.managers.scheduler import Scheduler

    if hasattr(compat.triton_backend(), "shared_read_ends"):
        ends = served.backend.shared_read_ends(served.mode).name
        published = {"PRE_REPLAY": before_replay, "POST_REPLAY": after_replay}[ends]
    else:
        published = before_replay if served.mode.is_decode() else None
    runner = SimpleNamespace(war_fastpath_read_done_event=published, shared_read_done_event=published)
    worker = SimpleNamespace(war_fastpath_runner=runner, last_shared_read_runner=runner)
    streams = {"schedule_stream": schedule, "forward_stream": forward}
    Scheduler._apply_war_barrier(SimpleNamespace(_war_barrier_enabled=True, model_worker=worker, **streams))
