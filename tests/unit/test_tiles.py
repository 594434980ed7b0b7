"""The dispatch table: which blocks cover the rows."""

from itertools import product

import pytest

from treemla.problem import VerifyShape
from treemla.schedule import MIN_PART_TOKENS
from treemla.tiles import MAX_PARTS, MMA, PATHS, TILE_TOKENS, WGMMA


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
def test_every_usable_share_of_every_block_has_a_row_and_together_they_have_all(path) -> None:
    """Of any height that holds a shape. Share k of a block is rows k * share_rows on, as RowBlock of csrc/work.cuh."""
    for heads, tree_tokens in product((1, 2, 3, 7, 8, 16, 64), (1, 2, 5, 9, 31, 64)):
        shape = VerifyShape(heads, tree_tokens)
        for rows in path.block_heights:
            shares = path.usable_shares(shape, rows, MAX_PARTS)
            assert [path.usable_shares(shape, rows, parts) for parts in (1, 2)] == [1, min(2, shares)]
            assert 1 <= shares <= path.most_shares(rows)
            step = path.share_rows(rows, shares)
            blocks = range(0, shape.rows, rows)
            starts = [block + k * step for block in blocks for k in range(shares)]
            held = [min(step, rows - k * step) for _ in blocks for k in range(shares)]
            assert max(starts) < shape.rows
            assert [
                row for start, count in zip(starts, held, strict=True) for row in range(start, start + count)
            ] == list(range(len(blocks) * rows))


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_the_planner_can_count_in_a_kernel_s_tiles(path) -> None:
    """It shifts by them, a part's least length is whole tiles, and a fixed split may be one of TILE_TOKENS."""
    assert path.tile_tokens.bit_count() == 1
    assert TILE_TOKENS <= path.tile_tokens <= MIN_PART_TOKENS


def test_a_kernel_s_name_says_which_shares_it_knows() -> None:
    assert [WGMMA.kernel_name(rows, by_shares=True).rpartition("_r")[2] for rows in (8, 16, 40, 48, 64, 72)] == [
        "8", "16_8", "40_24", "48_24_16", "64_32_24", "72_40_24",
    ]  # fmt: skip
    assert MMA.kernel_name(40, by_shares=True) == MMA.kernel_name(40) == "treemla_verify_mma_r40"
