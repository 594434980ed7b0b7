"""The compiled kernels, read with the real tools; and that each fault is found when it is planted."""

import pytest

from treemla import cubins, nvcc, tiles
from treemla.gate import static

CLEAN = 'extern "C" __global__ void planted(float* x) { x[threadIdx.x] *= 2.f; }'
SPILL = """extern "C" __global__ void __launch_bounds__(1024, 2) planted(float* x) {
  float held[64];
  #pragma unroll
  for (int i = 0; i < 64; i++) held[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 64; i++) x[i * 1024 + threadIdx.x] = held[(i + 1) % 64] * held[i] + held[(i + 7) % 64];
}"""
STACK = """extern "C" __global__ void planted(float* x, const int* where) {
  float held[64];
  for (int i = 0; i < 64; i++) held[i] = 0.f;
  for (int i = 0; i < 99; i++) held[where[i] & 63] += x[i];
  x[threadIdx.x] = held[where[99] & 63];
}"""
SHARED = """extern "C" __global__ void planted(float* x) {
  __shared__ float held[12000];
  held[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = held[255 - threadIdx.x];
}"""


@pytest.mark.parametrize("arch", tiles.TARGETS)
def test_no_kernel_spills_uses_stack_or_exceeds_shared_memory_and_none_is_missing(arch):
    report = static.report(arch)
    assert not report.problems, "\n".join(report.problems)
    assert {kernel.name for kernel in report.kernels} == set(tiles.TARGETS[arch].kernel_names)


@pytest.mark.parametrize("arch", tiles.TARGETS)
def test_building_again_elsewhere_gives_the_same_cubin(arch, tmp_path):
    copy = tmp_path / "another place"
    copy.mkdir()
    for source in cubins.CSRC.iterdir():
        (copy / source.name).write_bytes(source.read_bytes())
    again = tmp_path / "again.cubin"
    nvcc.compile_cubin(nvcc.find(), copy / nvcc.UNIT, arch, again)
    same = again.read_bytes() == cubins.cubin_path(arch).read_bytes()
    assert same, "a name with internal linkage (static, anonymous namespace, const) carries the path: declare it extern"


def planted(tmp_path, source, target=tiles.TARGETS["sm_120a"], expected=("planted",)):
    unit, cubin = tmp_path / "planted.cu", tmp_path / "planted.cubin"
    unit.write_text(source)
    nvcc.compile_cubin(nvcc.find(), unit, target.arch, cubin)
    return static.report_on(cubin, target, expected).problems


def test_a_clean_kernel_passes(tmp_path):
    assert planted(tmp_path, CLEAN) == ()


@pytest.mark.parametrize(
    ("source", "said"), [(SPILL, "planted: spills"), (STACK, "bytes of stack"), (STACK, "local memory instructions")]
)
def test_a_planted_fault_is_found(tmp_path, source, said):
    assert any(said in problem for problem in planted(tmp_path, source))


def test_shared_memory_over_the_targets_limit_is_found(tmp_path):
    from dataclasses import replace

    small = replace(tiles.TARGETS["sm_120a"], shared_memory_limit_bytes=47_999)
    assert planted(tmp_path, SHARED, small) == ("planted: 48000 bytes of shared memory, 47999 allowed",)


def test_a_kernel_that_is_not_there_is_found(tmp_path):
    assert "absent: missing from the cubin" in planted(tmp_path, CLEAN, expected=("planted", "absent"))


def test_a_compiler_warning_is_found(tmp_path):
    warned = 'extern "C" __global__ void planted(float* x) { int unused; x[0] = 1.f; }'
    assert any("warning" in problem for problem in planted(tmp_path, warned))
