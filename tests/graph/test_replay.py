"""Captured once, replayed over other lengths, trees and batches: the bits of an eager run, and the oracle's answer."""

import pytest
import torch
from captured import POISON, Captured, Setup, assert_same_bits

from treemla import MaskLayout, SlotTable

SETUPS = (
    Setup(),
    Setup(layout=MaskLayout.QLEN_ONLY, ranges=True, index_dtype=torch.int32),
    Setup(heads=5, tree_tokens=7, fixed_split=1024),
    Setup(heads=16, tree_tokens=33, batch=3, ranges=True),
    Setup(path="mma"),
    Setup(heads=5, tree_tokens=7, fixed_split=1024, path="mma"),
    Setup(fp8_kv=True),
    Setup(fp8_kv=True, path="mma"),
)
CAPTURE_LENGTHS = {"short": [1, 37, 64], "long": [65_536, 16_384, 33]}
REPLAY_LENGTHS = (
    [1, 1, 1],
    [31, 32, 33],
    [0, 0, 0],
    [4096, 0, 4095],
    [33, 16_384, 1],
    [65_536, 31, 32],
    [2, 65_535],  # smaller batches: the rest is padding
    [37],
    [65_536],
)


@pytest.fixture(scope="module", params=SETUPS, ids=lambda setup: setup.id)
def setup(request: pytest.FixtureRequest) -> Setup:
    return request.param


@pytest.fixture(scope="module", params=CAPTURE_LENGTHS)
def captured(setup: Setup, request: pytest.FixtureRequest, device: torch.device) -> Captured:
    made = Captured(setup, device)
    made.load(CAPTURE_LENGTHS[request.param], seed=1)
    made.capture()
    return made


@pytest.mark.parametrize("lengths", REPLAY_LENGTHS, ids=lambda lengths: "_".join(map(str, lengths)))
def test_replay_equals_eager_and_the_oracle(captured: Captured, lengths: list[int]) -> None:
    captured.load(lengths, seed=sum(lengths) + len(lengths))
    replayed = captured.replay()
    captured.check_against_oracle(replayed)
    assert_same_bits(replayed, captured.eager(), captured.setup.rerun("cuda"))


def test_padded_requests_get_zero_and_minus_infinity(captured: Captured) -> None:
    """Never NaN, although the slots that their table rows name hold NaN."""
    captured.load([37], seed=5)
    real = captured.setup.tree_tokens
    for results in (captured.replay(), captured.eager()):
        for out, lse in zip(results[::2], results[1::2], strict=True):
            assert (out[real:] == 0).all()
            assert (lse[real:] == -torch.inf).all()
            assert out[:real].isfinite().all()


def test_other_trees_over_the_same_lengths(captured: Captured) -> None:
    seen = []
    for tree in ("chain", "star", "comb", "random"):
        captured.load([100, 3], seed=9, tree=tree)
        replayed = captured.replay()
        captured.check_against_oracle(replayed)
        seen.append(replayed)
    assert not torch.equal(seen[0][0], seen[1][0])


def test_a_b_a(captured: Captured) -> None:
    """The first step's answer does not depend on what was replayed between, and twenty replays agree bit for bit."""
    captured.load([300, 5, 64], seed=2)
    first = captured.replay()
    captured.load([65_536, 1], seed=3)
    captured.replay()
    captured.load([300, 5, 64], seed=2)
    for _ in range(20):
        assert_same_bits(captured.replay(), first, captured.setup.rerun("cuda"))


def test_every_static_input_is_read_at_replay(captured: Captured) -> None:
    """Poison each alone: the answer changes, and it changes to what an eager run over the poison gives."""
    for name in captured.static_inputs:
        captured.load([200, 90, 40], seed=4)
        before = captured.replay()
        poison(captured, name)
        after = captured.replay()
        unchanged = all(((a == b) | (a.isnan() & b.isnan())).all() for a, b in zip(after, before, strict=True))
        assert not unchanged, f"{name} was poisoned and the replay did not notice: {captured.setup.rerun('cuda')}"
        assert_same_bits(after, captured.eager(), f"{name} poisoned: {captured.setup.rerun('cuda')}")


def poison(captured: Captured, name: str) -> None:
    """Other values that are still safe to read."""
    held = captured.static_inputs[name]
    if held.dtype == torch.bfloat16:
        held.fill_(torch.nan)
    elif held.dtype == torch.float8_e4m3fn:
        held.view(torch.uint8).fill_(0x7F)  # NaN
    elif name == "mask":
        held.fill_(False)
    elif name == "seq_lens":
        held.fill_(3)
    elif name == "kv_indptr":
        held.sub_(held[1] // 2).clamp_(min=0)  # ranges that start earlier, the first too short for its request
    elif name == "req_pool_indices":
        held.copy_(held.flip(0))
    else:
        held.fill_(int(captured.owned[0][0]))


def test_outputs_hold_no_poison(captured: Captured) -> None:
    """Every element of out and lse is written at every replay."""
    captured.load([64, 0, 1], seed=6)
    assert all((result != POISON).all() for result in captured.replay())


def test_request_longer_than_its_slots_is_nan_and_the_others_are_not(captured: Captured) -> None:
    captured.load([50, 60, 70], seed=7)
    captured.seq_lens[1] = captured.setup.max_context + 1 if isinstance(captured.slots, SlotTable) else 61
    rows = captured.setup.tree_tokens
    for result in captured.replay():
        assert result[rows : 2 * rows].isnan().all()
        assert result[:rows].isfinite().all()
        assert result[2 * rows : 3 * rows].isfinite().all()
