"""The backend as SGLang's decode graph runner drives it: static buffers, a graph a batch size, replays of any batch.

On a CPU, where nothing records, a graph is the forward itself, run again: the same checks then hold without capture.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from cases import make_tree
from compare import assert_matches, expected_attention
from runners import HEADS, LATENT, ROPE, eagle_input, full_mask, make_runner, ngram_input
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from treemla import VerifyPlan
from treemla.sglang.backend import TreemlaAttnBackend
from treemla.tree import batch_words, visible_from_words

SIZES = (1, 2, 4)
LAYERS = 3
SM_SCALE = 0.2


@dataclass(frozen=True)
class Setting:
    """What a server fixes at its start. algorithm: None serves decode, a name verify."""

    algorithm: str | None = "NGRAM"
    tree_tokens: int = 9
    masked: bool = True
    on_gpu: bool = False
    max_context: int = 256

    @property
    def id(self) -> str:
        masks = "" if self.masked else "-chain"
        return f"{self.algorithm or 'decode'}-t{self.tree_tokens}-c{self.max_context}{masks}"

    def rerun(self, device_type: str) -> str:
        folder = "graph" if device_type == "cuda" else "sglang"
        return f"python -m pytest tests/{folder}/test_served.py --device {device_type} -k {self.id}"


class Served:
    """A running server's graphs and the step that is loaded into its buffers."""

    def __init__(self, setting: Setting, device: torch.device) -> None:
        self.setting, self.device, self.tree_tokens = setting, device, setting.tree_tokens
        self.heads, self.widths = (8, (512, 64)) if setting.on_gpu else (HEADS, (LATENT, ROPE))
        dtype = torch.bfloat16 if setting.on_gpu else torch.float32
        self.runner = make_runner(
            SIZES[-1], self.tree_tokens, dtype, device=device.type, heads=self.heads, widths=self.widths,
            max_context=setting.max_context + self.tree_tokens, speculative_algorithm=setting.algorithm,
        )  # fmt: skip
        self.backend = TreemlaAttnBackend(self.runner)
        self.mode = ForwardMode.DECODE if setting.algorithm is None else ForwardMode.TARGET_VERIFY
        self.tail = 1 if setting.algorithm is None else 0
        self.table = self.runner.req_to_token_pool.req_to_token
        self.pool = self.runner.token_to_kv_pool.get_key_buffer(0)
        self.fill_value = self.backend.get_cuda_graph_seq_len_fill_value()
        width, tokens = sum(self.widths), SIZES[-1] * self.tree_tokens

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.rows, self.seq_lens, self.out_cache_loc = zeros(SIZES[-1]), zeros(SIZES[-1]), zeros(tokens)
        self.q = [zeros(tokens, self.heads * width, dtype=dtype) for _ in range(LAYERS)]
        self.k = zeros(tokens, 1, width, dtype=dtype)
        self.layer = RadixAttention(
            num_heads=self.heads, head_dim=width, scaling=SM_SCALE, num_kv_heads=1, layer_id=0,
            v_head_dim=self.widths[0],
        )  # fmt: skip
        self.graphs: dict[int, Callable[[], None]] = {}
        self.outputs: dict[int, list[torch.Tensor]] = {}
        self.lengths: list[int] = []
        self.step: dict[str, Any] = {}
        self.capture()

    @property
    def static_inputs(self) -> dict[str, torch.Tensor]:
        """What a replay reads and a server rewrites between replays; q of each layer."""
        inputs = {"rows": self.rows, "seq_lens": self.seq_lens, "out_cache_loc": self.out_cache_loc, "k": self.k}
        return inputs | {"table": self.table, "pool": self.pool} | {f"q[{i}]": q for i, q in enumerate(self.q)}

    def capture(self) -> None:
        """The largest batch first; two warm-ups before each."""
        self.backend.init_cuda_graph_state(SIZES[-1], SIZES[-1] * self.tree_tokens)
        self.seq_lens.fill_(self.fill_value)
        stand_in = torch.ones(SIZES[-1] * (self.fill_value + self.tree_tokens) * self.tree_tokens, dtype=torch.bool)
        memory = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        for size in reversed(SIZES):
            batch = self.batch(size, self.spec_info(stand_in.to(self.device)))
            self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
            for _ in range(2):
                self.forward(batch, size)
                self.backend.on_after_cuda_graph_warmup()
            if memory is None:
                self.graphs[size] = lambda batch=batch, size=size: self.forward(batch, size)
                continue
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory):
                self.forward(batch, size)
            self.graphs[size] = graph.replay

    def forward(self, batch: Any, size: int) -> None:
        """What is recorded: the plan, and all layers. The first writes the step's rows to the pool."""
        self.backend.init_forward_metadata_in_graph(batch)
        call = self.backend.forward_decode if self.mode.is_decode() else self.backend.forward_extend
        tokens = size * self.tree_tokens
        k = self.k[:tokens]
        self.outputs[size] = [
            call(
                q[:tokens], *((k, k[..., : self.widths[0]]) if nth == 0 else (None, None)), self.layer, batch, nth == 0
            )
            for nth, q in enumerate(self.q)
        ]

    def batch(self, size: int, spec_info: Any, padding: int = 0) -> Any:
        """The runner's view of a batch: slices of its static buffers."""
        return SimpleNamespace(
            batch_size=size, forward_mode=self.mode, req_pool_indices=self.rows[:size], seq_lens=self.seq_lens[:size],
            out_cache_loc=self.out_cache_loc[: size * self.tree_tokens], out_cache_loc_is_physical=True,
            spec_info=spec_info, num_padding=padding,
        )  # fmt: skip

    def spec_info(self, mask: torch.Tensor) -> Any:
        if self.mode.is_decode():
            return None
        make = ngram_input if self.setting.algorithm == "NGRAM" else eagle_input
        return make(mask if self.setting.masked else None, self.tree_tokens)

    def load(self, committed: Sequence[int], seed: int, tree: str = "random") -> None:
        """Make a step of so many committed tokens a request: scattered slots, NaN in every row that nobody owns."""
        random = torch.Generator().manual_seed(seed)
        held = [n + self.tree_tokens for n in committed]
        order = 1 + torch.randperm(len(self.pool) - 1, generator=random)
        owned = [*order[: sum(held)].split(held)]
        unowned = int(order[sum(held)])
        tree_slots = torch.cat([slots[n:] for slots, n in zip(owned, committed, strict=True)])
        rows = 1 + torch.randperm(SIZES[-1], generator=random)[: len(committed)]
        self.table.fill_(unowned)
        self.table[0] = 0
        for row, slots in zip(rows.tolist(), owned, strict=True):
            self.table[row, : len(slots)] = slots.to(self.device, torch.int32)
        self.pool.fill_(torch.nan)
        of_context = torch.cat([slots[:n] for slots, n in zip(owned, committed, strict=True)]).to(self.device)
        self.pool[of_context] = self.normal(random, len(of_context), 1, sum(self.widths))
        words = batch_words(
            [make_tree(tree if self.setting.masked else "chain", self.tree_tokens, seed + b) for b in range(len(held))],
            self.tree_tokens,
        )
        visible = torch.from_numpy(visible_from_words(words, self.tree_tokens)).bool()
        self.lengths, self.step = list(committed), {
            "rows": rows.to(self.device), "owned": [slots.to(self.device) for slots in owned],
            "seq_lens": torch.tensor([n + self.tail for n in committed], device=self.device),
            "out_cache_loc": tree_slots.to(self.device), "unowned": unowned,
            "words": torch.from_numpy(words).to(self.device),
            "mask": full_mask(list(committed), [*visible.view(-1, self.tree_tokens, self.tree_tokens)]).to(self.device),
            "k": self.normal(random, len(tree_slots), 1, sum(self.widths)),
            "q": [self.normal(random, len(tree_slots), self.heads * sum(self.widths)) for _ in self.q],
        }  # fmt: skip

    def normal(self, random: torch.Generator, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=random).to(self.device, self.k.dtype)

    @property
    def size(self) -> int:
        """The captured batch that the loaded step replays."""
        return next(size for size in SIZES if size >= len(self.lengths))

    def prepare(self) -> None:
        """The loaded step into the static buffers, padded as the runner pads, and what precedes a replay."""
        real, tokens = len(self.lengths), len(self.step["k"])
        for static, name, used, padding in (
            (self.rows, "rows", real, 0),
            (self.seq_lens, "seq_lens", real, self.fill_value),
            (self.out_cache_loc, "out_cache_loc", tokens, 0),
        ):
            static.fill_(padding)
            static[:used].copy_(self.step[name])
        self.k[:tokens].copy_(self.step["k"])
        for static, q in zip(self.q, self.step["q"], strict=True):
            static[:tokens].copy_(q)
        mask = self.step["mask"].clone()  # a new tensor each step, gone before the replay
        self.backend.init_forward_metadata_out_graph(self.batch(self.size, self.spec_info(mask), self.size - real))

    def replay(self) -> list[torch.Tensor]:
        """Prepare, replay, and the layers' outputs of the real requests, copied."""
        self.prepare()
        self.graphs[self.size]()
        return self.results()

    def results(self) -> list[torch.Tensor]:
        """[tokens, H, latent] a layer."""
        shape = -1, self.heads, self.widths[0]
        return [out[: len(self.step["k"])].view(shape).clone() for out in self.outputs[self.size]]

    def eager(self) -> list[torch.Tensor]:
        """The same step without a graph, as the eager runner runs it. Clobbers the outputs of its size."""
        self.prepare()
        real = len(self.lengths)
        batch = self.batch(real, self.spec_info(self.step["mask"]))
        self.backend.init_forward_metadata(batch)
        held = self.outputs.get(real)
        self.forward(batch, real)
        outs = self.outputs[real]
        if held is not None:
            self.outputs[real] = held
        return [out.view(-1, self.heads, self.widths[0]).clone() for out in outs]

    def check(self, results: list[torch.Tensor]) -> None:
        """Every layer against float64, by the tolerances of all suites."""
        for q, out in zip(self.step["q"], results, strict=True):
            query = q.view(-1, self.heads, sum(self.widths))
            expected = expected_attention(
                query, self.pool[:, 0], self.step["owned"], self.lengths, self.step["words"],
                latent_dim=self.widths[0], sm_scale=SM_SCALE,
            )  # fmt: skip
            assert_matches(out, expected.lse, expected, self.setting)  # the backend keeps lse to itself


def reachable(held: Any, path: str = "backend") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that hangs on a backend, with the way to it."""
    if isinstance(held, torch.Tensor):
        yield path, held
    elif isinstance(held, dict):
        for key, value in held.items():
            yield from reachable(value, f"{path}[{key}]")
    elif isinstance(held, list | tuple):
        for i, value in enumerate(held):
            yield from reachable(value, f"{path}[{i}]")
    elif is_dataclass(held) and not isinstance(held, type):
        for field in fields(held):
            yield from reachable(getattr(held, field.name), f"{path}.{field.name}")
    elif isinstance(held, VerifyPlan | TreemlaAttnBackend):
        for name, value in vars(held).items():
            yield from reachable(value, f"{path}.{name}")
