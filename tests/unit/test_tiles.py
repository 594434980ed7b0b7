"""The dispatch table: which blocks cover the rows."""

import pytest

from treemla.problem import VerifyShape
from treemla.schedule import MIN_PART_TOKENS
from treemla.tiles import MMA, PATHS, TILE_TOKENS, WGMMA


@pytest.mark.parametrize(
    ("tree_tokens", "heads", "mma", "wgmma"),
    [
        (1, 1, (1, 8), (1, 8)),
        (1, 8, (1, 8), (1, 8)),
        (9, 8, (2, 40), (1, 72)),
        (16, 8, (4, 32), (2, 64)),
        (9, 9, (3, 32), (2, 48)),
        (64, 128, (205, 40), (114, 72)),
    ],
)
def test_fewest_blocks_of_the_least_height(
    tree_tokens: int, heads: int, mma: tuple[int, int], wgmma: tuple[int, int]
) -> None:
    shape = VerifyShape(heads, tree_tokens)
    assert (MMA.row_blocks(shape), WGMMA.row_blocks(shape)) == (mma, wgmma)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_blocks_cover_all_rows_at_a_height_that_has_a_kernel(path) -> None:
    for heads in range(1, 129):
        for tree_tokens in (1, 2, 9, 33, 64):
            shape = VerifyShape(heads, tree_tokens)
            blocks, rows = path.row_blocks(shape)
            assert rows in path.block_heights
            assert (blocks - 1) * path.max_block_rows < shape.rows <= blocks * rows < shape.rows + 8 * blocks


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_the_planner_can_count_in_a_kernel_s_tiles(path) -> None:
    """It shifts by them, a part's least length is whole tiles, and a fixed split may be one of TILE_TOKENS."""
    assert path.tile_tokens.bit_count() == 1
    assert TILE_TOKENS <= path.tile_tokens <= MIN_PART_TOKENS
