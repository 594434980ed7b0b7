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
    ("tree_tokens", "batch", "parts", "cut"),
    [
        (9, 1, 4, (0, 0)),
        (9, 64, 132, (0, 0)),
        (9, 8, 132, (1, 0)),
        (1, 8, 132, (2, 0)),
        (32, 1, 33, (1, 2)),
        (9, 1, 132, (1, 3)),
        (1, 1, 132, (2, 3)),
    ],
)
def test_combine_is_cut_by_the_pieces_and_rows_of_a_step(
    tree_tokens: int, batch: int, parts: int, cut: tuple[int, int]
) -> None:
    plan = VerifyPlan(VerifyShape(8, tree_tokens), batch, "cpu", parts=parts)
    assert launch.combine_cut(plan, batch) == cut


@pytest.mark.parametrize("tree_tokens", [1, 9])
@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_what_shares_a_row_of_combine_is_one_warp_or_a_multiple_of_four_groups(tree_tokens: int, batch: int) -> None:
    """csrc/combine.cuh adds up groups by four, and warps only within a CTA."""
    for parts in (1, 4, 5, 9, 10, 19, 20, 39, 40, 79, 80, 132):
        piece_shift, warp_shift = launch.combine_cut(
            VerifyPlan(VerifyShape(8, tree_tokens), batch, "cpu", parts=parts), batch
        )
        assert warp_shift == 0 or 2 ** (piece_shift + warp_shift) % 4 == 0
        assert piece_shift <= launch.MOST_PIECE_SHIFT and 2**warp_shift <= launch.COMBINE_WARPS


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_combine_of_a_fixed_split_is_cut_alike_for_any_batch(batch: int) -> None:
    """The order of additions decides the last bits, and a request's result must not depend on its neighbours."""
    plan = VerifyPlan(VerifyShape(8, 9), 8, "cpu", fixed_split_tokens=64, max_context=1000)
    assert launch.combine_cut(plan, batch) == launch.combine_cut(plan, 8) == (1, 0)
