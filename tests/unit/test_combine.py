"""How the combine kernel is cut, as far as no GPU is needed to say it."""

import pytest

from treemla import combine
from treemla.plan import VerifyPlan
from treemla.problem import VerifyShape


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
    assert combine.cut(plan, batch) == cut


@pytest.mark.parametrize("tree_tokens", [1, 9])
@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_what_shares_a_row_of_combine_is_one_warp_or_a_multiple_of_four_groups(tree_tokens: int, batch: int) -> None:
    """csrc/combine.cuh adds up groups by four, and warps only within a CTA."""
    for parts in (1, 4, 5, 9, 10, 19, 20, 39, 40, 79, 80, 132):
        piece_shift, warp_shift = combine.cut(VerifyPlan(VerifyShape(8, tree_tokens), batch, "cpu", parts=parts), batch)
        assert warp_shift == 0 or 2 ** (piece_shift + warp_shift) % 4 == 0
        assert piece_shift <= combine.MOST_PIECE_SHIFT and 2**warp_shift <= combine.CTA_WARPS


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_combine_of_a_fixed_split_is_cut_alike_for_any_batch(batch: int) -> None:
    """The order of additions decides the last bits, and a request's result must not depend on its neighbours."""
    plan = VerifyPlan(VerifyShape(8, 9), 8, "cpu", fixed_split_tokens=64, max_context=1000)
    assert combine.cut(plan, batch) == combine.cut(plan, 8) == (1, 0)


@pytest.mark.parametrize("rows", [1, 3, 9, 72])
@pytest.mark.parametrize("piece_shift", range(combine.MOST_PIECE_SHIFT + 1))
@pytest.mark.parametrize("warp_shift", range(4))
def test_the_grid_has_a_warp_for_every_share_of_every_dim_and_no_idle_cta(
    rows: int, piece_shift: int, warp_shift: int
) -> None:
    plan = VerifyPlan(VerifyShape(rows, 1), 4, "cpu")
    ctas, requests = combine.grid(plan, 4, combine.Cut(piece_shift, warp_shift))
    unit_dims, cta_units = 256 // 2**piece_shift, 8 // 2**warp_shift
    assert requests == 4
    assert (ctas - 1) * cta_units * unit_dims < rows * 512 <= ctas * cta_units * unit_dims
