"""A server between requests: SGLang's real prefix tree, allocator, slot table and pools, and a plain memory of what each
cached token's row must hold.
"""

import zlib
from array import array
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch
from runners import make_runner
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from treemla.sglang import compat
from treemla.sglang.allocator import free_pages, ordered_allocator_classes
from treemla.sglang.holders import Holders

TREES = ["radix", "nothing"] if compat._find("sglang.srt.mem_cache.unified_cache.components:ComponentType") is None else [
    "rust", "python", "nothing"
]  # fmt: skip
CACHING = TREES[:-1]
LAYERS = 2


class IdleServer:
    """Looks to plug-ins as a Scheduler does. `session` gives it one whose row outlives its requests."""

    def __init__(
        self, tree: str = TREES[0], page_size: int = 1, size: int = 96, *, session: bool = False, drafts: bool = False,
        debug: bool = False, **settings,
    ) -> None:  # fmt: skip
        if drafts:
            settings["speculative_algorithm"] = "EAGLE"
        self.server_args = make_runner(**settings).server_args
        self.page = page_size
        shape = {"size": size, "page_size": page_size, "device": "cpu", "enable_memory_saver": False}
        self.pool = MLATokenToKVPool(
            **shape, dtype=torch.float32, kv_lora_rank=32, qk_rope_head_dim=8, layer_num=LAYERS
        )
        draft_pool = MHATokenToKVPool(**shape, dtype=torch.float32, head_num=2, head_dim=8, layer_num=1)
        self.req_to_token_pool = ReqToTokenPool(size=4, max_context_len=64, device="cpu", enable_memory_saver=False)
        token, paged = ordered_allocator_classes(debug=debug)
        rest = torch.float32, "cpu", self.pool, False
        self.token_to_kv_pool_allocator = token(size, *rest) if page_size == 1 else paged(size, page_size, *rest)
        self.tree = make_tree(tree, self)
        self.tree_cache = wrap_sessions(self.tree) if session else self.tree
        self.draft_worker = None
        self.rows = list(self.pool.kv_buffer)
        if drafts:
            runner = SimpleNamespace(token_to_kv_pool=draft_pool)
            self.draft_worker = SimpleNamespace(draft_worker=SimpleNamespace(draft_runners=[runner]))
            self.rows += [*draft_pool.k_buffer, *draft_pool.v_buffer]
        self.metrics_collector = None
        self.idle = True
        self.sessions: dict[str, tuple[int, list[int]]] = {}

    def is_fully_idle(self) -> bool:
        return self.idle

    # requests that come and go

    def serve(self, tokens: Sequence[int]) -> bool:
        """A request from its first token to its last: its whole pages stay cached. False where there is no room."""
        cached = self.match(tokens)
        slots = self.take(len(tokens) - len(cached))
        if slots is None:
            return False
        slots = torch.cat([cached, slots])
        self.write(tokens, slots, first=len(cached))
        whole = len(tokens) // self.page * self.page
        if whole > len(cached):
            key = RadixKey(array("q", tokens[:whole]))
            found = self.tree.insert(
                InsertParams(key=key, value=slots[:whole].clone(), prev_prefix_len=len(cached))
            ).prefix_len
            assert found == len(cached)
        self.token_to_kv_pool_allocator.free(slots[whole:])
        return True

    def serve_uncached(self, tokens: Sequence[int]) -> None:
        slots = self.take(len(tokens))
        if slots is not None:
            self.token_to_kv_pool_allocator.free(slots)

    def keep_session(self, name: str, tokens: Sequence[int]) -> bool:
        """A session's first turn: what the tree has of it stays the tree's, the rest is the session's."""
        cached, row = self.match(tokens), 1 + len(self.sessions)
        slots = self.take(len(tokens) - len(cached))
        if slots is None:
            return False
        slots = torch.cat([cached, slots])
        self.write(tokens, slots, first=len(cached))
        if len(cached):
            self.tree.inc_lock_ref(self.find(tokens).last_device_node)
        self.req_to_token_pool.req_to_token[row, : len(tokens)] = slots.int()
        session_slots(self.tree_cache)[name] = make_session_slot(row, len(tokens), len(cached))
        self.sessions[name] = row, list(tokens)
        return True

    def evict(self, num_tokens: int) -> None:
        self.tree.evict(EvictParams(num_tokens=num_tokens))

    def flush(self) -> None:
        self.tree.reset()
        self.token_to_kv_pool_allocator.clear()

    def take(self, n: int) -> torch.Tensor | None:
        """Slots of whole pages, the last cut to `n`."""
        slots = self.token_to_kv_pool_allocator.alloc(-(-n // self.page) * self.page) if n else torch.empty(0).long()
        return None if slots is None else slots[:n].clone()

    def match(self, tokens: Sequence[int]) -> torch.Tensor:
        """Slots of the cached prefix of `tokens`."""
        if not hasattr(self.tree, "insert") or self.tree.disable or len(tokens) < self.page:
            return torch.empty(0, dtype=torch.int64)
        found = self.find(tokens)
        if hasattr(found, "device_indices"):
            return found.device_indices
        core = self.tree.tree_core
        return core.collect_full_device_indices(found.last_device_node, core.root_node_handle())

    def find(self, tokens: Sequence[int]):
        key = RadixKey(array("q", tokens[: len(tokens) // self.page * self.page]))
        return self.tree.match_prefix(MatchPrefixParams(key=key))

    # what rows hold

    def write(self, tokens: Sequence[int], slots: torch.Tensor, first: int) -> None:
        for layer, buffer in enumerate(self.rows):
            for i in range(first, len(tokens)):
                buffer[slots[i]] = content(tokens[: i + 1], layer)

    def check(self, prompts: Sequence[Sequence[int]]) -> None:
        """Every cached token of every prompt and session reads its own row, and no slot is lost or owned twice."""
        for tokens in prompts:
            self.check_rows(tokens, self.match(tokens))
        for row, tokens in self.sessions.values():
            self.check_rows(tokens, self.req_to_token_pool.req_to_token[row, : len(tokens)].long())
        free = free_pages(self.token_to_kv_pool_allocator).tolist()
        held = {page for slots in self.held() for page in (slots // self.page).tolist()}
        assert len(set(free)) == len(free) and not held & set(free) and 0 not in held | set(free)
        assert len(held) + len(free) == self.token_to_kv_pool_allocator.size // self.page

    def check_rows(self, tokens: Sequence[int], slots: torch.Tensor) -> None:
        for layer, buffer in enumerate(self.rows):
            for i, slot in enumerate(slots.tolist()):
                want = content(tokens[: i + 1], layer)
                assert (buffer[slot] == want).all(), f"token {i} of {tokens} reads another's row, layer {layer}"

    def held(self) -> list[torch.Tensor]:
        """What all holders hold, found anew."""
        found = Holders(self).slots()
        assert found is not None
        return found

    def reads(self) -> list[np.ndarray]:
        return Holders(self).reads()


def content(tokens: Sequence[int], layer: int) -> float:
    """What a token's row holds: it depends on all tokens before it, as KV does."""
    return float(zlib.crc32(bytes([layer, *tokens])) % 65_521)


def make_tree(kind: str, server: IdleServer):
    params = CacheInitParams(
        disable=kind == "nothing", req_to_token_pool=server.req_to_token_pool,
        token_to_kv_pool_allocator=server.token_to_kv_pool_allocator, page_size=server.page,
    )  # fmt: skip
    if "radix" in TREES:
        from sglang.srt.mem_cache.chunk_cache import ChunkCache

        return ChunkCache(params) if kind == "nothing" else RadixCache(params)
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    params.tree_components = (ComponentType.FULL,)
    params.tree_core_backend = "rust" if kind == "nothing" else kind
    return UnifiedRadixCache(params)


def wrap_sessions(tree):
    if not hasattr(tree, "session"):  # 0.5.16; 0.5.23's tree has its own
        from sglang.srt.session.streaming_session import StreamingSession

        return StreamingSession(tree)
    return tree


def session_slots(tree) -> dict:
    return tree.slots if hasattr(tree, "inner") else tree.session.slots


def make_session_slot(row: int, length: int, protected: int):
    from sglang.srt.managers.schedule_batch import ReqKvInfo
    from sglang.srt.session.streaming_session import SessionSlot

    lengths = {"kv_committed_len": length, "cache_protected_len": protected}
    if "radix" in TREES:
        kv = ReqKvInfo(kv_allocated_len=length, swa_evicted_seqlen=0)
        return SessionSlot(req_pool_idx=row, kv=kv, **lengths)
    return SessionSlot(kv=ReqKvInfo(req_pool_idx=row, kv_allocated_len=length, **lengths))
