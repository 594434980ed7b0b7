"""TREEMLA_SLOTS, in a process of its own for each value: what SGLang's plug-in loader makes of it."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# A Scheduler whose start and idle turn are stand-ins, so that what the hooks do around them is seen.
SCRIPT = """
import logging, sys, types
import torch, torchvision_shim
from sglang.test.test_utils import maybe_stub_sgl_kernel
maybe_stub_sgl_kernel()
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache import allocator, kv_cache_configurator
from sglang.srt.runtime_context import get_parallel
rank = get_parallel().override(tp_rank=0)
rank.__enter__()
stock = [allocator.TokenToKVPoolAllocator]  # in a list, where the loader does not replace it

def init(self, server, **changes):
    self.__dict__.update(server.__dict__, server=server, **changes)

Scheduler.__init__, Scheduler.is_fully_idle = init, lambda self: True
Scheduler.on_idle = lambda self: print("idle, runs:", runs(self.server))

from sglang.srt.plugins import load_plugins
load_plugins()
logging.basicConfig(level=logging.INFO, stream=sys.stdout, force=True)
from idle_server import TREES, IdleServer
from test_idle_slots import runs, scattered
from treemla.sglang import make_backend

class Gauge:
    def __init__(self, name, text, labelnames, multiprocess_mode):
        self.name = name, tuple(labelnames), multiprocess_mode
    def labels(self, *values):
        self.values = values
        return self
    def set(self, value):
        print(*self.name, *self.values, "=", round(value, 3))

def attempt(what, call):
    try:
        call()
    except Exception as error:
        print(f"{what}: {type(error).__name__}: {error}")
    else:
        print(f"{what}: done")

taken = kv_cache_configurator.TokenToKVPoolAllocator, allocator.PagedTokenToKVPoolAllocator
print("allocators:", *(kind.__name__ for kind in taken))
def serve():
    scheduler = Scheduler(scattered(TREES[0]))
    scheduler.on_idle()
    scheduler.on_idle()
attempt("serve", serve)
attempt("lmcache", lambda: Scheduler(IdleServer(enable_lmcache=True)))
stolen = stock[0](8, torch.float32, "cpu", None, False)
attempt("stolen", lambda: Scheduler(scattered(TREES[0]), token_to_kv_pool_allocator=stolen))
runner = types.SimpleNamespace(is_draft_worker=False, token_to_kv_pool_allocator=stolen)
attempt("backend", lambda: make_backend(runner))
sys.modules["prometheus_client"] = types.SimpleNamespace(Gauge=Gauge)
collector = types.SimpleNamespace(labels={"model_name": "m", "tp_rank": "0"})
attempt("metrics", lambda: Scheduler(scattered(TREES[0]), metrics_collector=collector).on_idle())
"""


@functools.cache
def said(switch: str) -> str:
    paths = [str(HERE), str(HERE.parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TREEMLA_SLOTS": switch}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_unset_it_changes_nothing() -> None:
    assert "allocators: TokenToKVPoolAllocator PagedTokenToKVPoolAllocator" in said("")
    assert said("").count("idle, runs: 11") == 3 and "treemla:" not in said("")
    assert "lmcache: done" in said("") and "stolen: done" in said("")


@pytest.mark.parametrize(
    ("switch", "idle"), [("ordered", "idle, runs: 11"), ("dry-run", "idle, runs: 11"), ("compact", "idle, runs: 1\n")]
)
def test_sglang_takes_the_ordered_allocators_and_idles_as_told(switch: str, idle: str) -> None:
    assert "allocators: OrderedTokenToKVPoolAllocator OrderedPagedTokenToKVPoolAllocator" in said(switch)
    assert "serve: done" in said(switch)
    assert said(switch).count(idle) == 3
    assert ("would move 11 of 11" in said(switch)) == (switch == "dry-run")


def test_another_value_ends_the_start() -> None:
    assert "serve: ValueError: TREEMLA_SLOTS: expected one of ordered, dry-run, compact, got 'compcat'" in said(
        "compcat"
    )


@pytest.mark.parametrize("switch", ["dry-run", "compact"])
def test_a_holder_that_cannot_be_rewritten_ends_the_start(switch: str) -> None:
    (line,) = (line for line in said(switch).splitlines() if line.startswith("lmcache: "))
    assert "--enable-lmcache" in line and line.endswith("or set TREEMLA_SLOTS=ordered")
    assert "lmcache: done" in said("ordered")


@pytest.mark.parametrize("what", ["stolen", "backend"])
def test_an_allocator_that_did_not_take_ends_the_start(what: str) -> None:
    wanted = "RuntimeError: TREEMLA_SLOTS: expected an ordered allocator, got TokenToKVPoolAllocator"
    assert f"{what}: {wanted}" in said("ordered")


@pytest.mark.parametrize(
    ("switch", "mean_run", "moved"), [("ordered", 1.0, 0), ("dry-run", 1.0, 0), ("compact", 11.0, 11)]
)
def test_with_metrics_the_figures_are_gauges_with_sglangs_labels(switch: str, mean_run: float, moved: int) -> None:
    labels = "('model_name', 'tp_rank') mostrecent m 0"
    assert f"treemla:mean_run {labels} = {mean_run}" in said(switch)
    assert f"treemla:moved_slots {labels} = {moved}" in said(switch)
    assert f"treemla:rows_per_copy {labels}" in said(switch) and f"treemla:largest_free_share {labels}" in said(switch)
