"""One start of the real Engine, on a GPU, with dummy weights: greedy answers and decode rates, as JSON.

    python tests/e2e/start.py --backend triton   --run ngram --out build/e2e
    python tests/e2e/start.py --backend treemla  --run ngram --out build/e2e
    python tests/e2e/start.py --compare ngram --out build/e2e

A start takes minutes, so each is a process and a file, and one that has its file is not repeated.
Never run yet. Needs SGLang on the path; treemla may be a checkout: this script writes the metadata that SGLang finds it by.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
MODEL = {  # one of eight tensor-parallel ranks of Kimi K2.6, experts cut so that all layers fit
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 8, "num_key_value_heads": 8,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 2304, "moe_intermediate_size": 256, "n_routed_experts": 48, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 2.8,
    "vocab_size": 163840, "max_position_embeddings": 262144, "rope_theta": 50000.0, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "decode": {},
    "ngram": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 9},
}
LENGTHS = (7, 300, 4096, 9000)  # the last is longer than a prefill chunk
NEW_TOKENS = 96
RATE_CONTEXTS = (4096, 16384, 65536)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", choices=("triton", "treemla"))
    parser.add_argument("--run", choices=RUNS)
    parser.add_argument("--rates", action="store_true", help="also decode rates at 4k, 16k and 65k")
    parser.add_argument("--attempt", type=int, default=0, help="number of this start; a rate needs two at least")
    parser.add_argument("--compare", choices=RUNS, help="compare the two engines' answers instead of starting one")
    given = parser.parse_args()
    if given.compare:
        return compare(given.out, given.compare)
    if not given.backend or not given.run:
        parser.error("--backend and --run are needed to start an engine")
    path = given.out / f"{given.run}-{given.backend}-{given.attempt}.json"
    if path.exists():
        print(f"{path}: already there")
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    made = serve(given.out, given.backend, RUNS[given.run], rates=given.rates)
    path.write_text(json.dumps(made, indent=1))
    print(path)
    return 0


def serve(out: Path, backend: str, settings: dict[str, Any], *, rates: bool) -> dict[str, Any]:
    announce(out)
    model = out / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    import sglang

    engine = sglang.Engine(
        model_path=str(model), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", random_seed=1,
        attention_backend=backend, page_size=1, sampling_backend="pytorch", mem_fraction_static=0.5,
        context_length=131072, chunked_prefill_size=8192, max_running_requests=4, cuda_graph_max_bs_decode=4,
        **settings,
    )  # fmt: skip
    try:
        made: dict[str, Any] = {"backend": backend, "sglang": sglang.__version__, "answers": answers(engine)}
        if rates:
            made["tokens_per_s"] = {str(n): rate(engine, n) for n in RATE_CONTEXTS}
        return made
    finally:
        engine.shutdown()


def announce(out: Path) -> None:
    """Let this process and those it starts find treemla and its entry point, as an installed package would."""
    record = out / "installed/treemla-0.dist-info"
    record.mkdir(parents=True, exist_ok=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: treemla\nVersion: 0\n")
    (record / "entry_points.txt").write_text("[sglang.srt.plugins]\ntreemla = treemla.sglang:register\n")
    paths = [str(REPO / "src"), str(record.parent.resolve())]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


def prompt(length: int, seed: int) -> list[int]:
    """A 64-token pattern repeated: what an n-gram draft predicts well."""
    pattern = [(seed * 7919 + 104729 * i) % 150_000 + 1000 for i in range(64)]
    return (pattern * (length // 64 + 1))[:length]


def answers(engine: Any) -> dict[str, dict[str, Any]]:
    """Every length alone, all together in one batch, and once more from the radix cache."""
    made = {}
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    for round_name, batches in (("alone", [[p] for p in prompts]), ("batch", [prompts]), ("cached", [prompts[::-1]])):
        for batch in batches:
            for ids, said in zip(batch, generate(engine, batch, NEW_TOKENS), strict=True):
                made[f"{round_name}-{len(ids)}"] = dataclasses.asdict(said)
    return made


def generate(engine: Any, batch: list[list[int]], new_tokens: int) -> list[Any]:
    sys.path.insert(0, str(Path(__file__).parent))
    from agree import Answer

    sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    done = engine.generate(input_ids=batch, sampling_params=sampling, return_logprob=True, top_logprobs_num=2)
    made = []
    for one in done:
        chosen, top = one["meta_info"]["output_token_logprobs"], one["meta_info"]["output_top_logprobs"]
        margins = tuple(pair[0][0] - pair[1][0] for pair in top)
        made.append(Answer(tuple(t[1] for t in chosen), tuple(t[0] for t in chosen), margins))
    return made


def rate(engine: Any, context: int) -> float:
    """Decode tokens a second at this context, batch 1: a long answer's time less a short one's, prefix cached."""
    ids = prompt(context, seed=99)
    seconds = {}
    for new_tokens in (1, 32, 160):  # the first fills the cache
        begin = time.perf_counter()
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        engine.generate(input_ids=[ids], sampling_params=sampling)
        seconds[new_tokens] = time.perf_counter() - begin
    return (160 - 32) / (seconds[160] - seconds[32])


def compare(out: Path, run: str) -> int:
    sys.path.insert(0, str(Path(__file__).parent))
    import agree

    held = {}
    for backend in ("triton", "treemla"):
        said = json.loads((out / f"{run}-{backend}-0.json").read_text())["answers"]
        held[backend] = {name: agree.Answer(*(tuple(a[f]) for f in ("tokens", "logprobs", "margins")))
                         for name, a in said.items()}  # fmt: skip
    found = agree.compare(held["triton"], held["treemla"])
    print(f"{run}: {found.same} tokens agree, {found.ties} answers part at a tie, {len(found.faults)} faults")
    print(*found.faults, sep="\n")
    return 1 if found.faults or not found.same else 0


if __name__ == "__main__":
    raise SystemExit(main())
