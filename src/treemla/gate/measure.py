"""GPU time of a layer's work, with caches cold and launch gaps as in a model: many layers in one CUDA graph."""

from collections.abc import Callable, Sequence

import torch

COLD_BYTES = 600_000_000  # KV of all layers of a graph together, so that none finds its rows in L2
LAYERS = (2, 16)
FLUSH_BYTES = 256 * 1024 * 1024  # read before each replay; more than any L2
REPLAYS = 15


def num_layers(layer_bytes: int, cold_bytes: int = COLD_BYTES) -> int:
    """Layers a graph needs so that their KV exceeds `cold_bytes`, within LAYERS."""
    return min(max(-(-cold_bytes // layer_bytes), LAYERS[0]), LAYERS[1])


def time_layers(enqueue: Sequence[Callable[[], object]], replays: int = REPLAYS) -> list[float]:
    """Microseconds a layer, one sample a replay. Each callable enqueues one layer's work on the current stream.

    Work is warmed up eagerly first (kernels load, Triton compiles), then captured once; host time does not count.
    """
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for layer in enqueue:
            layer()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for layer in enqueue:
            layer()

    flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
    samples = []
    for replay in range(-1, replays):  # the first one uploads the graph
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.sum()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 0:
            samples.append(1e3 * begin.elapsed_time(end) / len(enqueue))
    return samples
