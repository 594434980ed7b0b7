"""What one process of a paired measurement holds: a kernel, a case, and blocks of replays that prove their work."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from treemla.gate import machine, nvml
from treemla.gate.cases import VerifyCase
from treemla.gate.inputs import Inputs, make_inputs
from treemla.gate.measure import LayerGraph
from treemla.gate.peers import BY_METRIC, Layers

BLOCK_US = 30_000.0  # of a slow kernel, which needs no more
MIN_REPLAYS = 3


class Timer(Protocol):
    def sample_us(self, replays: int) -> list[float]: ...


class Unproven(RuntimeError):
    """The timed work did not leave the result of its inputs: what was timed is not the work."""


@dataclass(frozen=True)
class Block:
    """Microseconds a layer of each replay, and what the GPU said of itself before and after them."""

    samples_us: tuple[float, ...]
    readings: tuple[nvml.Reading | None, nvml.Reading | None] = (None, None)


def gpu_inputs(case: VerifyCase) -> Inputs:
    return make_inputs(case, torch.device("cuda", torch.cuda.current_device()))


class Side:
    """metric: a key of `peers.BY_METRIC`, the kernel that is timed."""

    def __init__(
        self,
        metric: str,
        inputs_of: Callable[[VerifyCase], Inputs] = gpu_inputs,
        timer_of: Callable[[Layers], Timer] = LayerGraph,
    ) -> None:
        self.layers_of = BY_METRIC[metric].load()
        self.inputs_of, self.timer_of = inputs_of, timer_of
        self.gauge = nvml.attach(machine.gpu_uuid()) if torch.cuda.is_available() else None
        self.held: tuple[Inputs, Layers, Timer] | None = None

    def prepare(self, case: VerifyCase) -> str:
        """Make the inputs, judge the result, record the graph. What is wrong with the result; empty: nothing is."""
        self.held = None  # before the next inputs take their place
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        inputs = self.inputs_of(case)
        layers = self.layers_of(inputs)
        if problem := inputs.error_of(layers[-1](), None):
            return problem
        timer = self.timer_of(layers)
        self.fit = int(BLOCK_US / (min(timer.sample_us(1)) * len(layers)))
        self.held = inputs, layers, timer
        self.last_checksum = 0
        return ""

    def block(self, replays: int, seed: int) -> Block:
        """Time at most so many replays, fewer of a slow kernel, on queries made from `seed`. Unproven unless the output
        they left is new, and has the bits of an untimed run on the same queries.
        """
        if self.held is None:
            raise RuntimeError("block: expected a prepared case")
        inputs, layers, timer = self.held
        inputs.q.normal_(generator=torch.Generator(inputs.q.device).manual_seed(seed))
        out = layers[-1]()
        out.fill_(torch.nan)
        before = self.gauge.read() if self.gauge else None
        samples = timer.sample_us(max(min(replays, self.fit), MIN_REPLAYS))
        after = self.gauge.read() if self.gauge else None
        left = checksum(out)
        out.fill_(torch.nan)
        if left != checksum(layers[-1]()):
            raise Unproven("the timed replays left another output than an untimed run on the same inputs")
        if left == self.last_checksum:
            raise Unproven("the timed replays left the output of the block before, whose inputs were others")
        self.last_checksum = left
        return Block(tuple(samples), (before, after))


def checksum(out: torch.Tensor) -> int:
    """Of a bf16 tensor's bits and where they stand. Unproven where it holds a NaN or an infinity."""
    if not out.isfinite().all():
        raise Unproven("the output is not finite: some of it was never written")
    bits = out.contiguous().view(torch.int16).flatten().long()
    places = torch.arange(len(bits), device=bits.device) % 65_521 + 1
    return int((bits * places).sum())
