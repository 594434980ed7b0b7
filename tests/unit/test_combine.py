"""How the combine kernel is cut, as far as no GPU is needed to say it."""

import pytest

from treemla import combine
from treemla.plan import VerifyPlan
from treemla.problem import VerifyShape


@pytest.mark.parametrize(
    ("tree_tokens", "batch", "parts", "shift"),
    [
        (9, 1, 4, 0),
        (9, 1, 9, 1),
        (9, 1, 132, 4),
        (9, 2, 132, 3),
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
    assert combine.most_shift(plan, batch) == combine.most_shift(plan, 8) == 2


@pytest.mark.parametrize("rows", [1, 3, 9, 72])
@pytest.mark.parametrize("shift", range(combine.MOST_GROUP_SHIFT + 1))
def test_the_grid_has_a_warp_for_every_group_and_no_idle_cta(rows: int, shift: int) -> None:
    plan = VerifyPlan(VerifyShape(rows, 1), 4, "cpu")
    ctas, requests = combine.grid(plan, 4, shift)
    assert requests == 4
    assert 8 * (ctas - 1) < rows * 2 * 2**shift <= 8 * ctas


@pytest.mark.parametrize(("ctas", "an_sm"), [(1, 2), (132, 2), (264, 2), (265, 3), (396, 3), (397, 4), (9999, 4)])
def test_an_sm_has_room_for_its_share_of_the_ctas_and_no_more(ctas: int, an_sm: int) -> None:
    """Of an H200's 132 and 228 KB; a CTA's own, and 1 KB of the driver's. By registers there is room for four."""
    held = combine.shared_bytes(ctas, 132, 233_472) + combine.CTA_SHARED_BYTES + 1024
    assert min(4, 233_472 // held) == an_sm
    assert 233_472 - an_sm * held > 0
