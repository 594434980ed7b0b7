"""What a side of the gate times: work that gets fresh inputs, and whose outcome shows whether it was done."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from treemla.gate.inputs import Inputs, random_tree
from treemla.gate.peers import Layers
from treemla.tree import batch_words, full_mask, trees_from_full_mask

PLAN_STEPS = 16  # in one graph, so that the launch of the graph does not count


class Unproven(RuntimeError):
    """The timed work did not leave the result of its inputs: what was timed is not the work."""


class Work(Protocol):
    """`steps` enqueue, and are what a graph is made of; the others are not timed."""

    @property
    def steps(self) -> Sequence[Callable[[], object]]: ...

    def problem(self) -> str:
        """What is wrong with the result; empty: nothing is."""

    def refresh(self, seed: int) -> None:
        """New inputs, the same for a seed."""

    def clear(self) -> None:
        """Take away the result, so that work which is not done leaves none."""

    def checksum(self) -> int:
        """Of the result's bits and where they stand. Unproven where some of it was never written."""


class Verify:
    """The layers of a kernel, on queries that are new with every `refresh`."""

    def __init__(self, inputs: Inputs, layers: Layers) -> None:
        self.inputs, self.steps, self.out = inputs, layers, layers[-1]()

    def problem(self) -> str:
        return self.inputs.error_of(self.out, None)

    def refresh(self, seed: int) -> None:
        q = self.inputs.q
        q.normal_(generator=torch.Generator(q.device).manual_seed(seed))

    def clear(self) -> None:
        self.out.fill_(torch.nan)

    def checksum(self) -> int:
        return checksum(self.out)


class Plan:
    """The plan step, on trees that are new with every `refresh`: words and schedule are its result."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.steps = inputs, [inputs.plan_step] * PLAN_STEPS
        self.result = (inputs.words, *self.schedule())

    def problem(self) -> str:
        case, plan = self.inputs.case, self.inputs.plan
        trees = trees_from_full_mask(self.inputs.mask.cpu().numpy(), case.contexts, case.tree_tokens)
        words = torch.from_numpy(batch_words(trees, case.tree_tokens).view(np.int64)).flatten()
        if not torch.equal(self.inputs.words.cpu(), words):
            return f"{case.id}: the words are not those of the mask"
        written = [tensor.clone() for tensor in self.schedule()]
        plan.load(plan.mirror(np.array(case.contexts, dtype=np.int32)))
        problem = ""
        for before, after in zip(written, self.schedule(), strict=True):
            if not torch.equal(before, after):
                name = next((name for name, tensor in vars(plan).items() if tensor is after), "a tensor")
                problem = f"{case.id}: {name} of the plan is not the schedule of these lengths"
                after.copy_(before)
        return problem

    def schedule(self) -> list[torch.Tensor]:
        """The plan's, without the workspace. By their type, not by name: a base's plan may have others."""
        return [tensor for tensor in self.inputs.plan.tensors if tensor.dtype == torch.int32]

    def refresh(self, seed: int) -> None:
        case, random = self.inputs.case, np.random.default_rng(seed)
        trees = [random_tree(case.tree_tokens, random) for _ in case.contexts]
        self.inputs.mask.copy_(torch.from_numpy(full_mask(trees, case.contexts)))

    def clear(self) -> None:
        for tensor in self.result:
            tensor.zero_()

    def checksum(self) -> int:
        return sum(of_integers(tensor) * (1 + n) for n, tensor in enumerate(self.result))


def checksum(out: torch.Tensor) -> int:
    """Of a bf16 tensor's bits and where they stand. Unproven where it holds a NaN or an infinity."""
    if not out.isfinite().all():
        raise Unproven("the output is not finite: some of it was never written")
    return of_integers(out.contiguous().view(torch.int16))


def of_integers(tensor: torch.Tensor) -> int:
    """A sum over values and their places, modulo 2^64."""
    values = tensor.flatten().long()
    places = torch.arange(len(values), device=values.device) % 65_521 + 1
    return int((values * places).sum())
