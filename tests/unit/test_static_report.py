"""The static layer's parsers: each fault is found in what the tools print, and output they do not know is an error."""

import re
from pathlib import Path

import pytest

from treemla import tiles
from treemla.gate import sass, static

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'good' for 'sm_90a'
ptxas info    : Function properties for good
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers
ptxas info    : Compiling entry function 'bad' for 'sm_90a'
ptxas info    : Function properties for bad
    8 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 8 bytes cumulative stack size
"""
USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function bad:
  REG:255 STACK:8 SHARED:1280 LOCAL:0 CONSTANT[0]:536 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function good:
  REG:40 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:536 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = """
	code for sm_90a
		Function : good
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                  /* 0x00000a00ff017b82 */
                                                                           /* 0x000fe20000000800 */
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR8][R4.64+0xc] ;    /* 0x00000c0804047981 */
		Function : bad
        /*0000*/                   STL.64 [R1], R2 ;                       /* 0x00000a00ff017b82 */
        /*0010*/              @UP1 LDL R2, [R1] ;                          /* 0x00000a00ff017b82 */
        /*0020*/                   EXIT ;                                  /* 0x00000a00ff017b82 */
"""
TARGET = tiles.TARGETS["sm_90a"]


def kernel(name="k", **changed):
    clean = {"registers": 40, "spill_bytes": 0, "stack_bytes": 0, "static_shared_bytes": 0, "loops": ({"tensor": 1},)}
    return static.KernelResources(name, **{**clean, "local_accesses": 0, "instructions": 9, **changed})


def problems(*kernels, expected=None):
    return static._problems(kernels, TARGET, expected or tuple(k.name for k in kernels))


def test_spills_are_read_per_kernel_stores_and_loads_together():
    assert static.parse_ptxas_log(LOG) == ({"good": 0, "bad": 32}, [])


@pytest.mark.parametrize(
    "line",
    [
        "ptxas warning : Registers are spilled to local memory in function 'bad', 12 bytes spill stores",
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized",
        "treemla.cu(3): warning #177-D: variable was declared but never referenced",
    ],
)
def test_compiler_warnings_are_kept(line):
    assert static.parse_ptxas_log(LOG + line + "\n")[1] == [line]


def test_resource_usage_is_read_per_kernel():
    usage = static.parse_resource_usage(USAGE)
    assert {name: (held["REG"], held["STACK"], held["SHARED"]) for name, held in usage.items()} == {
        "bad": (255, 8, 1280),
        "good": (40, 0, 1024),
    }


def test_instructions_are_read_without_predicates_and_modifiers():
    opcodes = {name: [i.opcode for i in found] for name, found in sass.parse_sass(SASS).items()}
    assert opcodes == {"good": ["LDC", "LDG.E.128"], "bad": ["STL.64", "LDL", "EXIT"]}


@pytest.mark.parametrize("said", ["", "Resource usage:\n Common:\n  GLOBAL:0\n"])
def test_resource_usage_without_kernels_is_an_error(said):
    with pytest.raises(sass.UnreadableOutput, match="expected kernels"):
        static.parse_resource_usage(said)


@pytest.mark.parametrize("said", ["", SASS.replace("Function :", "Fun :"), SASS[: SASS.index("/*0000*/")]])
def test_instructions_without_kernels_or_kernels_without_instructions_are_an_error(said):
    with pytest.raises(sass.UnreadableOutput):
        sass.parse_sass(said)


def test_a_clean_kernel_has_no_problem():
    assert problems(kernel()) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"spill_bytes": 8}, "k: spills 8 bytes"),
        ({"stack_bytes": 64}, "k: 64 bytes of stack"),
        ({"local_accesses": 2}, "k: 2 local memory instructions"),
        ({"illegal_instructions": 3}, "k: 3 instructions that no GPU executes"),
        ({"static_shared_bytes": 232_449}, "k: 232449 bytes of shared memory, 232448 allowed"),
    ],
)
def test_each_fault_of_a_kernel_is_a_problem(changed, said):
    assert problems(kernel(**changed)) == [said]


def test_dynamic_shared_memory_counts_beside_static():
    name = tiles.WGMMA.kernel_name(40)
    room = TARGET.shared_memory_limit_bytes - tiles.WGMMA.shared_memory_bytes(40, False)
    registers = tiles.WGMMA.registers
    assert problems(kernel(name, registers=registers, static_shared_bytes=room)) == []
    assert len(problems(kernel(name, registers=registers, static_shared_bytes=room + 1))) == 1


def test_a_missing_and_an_unexpected_kernel_are_problems():
    assert problems(kernel("k"), expected=("other",)) == [
        "other: missing from the cubin",
        "k: not one of the target's kernel_names",
    ]


def test_tools_that_disagree_on_the_kernels_are_an_error(monkeypatch, tmp_path):
    cubin = tmp_path / "sm_90a.cubin"
    cubin.with_suffix(".ptxas.txt").write_text(LOG.replace("'bad'", "'worse'"))
    monkeypatch.setattr(static, "cuobjdump_says", lambda option, _: USAGE if option == "-res-usage" else SASS)
    with pytest.raises(sass.UnreadableOutput, match="name different kernels"):
        static.report_on(cubin, TARGET, ("good", "bad"))


def test_a_report_joins_the_log_the_usage_and_the_instructions(monkeypatch, tmp_path):
    cubin = tmp_path / "sm_90a.cubin"
    cubin.with_suffix(".ptxas.txt").write_text(LOG)
    monkeypatch.setattr(static, "cuobjdump_says", lambda option, _: USAGE if option == "-res-usage" else SASS)
    report = static.report_on(cubin, TARGET, ("good", "bad"))
    assert report.kernels == (
        static.KernelResources("bad", 255, 32, 8, 256, 2, 3),
        static.KernelResources("good", 40, 0, 0, 0, 0, 2),
    )
    assert report.problems == ("bad: spills 32 bytes", "bad: 8 bytes of stack", "bad: 2 local memory instructions")


def test_every_kernel_that_is_launched_is_expected_in_the_cubins():
    source = Path(__file__).parents[2] / "csrc" / "treemla.cu"
    text = source.read_text()
    for name in TARGET.kernel_names:
        rows = re.search(r"_r([\d_]+)$", name)
        assert name.removesuffix(rows[1] if rows else "") in text, name
        assert not rows or re.search(rf"^TREEMLA_VERIFY_\w+\((.*, )?{rows[1]}\)$", text, re.MULTILINE), name


def test_narrow_copies_are_a_problem():
    assert problems(kernel(narrow_copies=2)) == ["k: 2 copies of fewer than 16 bytes"]


def test_verify_kernel_without_tensor_cores_is_a_problem():
    name = tiles.MMA.kernel_name(8)
    right = {"registers": tiles.MMA.registers}
    assert problems(kernel(name, **right, loops=())) == [f"{name}: no loop uses the tensor cores"]
    assert problems(kernel(name, **right)) == []


def test_registers_other_than_the_claims_assume_are_a_problem():
    name = tiles.MMA.kernel_name(40)
    assert problems(kernel(name, registers=80)) == [f"{name}: 80 registers a thread, expected 168"]
