"""pack_tree_mask: both of SGLang's layouts against reading the mask element by element."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treemla import MaskLayout, pack_tree_mask


@st.composite
def masks(draw: st.DrawFn) -> tuple[torch.Tensor, list[int]]:
    """A mask [B, T, T] of any bits and the committed lengths."""
    tree_tokens = draw(st.one_of(st.sampled_from([1, 2, 31, 32, 33, 63, 64]), st.integers(1, 64)))
    lengths = draw(st.lists(st.one_of(st.just(0), st.integers(0, 90)), min_size=1, max_size=5))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    mask = torch.rand(len(lengths), tree_tokens, tree_tokens, generator=random) < draw(st.sampled_from([0.1, 0.5, 1.0]))
    return mask, lengths


def full_layout(mask: torch.Tensor, lengths: list[int], prefix: bool) -> torch.Tensor:
    """As SGLang lays it out: each request's rows one after another, `prefix` in the committed columns."""
    blocks = [
        torch.cat([torch.full((len(own), n), prefix), own], dim=1).flatten()
        for own, n in zip(mask, lengths, strict=True)
    ]
    return torch.cat(blocks)


def bit_by_bit(mask: torch.Tensor) -> list[int]:
    """[B*T] words as Python integers of 64 bits."""
    return [sum(int(bit) << j for j, bit in enumerate(row)) for row in mask.flatten(0, 1).tolist()]


def unsigned(words: torch.Tensor) -> list[int]:
    return [word % 2**64 for word in words.tolist()]


def pack(
    mask: torch.Tensor, lengths: list[int], tree_tokens: int, layout: MaskLayout, num_padding: int = 0
) -> list[int]:
    words = torch.full((len(lengths) * tree_tokens,), 0x5A5A_5A5A)
    pack_tree_mask(mask, torch.tensor(lengths), words, layout, num_padding)
    return unsigned(words)


@given(masks(), st.booleans(), st.sampled_from([torch.bool, torch.uint8]))
def test_full_layout_reads_the_tree_columns_alone(
    drawn: tuple[torch.Tensor, list[int]], prefix: bool, dtype: torch.dtype
) -> None:
    mask, lengths = drawn
    flat = full_layout(mask, lengths, prefix).to(dtype)
    assert pack(flat, lengths, mask.shape[1], MaskLayout.FULL) == bit_by_bit(mask)


@given(masks(), st.sampled_from([torch.bool, torch.uint8]))
def test_qlen_only_layout(drawn: tuple[torch.Tensor, list[int]], dtype: torch.dtype) -> None:
    mask, lengths = drawn
    assert pack(mask.to(dtype), lengths, mask.shape[1], MaskLayout.QLEN_ONLY) == bit_by_bit(mask)
    assert pack(mask.to(dtype).flatten(), lengths, mask.shape[1], MaskLayout.QLEN_ONLY) == bit_by_bit(mask)


@given(masks(), st.data(), st.sampled_from(MaskLayout))
def test_padding_gets_zero_words_and_its_mask_is_not_read(
    drawn: tuple[torch.Tensor, list[int]], data: st.DataObject, layout: MaskLayout
) -> None:
    """The buffer may end where the padded requests begin."""
    mask, lengths = drawn
    num_padding = data.draw(st.integers(0, len(lengths)))
    real = len(lengths) - num_padding
    held = mask[:real].flatten() if layout is MaskLayout.QLEN_ONLY else torch.zeros(0, dtype=torch.bool)
    if layout is MaskLayout.FULL and real:
        held = full_layout(mask[:real], lengths[:real], prefix=True)
    zeros = [0] * (num_padding * mask.shape[1])
    assert pack(held, lengths, mask.shape[1], layout, num_padding) == bit_by_bit(mask[:real]) + zeros


@given(masks(), st.sampled_from(MaskLayout))
def test_longer_buffer_gives_the_same_words(drawn: tuple[torch.Tensor, list[int]], layout: MaskLayout) -> None:
    """Static buffers are as large as the largest batch needs."""
    mask, lengths = drawn
    exact = full_layout(mask, lengths, prefix=True) if layout is MaskLayout.FULL else mask.flatten()
    longer = torch.cat([exact, torch.ones(123, dtype=torch.bool)])
    assert pack(longer, lengths, mask.shape[1], layout) == bit_by_bit(mask)


def test_uint8_above_one_is_visible() -> None:
    assert pack(torch.tensor([[[2]], [[255]], [[0]]], dtype=torch.uint8), [0, 0, 0], 1, MaskLayout.QLEN_ONLY) == [
        1,
        1,
        0,
    ]


WORDS = torch.zeros(6, dtype=torch.int64)
LENGTHS = torch.tensor([4, 5])
MASK = torch.ones(100, dtype=torch.bool)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"custom_mask": MASK.int()},
            TypeError,
            "custom_mask: expected dtype torch.bool or torch.uint8, got torch.int32",
        ),
        ({"custom_mask": None}, TypeError, "custom_mask: expected a tensor, got NoneType"),
        ({"custom_mask": MASK[::2]}, ValueError, "custom_mask: expected a contiguous tensor, got"),
        ({"custom_mask": MASK.to("meta")}, ValueError, "custom_mask: expected device cpu, got 'meta'"),
        (
            {"custom_mask": MASK[: 3 * (4 + 3) + 3 * (5 + 3) - 1]},
            ValueError,
            "custom_mask: expected at least 45 elements",
        ),
        ({"custom_mask": MASK[:17], "layout": MaskLayout.QLEN_ONLY}, ValueError, "custom_mask: expected at least 18"),
        ({"seq_lens": LENGTHS.float()}, TypeError, "seq_lens: expected dtype torch.int32 or torch.int64"),
        ({"seq_lens": LENGTHS[:0]}, ValueError, "seq_lens: expected at least 1 request, got 0"),
        ({"seq_lens": LENGTHS[None]}, ValueError, r"seq_lens: expected shape \[\*\], got \[1, 2\]"),
        ({"seq_lens": torch.tensor([4, -1])}, ValueError, r"seq_lens: expected lengths in 0\.\.100, .* got \[4, -1\]"),
        ({"words": WORDS.int()}, TypeError, "words: expected dtype torch.int64"),
        ({"words": torch.zeros(12, dtype=torch.int64)[::2]}, ValueError, "words: expected a contiguous tensor"),
        ({"words": WORDS[:5]}, ValueError, r"words: expected T = 1\.\.64 words for each of 2 requests, got 5"),
        ({"words": WORDS[:0]}, ValueError, r"words: expected T = 1\.\.64 words"),
        ({"words": torch.zeros(130, dtype=torch.int64)}, ValueError, r"words: expected T = 1\.\.64 words"),
        ({"words": [0] * 6}, TypeError, "words: expected a tensor, got list"),
        ({"layout": "full"}, TypeError, "layout: expected a MaskLayout, got 'full'"),
        ({"num_padding": 3}, ValueError, r"num_padding: expected 0\.\.2, got 3"),
        ({"num_padding": -1}, ValueError, r"num_padding: expected 0\.\.2, got -1"),
        ({"num_padding": True}, TypeError, "num_padding: expected an int, got True"),
    ],
)
def test_bad_input_is_named_and_writes_nothing(
    changed: dict[str, object], error: type[Exception], message: str
) -> None:
    arguments = {"custom_mask": MASK, "seq_lens": LENGTHS, "words": WORDS, "layout": MaskLayout.FULL} | changed
    words = arguments["words"]
    if isinstance(words, torch.Tensor):
        words.fill_(77)
    with pytest.raises(error, match=message):
        pack_tree_mask(**arguments)
    assert not isinstance(words, torch.Tensor) or (words == 77).all()
