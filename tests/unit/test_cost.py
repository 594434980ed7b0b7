"""The cost model: what it says of an H200, what must hold for any constants, and what it chooses."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treemla import cost
from treemla.problem import FP8, VerifyShape
from treemla.tiles import MAX_PARTS, MMA, WGMMA

SMS = 132
H200 = cost.DEFAULTS["wgmma"]
TREE = VerifyShape(8, 9)
WHOLE = cost.Tiling(1, 72, SMS, 6)

# Contexts, T, H; microseconds a layer: docs/measured/2026-11-30-h200-5c06dc5-gpu-peers.jsonl.
MEASURED = [
    ((4096,), 9, 8, 10.6),
    ((16384,), 9, 8, 15.6),
    ((65536,), 9, 8, 31.0),
    ((65536,), 1, 8, 23.6),
    ((65536,), 32, 8, 67.0),
    ((16384,) * 8, 9, 8, 51.0),
    ((4096,) * 32, 9, 8, 53.4),
    ((16384,) * 8, 1, 8, 40.9),
    ((16384,) * 8, 9, 64, 262.3),
]
# Contexts; microseconds of one block of 72 rows, T = 9, H = 8, by one, two and three CTAs: process e of
# docs/measured/raw/2026-11-30-h200-log-61-66.jsonl.
BY_SHARES = [
    ((512,), (10.5, 8.7, 7.8)),
    ((2048,), (11.5, 9.7, 9.4)),
    ((4096,), (14.4, 11.3, 10.4)),
    ((6144,), (15.5, 11.9, 12.3)),
    ((8192,), (15.2, 12.9, 12.7)),
    ((16384,), (17.4, 15.3, 16.1)),
    ((24576,), (19.9, 18.6, 20.9)),
    ((32768,), (22.1, 21.7, 25.1)),
    ((65536,), (31.5, 34.7, 43.1)),
    ((1024,) * 8, (17.1, 14.3, 13.5)),
    ((4096,) * 4, (19.8, 16.8, 18.2)),
    ((4096,) * 8, (23.4, 22.8, 26.8)),
]

shapes = st.builds(VerifyShape, st.sampled_from([1, 8, 16, 64, 128]), st.integers(1, 64))
kernels = st.sampled_from([MMA, WGMMA])


def us(constants=H200, kernel=WGMMA, shape=TREE, contexts=(16384,), tiling=WHOLE):
    return cost.estimate(constants, kernel, shape, contexts, tiling, SMS).us


@pytest.mark.parametrize(("contexts", "tree_tokens", "heads", "expected_us"), MEASURED)
def test_the_model_is_near_what_an_h200_took(contexts, tree_tokens, heads, expected_us) -> None:
    """By a plan for any length."""
    shape, steps = VerifyShape(heads, tree_tokens), cost.design_steps(len(contexts))
    got = us(shape=shape, contexts=contexts, tiling=cost.choose(H200, WGMMA, shape, SMS, steps))
    by_thirds = contexts == (4096,)
    assert got == pytest.approx(expected_us, rel=0.08 if by_thirds else 0.05)


@pytest.mark.parametrize(("contexts", "measured"), BY_SHARES)
def test_the_shares_that_the_model_takes_for_the_quickest_are_nearly_so(contexts, measured) -> None:
    whole = cost.Tiling(1, 72, SMS, 2)
    said = [us(contexts=contexts, tiling=whole.by_shares(shares)) for shares in (1, 2, 3)]
    assert measured[int(np.argmin(said))] <= 1.05 * min(measured)


def test_shares_end_where_they_are_the_slower_ones() -> None:
    """T = 9, H = 8: measured, thirds between 4k and 6k tokens, halves between 32k and 48k; four blocks share nothing."""
    made = cost.choose(H200, WGMMA, TREE, SMS, cost.design_steps(8))
    assert 4_096 < made.third_tiles * WGMMA.tile_tokens <= 8_448
    assert 24_576 < made.halved_tiles * WGMMA.tile_tokens < 49_152
    of_four = cost.choose(H200, WGMMA, VerifyShape(8, 32), SMS, cost.design_steps(8))
    assert of_four.halved_tiles == of_four.third_tiles == 0


@pytest.mark.parametrize(
    ("shape", "whole", "most"),
    [(TREE, WHOLE, 3), (VerifyShape(8, 5), cost.Tiling(1, 40, SMS, 2), 2), (VerifyShape(8, 1), cost.Tiling(1, 8, SMS, 1), 1),
     (TREE, cost.Tiling(1, 72, 2, 2), 2), (TREE, cost.Tiling(1, 72, 1, 2), 1)],
)  # fmt: skip
def test_no_block_is_shared_by_more_ctas_than_it_has_kernels_or_parts(shape, whole, most) -> None:
    """And thirds, the lower ones, end before halves do."""
    made = cost.with_shares(H200, WGMMA, shape, SMS, whole)
    assert (made.third_tiles > 0) <= (most == 3) and (made.halved_tiles > 0) <= (most >= 2)
    if whole.parts == SMS and most > 1:
        assert made.halved_tiles > made.third_tiles
        assert (made.third_tiles > 0) == (most == 3)


def test_terms_worked_out_by_hand() -> None:
    """Two SMs, a request of four mma tiles and one of tree, memory free: parts of three and two tiles, a partial each."""
    constants = cost.Constants(10.0, 1.0, 0.125, 50.0, 1.0, 0.0625, 1e12, 18432.0)
    asked = MMA, VerifyShape(1, 32), (128,), cost.Tiling(1, 32, 2, 4), 2
    made = cost.estimate(constants, *asked)
    assert (made.layer_us, made.tiles, made.pieces) == (10.0, 3, 1)
    assert made.busiest_us == pytest.approx(3 * (1 + 32 / 8))
    assert made.partials_us == pytest.approx(2 * 32 * 1536 / 18432)
    # Where masks are dear the shorter piece, which has the tree, takes longer.
    masked = cost.estimate(replace(constants, ragged_row_us=0.25), *asked)
    assert (masked.busiest_us, masked.tiles) == (pytest.approx(2 * 5 + 32 / 4), 2)


def test_a_further_piece_of_an_sm_costs_a_piece_and_whole_requests_no_partials() -> None:
    constants = cost.Constants(10.0, 1.0, 0.125, 50.0, 1.0, 0.25, 1e12, 1e12)
    one = cost.estimate(constants, MMA, VerifyShape(1, 8), (64,), cost.Tiling(1, 8, 1, 4), 1)
    two = cost.estimate(constants, MMA, VerifyShape(1, 8), (64, 64), cost.Tiling(1, 8, 1, 4), 1)
    assert two.us - one.us == pytest.approx(3 * 2.0 + 8 * 0.25 + 50.0 + 8 * 1.0)
    assert two.partials_us == 0.0


def test_ctas_beyond_a_wave_wait_for_the_sm_that_is_free_first() -> None:
    assert cost._sm_of_ctas(np.array([3.0, 1.0, 1.0, 1.0, 1.0]), 2).tolist() == [0, 1, 1, 1, 0]
    constants = cost.Constants(1.0, 1.0, 1e-9, 5.0, 1e-9, 1e-9, 1e12, 1e12)
    made = cost.estimate(constants, MMA, VerifyShape(1, 8), (192,), cost.Tiling(1, 8, 3, 4), 2)
    assert made.tiles == 3 + 1  # of parts of 3, 3 and 1
    assert made.busiest_us == pytest.approx(4 * 1.0 + 5.0, rel=1e-3)


@pytest.mark.parametrize(("blocks", "parts", "streams"), [(1, 2, 2), (2, 1, 1), (2, 2, 1)])
def test_blocks_of_a_part_read_one_tile_and_waiting_ctas_none(blocks, parts, streams) -> None:
    """Two SMs and memory that takes 32 * (1152 + 4) us a tile; `streams` of them at once."""
    slow = cost.Constants(1.0, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9, 1.0, 1e12)
    made = cost.estimate(slow, MMA, VerifyShape(1, 16), (320,), cost.Tiling(blocks, 16 // blocks, parts, 4), 2)
    assert made.busiest_us == pytest.approx(made.tiles * streams * 32 * 1156)


@pytest.mark.parametrize("name", ["layer_us", "tile_us", "tile_row_us", "piece_us", "piece_row_us", "ragged_row_us"])
def test_a_dearer_constant_costs_more(name) -> None:
    contexts = (1000,) * 200
    assert us(replace(H200, **{name: 2 * getattr(H200, name)}), contexts=contexts) > us(contexts=contexts)


@pytest.mark.parametrize("name", ["memory_bytes_per_us", "partial_bytes_per_us"])
def test_a_higher_rate_costs_less(name) -> None:
    assert us(replace(H200, **{name: 2 * getattr(H200, name)})) < us()


def test_fp8_rows_ask_less_of_memory() -> None:
    slow = replace(H200, memory_bytes_per_us=1e6)
    assert us(slow, shape=VerifyShape(8, 9, kv_dtype=FP8)) < us(slow)


@given(kernels, shapes, st.sampled_from([1, 80, 132, 188]))
def test_every_tiling_covers_the_rows_with_kernels_and_parts_that_exist(kernel, shape, num_sms) -> None:
    made = cost.tilings(cost.DEFAULTS[kernel.name], kernel, shape, num_sms)
    assert len(set(made)) == len(made)
    assert (made[0].blocks, made[0].block_rows) == kernel.row_blocks(shape)
    for tiling in made:
        assert tiling.block_rows in kernel.block_heights
        assert shape.rows <= tiling.blocks * tiling.block_rows < shape.rows + 8 * tiling.blocks
        assert 1 <= tiling.parts <= MAX_PARTS
        assert tiling.overhead_tiles >= 0


@given(kernels, shapes, st.sampled_from([(4096,), (4096, 65536)]), st.sampled_from([1, 8]))
@settings(max_examples=30, deadline=None)
def test_no_tiling_has_a_clearly_smaller_worst_ratio_than_the_chosen_one(kernel, shape, contexts, max_batch) -> None:
    constants, steps = cost.DEFAULTS[kernel.name], cost.design_steps(max_batch, contexts)
    chosen = cost.choose(constants, kernel, shape, SMS, steps)
    considered = [*cost.tilings(constants, kernel, shape, SMS), chosen]
    took = [[us(constants, kernel, shape, step, tiling) for step in steps] for tiling in considered]
    best = [min(column) for column in zip(*took, strict=True)]
    worst = [max(mine / least for mine, least in zip(row, best, strict=True)) for row in took]
    assert worst[-1] <= min(worst) * (1 + cost.ALIKE) ** 2  # blocks and parts, then the overhead


@pytest.mark.parametrize(
    ("max_batch", "tree_tokens", "heads", "expected"),
    [
        (1, 9, 8, (1, 72, 132)),
        (8, 9, 8, (1, 72, 132)),
        (32, 9, 8, (1, 72, 132)),
        (8, 1, 8, (1, 8, 132)),
        (1, 32, 8, (4, 64, 33)),
        (8, 9, 64, (8, 72, 16)),
        (1, 16, 64, (16, 64, 8)),  # 15 blocks of 72 leave 12 SMs idle, or take two waves
    ],
)
def test_a_plan_for_any_length_on_an_h200(max_batch, tree_tokens, heads, expected) -> None:
    made = cost.choose(H200, WGMMA, VerifyShape(heads, tree_tokens), SMS, cost.design_steps(max_batch))
    assert (made.blocks, made.block_rows, made.parts) == expected


def test_overhead_is_what_a_piece_takes_in_tiles() -> None:
    constants = cost.Constants(10.0, 1.0, 0.125, 6.0, 0.5, 0.0, 1e12, 1e12)
    assert [cost.overhead_tiles(constants, height) for height in (8, 40)] == [round(10 / 2), round(26 / 6)]


def test_the_worst_step_decides_and_not_the_sum() -> None:
    """T = 32: short steps gain a little by six blocks, a long one loses much."""
    short, long, shape = (4096,), (65536,), VerifyShape(8, 32)
    steps = (short,), (long,), (short,) * 9 + (long,)
    assert [cost.choose(H200, WGMMA, shape, SMS, of).blocks for of in steps] == [6, 4, 4]


def test_steps_are_each_context_in_each_batch() -> None:
    assert cost.design_steps(1, (5, 7)) == ((5,), (7,))
    assert cost.design_steps(8, (5,)) == ((5,), (5,) * 4, (5,) * 8)
    assert cost.design_steps(4096, (5,))[-1] == (5,) * 64
