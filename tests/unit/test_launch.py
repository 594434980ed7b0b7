"""What the host asks of a launch, as far as no GPU is needed to say it."""

import pytest

from treemla import launch, tiles
from treemla.plan import VerifyPlan
from treemla.problem import VerifyShape

STATIC_SHARED_BYTES = 1024  # a generous bound on what the planner declares beside its dynamic arrays


@pytest.mark.parametrize("target", tiles.TARGETS.values(), ids=tiles.TARGETS)
def test_largest_plan_fits_shared_memory(target: tiles.Target) -> None:
    assert target.shared_memory_limit_bytes >= launch.PLAN_SHARED_LIMIT_BYTES + STATIC_SHARED_BYTES


def test_every_plan_takes_at_most_the_limit() -> None:
    largest = launch.plan_shared_bytes(tiles.MAX_BATCH, tiles.MAX_PARTS)
    assert launch.plan_shared_bytes(1, 1) < largest == launch.PLAN_SHARED_LIMIT_BYTES


@pytest.mark.parametrize(
    ("batch", "parts", "warps"), [(1, 1, 1), (1, 4, 1), (1, 5, 2), (1, 132, 16), (8, 132, 4), (64, 132, 1)]
)
def test_combine_warps_follow_the_pieces_of_a_request(batch: int, parts: int, warps: int) -> None:
    plan = VerifyPlan(VerifyShape(8, 9), batch, "cpu", parts=parts)
    assert launch.combine_unit_warps(plan, batch) == warps


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_combine_warps_of_a_fixed_split_ignore_the_batch(batch: int) -> None:
    """The merge order decides the last bits, and a request's result must not depend on its neighbours."""
    plan = VerifyPlan(VerifyShape(8, 9), 8, "cpu", fixed_split_tokens=64, max_context=1000)
    assert launch.combine_unit_warps(plan, batch) == launch.combine_unit_warps(plan, 8) == 4
