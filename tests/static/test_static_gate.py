"""The static gate on small kernels that are compiled here: planted changes are found in what the tools say."""

import pytest

from treemla import nvcc, tiles
from treemla.gate import kernelcode, static_gate
from treemla.gate.exits import Exit

TARGET = tiles.TARGETS["sm_120a"]
BASE = """extern "C" __global__ void k(const float4* x, float4* y) {
  float4 held = x[threadIdx.x];
  held.x += held.y * held.z;
  y[threadIdx.x] = held;
}"""
SCALAR = """extern "C" __global__ void k(const float* x, float* y) {
  #pragma unroll
  for (int i = 0; i < 4; i++) y[4 * threadIdx.x + i] = x[5 * threadIdx.x + i] * x[5 * threadIdx.x + 3];
}"""
ARRAY = """extern "C" __global__ void k(const float4* x, float4* y, const int* where) {
  float held[64];
  for (int i = 0; i < 64; i++) held[i] = 0.f;
  for (int i = 0; i < 99; i++) held[where[i] & 63] += x[i].x;
  float4 out = x[threadIdx.x];
  out.x = held[where[99] & 63];
  y[threadIdx.x] = out;
}"""
SHARED = BASE.replace(
    "float4 held =",
    "__shared__ float4 kept[64]; kept[threadIdx.x] = y[0]; __syncthreads(); y[1] = kept[0]; float4 held =",
)


@pytest.fixture
def compiled(tmp_path):
    def compiled(source, name="k"):
        unit, cubin = tmp_path / f"{name}.cu", tmp_path / f"{name}.cubin"
        unit.write_text(source)
        nvcc.compile_cubin(nvcc.find(), unit, TARGET.arch, cubin)
        return kernelcode.read(cubin, TARGET, nvcc.version(nvcc.find()))["k"]

    return compiled


def test_a_comment_and_another_file_make_no_other_kernel(compiled):
    assert compiled(BASE).sha256 == compiled("// a comment\n" + BASE, "elsewhere").sha256


def test_other_operands_make_another_kernel(compiled):
    old, new = compiled(BASE), compiled(BASE.replace("held.y * held.z", "held.y * held.w"))
    assert old.opcodes == new.opcodes and static_gate.judge(old, new)[:2] == ("changed", Exit.PASS)


@pytest.mark.parametrize(
    ("source", "said"),
    [(SCALAR, "-> 4 of 32"), (ARRAY, "local load instructions 0 ->"), (SHARED, "shared bytes 0 -> 1024")],
)
def test_a_planted_change_for_the_worse_is_red(compiled, source, said):
    verdict, code, text = static_gate.judge(compiled(BASE), compiled(source))
    assert (verdict, code) == ("worse", Exit.FAILED) and said in text


def test_the_kernels_of_this_checkout_are_the_same_as_themselves():
    for target in tiles.TARGETS.values():
        code = static_gate.compiled(target)
        found = static_gate.judge_all(target, code, code)
        assert {finding.verdict for finding in found} == {"same"}
        assert {f"{target.arch} {name}" for name in target.kernel_names} == {finding.name for finding in found}
        assert all(held.ctas for held in code.values())


def test_blessing_stores_every_kernel_and_the_gate_then_passes(tmp_path):
    made = static_gate.bless("first", tmp_path)
    assert made.exit is Exit.PASS and (tmp_path / static_gate.LEDGER).read_text().count("\n") == 1
    for target in tiles.TARGETS.values():
        stored = kernelcode.load_all(target.arch, tmp_path)
        found = static_gate.judge_all(target, static_gate.compiled(target), stored)
        assert {finding.verdict for finding in found} == {"same"}


@pytest.mark.parametrize("target", tiles.TARGETS.values(), ids=tiles.TARGETS)
def test_no_kernel_is_missing_among_the_stored_or_worse_than_they_are(target):
    found = static_gate.judge_all(target, static_gate.compiled(target), kernelcode.load_all(target.arch))
    assert {finding.name: finding.text for finding in found if finding.exit is not Exit.PASS} == {}
