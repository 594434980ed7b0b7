"""GPU time of a layer's work, launch gaps as in a model: many layers in one CUDA graph."""

from collections.abc import Callable, Sequence

import torch

COLD_BYTES = 600_000_000  # KV of all layers of a graph together, so that none finds its rows in L2
LAYERS = (2, 16)
FLUSH_BYTES = 256 * 1024 * 1024  # read before each replay; more than any L2
LEAD_CLOCKS = 400_000  # 200 us in which the host enqueues a replay
CLOCK_CLOCKS = 4_000_000  # 2 ms
REPLAYS = 15


def num_layers(layer_bytes: int, cold_bytes: int = COLD_BYTES) -> int:
    """Layers a graph needs so that their KV exceeds `cold_bytes`, within LAYERS."""
    return min(max(-(-cold_bytes // layer_bytes), LAYERS[0]), LAYERS[1])


class LayerGraph:
    """Work of several layers, captured once as a CUDA graph.

    enqueue: a callable a layer, which enqueues its work on the current stream. It runs eagerly first (kernels load,
    Triton compiles), so host time does not count.
    cold: read more than any L2 holds before each replay. A warm graph finds in L2 what its last replay left there.
    """

    def __init__(self, enqueue: Sequence[Callable[[], object]], *, cold: bool = True) -> None:
        self.enqueue = enqueue  # owns the buffers that the graph works on
        self.flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda") if cold else None
        self.graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for layer in enqueue:
                layer()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            for layer in enqueue:
                layer()

    def sample_us(self, replays: int = REPLAYS) -> list[float]:
        """Microseconds a layer, one sample a replay, after a replay that does not count: it uploads the graph."""
        return [self._replay_us() for _ in range(replays + 1)][1:]

    def _replay_us(self) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if self.flush is None:
            spin(LEAD_CLOCKS)
        else:
            self.flush.sum()
        begin.record()
        self.graph.replay()
        end.record()
        return _elapsed_us(begin, end) / len(self.enqueue)


def time_layers(enqueue: Sequence[Callable[[], object]], *, cold: bool = True) -> list[float]:
    """Microseconds a layer, REPLAYS samples."""
    return LayerGraph(enqueue, cold=cold).sample_us()


def sm_clock_mhz() -> float:
    """The clock that the SMs run at now: the time they take to count CLOCK_CLOCKS of it."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    spin(LEAD_CLOCKS)
    begin.record()
    spin(CLOCK_CLOCKS)
    end.record()
    return CLOCK_CLOCKS / _elapsed_us(begin, end)


def spin(clocks: int) -> None:
    """Keep the current stream busy for so many SM clocks."""
    torch.cuda._sleep(clocks)  # noqa: SLF001 - counts clock64, and torch offers no other kernel that does


def _elapsed_us(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    elapsed_ms: float = begin.elapsed_time(end)
    return 1e3 * elapsed_ms
