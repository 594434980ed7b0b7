"""What move_rows refuses, with the argument's name, before a row is written."""

import pytest
import torch

from treemla.kv import move_rows


def slots(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def pool(rows: int = 6, width: int = 8) -> torch.Tensor:
    return torch.arange(rows * width, dtype=torch.float32).view(rows, width)


REFUSED = {
    "no buffer": (([], slots(1), slots(2)), {}, ValueError, "buffers: expected at least one buffer"),
    "not a tensor": (([pool(), [1]], slots(1), slots(2)), {}, TypeError, r"buffers\[1\]: expected a tensor, got list"),
    "no slots": (([pool(0)], slots(1), slots(2)), {}, ValueError, r"buffers\[0\]: expected shape \[slots"),
    "columns, not rows": (([pool().T], slots(1), slots(2)), {}, ValueError, "rows of contiguous elements"),
    "one row for all": (([pool(1).expand(6, 8)], slots(1), slots(2)), {}, ValueError, "rows of contiguous elements"),
    "int32 slots": (([pool()], slots(1).int(), slots(2)), {}, TypeError, "source: expected dtype torch.int64"),
    "as many of both": (([pool()], slots(1, 2), slots(3)), {}, ValueError, r"destination: expected shape \[2\]"),
    "a slot too high": (([pool(), pool(5)], slots(5), slots(1)), {}, ValueError, r"source: expected slots 0..4.*\[5\]"),
    "a slot below 0": (([pool()], slots(1), slots(-1)), {}, ValueError, r"destination: expected slots 0..5.*\[-1\]"),
    "two into one": (([pool()], slots(1, 2), slots(3, 3)), {}, ValueError, r"destination: expected distinct.*\[3\]"),
    "both, and said not to be": (([pool()], slots(1, 2), slots(2, 3)), {"disjoint": True}, ValueError,
                                 r"disjoint: expected no slot that is both source and destination, got \[2\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    arguments, options, error, message = REFUSED[name]
    before = [buffer.clone() for buffer in arguments[0] if isinstance(buffer, torch.Tensor)]
    with pytest.raises(error, match=message):
        move_rows(*arguments, **options)
    after = [buffer for buffer in arguments[0] if isinstance(buffer, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_meta_tensors_stand_for_other_devices_in_the_check() -> None:
    with pytest.raises(ValueError, match=r"buffers\[1\]: expected device cpu, got 'meta'"):
        move_rows([pool(), torch.empty(6, 8, device="meta")], slots(1), slots(2))


def test_values_are_not_read_when_the_caller_says_so() -> None:
    buffer = pool()
    move_rows([buffer], slots(1, 2), slots(3, 3), check_values=False)
    assert buffer[3].tolist() in (pool()[1].tolist(), pool()[2].tolist())
