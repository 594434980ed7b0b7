"""What the suite does inside SGLang's processes, as a second plug-in beside treemla's: weights, faults, counts.

SGLang swallows what a plug-in raises, so this one leaves a file when it is done and the suite looks for it.
"""

import importlib
import importlib.util
import json
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

ASKED = "TREEMLA_E2E"  # environment: {"weights": bool, "fault": name or null, "folder": where files go}
SAMPLERS = ("sglang.srt.speculative.ngram_worker", "sglang.srt.speculative.eagle_worker_common")
# What 0.5.16's EAGLE worker imports, whatever serves, to ask whether the draft's attention is one of these.
NEED_DEEP_GEMM = {
    "sglang.srt.layers.attention.dsa_backend": "DeepseekSparseAttnBackend",
    "sglang.srt.layers.attention.deepseek_v4_backend": "DeepseekV4AttnBackend",
    "sglang.srt.layers.attention.flashmla_backend": "FlashMLABackend",
}


def register() -> None:
    if multiprocessing.parent_process() is None:  # the user's process: no model here
        return
    asked = json.loads(os.environ[ASKED])
    folder = Path(asked["folder"])
    if importlib.util.find_spec("deep_gemm") is None:
        stand_in_for_backends()
    if asked["weights"]:
        from e2e import weights

        loader: Any = importlib.import_module("sglang.srt.model_loader.loader")
        loader.initialize_dummy_weights = weights.fill
    if asked["fault"]:
        from e2e import faults

        faults.inject(asked["fault"])
    counts = Counts(folder / "counts.json")
    for name in SAMPLERS:
        counts.watch(importlib.import_module(name))
    (folder / "plugin.json").write_text(json.dumps(asked))


def stand_in_for_backends() -> None:
    """Classes that nothing is an instance of, where the real modules cannot be imported without DeepGEMM. A stand-in
    for deep_gemm itself would make other parts of SGLang believe in it, and those modules import more that is missing.
    """
    for module, name in NEED_DEEP_GEMM.items():
        sys.modules[module] = ModuleType(module)
        setattr(sys.modules[module], name, type(name, (), {}))


class Counts:
    """Accepted draft tokens, and how many were not their parent's first child. The GPU counts; nothing waits for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.on_device: torch.Tensor | None = None
        self.on_host: torch.Tensor | None = None

    def watch(self, worker: Any) -> None:
        sample = worker.eagle_sample

        def counted(verify_input: Any, *arguments: Any, **options: Any) -> Any:
            predict, accept_lens, accept_index = sample(verify_input, *arguments, **options)
            self.add(verify_input.retrieve_next_token, accept_index)
            return predict, accept_lens, accept_index

        worker.eagle_sample = counted

    def add(self, first_child: torch.Tensor, accept_index: torch.Tensor) -> None:
        """first_child: [B, T], -1 for none. accept_index: [B, depth], b * T + node along the path, then -1."""
        if self.on_device is None:
            self.on_device = torch.zeros(3, dtype=torch.int64, device=accept_index.device)
            self.on_host = torch.zeros(3, dtype=torch.int64, pin_memory=accept_index.is_cuda)
            threading.Thread(target=self.write, daemon=True).start()
        self.on_device += accepted(first_child, accept_index)
        self.on_host.copy_(self.on_device, non_blocking=True)

    def write(self) -> None:
        while True:
            steps, drafts, later = self.on_host.tolist()
            fresh = self.path.with_suffix(".new")
            fresh.write_text(json.dumps({"steps": steps, "accepted_drafts": drafts, "later_children": later}))
            fresh.replace(self.path)
            time.sleep(0.2)


def accepted(first_child: torch.Tensor, accept_index: torch.Tensor) -> torch.Tensor:
    """[1 step, accepted drafts, those of them that are a second or later child]."""
    parent, child = accept_index[:, :-1].long(), accept_index[:, 1:].long()
    is_draft = (parent >= 0) & (child >= 0)
    first = first_child.flatten()[parent.clamp(min=0)]
    later = is_draft & (first != child % first_child.shape[1])
    return torch.stack([torch.ones_like(later.sum()), is_draft.sum(), later.sum()])
