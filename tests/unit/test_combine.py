"""How the combine kernel is cut, as far as no GPU is needed to say it."""

import json
import math
from pathlib import Path

import pytest

from treemla import combine
from treemla.plan import VerifyPlan
from treemla.problem import VerifyShape


@pytest.mark.parametrize(
    ("tree_tokens", "batch", "parts", "shift"),
    [
        (9, 1, 4, 0),
        (9, 1, 5, 0),
        (9, 1, 10, 1),
        (9, 1, 132, 4),
        (9, 2, 132, 3),
        (9, 4, 132, 3),
        (9, 5, 132, 2),
        (9, 8, 132, 2),
        (9, 16, 132, 1),
        (9, 64, 132, 0),
        (32, 1, 33, 2),
        (1, 1, 132, 5),
        (1, 8, 132, 4),
    ],
)
def test_groups_are_as_many_as_all_pieces_take_and_a_gpu_has_room_for(
    tree_tokens: int, batch: int, parts: int, shift: int
) -> None:
    plan = VerifyPlan(VerifyShape(8, tree_tokens), batch, "cpu", parts=parts)
    assert combine.most_shift(plan, batch) == shift


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_combine_of_a_fixed_split_is_cut_alike_for_any_batch(batch: int) -> None:
    """The order of additions decides the last bits, and a request's result must not depend on its neighbours."""
    plan = VerifyPlan(VerifyShape(8, 9), 8, "cpu", fixed_split_tokens=64, max_context=1000)
    assert combine.most_shift(plan, batch) == combine.most_shift(plan, 8) == 2  # of 16 pieces


@pytest.mark.parametrize("rows", [1, 3, 9, 72])
@pytest.mark.parametrize("shift", range(combine.MOST_GROUP_SHIFT + 1))
def test_the_grid_has_a_warp_for_every_group_and_no_idle_cta(rows: int, shift: int) -> None:
    plan = VerifyPlan(VerifyShape(rows, 1), 4, "cpu")
    ctas, requests = combine.grid(plan, 4, shift)
    assert requests == 4
    assert 8 * (ctas - 1) < rows * 2 * 2**shift <= 8 * ctas


SM_SHARED_BYTES = {132: 233_472, 188: 102_400}  # by SMs: an H200, an RTX PRO 6000


@pytest.mark.parametrize(
    ("waves", "shift", "an_sm"),
    [(0.01, 5, 2), (1, 0, 2), (2, 3, 2), (2.1, 2, 3), (3, 2, 3), (3.1, 2, 4), (80, 0, 4), (3.1, 3, 3), (80, 5, 3)],
)
@pytest.mark.parametrize("num_sms", SM_SHARED_BYTES)
def test_an_sm_has_room_for_its_share_of_the_ctas_and_no_more(
    num_sms: int, waves: float, shift: int, an_sm: int
) -> None:
    """By registers there is room for four; the granule is 128 bytes."""
    asked = combine.shared_bytes(math.ceil(waves * num_sms), shift, num_sms, SM_SHARED_BYTES[num_sms])
    held = -(-(combine.STATIC_SHARED_BYTES + asked) // 128) * 128 + combine.DRIVER_SHARED_BYTES
    assert min(4, SM_SHARED_BYTES[num_sms] // held) == an_sm
    assert 0 <= asked <= SM_SHARED_BYTES[num_sms] - 1024 - combine.STATIC_SHARED_BYTES  # what a CTA may have


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_combine_s_static_shared_memory_is_what_the_stored_kernel_has(arch: str) -> None:
    """Not sizeof(CombineSpace): it is padded to the alignment of other kernels' shared memory."""
    stored = Path(__file__).parents[2] / "perf_baselines/static" / arch / "treemla_combine.json"
    assert json.loads(stored.read_text())["shared_bytes"] == combine.STATIC_SHARED_BYTES
