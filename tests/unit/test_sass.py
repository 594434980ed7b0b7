"""Loops and instruction classes of machine code: what lies between a branch back and its target, counted."""

import pytest

from treemla.gate import sass

LISTING = """
		Function : k
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDSM.16.M88.4 R4, [R2] ;
        /*0020*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR4][R10.64] ;
        /*0040*/                   LDS.128 R12, [R2+0x10] ;
        /*0050*/              @!P0 BRA 0x10 ;
        /*0060*/                   LDGSTS.E [R3], desc[UR4][R10.64] ;
        /*0070*/               @P1 BRA 0x0 ;
        /*0080*/                   BRA 0xa0 ;
        /*0090*/                   EXIT ;
        /*00a0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3 ;
        /*00b0*/              @!P0 BRA 0xa0 ;
        /*00c0*/                   BRA 0x20 ;
"""


@pytest.fixture
def instructions() -> list[sass.Instruction]:
    return sass.parse_sass(LISTING)["k"]


def test_branches_know_their_targets(instructions: list[sass.Instruction]) -> None:
    assert [i.target for i in instructions if i.name == "BRA"] == [0x10, 0x0, 0xA0, 0xA0, 0x20]


def test_innermost_loop_with_tensor_instructions_is_found_and_seldom_run_code_is_none(
    instructions: list[sass.Instruction],
) -> None:
    (loop,) = sass.tensor_loops(instructions)
    assert [i.address for i in loop] == [0x10, 0x20, 0x30, 0x40, 0x50]


def test_loop_is_counted_by_class_and_width(instructions: list[sass.Instruction]) -> None:
    (loop,) = sass.tensor_loops(instructions)
    counted = {name: count for name, count in sass.mix(loop).items() if count}
    assert counted == {"all": 5, "tensor": 1, "ldmatrix": 1, "cp.async 16 B": 1, "shared load": 1}
    assert sass.mix(instructions)["cp.async less"] == 1


def test_kernel_without_tensor_instructions_has_no_tensor_loop() -> None:
    listing = LISTING.replace("HMMA.16816.F32.BF16 R8, R4, R6, R8", "FFMA R8, R4, R6, R8")
    assert sass.tensor_loops(sass.parse_sass(listing)["k"]) == []


def test_an_instruction_with_half_a_descriptor_is_illegal() -> None:
    made, sound = "LDGSTS.E.BYPASS.128 [R20+UR0+0x2a000], desc[UR1][R24.64+0x200]", "LDG.E R2, desc[UR28][R2.64]"
    listing = f"Function : k\n        /*0000*/  {made} ;\n        /*0010*/  @!P0 {sound} ;\n        /*0020*/  EXIT ;\n"
    assert [i.is_illegal for i in sass.parse_sass(listing)["k"]] == [True, False, False]
