"""The same cases through SGLang's own Triton kernel: peer and treemla both against the float64 oracle.

On a CPU the kernel runs under Triton's interpreter, in fp32 and fp16 (its bf16 dots are wrong there). On a GPU in bf16.
Cases with rows that see nothing are left to test_oracle.py: SGLang 0.5.16 divides by zero there. So are, on a CPU, those
that turn a knob of treemla's plan alone or hold many heads: the interpreter takes about 40 ms a head and key tile.
So are caches in fp8: SGLang rounds queries and weights to the cache's dtype. So are scores made to move treemla's references.
"""

from collections.abc import Callable

import case_lists
import pytest
import torch
from cases import MIXES, RISING, Case, make_inputs
from compare import assert_matches
from peers import sglang_extend


def is_comparable(case: Case) -> bool:
    return case.sees_everywhere and not case.kv and case.family != RISING


def fits_the_interpreter(case: Case) -> bool:
    return case.dtype != "bf16" and case.heads <= 5 and case.parts == case.split == 0


CASES = {
    "cpu": [case for case in case_lists.CASES["cpu"] if is_comparable(case) and fits_the_interpreter(case)],
    "cuda": [case for case in case_lists.CASES["cuda"] if is_comparable(case)],
}


def test_treemla_and_sglang_agree_with_the_oracle(
    case: Case, device: torch.device, record_property: Callable[[str, object], None]
) -> None:
    inputs = make_inputs(case, device)
    expected = inputs.expected()
    assert_matches(*sglang_extend(inputs), expected, case, who="sglang").record(record_property, "sglang")
    assert_matches(*inputs.run(), expected, case).record(record_property)


@pytest.mark.parametrize("tree_tokens", [1, 2, 9, 33, 64])
def test_a_chain_is_what_sglang_computes_causally(tree_tokens: int, device: torch.device) -> None:
    dtype = "bf16" if device.type == "cuda" else "fp32"
    inputs = make_inputs(Case(MIXES[1], tree_tokens, 2, dtype=dtype, tree="none"), device)
    expected = inputs.expected()
    assert_matches(*sglang_extend(inputs, causal=True), expected, inputs.case, who="sglang")
    assert_matches(*inputs.run(), expected, inputs.case)
