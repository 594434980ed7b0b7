"""What one process of a paired measurement holds: a kernel, a case, and blocks of replays that prove their work."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from treemla.gate import machine, nvml, work
from treemla.gate.cases import PlanCase, VerifyCase
from treemla.gate.inputs import Inputs, make_inputs
from treemla.gate.measure import LayerGraph
from treemla.gate.peers import BY_METRIC
from treemla.gate.work import Unproven, Work

BLOCK_US = 30_000.0  # of a slow kernel, which needs no more
MIN_REPLAYS = 3


class Timer(Protocol):
    def sample_us(self, replays: int) -> list[float]: ...


@dataclass(frozen=True)
class Block:
    """Microseconds a layer of each replay, and what the GPU said of itself before and after them."""

    samples_us: tuple[float, ...]
    readings: tuple[nvml.Reading | None, nvml.Reading | None] = (None, None)


def gpu_inputs(case: VerifyCase) -> Inputs:
    return make_inputs(case, torch.device("cuda", torch.cuda.current_device()))


class Side:
    """metric: a key of `peers.BY_METRIC`, the kernel that is timed; of a PlanCase it is this library's plan step."""

    def __init__(
        self,
        metric: str,
        inputs_of: Callable[[VerifyCase], Inputs] = gpu_inputs,
        timer_of: Callable[[Sequence[Callable[[], object]]], Timer] = LayerGraph,
    ) -> None:
        self.layers_of = BY_METRIC[metric].load()
        self.inputs_of, self.timer_of = inputs_of, timer_of
        self.gauge = nvml.attach(machine.gpu_uuid()) if torch.cuda.is_available() else None
        self.held: tuple[Work, Timer] | None = None

    def prepare(self, case: VerifyCase | PlanCase) -> str:
        """Make the inputs, judge the result, record the graph. What is wrong with the result; empty: nothing is."""
        self.held = None  # before the next inputs take their place
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        made = self.work_of(case)
        if problem := made.problem():
            return problem
        timer = self.timer_of(made.steps)
        self.fit = int(BLOCK_US / (min(timer.sample_us(1)) * len(made.steps)))
        self.held = made, timer
        self.last_checksum = 0
        return ""

    def work_of(self, case: VerifyCase | PlanCase) -> Work:
        if isinstance(case, PlanCase):
            return work.Plan(self.inputs_of(case.verify))
        inputs = self.inputs_of(case)
        return work.Verify(inputs, self.layers_of(inputs))

    def block(self, replays: int, seed: int) -> Block:
        """Time at most so many replays, fewer of a slow kernel, on inputs made from `seed`. Unproven unless the result
        they left is new, and has the bits of an untimed run on the same inputs.
        """
        if self.held is None:
            raise RuntimeError("block: expected a prepared case")
        held, timer = self.held
        held.refresh(seed)
        held.clear()
        before = self.gauge.read() if self.gauge else None
        samples = timer.sample_us(max(min(replays, self.fit), MIN_REPLAYS))
        after = self.gauge.read() if self.gauge else None
        left = held.checksum()
        held.clear()
        held.steps[-1]()
        if left != held.checksum():
            raise Unproven("the timed replays left another output than an untimed run on the same inputs")
        if left == self.last_checksum:
            raise Unproven("the timed replays left the output of the block before, whose inputs were others")
        self.last_checksum = left
        return Block(tuple(samples), (before, after))
