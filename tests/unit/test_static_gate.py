"""The static gate on made-up kernels: what is worse, what is only other, and what is missing."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treemla import nvcc, tiles
from treemla.gate import cli, kernelcode, mix, sass, static, static_gate
from treemla.gate.baseline import BrokenBaseline
from treemla.gate.exits import Exit
from treemla.gate.kernelcode import KernelCode

TARGET = tiles.TARGETS["sm_120a"]
LOOP = {"HMMA.16816.F32.BF16": 85, "LDSM.16.M88.4": 20, "LDS.128": 10, "BAR.SYNC.DEFER_BLOCKING": 2, "FFMA": 300}
OPCODES = {**LOOP, "LDG.E.128": 64, "LDG.E": 8, "STG.E.128": 16, "EXIT": 1}
OLD = KernelCode("sm_120a", "k", "13.0.88", "a" * 64, 168, 2, 0, 0, 101184, 1, OPCODES, (LOOP,))


def changed(**fields):
    return replace(OLD, sha256="b" * 64, **fields)


def loop(**counts):
    return changed(loops=({**LOOP, **{name.replace("__", "."): count for name, count in counts.items()}},))


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (changed(registers=184), "registers 168 -> 184"),
        (changed(spill_bytes=8), "spilled bytes 0 -> 8"),
        (changed(stack_bytes=64), "stack bytes 0 -> 64"),
        (changed(shared_bytes=101185), "shared bytes 101184 -> 101185"),
        (changed(barriers=3), "barriers 2 -> 3"),
        (changed(ctas=0), "CTAs an SM 1 -> 0"),
        (changed(loops=()), "tensor-core loops 1 -> 0"),
        (loop(FFMA=320), "loop of 417 instructions -> 437"),
        (loop(HMMA__16816__F32__BF16=86), "tensor in a loop 85 -> 86"),
        (loop(BAR__SYNC=1), "barrier in a loop 2 -> 3"),
        (loop(LDS__128=9, LDS=4), "shared load narrower: 10 of 128 bits -> 13 of 98.46"),
        (loop(LDSM__16__M88__4=18, LDSM__16__M88__2=4), "ldmatrix narrower: 20 of 4 matrices -> 22 of 3.636"),
        (
            changed(opcodes={**OPCODES, "LDG.E.128": 0, "LDG.E.64": 128}),
            "global load narrower: 72 of 117.3 bits -> 136 of 62.12",
        ),
        (changed(opcodes={**OPCODES, "LDL": 2}), "local load instructions 0 -> 2"),
    ],
)
def test_each_way_to_become_worse_is_red_and_says_how(new, said):
    verdict, code, text = static_gate.judge(OLD, new)
    assert (verdict, code) == ("worse", Exit.FAILED) and said in text


@pytest.mark.parametrize(
    "new",
    [
        changed(),
        changed(registers=128),
        changed(ctas=2),
        loop(FFMA=310),
        loop(FFMA=200),
        changed(opcodes={**OPCODES, "LDG.E.128": 8}),  # fewer, and so narrower on the mean
        changed(opcodes={**OPCODES, "STG.E.128": 32}),
    ],
)
def test_what_is_only_other_passes_and_is_shown(new):
    verdict, code, text = static_gate.judge(OLD, new)
    assert (verdict, code) == ("changed", Exit.PASS) and text


def test_the_same_instructions_are_the_same_kernel():
    assert static_gate.judge(OLD, OLD) == ("same", Exit.PASS, "")


def test_shared_memory_that_the_host_asks_for_counts_though_the_instructions_are_the_same():
    assert static_gate.judge(OLD, replace(OLD, shared_bytes=101188))[0] == "worse"


def test_another_compiler_is_nothing_to_compare_with():
    assert static_gate.judge(OLD, changed(compiler="13.1.2"))[1] is Exit.BASELINE_MISSING


def test_the_change_is_explained_by_the_opcodes_that_moved_most():
    new = {**OPCODES, "LDG.E.128": 32, "LDG.E.64": 64, "FFMA": 100}
    assert mix.difference(OPCODES, new) == "LDG.E.64 0 -> 64, LDG.E.128 64 -> 32, FFMA 300 -> 100"
    assert mix.difference({}, {f"OP{n}": 1 for n in range(9)}).endswith("and 3 more")


@pytest.mark.parametrize(
    ("opcode", "expected"),
    [
        ("LDG.E.128.CONSTANT", "global load 128"), ("LDG.E.U16", "global load 16"), ("LDG.E", "global load 32"),
        ("LDG.E.64.STRONG.GPU", "global load 64"), ("STS.U8", "shared store 8"), ("LDGSTS.E.BYPASS.128", "async copy 128"),
        ("LDSM.16.MT88.4", "ldmatrix x4"), ("LDSM.16.M88", "ldmatrix x1"), ("STSM.16.MT88.2", "stmatrix x2"),
        ("HGMMA.64x72x16.F32.BF16", "tensor"), ("QMMA.16832.F32.E4M3.E4M3", "tensor"), ("UBLKCP.S.G", "bulk copy"),
        ("UTMALDG.2D", "bulk copy"), ("SYNCS.PHASECHK.TRANS64.TRYWAIT", "mbarrier"), ("BAR.SYNC", "barrier"),
        ("STL.128", "local store 128"), ("FFMA", "other"), ("IMAD.WIDE.U32", "other"),
    ],
)  # fmt: skip
def test_opcodes_have_classes_and_widths(opcode, expected):
    assert mix.class_of(opcode) == expected


@given(st.dictionaries(st.sampled_from(sorted(OPCODES)), st.integers(1, 99), min_size=1))
def test_every_instruction_is_in_one_class(opcodes):
    assert sum(mix.by_class(opcodes).values()) == sum(opcodes.values())


def kernels(target=TARGET):
    return {name: replace(OLD, kernel=name) for name in target.kernel_names}


def verdicts(code, old):
    return {f.name.split()[1]: (f.verdict, f.exit) for f in static_gate.judge_all(TARGET, code, old)}


def test_missing_new_and_stale_kernels_are_no_pass():
    held, first, *_ = kernels(), *TARGET.kernel_names
    without = {name: code for name, code in held.items() if name != first}
    assert verdicts(without, held)[first] == ("missing", Exit.FAILED)
    assert verdicts(held, without)[first] == ("no baseline", Exit.BASELINE_MISSING)
    assert verdicts(held, {**held, "gone": replace(OLD, kernel="gone")})["gone"] == ("stale", Exit.BASELINE_MISSING)
    assert set(verdicts(held, held).values()) == {("same", Exit.PASS)}
    assert {code for _, code in verdicts(held, {}).values()} == {Exit.BASELINE_MISSING}


def test_kernels_that_a_base_lacks_or_had_are_named_and_pass():
    held, first, *_ = kernels(), *TARGET.kernel_names
    base = {**{name: code for name, code in held.items() if name != first}, "gone": replace(OLD, kernel="gone")}
    made = {f.name.split()[1]: (f.verdict, f.exit) for f in static_gate.judge_all(TARGET, held, base, stored=False)}
    assert made[first] == ("new", Exit.PASS) and made["gone"] == ("removed", Exit.PASS)


def test_a_broken_rule_is_red_at_the_kernel_that_it_names():
    found = static_gate.judge_all(TARGET, kernels(), kernels())
    names = [finding.name.split()[1] for finding in found]
    problems = [f"{names[3]}: spills 8 bytes", f"ptxas warning: spilled in function '{names[3]}'", "warning: something"]
    made = {f.name: f for f in static_gate.broken("sm_120a", problems, found)}
    assert {name for name, f in made.items() if f.exit is Exit.FAILED} == {f"sm_120a {names[3]}", "sm_120a"}
    assert made[f"sm_120a {names[3]}"].text == "; ".join(problems[:2])


@pytest.fixture
def compiler(monkeypatch):
    """What compiling an architecture gives, in the place of nvcc: ({arch: problems}, {arch: an error})."""
    problems, errors = {}, {}

    def report(arch):
        if arch in errors:
            raise errors[arch]
        return static.StaticReport(arch, (), tuple(problems.get(arch, ())))

    monkeypatch.setattr(static_gate.static, "report", report)
    monkeypatch.setattr(
        static_gate, "compiled", lambda target: {n: replace(k, arch=target.arch) for n, k in kernels(target).items()}
    )
    monkeypatch.setattr(nvcc, "find", lambda: Path("nvcc"))
    monkeypatch.setattr(nvcc, "version", lambda _: "13.0.88")
    return problems, errors


def test_kernels_that_keep_the_rules_are_stored(compiler, tmp_path):
    assert static_gate.bless("first", tmp_path).exit is Exit.PASS
    for target in tiles.TARGETS.values():
        assert set(kernelcode.load_all(target.arch, tmp_path)) == set(target.kernel_names)


def test_static_compares_with_what_is_stored_and_one_kernel_missing_there_is_exit_5(
    compiler, tmp_path, monkeypatch, capsys
):
    static_gate.bless("first", tmp_path)
    load_all = kernelcode.load_all
    monkeypatch.setattr(static_gate.kernelcode, "load_all", lambda arch: load_all(arch, tmp_path))
    assert cli.main(["static"]) == Exit.PASS
    name = TARGET.kernel_names[0]
    kernelcode.path_of("sm_120a", name, tmp_path).unlink()
    capsys.readouterr()
    assert cli.main(["static"]) == Exit.BASELINE_MISSING
    assert f"BASELINE_MISSING: sm_120a {name}: nothing is stored of it" in capsys.readouterr().out


@pytest.mark.parametrize("arch", tiles.TARGETS)
@pytest.mark.parametrize("error", [nvcc.NvccError("line 3"), sass.UnreadableOutput("nothing")])
def test_nothing_is_stored_where_an_architecture_does_not_compile(compiler, tmp_path, arch, error):
    compiler[1][arch] = error
    made = static_gate.bless("first", tmp_path)
    assert made.exit is Exit.FAILED and str(error) in made.text()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arch", tiles.TARGETS)
def test_nothing_is_stored_where_a_kernel_breaks_the_rules(compiler, tmp_path, arch):
    name = tiles.TARGETS[arch].kernel_names[0]
    compiler[0][arch] = [f"{name}: spills 8 bytes"]
    made = static_gate.bless("first", tmp_path)
    assert made.exit is Exit.FAILED and "spills 8 bytes" in made.text()
    assert not list(tmp_path.iterdir())


def test_blessing_without_a_compiler_is_exit_4(compiler, monkeypatch, capsys):
    compiler[1]["sm_90a"] = nvcc.NvccMissing("nvcc: none")
    monkeypatch.setattr(kernelcode, "load_all", lambda *_: pytest.fail("went on"))
    assert cli.main(["static", "--bless", "why"]) == Exit.INVALID_ENVIRONMENT
    assert "nvcc: none" in capsys.readouterr().out


def test_blessing_beside_a_comparison_is_wrong_usage(monkeypatch):
    monkeypatch.setattr(static_gate, "bless", lambda *_: pytest.fail("went on"))
    assert cli.main(["static", "--bless", "why", "--against", "stored"]) == Exit.USAGE


@pytest.mark.parametrize("name", ["bad-gpu-perf.jsonl", "bad-gpu-peers.jsonl"])
@pytest.mark.parametrize("content", [b"{}\n", b"\xff\xfe", b""])
def test_committed_times_that_do_not_load_are_named_before_anything_is_compiled(
    tmp_path, monkeypatch, content, name, capsys
):
    (tmp_path / "docs/measured").mkdir(parents=True)
    (tmp_path / "docs/measured" / name).write_bytes(content)
    monkeypatch.setattr(static_gate, "REPO", tmp_path)
    monkeypatch.setattr(static_gate, "compile_all", lambda: pytest.fail("went on"))
    assert cli.main(["static"]) == Exit.BASELINE_MISSING
    assert name in capsys.readouterr().out


def test_what_is_stored_loads_as_it_was_and_as_the_schema_says(tmp_path):
    OLD.dump(tmp_path)
    assert kernelcode.load_all("sm_120a", tmp_path) == {"k": OLD}
    path = kernelcode.path_of("sm_120a", "k", tmp_path)
    jsonschema.validate(json.loads(path.read_text()), json.loads(kernelcode.SCHEMA.read_text()))


@pytest.mark.parametrize(
    "change",
    [{"registers": -1}, {"registers": "168"}, {"opcodes": {}, "loops": []}, {"kernel": "other"}, {"arch": "sm_90a"}, {"x": 1}, {"loops": 3}],
)  # fmt: skip
def test_a_stored_file_that_cannot_be_right_does_not_load(tmp_path, change):
    OLD.dump(tmp_path)
    path = kernelcode.path_of("sm_120a", "k", tmp_path)
    path.write_text(json.dumps({**asdict(OLD), **change}))
    with pytest.raises(BrokenBaseline):
        kernelcode.load_all("sm_120a", tmp_path)


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "expected"),
    [
        ("sm_90a", 512, 128, 232_400, 1),  # shared memory
        ("sm_120a", 384, 168, 101_184, 1),
        ("sm_90a", 256, 32, 0, 8),  # warps
        ("sm_120a", 256, 32, 0, 6),
        ("sm_90a", 512, 64, 25_600, 2),  # registers
        ("sm_90a", 32, 16, 0, 32),  # blocks
        ("sm_90a", 128, 33, 0, 12),  # registers come in eights a thread
        ("sm_90a", None, 32, 0, None),
    ],
)
def test_blocks_a_multiprocessor_are_bound_by_what_runs_out_first(arch, threads, registers, shared, expected):
    assert kernelcode.ctas(arch, threads, registers, shared) == expected
