"""The MLA kernels that ours is timed beside: how each is called, what it lacks, and what its process holds."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from treemla import verify_attention
from treemla.gate import fingerprint, flashinfer_peer, flashmla_peer, triton_peer
from treemla.gate.cases import VerifyCase
from treemla.gate.inputs import SM_SCALE, Inputs, make_inputs
from treemla.gate.measure import LayerGraph

SLOW_LAYERS = 2  # in a graph of a kernel that takes up to 10 ms a layer

Layers = list[Callable[[], torch.Tensor]]  # each enqueues one layer and returns its output [B*T, H, 512]


@dataclass(frozen=True)
class Peer:
    """A kernel to time. `load` imports it, in the peer's process, and returns what makes its layers.

    lacks: what ours does and it does not. page_size: the only one it takes. package: what its version is named by.
    trees: it takes cases of T > 1; singles: of T = 1.
    """

    metric: str
    label: str
    load: Callable[[], Callable[[Inputs], Layers]]
    lacks: tuple[str, ...] = ()
    page_size: int | None = None
    package: str | None = None
    trees: bool = True
    singles: bool = True

    @property
    def heading(self) -> str:
        return f"{self.label} ({', '.join(self.lacks)})" if self.lacks else self.label

    @property
    def version(self) -> str | None:
        return self.package and f"{self.package} {fingerprint.package_version(self.package)}"

    def case(self, row: VerifyCase) -> VerifyCase | None:
        """What it is measured on for a row of the table; None where it has nothing for that row."""
        if not (self.singles if row.tree_tokens == 1 else self.trees):
            return None
        return replace(row, page_size=self.page_size or row.page_size)


def _treemla() -> Callable[[Inputs], Layers]:
    def layers(inputs: Inputs) -> Layers:
        taken = inputs.slots, inputs.words, inputs.plan
        lse = torch.empty(inputs.q.shape[:2], dtype=torch.float32, device=inputs.q.device)
        scaled = partial(verify_attention, sm_scale=SM_SCALE, out=inputs.empty_out(), lse=lse)

        def layer(kv: torch.Tensor) -> Callable[[], torch.Tensor]:
            return lambda: scaled(inputs.q, kv, *taken)[0]

        return [layer(kv) for kv in inputs.kv_layers]

    return layers


def _triton(*, eager: bool) -> Callable[[Inputs], Layers]:
    extend = triton_peer.load()

    def layers(inputs: Inputs) -> Layers:
        taken = inputs.owned, inputs.case.contexts, inputs.mask
        out = inputs.empty_out()
        return [
            triton_peer.verify(extend, inputs.q, kv, *taken, sm_scale=SM_SCALE, out=out, eager=eager)
            for kv in inputs.kv_layers[-SLOW_LAYERS:]
        ]

    return layers


def _triton_decode() -> Callable[[Inputs], Layers]:
    kernels = triton_peer.load_decode()

    def layers(inputs: Inputs) -> Layers:
        sms = torch.cuda.get_device_properties(inputs.q.device).multi_processor_count
        out = inputs.empty_out()
        return [
            triton_peer.decode(kernels, inputs.q, kv, inputs.owned, sm_scale=SM_SCALE, out=out, sms=sms)
            for kv in inputs.kv_layers
        ]

    return layers


def _flashinfer(backend: str) -> Callable[[Inputs], Layers]:
    wrapper = flashinfer_peer.load()
    return lambda inputs: flashinfer_peer.layers(wrapper, backend, inputs, inputs.kv_layers, inputs.empty_out())


def _flashmla() -> Callable[[Inputs], Layers]:
    kernels = flashmla_peer.load()
    return lambda inputs: flashmla_peer.layers(kernels, inputs, inputs.kv_layers)


CAUSAL = "no tree mask"
OURS = Peer("verify", "treemla", _treemla)
PEERS = (
    OURS,
    Peer("triton", "SGLang Triton", partial(_triton, eager=False), singles=False),
    Peer("triton_eager", "SGLang Triton, eager types", partial(_triton, eager=True), singles=False),
    Peer("triton_decode", "SGLang Triton decode", _triton_decode, ("T = 1 alone",), trees=False),
    Peer("flashinfer_fa2", "FlashInfer fa2", partial(_flashinfer, "fa2"), (CAUSAL,), package="flashinfer-python"),
    Peer("flashinfer_fa3", "FlashInfer fa3", partial(_flashinfer, "fa3"), (CAUSAL,), package="flashinfer-python"),
    Peer("flashmla", "FlashMLA", _flashmla, (CAUSAL, "no page size 1"), 64, package="sglang-kernel"),
)
BY_METRIC = {peer.metric: peer for peer in PEERS}


class Session:
    """What a peer's process holds: its kernel, and the graph of the case at hand."""

    def __init__(self, metric: str) -> None:
        self.peer = BY_METRIC[metric]
        self.layers_of = self.peer.load()
        self.held: tuple[Inputs, LayerGraph] | None = None

    def version(self) -> str | None:
        return self.peer.version

    def prepare(self, case: VerifyCase) -> str:
        """Make the inputs, judge the result, capture the graph. What is wrong with the result; empty: nothing is."""
        self.held = None  # before the next inputs take their place
        torch.cuda.empty_cache()
        inputs = make_inputs(case, torch.device("cuda", torch.cuda.current_device()))
        layers = self.layers_of(inputs)
        if problem := inputs.error_of(layers[-1](), None, causal=CAUSAL in self.peer.lacks):
            return problem
        self.held = inputs, LayerGraph(layers)
        return ""

    def time(self, replays: int) -> list[float]:
        """Microseconds a layer, one sample a replay."""
        if self.held is None:
            raise RuntimeError("time: expected a prepared case")
        return self.held[1].sample_us(replays)
