"""The parts of tests/e2e that run inside or over an Engine: weights, counts of accepted children, traces of steps."""

import gzip
import json

import pytest
import torch
from e2e import report, run, stand_ins, trace_steps, weights
from e2e.inside import accepted

VOCABULARY, HIDDEN = 128, 2048


def filled(name, *shape, heads=1):
    weight = torch.empty(*shape, dtype=torch.bfloat16)
    weights.fill_one(name, weight, heads)
    return weight.float()


def test_every_successor_of_a_token_leads_all_other_tokens():
    tokens = filled("model.embed_tokens.weight", VOCABULARY, HIDDEN)
    logits = tokens / tokens.square().mean(1, keepdim=True).sqrt() @ filled("lm_head.weight", VOCABULARY, HIDDEN).T
    follows = torch.stack(weights.successors(VOCABULARY), dim=1)
    of_successors = logits.gather(1, follows)
    others = logits.scatter(1, follows, -torch.inf)
    assert (of_successors.min(1).values > others.max(1).values).float().mean() > 0.95
    assert all((follows[:, i].sort().values == torch.arange(VOCABULARY)).all() for i in range(follows.shape[1]))


def test_the_draft_model_reads_and_names_tokens_as_the_target_does():
    assert stand_ins.DRAFT["hidden_size"] == stand_ins.SMALL["hidden_size"]
    assert stand_ins.DRAFT["vocab_size"] == stand_ins.SMALL["vocab_size"]
    assert torch.equal(filled("lm_head.weight", 128, 64), filled("lm_head.weight", 128, 64))


def test_heads_are_diffuse_and_peaked_and_layers_differ():
    first, second = (filled(f"model.layers.{i}.self_attn.q_b_proj.weight", 8 * 192, 1536, heads=8) for i in (0, 1))
    scale = first.view(8, -1).std(1) * 1536**0.5
    assert scale.tolist() == pytest.approx([*weights.SHARPNESS, *weights.SHARPNESS[:2]], rel=0.02)
    assert not torch.equal(first, second)


def test_accepted_children_are_counted_by_their_place_among_their_siblings():
    #     0 -> 1, 2; 1 -> 3; 2 -> 4, 5   and in the second request a chain
    first_child = torch.tensor([[1, 3, 4, -1, -1, -1], [1, 2, 3, 4, 5, -1]])
    accept_index = torch.tensor([[0, 2, 5, -1], [6, 7, 8, 9]], dtype=torch.int32)
    assert accepted(first_child, accept_index).tolist() == [1, 5, 2]


def test_a_step_is_split_into_groups_and_idle_time(tmp_path):
    def kernel(name, ts, dur, correlation):
        return {"name": name, "cat": "kernel", "ts": ts, "dur": dur, "args": {"correlation": correlation}}

    events = [{"name": "process_name", "args": {"name": "python"}}]
    for step in range(5):
        at = 1000.0 * step
        events.append({"name": "cudaGraphLaunch", "cat": "cuda_runtime", "args": {"correlation": step}})
        events += [kernel("treemla_plan", at, 10, step), kernel("treemla_verify_wgmma_r72", at + 10, 50, step)]
        events += [kernel("treemla_combine", at + 55, 10, step), kernel("gemm", at + 100, 100, step)]
        events += [kernel("treemla_pack_mask", at + 900, 5, 100 + step), kernel("cat", at + 950, 20, 100 + step)]
    path = tmp_path / "x.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    made = trace_steps.summarise(path)
    assert made["steps"] == 2 and made["step_us"] == 1000
    assert made["idle_us"] == 1000 - 65 - 100 - 25
    assert {name: tuple(held.values()) for name, held in made["groups"].items()} == {
        "verify attention": (2, 55), "plan and pack": (2, 15), "rest of the graph": (1, 100), "outside it": (1, 20),
    }  # fmt: skip
    assert made["longest"][0] == {"group": "rest of the graph", "kernel": "gemm", "count": 1, "us": 100}


def answer(seconds, tokens, steps, **more):
    return {"seconds": seconds, "tokens": tokens, "steps": steps} | more


def turn(backend, *timed):
    return {"key": f"rates-0-{backend}-65536-0", "context": 65_536, "backend": backend, "timed": list(timed)}


@pytest.mark.parametrize(("backend", "rate"), [("treemla", (448.0, 20.0, 8.96)), ("triton", (560.0, 16.0, 8.96))])
def test_where_admission_varies_it_speaks_against_treemla(backend, rate):
    """The short answer that is taken off is the quickest of treemla's and the slowest of Triton's."""
    turns = [turn(backend, answer(short_s, 64, 7), answer(1.6, 512, 57)) for short_s in (0.6, 0.8)]
    (rates,) = report.samples(turns).values()
    assert rates == [pytest.approx(rate)] * 2


def test_an_answer_is_timed_from_its_first_tokens():
    timed = answer(3.0, 501, 51, first=answer(2.0, 1, 1))
    (rates,) = report.samples([turn("treemla", answer(9.0, 64, 7), timed)]).values()
    assert rates == [pytest.approx((500.0, 20.0, 10.0))]


def timed_at(context, triton_s, treemla_s):
    """A turn of each backend; seconds of 500 tokens behind the first."""
    for backend, seconds in (("triton", triton_s), ("treemla", treemla_s)):
        timed = [answer(9.0, 64, 7), answer(2.0 + seconds, 501, 51, first=answer(2.0, 1, 1))]
        yield turn(backend, *timed) | {"context": context}


def test_a_context_is_missed_where_it_is_below_the_bar_or_was_not_measured():
    records = [*timed_at(4096, 1.9, 1.0), *timed_at(16_384, 3.4, 1.0), *list(timed_at(65_536, 20.0, 1.0))[1:]]
    assert report.missed(records) == [16_384, 65_536]


@pytest.mark.parametrize("other", [{"treemla": "b" * 40}, {"gpu": "another"}, None])
def test_rates_of_another_commit_or_machine_or_of_none_that_is_known_are_no_measurements(other, tmp_path, capsys):
    here = {"gpu": "NVIDIA H200", "driver": "580", "treemla": "a" * 40}
    turns = [*timed_at(4096, 9.0, 1.0)]
    wheres = (here, other and here | other)
    records = [one | {"where": held} for one, held in zip(turns, wheres, strict=True)]
    assert "rates" in report.write(records, tmp_path)
    assert "expected records of one GPU, driver and commit" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_half_a_record_of_a_run_that_was_killed_is_done_again(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"key": "a"}\n{"key": "b", "ti')
    book = run.Book(path)
    book.add("c", {})
    assert list(book.held) == list(run.Book(path).held) == ["a", "c"]


@pytest.mark.parametrize("line", ["nonsense", "[1]", "{}", ""])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    path = tmp_path / "results.jsonl"
    path.write_text(f'{{"key": "a"}}\n{line}\n{{"key": "b"}}\n')
    with pytest.raises(SystemExit, match=r"results\.jsonl:2: expected a record"):
        run.Book(path)


def test_a_trace_without_steps_is_an_error(tmp_path):
    path = tmp_path / "x.trace.json"
    path.write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(ValueError, match="0 whole steps"):
        trace_steps.summarise(path)
