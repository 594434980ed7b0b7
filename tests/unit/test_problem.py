"""VerifyShape refuses what no kernel and no path is built for."""

import pytest
import torch

from treemla import VerifyShape


@pytest.mark.parametrize(("tree_tokens", "heads"), [(0, 1), (65, 1), (1, 0), (1, 129)])
def test_shape_outside_the_limits(tree_tokens: int, heads: int) -> None:
    with pytest.raises(ValueError, match=r"expected 1\.\."):
        VerifyShape(num_heads=heads, tree_tokens=tree_tokens)


@pytest.mark.parametrize(("changed", "name"), [({"page_size": 2}, "page_size"), ({"dtype": torch.float64}, "dtype")])
def test_shape_with_an_unknown_page_size_or_dtype(changed: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected one of"):
        VerifyShape(num_heads=1, tree_tokens=1, **changed)


@pytest.mark.parametrize("page_size", [True, 16.0, "16"])
def test_page_size_is_an_int(page_size: object) -> None:
    with pytest.raises(TypeError, match="page_size: expected an int"):
        VerifyShape(num_heads=1, tree_tokens=1, page_size=page_size)
