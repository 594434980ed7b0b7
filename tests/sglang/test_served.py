"""The backend under SGLang's runner without graphs: what tests/graph/test_served.py checks with them."""

from types import SimpleNamespace

import pytest
import served_checks as checks
import torch
from served import Served, Setting

SETTINGS = (
    Setting(),
    Setting("NGRAM", tree_tokens=5),
    Setting("EAGLE"),
    Setting("EAGLE", tree_tokens=4, masked=False),
    Setting(None, tree_tokens=1),
)


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda setting: setting.id)
def served(request):
    return Served(request.param, torch.device("cpu"))


@pytest.mark.parametrize("lengths", checks.LENGTHS, ids=lambda lengths: "_".join(map(str, lengths)))
def test_replays_are_right_and_equal_eager(served, lengths):
    checks.replays_are_right(served, lengths)


def test_trees_change_between_replays():
    for algorithm in ("NGRAM", "EAGLE"):
        checks.trees_change_between_replays(Served(Setting(algorithm), torch.device("cpu")))


def test_no_state_leaks_from_one_replay_into_the_next(served):
    checks.no_state_leaks(served)


def test_every_static_input_is_read_at_replay(served):
    checks.every_static_input_is_read(served)


def test_no_pointer_moves(served):
    checks.pointers_stay(served)


def test_the_scheduler_s_barrier_waits_for_the_end_of_the_replay(served):
    waited = []
    schedule = SimpleNamespace(wait_event=waited.append, wait_stream=waited.append)
    checks.scheduler_waits(served, schedule, forward="whole forward", before_replay="before", after_replay="after")
    assert waited in (["whole forward"], ["after"])


def test_many_replays_of_changing_steps(served):
    checks.many_replays(served, 40)
