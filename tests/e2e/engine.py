"""One real Engine in a process: started by its arguments, then obeying one JSON line after another from its input.

Replies are JSON lines on standard output; whatever SGLang prints goes to a file. run.py is the other end.
"""

import argparse
import asyncio
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
TESTS = REPO / "tests"
# This folder, which Python puts first for a script, and tests have modules of common names: e2e.NAME, after all others.
sys.path[:] = [path for path in sys.path if path != str(TESTS / "e2e")] + [str(TESTS)]
LENGTHS = (7, 12, 25, 40, 130, 320, 1500, 6000)  # the last two are longer than a prefill chunk, or near it
NEW_TOKENS = 48
LONG_ANSWER = 700
GREEDY = {"temperature": 0, "ignore_eos": True}
SIZES = (1, 2, 3, 4)  # requests together; graphs exist for 1, 2 and 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "run", "backend", "folder"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--fault")
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    folder = Path(given.folder)
    folder.mkdir(parents=True, exist_ok=True)
    replies = os.fdopen(os.dup(1), "w")
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    engine = None
    try:
        engine, ready = start(given, folder)
        reply(replies, ready)
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "stop":
                break
            reply(replies, COMMANDS[command.pop("do")](engine, **command))
    except Exception:  # the other end reports it
        reply(replies, {"error": traceback.format_exc()})
        return 1
    finally:
        if engine is not None:
            engine.shutdown()
    reply(replies, {"stopped": True})
    return 0


def reply(replies: Any, made: dict[str, Any]) -> None:
    replies.write(json.dumps(made) + "\n")
    replies.flush()


def start(given: argparse.Namespace, folder: Path) -> tuple[Any, dict[str, Any]]:
    """The Engine, and what it took: seconds, and the line in which treemla says what it serves."""
    from e2e import stand_ins

    begin = time.monotonic()
    announce(folder, weights=given.model == "small", fault=given.fault)
    os.environ.update(stand_ins.ENVIRONMENT.get(given.run, {}))
    settings = stand_ins.settings(given.model, given.run, given.backend, folder / "models")
    import sglang

    engine = sglang.Engine(**settings, port=given.port, nccl_port=given.port + 1)
    if not (folder / "plugin.json").exists():
        engine.shutdown()
        raise RuntimeError("the suite's own plug-in did not load; the log says why")
    said = [line for line in treemla_lines(folder) if "treemla: serves" in line]
    if bool(said) is (given.backend == "triton"):
        engine.shutdown()
        raise RuntimeError(f"backend {given.backend}, but the log says of treemla: {said}")
    return engine, {"ready_s": time.monotonic() - begin, "serves": said, "sglang": sglang.__version__}


def treemla_lines(folder: Path) -> list[str]:
    """What treemla has logged so far."""
    return [line for line in (folder / "log.txt").read_text(errors="replace").splitlines() if "treemla: " in line]


def announce(folder: Path, *, weights: bool, fault: str | None) -> None:
    """Let this process and those it starts find treemla's entry point, as an installed package's, and the suite's."""
    record = folder / "installed/treemla-0.dist-info"
    record.mkdir(parents=True, exist_ok=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: treemla\nVersion: 0\n")
    entry_points = "[sglang.srt.plugins]\ntreemla = treemla.sglang:register\ntreemla_e2e = e2e.inside:register\n"
    (record / "entry_points.txt").write_text(entry_points)
    paths = [str(REPO / "src"), str(record.parent.resolve())]
    sys.path[:0] = paths
    given = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *given, str(TESTS)])
    asked = {"weights": weights, "fault": fault, "folder": str(folder.resolve())}
    os.environ["TREEMLA_E2E"] = json.dumps(asked)
    (folder / "plugin.json").unlink(missing_ok=True)
    (folder / "counts.json").unlink(missing_ok=True)


def prompt(length: int, seed: int, vocabulary: int) -> list[int]:
    import random

    return random.Random(1000 * seed + length).choices(range(vocabulary), k=length)


def answers(engine: Any, folder: str, short: bool = False) -> dict[str, Any]:
    """Every prompt in batches of each size with an empty cache, again from the cache, around an abort, and one long
    answer. short: batches of one, and again from the cache."""
    vocabulary = engine.tokenizer_manager.model_config.vocab_size
    prompts = [prompt(length, seed, vocabulary) for seed, length in enumerate(LENGTHS)]
    made: dict[str, Any] = {}

    def keep(round_name: str, ids: list[int], said: dict[str, Any]) -> None:
        made[f"{round_name}/{len(ids)}"] = answer(said)

    for size in SIZES[:1] if short else SIZES:
        flush(engine)
        for first in range(0, len(prompts), size):
            batch = prompts[first : first + size]
            for ids, said in zip(batch, generate(engine, batch, NEW_TOKENS), strict=True):
                keep(f"batch{size}", ids, said)
    for ids in prompts:
        keep("cached", ids, generate(engine, [ids], NEW_TOKENS)[0])
    if not short:
        victims = abort_round(engine, prompts, keep)
        made["abort"] = {"victims": victims}
        (said,) = generate(engine, [prompts[4]], LONG_ANSWER)
        keep("long", prompts[4], said)
    return {"answers": made} | counts_and_log(Path(folder))


def serve_churn(engine: Any, folder: str) -> dict[str, Any]:
    """The requests of churn.py, group after group; with each answer how often slots had been compacted before it."""
    from e2e import churn

    vocabulary = engine.tokenizer_manager.model_config.vocab_size
    made: dict[str, Any] = {}
    victims = []
    for nth, group in enumerate(churn.groups(vocabulary)):
        compactions = sum("treemla: moved" in line for line in treemla_lines(Path(folder)))
        asked = together(engine, group.prompts, group.victim, f"churn-{nth}", group.new_tokens)
        done, had = engine.loop.run_until_complete(asked)
        victims += [] if had is None else [had]
        for i, (_, said) in enumerate(done):
            made[f"group{nth}/{i}"] = answer(said) | {"compactions": compactions}
        time.sleep(group.pause_s)
    made["abort"] = {"victims": victims}
    return {"answers": made} | counts_and_log(Path(folder))


def counts_and_log(folder: Path) -> dict[str, Any]:
    time.sleep(0.5)  # the counts are written five times a second
    counts = folder / "counts.json"
    held = json.loads(counts.read_text()) if counts.exists() else None
    return {"counts": held, "log": treemla_lines(folder)}


def flush(engine: Any) -> None:
    """Empty the cache; the scheduler refuses while it still winds up the last request."""
    for _ in range(50):
        done = engine.flush_cache()
        if getattr(done, "success", True):
            return
        time.sleep(0.1)
    raise RuntimeError("flush_cache: refused for 5 s")


def generate(engine: Any, batch: list[list[int]], new_tokens: int) -> list[dict[str, Any]]:
    sampling = GREEDY | {"max_new_tokens": new_tokens}
    made = engine.generate(input_ids=batch, sampling_params=sampling, return_logprob=True, top_logprobs_num=2)
    return list(made)


def answer(said: dict[str, Any]) -> dict[str, Any]:
    """Token ids, log-probabilities and leads; how much came from the cache, and how many verify steps there were."""
    meta, tokens = said["meta_info"], list(said["output_ids"])
    chosen, top = meta["output_token_logprobs"][: len(tokens)], meta["output_top_logprobs"][: len(tokens)]
    if [entry[1] for entry in chosen] != tokens:
        raise ValueError(f"log-probabilities are of {[entry[1] for entry in chosen]}, the answer is {tokens}")
    return {
        "tokens": tokens,
        "logprobs": [round(entry[0], 6) for entry in chosen],
        "leads": [round(pair[0][0] - pair[1][0], 6) for pair in top],
        "cached": meta["cached_tokens"],
        "steps": meta.get("spec_verify_ct", 0),
    }


def abort_round(engine: Any, prompts: list[list[int]], keep: Any) -> list[int]:
    """Twice four requests together, of which one is aborted after its first tokens; the others must not notice.
    Then two alone, in the rows and slots that were freed. Returns how many tokens each victim had."""
    victims = []
    for nth in range(2):
        batch = prompts[4 * nth : 4 * nth + 4]
        asked = together(engine, batch, 1 + nth, f"victim-{nth}", NEW_TOKENS)
        done, had = engine.loop.run_until_complete(asked)
        victims.append(had)
        for ids, said in done:
            keep("abort", ids, said)
    for ids in prompts[1:3]:
        keep("after", ids, generate(engine, [ids], NEW_TOKENS)[0])
    return victims


async def together(
    engine: Any, batch: list[list[int]], victim: int | None, rid: str, new_tokens: int
) -> tuple[list[Any], int | None]:
    """All prompts of `batch` at once; number `victim` is aborted. (prompt, answer) of the others, its tokens."""

    async def stopped(ids: list[int]) -> int:
        had = 0
        sampling = GREEDY | {"max_new_tokens": 10 * NEW_TOKENS}
        chunks = await engine.async_generate(input_ids=ids, sampling_params=sampling, stream=True, rid=rid)
        async for said in chunks:
            had = len(said["output_ids"])
            if had > 8:
                engine.tokenizer_manager.abort_request(rid)
        return had

    async def whole(ids: list[int]) -> Any:
        sampling = GREEDY | {"max_new_tokens": new_tokens}
        asked = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
        return ids, await engine.async_generate(**asked)

    tasks = [stopped(ids) if i == victim else whole(ids) for i, ids in enumerate(batch)]
    done = await asyncio.gather(*tasks)
    return [one for i, one in enumerate(done) if i != victim], None if victim is None else done[victim]


def pattern(context: int) -> list[int]:
    """64 tokens repeated: what an n-gram draft predicts well. A short one begins a longer one, and finds its cache."""
    return ([1000 + 104_729 * i % 150_000 for i in range(64)] * (context // 64 + 1))[:context]


def rate(engine: Any, context: int, tokens: list[int]) -> dict[str, Any]:
    """Answers after `context` tokens in the cache: what they took, and what their first tokens had taken."""
    timed = [engine.loop.run_until_complete(streamed(engine, pattern(context), n)) for n in tokens]
    return {"context": context, "timed": timed}


async def streamed(engine: Any, ids: list[int], new_tokens: int) -> dict[str, Any]:
    begin, chunks = time.perf_counter(), []
    sampling = GREEDY | {"max_new_tokens": new_tokens}
    async for said in await engine.async_generate(input_ids=ids, sampling_params=sampling, stream=True):
        meta = said["meta_info"]
        so_far = {"seconds": time.perf_counter() - begin, "tokens": meta["completion_tokens"]}
        chunks.append(so_far | {"steps": meta.get("spec_verify_ct", 0), "cached": meta["cached_tokens"]})
    return chunks[-1] | {"first": chunks[0]}


def profile(engine: Any, context: int, new_tokens: int, folder: str) -> dict[str, Any]:
    """Where the time of a step goes."""
    from e2e import trace_steps

    where = Path(folder).resolve() / f"trace-{context}"
    where.mkdir(exist_ok=True)
    engine.start_profile(output_dir=str(where), activities=["CPU", "GPU"], with_stack=False, record_shapes=False)
    engine.generate(input_ids=[pattern(context)], sampling_params=GREEDY | {"max_new_tokens": new_tokens})
    engine.stop_profile()
    for _ in range(120):  # the file appears when it is whole
        if found := sorted(where.glob("*.trace.json*"), key=lambda path: path.stat().st_mtime):
            return {"context": context, "steps": trace_steps.summarise(found[-1])}
        time.sleep(0.5)
    raise RuntimeError("no trace after 60 s")


COMMANDS = {"answers": answers, "churn": serve_churn, "rate": rate, "profile": profile}

if __name__ == "__main__":
    raise SystemExit(main())
