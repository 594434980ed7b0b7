"""Every case: treemla.verify_attention against the float64 oracle."""

from collections.abc import Callable

import torch
from case_lists import CASES
from cases import Case, make_inputs
from compare import assert_matches
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import cases

assert CASES  # read by conftest


def test_matches_the_oracle(case: Case, device: torch.device, record_property: Callable[[str, object], None]) -> None:
    inputs = make_inputs(case, device)
    assert_matches(*inputs.run(), inputs.expected(), case).record(record_property)


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_matches_the_oracle_on_drawn_cases(data: st.DataObject, device: torch.device) -> None:
    case = data.draw(cases(device.type))
    inputs = make_inputs(case, device)
    assert_matches(*inputs.run(), inputs.expected(), case)
