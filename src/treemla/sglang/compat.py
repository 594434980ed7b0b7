"""What SGLang looks like from outside: names, hooks that differ between versions, and the check that they are there.

No other module asks for a version. What differs is found by looking, so that a version between the tested ones works
and one that moved something is refused with the name of what moved.
"""

import functools
import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

PLUGINS = "sglang.srt.plugins"  # the entry point group
TESTED = ("0.5.16", "0.5.23")  # the contract tests run on these
REMEDY = f"install one of the tested versions ({', '.join(TESTED)}), or serve with --attention-backend triton"

# How the draft stage hands a tree mask over: one of these is there, in 0.5.16 the first and in 0.5.23 the second.
MASK_HOOKS = ("get_verify_buffers_to_fill_after_draft", "verify_mask")
# Overrides that the base class of some versions lacks; the other says where a forward has read the scheduler's tables.
VERSION_HOOKS = ("verify_mask", "shared_read_ends")

USED = (
    "sglang.srt.layers.attention.attention_registry:ATTENTION_BACKENDS",
    "sglang.srt.layers.attention.attention_registry:register_attention_backend",
    "sglang.srt.server_args:ATTENTION_BACKEND_CHOICES",
    "sglang.srt.server_args:add_attention_backend_choices",
    "sglang.srt.server_args:add_deterministic_attention_backend_choices",
    "sglang.srt.server_args:DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
    "sglang.srt.speculative.dflash_utils:_DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS",
    "sglang.srt.mem_cache.memory_pool:KVWriteLoc",
    "sglang.srt.mem_cache.memory_pool:MLATokenToKVPool",
    "sglang.srt.configs.model_config:AttentionArch",
    "sglang.srt.runtime_context:get_parallel",
    "sglang.srt.environ:envs",
)
VERIFY_INPUTS = (
    "sglang.srt.speculative.eagle_info:EagleVerifyInput",
    "sglang.srt.speculative.ngram_info:NgramVerifyInput",
    "sglang.srt.speculative.dflash_info:DFlashVerifyInput",
)
REPLAY_VIEW = "sglang.srt.model_executor.runner.decode_cuda_graph_runner:build_replay_fb_view"

logger = logging.getLogger(__name__)


class UnsupportedSglang(RuntimeError):
    """This SGLang differs from the tested ones in something that the backend relies on."""


def installed() -> str | None:
    """The version of SGLang, None where there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def register_backend(name: str, factory: Callable[[Any], Any]) -> None:
    """Add `name` to the registry and to the choices of --attention-backend and of deterministic inference."""
    server_args = importlib.import_module("sglang.srt.server_args")
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    if name not in registry.ATTENTION_BACKENDS:
        registry.register_attention_backend(name)(factory)
    if name not in server_args.ATTENTION_BACKEND_CHOICES:
        server_args.add_attention_backend_choices([name])
    if name not in server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        server_args.add_deterministic_attention_backend_choices([name])


def is_registered(name: str) -> bool:
    """Whether SGLang's registry and command line both know `name`."""
    server_args = importlib.import_module("sglang.srt.server_args")
    registry = importlib.import_module("sglang.srt.layers.attention.attention_registry")
    return name in registry.ATTENTION_BACKENDS and name in server_args.ATTENTION_BACKEND_CHOICES


def triton_backend() -> Any:
    """SGLang's Triton attention backend class."""
    return importlib.import_module("sglang.srt.layers.attention.triton_backend").TritonAttnBackend


def backend_class() -> Any:
    """TreemlaAttnBackend, once the contract check has passed. Raises UnsupportedSglang saying what changed."""
    try:
        backend = importlib.import_module("treemla.sglang.backend").TreemlaAttnBackend
    except (ImportError, AttributeError) as error:
        raise UnsupportedSglang(f"sglang {installed()}: {error}; {REMEDY}") from error
    changes = list(contract_changes(backend))
    if changes:
        listed = "".join(f"\n  - {change}" for change in changes)
        raise UnsupportedSglang(f"sglang {installed()} is not what treemla was written for:{listed}\n{REMEDY}")
    if installed() not in TESTED:
        message = "treemla: sglang %s passed the contract check but is none of the tested versions (%s)"
        logger.warning(message, installed(), ", ".join(TESTED))
    return backend


def shadow_class() -> Any:
    """ShadowBackend, under the same conditions as `backend_class`."""
    backend_class()
    return importlib.import_module("treemla.sglang.shadow").ShadowBackend


def contract_changes(backend: type) -> Iterator[str]:
    """What this SGLang lacks or spells differently, one sentence each."""
    for path in (*USED, *VERIFY_INPUTS, REPLAY_VIEW):
        if _find(path) is None:
            yield f"{path.replace(':', '.')} is gone"
    for path in VERIFY_INPUTS:
        found = _find(path)
        held = inspect.signature(found).parameters if found is not None else {}
        missing = {"custom_mask", "draft_token_num"} - set(held)
        if found is not None and missing:
            yield f"{path.replace(':', '.')} has no field {', '.join(sorted(missing))}"
    view = _find(REPLAY_VIEW)
    if view is not None and "num_padding=" not in inspect.getsource(view):
        yield f"{REPLAY_VIEW.replace(':', '.')} no longer says how many requests are padding (num_padding)"
    yield from override_changes(backend)


def override_changes(backend: type) -> Iterator[str]:
    """Every public method of `backend` is an override: of a method that exists, with the same parameters."""
    base = backend.__mro__[1]
    if not any(hasattr(base, hook) for hook in MASK_HOOKS):
        yield f"{base.__name__} has none of {MASK_HOOKS}: how the draft stage hands over its mask is unknown"
    for name, ours in vars(backend).items():
        if name.startswith("_") or not (inspect.isfunction(ours) or isinstance(ours, property)):
            continue
        theirs = inspect.getattr_static(base, name, None)
        if theirs is None:
            if name not in VERSION_HOOKS:
                yield f"{base.__name__}.{name} is gone"
        elif isinstance(theirs, property) or isinstance(ours, property):
            if type(theirs) is not type(ours):
                yield f"{base.__name__}.{name} is now a {type(theirs).__name__}"
        elif _parameters(theirs) != _parameters(ours):
            yield f"{base.__name__}.{name} takes ({_parameters(theirs)}), expected ({_parameters(ours)})"


def skip_dflash_mask(backend: type) -> None:
    """Tell DFLASH that `backend` needs no dense mask for its chains: it asks by class name."""
    dflash: Any = importlib.import_module("sglang.srt.speculative.dflash_utils")
    names = dflash._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS  # noqa: SLF001 # the only place that decides it
    dflash._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS = names | {backend.__name__}  # noqa: SLF001


def offers_verify_mask() -> bool:
    """Whether the draft stage asks the backend for a mask buffer and its layout (`verify_mask`)."""
    return hasattr(triton_backend(), "verify_mask")


def make_verify_mask(max_batch: int, tree_tokens: int, device: torch.device) -> Any:
    """A buffer of [T, T] masks, without the context, that the draft stage fills; needs `offers_verify_mask()`."""
    module = importlib.import_module("sglang.srt.layers.attention.verify_mask")
    buffer = torch.zeros(max_batch * tree_tokens**2, dtype=torch.bool, device=device)
    return module.VerifyMask(buffer=buffer, mode=module.TreeMaskMode.QLEN_ONLY, max_bs=max_batch)


def ask_for_tree_masks() -> None:
    """Make EAGLE's worker draw [T, T] masks where it, and not the backend, decides (0.5.16), as SGLang does on a CPU.

    The worker asks again after the target's backend exists, which is when this is called. One that does not, or that
    draws masks without asking (multi-layer EAGLE, FROZEN_KV_MTP), goes on with masks over the whole context.
    """
    worker: Any = importlib.import_module("sglang.srt.speculative.eagle_worker_v2")
    mode = importlib.import_module("sglang.srt.speculative.eagle_utils").TreeMaskMode.QLEN_ONLY
    worker.default_tree_mask_mode = lambda: mode


def read_tables_until_replay_ends(forward_mode: Any, base: Callable[[Any], Any]) -> Any:
    """The answer to `shared_read_ends`: verify and decode read req_to_token until the last layer."""
    ends = importlib.import_module("sglang.srt.layers.attention.base_attn_backend").SharedReadEnds
    if forward_mode.is_decode() or forward_mode.is_target_verify():
        return ends.POST_REPLAY
    return base(forward_mode)


def fence_tables(algorithm: Any) -> None:
    """Keep the scheduler from writing req_to_token under a forward, where versions have no `shared_read_ends`.

    0.5.16 tells the scheduler before a decode or DFLASH replay that its reads are done. For those the coarse barrier,
    which waits for the whole forward, is switched on. EAGLE's event comes from its draft extend, after verify; NGRAM
    has none and waits anyway.
    """
    if hasattr(triton_backend(), "shared_read_ends") or algorithm.is_eagle() or algorithm.is_standalone():
        return
    importlib.import_module("sglang.srt.environ").envs.SGLANG_FORCE_COARSE_WAR_BARRIER.set(True)
    logger.info("treemla: SGLANG_FORCE_COARSE_WAR_BARRIER is on: captured kernels read req_to_token while they replay")


def write_location(forward_batch: Any) -> Any:
    """Where the pool writes the rows of this forward."""
    location = importlib.import_module("sglang.srt.mem_cache.memory_pool").KVWriteLoc
    if hasattr(location, "for_batch"):
        return location.for_batch(forward_batch)
    return location(forward_batch.out_cache_loc)


def setting(runner: Any, name: str) -> Any:
    """What SGLang resolved for a server argument; None where this version has no such argument.

    0.5.23 leaves the arguments as they were given and keeps what it resolved beside them.
    """
    resolved = _find("sglang.srt.arg_groups.overrides:resolution_result")
    decided = None if resolved is None else resolved(runner.server_args, name)
    return getattr(runner.server_args, name, None) if decided is None else decided


def speculative_algorithm(runner: Any) -> Any:
    """The runner's SpeculativeAlgorithm, or the plug-in's object that stands for one."""
    module = importlib.import_module("sglang.srt.speculative.spec_info")
    return module.SpeculativeAlgorithm.from_string(setting(runner, "speculative_algorithm"))


def is_mla(runner: Any) -> bool:
    """Whether the model's attention is MLA."""
    arch = importlib.import_module("sglang.srt.configs.model_config").AttentionArch
    return bool(runner.model_config.attention_arch == arch.MLA)


def is_plain_mla_pool(pool: Any) -> bool:
    """Whether the KV pool holds latent rows of one dtype and nothing else: no block scales, no sparse or hybrid variant.

    With --kv-cache-dtype fp8_e4m3 such a row is e4m3 from end to end, divided by the layer's k_scale when written.
    """
    if type(pool) is not importlib.import_module("sglang.srt.mem_cache.memory_pool").MLATokenToKVPool:
        return False
    return bool(pool.kv_cache_dim == pool.kv_lora_rank + pool.qk_rope_head_dim)


def graphs_of(runner: Any, phase: str) -> str:
    """How SGLang captures `phase`, "prefill" or "decode": full, breakable, tc_piecewise or disabled."""
    config = setting(runner, "cuda_graph_config")
    return "disabled" if config is None else str(config[phase].backend)


def is_plain_tree(tree: Any) -> bool:
    """Whether the prefix cache is one whose nodes can be found: RadixCache or ChunkCache of 0.5.16, UnifiedRadixCache
    of 0.5.23 with full attention alone."""
    known = ("sglang.srt.mem_cache.radix_cache:RadixCache", "sglang.srt.mem_cache.chunk_cache:ChunkCache")
    unified = _find("sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache")
    if type(tree) is unified:
        return hasattr(tree, "tree_core") and tuple(tree.tree_components) == (full_component(),)
    return type(tree) in [found for path in known if (found := _find(path)) is not None]


@functools.cache
def full_component() -> Any:
    """0.5.23's name for the KV of full attention in a tree node."""
    return importlib.import_module("sglang.srt.mem_cache.unified_cache.components").ComponentType.FULL


def tensor_parallel_rank() -> int:
    """This process's rank among those that do the same with the same requests."""
    return int(importlib.import_module("sglang.srt.runtime_context").get_parallel().tp_rank)


def context_parallel_size() -> int:
    """Ranks that share the KV of one request in decode (DCP)."""
    return int(importlib.import_module("sglang.srt.runtime_context").get_parallel().attn_dcp_size)


def _find(path: str) -> Any:
    """The object at `module:attribute`, None where either is missing."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        return None


def _parameters(function: Any) -> str:
    return ", ".join(
        name if parameter.default is inspect.Parameter.empty else f"{name}={parameter.default}"
        for name, parameter in inspect.signature(function).parameters.items()
    )
