"""Stands for SGLang where tests try the driver of tests/e2e without a GPU: an Engine that answers out of its prompts.

Its rounding is noise of 0.01; a fault in the environment makes its log-probabilities wrong. It logs what treemla would
of slots and of a shadow.
"""

import asyncio
import gzip
import itertools
import json
import os
import random
import time
from pathlib import Path
from types import SimpleNamespace

__version__ = "0"


class Clock:
    now_s = 0.0


time.perf_counter = lambda: Clock.now_s  # 100 tokens a second, however slow the machine


def common(a, b):
    """Length of the common beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


class Engine:
    def __init__(self, **settings):
        asked = json.loads(os.environ["TREEMLA_E2E"])
        self.folder, self.fault, self.backend = Path(asked["folder"]), asked["fault"], settings["attention_backend"]
        self.is_speculative = "speculative_algorithm" in settings
        if os.environ.get("FAKE_DIES") in (self.backend, "all"):
            print("a traceback in the log", flush=True)
            os._exit(3)
        if self.backend != "triton":
            print("treemla: serves verify and decode", flush=True)
        (self.folder / "plugin.json").write_text("{}")
        self.loop = asyncio.new_event_loop()
        self.noise = random.Random(self.backend)
        self.token_s = 0.2 if self.backend == "triton" else 0.01
        self.aborted, self.seen = set(), set()
        config = SimpleNamespace(vocab_size=128)
        self.tokenizer_manager = SimpleNamespace(model_config=config, abort_request=self.aborted.add)

    def generate(self, input_ids, sampling_params, **_):
        made = [self.answer(ids, sampling_params["max_new_tokens"]) for ids in input_ids]
        Clock.now_s += len(made) * sampling_params["max_new_tokens"] * self.token_s
        return made

    def answer(self, ids, new_tokens):
        text = random.Random(str(ids[:40]))
        tokens, chances = zip(*((text.randrange(128), -text.random()) for _ in range(new_tokens)), strict=True)
        self.log_as_treemla()
        wrong = 0.5 if self.fault else 0.0
        logprobs = [chance + self.noise.gauss(wrong, 0.01) for chance in chances]
        cached = max((common(ids, old) for old in self.seen), default=0)
        steps = -(-new_tokens // 3) if self.is_speculative else 0
        self.seen.add(tuple(ids))
        if self.is_speculative:
            counts = {"steps": steps, "accepted_drafts": 200, "later_children": 100}
            (self.folder / "counts.json").write_text(json.dumps(counts))
        meta = {
            "output_token_logprobs": [(p, t, None) for p, t in zip(logprobs, tokens, strict=True)],
            "output_top_logprobs": [[(p, t, None), (p - 1, 0, None)] for p, t in zip(logprobs, tokens, strict=True)],
            "cached_tokens": cached,
            "completion_tokens": new_tokens,
            "spec_verify_ct": steps,
        }
        return {"output_ids": list(tokens), "meta_info": meta}

    def log_as_treemla(self):
        if os.environ.get("TREEMLA_SLOTS") == "compact":
            print("treemla: moved 40 of 400 held slots in 2.0 ms: mean run 3.0 -> 9.0", flush=True)
            print("treemla: 400 held slots: mean_run 9, rows_per_copy 4, largest_free_share 0.5", flush=True)
        if self.backend == "treemla-shadow":
            shares = "largest shares of the tolerance: treemla 0.50, Triton 0.40"
            print(f"treemla: compared step 16, 16 layers, {shares}", flush=True)
            if self.fault:
                print("treemla: beyond the tolerance in step 16 (1 such steps so far): Triton in 3 layers", flush=True)

    async def async_generate(self, input_ids, sampling_params, rid=None, stream=False, **_):
        whole = self.answer(input_ids, sampling_params["max_new_tokens"])
        if stream:
            return self.chunks(whole, rid)
        Clock.now_s += len(whole["output_ids"]) * self.token_s
        return whole

    async def chunks(self, whole, rid):
        """After a second's admission."""
        Clock.now_s += 1
        length, before = len(whole["output_ids"]), 0
        for had in (*range(1, length, 5), length):
            if rid in self.aborted:
                return
            Clock.now_s += (had - before) * self.token_s
            before = had
            so_far = {"completion_tokens": had, "spec_verify_ct": -(-had // 3) if self.is_speculative else 0}
            yield {"output_ids": whole["output_ids"][:had], "meta_info": whole["meta_info"] | so_far}
            await asyncio.sleep(0)

    def flush_cache(self):
        self.seen.clear()
        return SimpleNamespace(success=True)

    def start_profile(self, output_dir, **_):
        self.trace = Path(output_dir) / "0-TP-0.trace.json.gz"

    def stop_profile(self):
        launches = [{"name": "cudaGraphLaunch", "cat": "cuda_runtime", "args": {"correlation": i}} for i in range(6)]
        kernels = [
            {"name": name, "cat": "kernel", "ts": 100 * i + at, "dur": 20, "args": {"correlation": correlation}}
            for i in range(6)
            for name, at, correlation in (("treemla_plan", 0, i), ("treemla_verify_x", 30, i), ("fill", 60, 1000 + i))
        ]
        self.trace.write_bytes(gzip.compress(json.dumps({"traceEvents": launches + kernels}).encode()))

    def shutdown(self):
        pass
