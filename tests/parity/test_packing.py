"""SGLang's boolean masks, packed on the device, are the words of the trees they were made from."""

import pytest
import torch
from cases import Case, make_inputs
from compare import assert_matches
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import trees
from tree_kinds import make_tree

from treemla import MaskLayout, pack_tree_mask
from treemla.tree import DraftTree, batch_words, full_mask, qlen_mask


def packed(made: list[DraftTree], lengths: list[int], layout: MaskLayout, device: torch.device, **options):
    """Words that pack_tree_mask writes over poison. options: num_padding, and the mask's and lengths' dtypes."""
    mask = full_mask(made, lengths) if layout is MaskLayout.FULL else qlen_mask(made)
    on_device = torch.from_numpy(mask).to(device, options.get("mask_dtype", torch.bool))
    seq_lens = torch.tensor(lengths, dtype=options.get("lengths_dtype", torch.int32), device=device)
    words = torch.full((len(made) * made[0].tree_tokens,), 0x5A5A_5A5A_5A5A_5A5A, device=device)
    pack_tree_mask(on_device, seq_lens, words, layout, options.get("num_padding", 0))
    return words.cpu()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), layout=st.sampled_from(MaskLayout), dtype=st.sampled_from([torch.int32, torch.int64]))
def test_masks_of_drawn_trees_give_their_words(
    data: st.DataObject, layout: MaskLayout, dtype: torch.dtype, device: torch.device
) -> None:
    drawn = data.draw(st.lists(trees(), min_size=1, max_size=4))
    size = min(tree.tree_tokens for tree in drawn)
    made = [DraftTree(tree.parents[:size]) for tree in drawn]
    lengths = data.draw(st.lists(st.integers(0, 200), min_size=len(made), max_size=len(made)))
    mask_dtype = data.draw(st.sampled_from([torch.bool, torch.uint8]))
    words = packed(made, lengths, layout, device, mask_dtype=mask_dtype, lengths_dtype=dtype)
    assert words.tolist() == batch_words(made, size).tolist()


@pytest.mark.parametrize("layout", MaskLayout)
@pytest.mark.parametrize("num_padding", [0, 1, 3, 4])
def test_padding_gets_zero_words(num_padding: int, layout: MaskLayout, device: torch.device) -> None:
    made = [make_tree("random", 9, seed) for seed in range(4)]
    want = batch_words(made, 9)
    want[len(want) - 9 * num_padding :] = 0
    words = packed(made, [40, 3, 0, 0], layout, device, num_padding=num_padding)
    assert words.tolist() == want.tolist()


@pytest.mark.parametrize("layout", MaskLayout)
def test_a_mask_packed_on_the_device_verifies_as_its_tree(layout: MaskLayout, device: torch.device) -> None:
    dtype = "bf16" if device.type == "cuda" else "fp32"
    case = Case((70, 0, 33), 17, 3, dtype=dtype, tree="random", family="mean")
    inputs = make_inputs(case, device)
    made = [make_tree("star", 17, 0), make_tree("comb", 17, 0), make_tree("random", 17, 5)]
    inputs.words.copy_(packed(made, list(case.lengths), layout, device))
    expected = inputs.expected()
    assert_matches(*inputs.run(), expected, case)
    assert (expected.out[16, 0, :17] > 0).tolist() == made[0].visible[16].tolist()
