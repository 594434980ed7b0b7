"""The bound model: each unit by arithmetic that can be done by hand, and how near it must be to judge."""

from dataclasses import replace

import pytest
from fake_sides import WHERE

from treemla import tiles
from treemla.gate import bound, roofline, schema
from treemla.gate.cases import GATED_KERNELS, VerifyCase
from treemla.gate.kernelcode import KernelCode

H200, PRO = bound.GPUS
LOOP = {"HMMA.16816.F32.BF16": 10, "LDS.128": 4, "LDSM.16.M88.4": 2, "FFMA": 24}
CASE = VerifyCase((65536,), 9, 8)


def kernel(name, arch="sm_120a", loops=(LOOP,)):
    return KernelCode(arch, name, "13.0.88", "a" * 64, 168, 2, 0, 0, 0, 1, {"FFMA": 1}, loops)


def code(**more):
    """Every verify kernel of both architectures, all with the same loops."""
    made = {}
    for arch, target in tiles.TARGETS.items():
        loops = tuple({**LOOP, **more} for _ in bound.TILES[target.paths[0].name].warps)
        made[arch] = {name: kernel(name, arch, loops) for name in target.kernel_names}
    return made


def test_units_of_a_tile_are_counted_by_hand():
    made = bound.clocks_a_tile(kernel("k").loops, bound.Tile(32, (8,)), PRO)
    assert made["tensor cores"] == 8 * 10 * 2 * 16 * 8 * 16 / 1024
    assert made["shared memory"] == (8 * (4 * 512 + 2 * 512) + 32 * 1152) / 128
    assert made["issue"] == 8 * 40 / 4


@pytest.mark.parametrize(
    ("opcode", "flops", "read"),
    [
        ("HMMA.16816.F32.BF16", 4096, 0),
        ("QMMA.16832.F32.E4M3.E4M3", 8192, 0),
        ("HGMMA.64x72x16.F32.BF16", 2 * 64 * 72 * 16 / 4, 2 * 16 * (64 + 72) / 4),
        ("LDS.64", 0, 256),
        ("STS", 0, 128),
        ("STSM.16.MT88.2", 0, 256),
        ("LDG.E.128", 0, 0),
        ("FFMA", 0, 0),
    ],
)
def test_instructions_have_their_flops_and_shared_bytes(opcode, flops, read):
    assert (bound.tensor_flops(opcode), bound.shared_bytes(opcode)) == (flops, read)


def test_time_is_the_slowest_unit_and_a_fixed_part():
    made = bound.predict(CASE, PRO, code()["sm_120a"])
    assert made.us == bound.FIXED_US + max(made.by.values())
    assert made.by["DRAM"] == pytest.approx(1e6 * roofline.traffic_bytes(CASE) / 1.79e12)
    assert made.limiter == "DRAM"


def test_more_tensor_work_moves_the_limit_from_memory_to_the_tensor_cores():
    made = bound.predict(CASE, PRO, code(**{"HMMA.16816.F32.BF16": 400})["sm_120a"])
    assert made.limiter == "tensor cores" and made.us > bound.predict(CASE, PRO, code()["sm_120a"]).us


def test_a_kernel_of_another_shape_is_not_predicted():
    held = {name: replace(k, loops=()) for name, k in code()["sm_120a"].items()}
    assert bound.predict(CASE, PRO, held) is None
    assert bound.predict(CASE, PRO, {}) is None


def times(factor, metric="verify"):
    """What the model predicts for the H200, times a factor, as measurements."""
    return [
        schema.Measurement.of(case.id, metric, "us", [factor * bound.predict(case, H200, code()["sm_90a"]).us], WHERE)
        for case in GATED_KERNELS
    ]


def test_the_error_is_that_of_the_median_case():
    assert bound.median_error(bound.errors(times(1.25), code())) == pytest.approx(0.2)
    assert bound.median_error({}) is None


def test_only_times_of_the_kernel_that_the_gpu_takes_unasked_count():
    assert bound.errors(times(1.0, "verify_wgmma"), code()) == bound.errors(times(1.0), code())
    for other in ("verify_mma", "plan", "triton"):
        assert bound.errors(times(1.0, other), code()) == {}


def test_only_a_model_that_is_near_is_red():
    slow = code(FFMA=4000)
    near, far = times(1.1), times(1.5)
    found = bound.slowed(code(), slow, near)
    assert found and all(finding.exit.name == "FAILED" and "issue" in finding.text for finding in found)
    assert bound.slowed(code(), slow, far) == [] == bound.slowed(code(), slow, []) == bound.slowed({}, slow, near)
    assert bound.slowed(code(), code(), near) == []
    assert "too far to judge" in bound.shown(code(), far) and "is red" in bound.shown(code(), near)
    assert "No measurement" in bound.shown(code(), [])


def test_of_a_kernel_that_also_takes_shares_the_loops_of_whole_blocks_are_counted():
    loops = (
        {"HGMMA.64x72x16.F32.BF16": 16},
        {"HGMMA.64x72x16.F32.BF16": 4},
        {"HGMMA.64x40x16.F32.BF16": 16},
        {"FADD": 1},
    )
    held = replace(kernel("k"), loops=loops)
    assert bound.whole_block(held, 72) == [loops[0], loops[1], loops[3]]
    assert bound.whole_block(held, 40) == [loops[2], loops[3]]
