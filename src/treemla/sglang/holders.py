"""Who holds KV slots while SGLang serves nobody, and whose rows they are: what compaction reads, moves and rewrites.

At that point the prefix tree, the sessions that keep their slots between turns, and the free list hold every slot.
Whatever else may hold one (a transfer under way, another store's index) is refused when the server starts, by name.
"""

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from treemla import cubins
from treemla.kv import move_rows
from treemla.sglang import compat
from treemla.sglang.allocator import Ordered

# Settings under which somebody outside of tree, sessions and free list holds slots, or addresses of rows.
OUTSIDE = {
    "enable_hierarchical_cache": "--enable-hierarchical-cache: HiCache's queued copies",
    "enable_lmcache": "--enable-lmcache: LMCache",
    "enable_flexkv": "--enable-flexkv: FlexKV",
    "enable_unified_cache_external_linker": "--enable-unified-cache-external-linker: the linker's queued copies",
    "radix_cache_backend": "--radix-cache-backend: a prefix tree of its own",
    "enable_session_radix_cache": "--enable-session-radix-cache: the tree's session references",
    "disaggregation_mode": "--disaggregation-mode: KV transfers",
    "disaggregation_decode_enable_offload_kvcache": "--disaggregation-decode-enable-offload-kvcache: offloaded KV",
    "pp_size": "--pp-size: micro-batches of other stages",
    "enable_dp_attention": "--enable-dp-attention: ranks that are idle at different times",
    "attn_cp_size": "--attn-cp-size: pages that ranks share",
    "dcp_size": "--dcp-size: slots that ranks share",
    "enable_hisparse": "--enable-hisparse: its device buffers",
    "enable_unified_memory": "--enable-unified-memory: its virtual slots",
    "enable_memory_saver": "--enable-memory-saver: a pool that may be released while idle",
    "kv_canary": "--kv-canary: its record of slots",
    "dllm_algorithm": "--dllm-algorithm: staged requests",
    "enable_pdmux": "--enable-pdmux: a second stream's batches",
}
UNUSED = (None, False, 0, "", "null", "none")
IDS_A_CALL = 20_000  # tree nodes looked for in one idle turn: 20 ms
IDS_AT_MOST = 10_000_000  # ... and before giving up


class Unreachable(ValueError):
    """Somebody holds slots whom compaction cannot rewrite."""


class Holders:
    """The holders of one scheduler's slots. Raises Unreachable, naming all that cannot be rewritten."""

    def __init__(self, scheduler: Any) -> None:
        found = list(unreachable(scheduler))
        if found:
            raise Unreachable("cannot rewrite " + "; ".join(found))
        self.allocator = scheduler.token_to_kv_pool_allocator
        self.table: torch.Tensor = scheduler.req_to_token_pool.req_to_token
        self.outer = scheduler.tree_cache
        self.tree = inner_tree(self.outer)
        self.nodes = TreeNodes(self.tree.tree_core) if hasattr(self.tree, "tree_core") else None
        pools = [self.allocator.get_kvcache(), *draft_pools(scheduler)]
        self.buffers = [buffer for pool in unique(pools) for buffer in pool_rows(pool) or ()]
        nothing = self.allocator.free_pages[:0]
        move_rows(self.buffers, nothing, nothing, disjoint=True)  # refuses rows that it could not move
        if nothing.is_cuda:
            cubins.kernel("treemla_move_rows", nothing.device)  # a GPU without it is refused now, not when idle

    def slots(self) -> list[torch.Tensor] | None:
        """Every holder's slots in token order, as views of what SGLang reads: int64 values of tree nodes, int32 rows
        of the slot table. Two may share slots. None while nodes are still being looked for: ask again.
        """
        values = tree_values(self.tree) if self.nodes is None else self.nodes.values()
        return None if values is None else [*values, *self.session_rows()]

    def reads(self) -> list[np.ndarray]:
        """The same slots as requests read them, on the host: each stretch of the tree without a branch, each session.

        A conversation is a chain of short nodes, one a turn: they should lie together, not each for itself.
        """
        stretches = tree_stretches(self.tree) if self.nodes is None else self.nodes.stretches()
        return [slots.cpu().long().numpy() for slots in (*stretches, *self.session_rows())]

    def session_rows(self) -> list[torch.Tensor]:
        """Sessions keep a row of the slot table between turns; its first slots may be the tree's."""
        sessions = getattr(self.outer, "slots", None)  # 0.5.16: a wrapper around the tree
        if sessions is None:
            sessions = self.tree.session.slots if hasattr(self.tree, "session") else {}
        rows = ((getattr(slot, "req_pool_idx", None), slot.kv) for slot in sessions.values() if slot.kv is not None)
        held = [(kv.req_pool_idx if row is None else row, kv.kv_allocated_len) for row, kv in rows]
        return [self.table[row, :length] for row, length in held if row is not None and length > 0]


class TreeNodes:
    """The values of a tree core's nodes, of 0.5.23's Rust and Python cores alike.

    A core has no iterator. It hands out ids in order, from its root's, and says how many tokens its nodes hold, so ids
    are tried until what was found adds up to that. A node's value shares its memory with the tree.
    """

    def __init__(self, core: Any) -> None:
        self.core = core
        self.alive: list[int] = []
        self.next_id = 0
        self.tried = 0  # since it last added up

    def values(self) -> list[torch.Tensor] | None:
        """All of them; None where more ids must be tried. Raises Unreachable where that has not helped."""
        total = self.core.total_size()[0]
        self.next_id = max(self.next_id, self.core.root_node_handle())  # a flushed tree has a new root
        found = {i: value for i in self.alive if (value := self.value(i)) is not None}
        size = sum(map(len, found.values()))
        for _ in range(IDS_A_CALL):
            if size >= total:
                break
            if (value := self.value(self.next_id)) is not None:
                found[self.next_id] = value
                size += len(value)
            self.next_id += 1
            self.tried += 1
        self.alive = list(found)
        if size == total:
            self.tried = 0
            return list(found.values())
        if size > total or self.tried >= IDS_AT_MOST:
            raise Unreachable(f"the prefix tree: it holds {total} tokens, of which {size} were found")
        return None

    def stretches(self) -> list[torch.Tensor]:
        """From the core's list of tokens, each with the slot of the token before it, parents before children."""
        walk = self.core.walk_for_kv_canary(unlocked_only=False, swa_resident_only=False)
        slots, previous = walk.slot_indices.cpu(), walk.prev_slot_indices.cpu()
        if len(slots) == 0:
            return []
        followers = torch.bincount(previous[previous >= 0], minlength=int(slots.max()) + 1)
        goes_on = (previous[1:] == slots[:-1]) & (followers[slots[:-1]] == 1)
        begins = [0, *(1 + torch.nonzero(~goes_on).flatten()).tolist()]
        return list(slots.tensor_split(begins[1:]))

    def value(self, node_id: int) -> torch.Tensor | None:
        try:
            value = self.core.get_component_device_value(node_id, compat.full_component())
        except KeyError:  # no such node, or no more
            return None
        return value if isinstance(value, torch.Tensor) and len(value) else None


def tree_chains(tree: Any) -> list[list[torch.Tensor]]:
    """Values of 0.5.16's RadixCache, those of each stretch without a branch together; none of a ChunkCache."""
    chains, waiting = [], [*tree.root_node.children.values()] if hasattr(tree, "root_node") else []
    while waiting:
        node = waiting.pop()
        chain = [node.value]
        while len(node.children) == 1:
            (node,) = node.children.values()
            chain.append(node.value)
        chains.append(chain)
        waiting += node.children.values()
    return chains


def tree_values(tree: Any) -> list[torch.Tensor]:
    return [value for chain in tree_chains(tree) for value in chain]


def tree_stretches(tree: Any) -> list[torch.Tensor]:
    return [torch.cat(chain) for chain in tree_chains(tree)]


def inner_tree(tree: Any) -> Any:
    """0.5.16 wraps the tree where streaming sessions are on."""
    return getattr(tree, "inner", tree)


def unreachable(scheduler: Any) -> Iterator[str]:
    """One phrase for each holder that cannot be rewritten, and each pool whose rows cannot be moved."""
    for field, what in OUTSIDE.items():
        value = compat.setting(scheduler, field)
        sizes = field.endswith("_size") and value == 1
        if value is True or not (value in UNUSED or sizes):
            yield what
    tree = inner_tree(scheduler.tree_cache)
    if not compat.is_plain_tree(tree):
        yield f"the prefix tree, a {type(tree).__name__}"
    elif getattr(tree, "cache_controller", None) is not None or getattr(tree, "linker", None) is not None:
        yield "the prefix tree's copies on the host"
    allocator = scheduler.token_to_kv_pool_allocator
    if not isinstance(allocator, Ordered):
        yield f"the free list, a {type(allocator).__name__}"
        return
    if not compat.is_plain_mla_pool(allocator.get_kvcache()):
        yield f"the KV pool, a {type(allocator.get_kvcache()).__name__}"
    if not has_plain_drafts(scheduler):
        yield f"--speculative-algorithm {compat.setting(scheduler, 'speculative_algorithm')}: its draft's KV"
        return
    for pool in draft_pools(scheduler):
        if pool_rows(pool) is None:
            yield f"the draft model's KV pool, a {type(pool).__name__}"


def pool_rows(pool: Any) -> list[torch.Tensor] | None:
    """Each layer's rows of a plain MLA or MHA pool, [slots, ...] each; None for a layout with more than rows."""
    plain_mha = importlib.import_module("sglang.srt.mem_cache.memory_pool").MHATokenToKVPool
    if compat.is_plain_mla_pool(pool):
        return list(pool.kv_buffer)
    scaled = any(getattr(pool, name, None) is not None for name in ("k_scale_buffer", "native_k_scale_buffer"))
    if type(pool) is not plain_mha or pool.use_hnd or scaled:
        return None
    return [*pool.k_buffer, *pool.v_buffer]


def has_plain_drafts(scheduler: Any) -> bool:
    """Whether the drafts have no KV (none, NGRAM) or one in pools with the target's slots (EAGLE, STANDALONE)."""
    algorithm = compat.speculative_algorithm(scheduler)
    eagle = algorithm.is_eagle() and not algorithm.is_frozen_kv_mtp()
    return bool(algorithm.is_none() or algorithm.is_ngram() or algorithm.is_standalone() or eagle)


def draft_pools(scheduler: Any) -> list[Any]:
    """KV pools of the draft models' runners."""
    algorithm = compat.speculative_algorithm(scheduler)
    if scheduler.draft_worker is None or algorithm.is_none() or algorithm.is_ngram():
        return []
    return [runner.token_to_kv_pool for runner in scheduler.draft_worker.draft_worker.draft_runners]


def unique(pools: list[Any]) -> list[Any]:
    return list({id(pool): pool for pool in pools}.values())
