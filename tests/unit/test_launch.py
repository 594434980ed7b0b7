"""What the host asks of a launch, as far as no GPU is needed to say it."""

import pytest

from treemla import launch, tiles

STATIC_SHARED_BYTES = 1024  # a generous bound on what the planner declares beside its dynamic arrays


@pytest.mark.parametrize("target", tiles.TARGETS.values(), ids=tiles.TARGETS)
def test_largest_plan_fits_shared_memory(target: tiles.Target) -> None:
    assert target.shared_memory_limit_bytes >= launch.PLAN_SHARED_LIMIT_BYTES + STATIC_SHARED_BYTES


def test_every_plan_takes_at_most_the_limit() -> None:
    largest = launch.plan_shared_bytes(tiles.MAX_BATCH, tiles.MAX_PARTS)
    assert launch.plan_shared_bytes(1, 1) < largest == launch.PLAN_SHARED_LIMIT_BYTES
