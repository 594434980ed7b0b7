"""Random serving on SGLang's real allocators: stock and ordered ones in lockstep, with every invariant after a step."""

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from machine import Machine

from treemla.sglang.allocator import ordered_allocator_classes

SIZE = 128  # slots: small enough that requests meet its end
STEPS = 50


def stock_classes() -> tuple[type, type]:
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    return TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator


def make(classes: tuple[type, type], page_size: int, *, need_sort: bool = False):
    token, paged = classes
    rest = (torch.bfloat16, "cpu", None, need_sort)
    return token(SIZE, *rest) if page_size == 1 else paged(SIZE, page_size, *rest)


def play(make_all, examples: int, *, shrink: bool = True) -> Counter[str]:
    """Run a machine over the allocators that `make_all` makes; how often each rule fired.

    The error of a sequence that goes wrong is that of the simplest one found, or without `shrink` of the first.
    """
    fired: Counter[str] = Counter()
    machine = type("Played", (Machine,), {"make": staticmethod(make_all), "fired": fired})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            report_multiple_bugs=False,
            phases=tuple(Phase) if shrink else (Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )
    return fired


def expected_rules(allocator) -> set[str]:
    rules = {name for name, thing in vars(Machine).items() if hasattr(thing, "hypothesis_stateful_rule")}
    rules.remove("verify")  # it is made of others
    return rules if hasattr(allocator, "backup_state") else rules - {"borrow_and_restore"}


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("debug", [False, True], ids=["ordered", "debug"])
def test_requests_read_their_own_rows_and_ours_hands_out_what_stock_does(
    request, page_size: int, debug: bool, record_property
) -> None:
    def make_all():
        return [make(ordered_allocator_classes(debug=debug), page_size), make(stock_classes(), page_size)]

    examples = request.config.getoption("--examples")
    fired = play(make_all, examples)
    record_property("fired", ", ".join(f"{rule} {n}" for rule, n in sorted(fired.items())))
    rare = {rule: fired[rule] for rule in expected_rules(make_all()[0]) if fired[rule] < examples // 10}
    assert not rare, f"rules that hardly fired in {examples} examples: {rare}"
    assert fired["(of which None)"] >= examples // 5, "requests hardly ever met the end of the pool"


@pytest.mark.parametrize("page_size", [1, 4])
def test_stock_with_need_sort_agrees_too(request, page_size: int) -> None:
    """What prefill-decode disaggregation runs, and what ours is built on."""
    play(
        lambda: [make(stock_classes(), page_size, need_sort=need_sort) for need_sort in (True, False)],
        request.config.getoption("--examples") // 2,
    )
