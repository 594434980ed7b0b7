"""What Python and csrc/ both write down: the compiler itself compares them."""

import ctypes
import subprocess

import pytest
from families import RISE

from treemla import combine, cubins, launch, launch_moves, nvcc, schedule, tiles

STRUCTS = {
    "Slots": launch.SlotsArg,
    "PlanParams": launch.PlanArgs,
    "PackMaskParams": launch.PackMaskArgs,
    "VerifyParams": launch.VerifyArgs,
    "MoveRowsParams": launch_moves.MoveRowsArgs,
}
CONSTANTS = {
    "kRowTile": tiles.ROW_TILE,
    "kTileTokens": tiles.TILE_TOKENS,  # of the mma kernel's loop
    "kThreads": tiles.MMA.threads,
    "kPlanThreads": launch.PLAN_THREADS,
    "kPackThreads": launch.PACK_THREADS,
    "kMoveThreads": launch_moves.MOVE_THREADS,
    "kMoveChunks": launch_moves.MOVE_CHUNKS,
    "kMoveBuffers": launch_moves.MOVE_BUFFERS,
    "kCombineWarps": combine.CTA_WARPS,
    "kRowsAtOnce": combine.LANE_PIECES,
    "kMaxPieceShift": combine.MOST_PIECE_SHIFT,
    "kMaxGroupShift": combine.MOST_GROUP_SHIFT,
    "kMinPartTokens": schedule.MIN_PART_TOKENS,
    "kDirect": schedule.DIRECT,
    "kOverlong": schedule.OVERLONG,
}
LAYOUTS = {
    "mma": {"bf16": "MmaLayout<{rows}>", "e4m3": "MmaLayout<{rows}>"},
    "wgmma": {kv: f"WgLayout<{{rows}}, treemla::KvType::{kv}>" for kv in ("bf16", "e4m3")},
}


@pytest.mark.parametrize("arch", tiles.TARGETS)
def test_python_and_device_code_agree(arch, tmp_path):
    target = tiles.TARGETS[arch]
    claims = [f"treemla::{name} == {value}" for name, value in CONSTANTS.items()]
    for name, struct in STRUCTS.items():
        claims.append(f"sizeof(treemla::{name}) == {ctypes.sizeof(struct)}")
        claims += [
            f"offsetof(treemla::{name}, {field}) == {getattr(struct, field).offset}" for field, *_ in struct._fields_
        ]
    claims += ["sizeof(treemla::Piece) == 16", f"sizeof(treemla::PartWork) == {4 * schedule.PART_WORK_INTS}"]
    in_record = ("first", "begin", "end", "shares", "share")  # Schedule.part_work
    claims += [
        f"offsetof(treemla::PartWork, {name}) == {4 * at}" for name, at in zip(in_record, (0, 4, 5, 6, 7), strict=True)
    ]
    claims.append(f"32 * treemla::kLatentDim / treemla::kRowChunks == {combine.WARP_DIMS}")
    for path in target.paths:
        claims += [
            f"treemla::{layout.format(rows=rows)}::kBytes == {path.shared_memory_bytes(rows, kv == 'e4m3')}"
            for kv, layout in LAYOUTS[path.name].items()
            for rows in path.block_heights
        ]
    if tiles.WGMMA in target.paths:
        claims += [
            f"treemla::kWgThreads == {tiles.WGMMA.threads}",
            f"treemla::kWgTileTokens == {tiles.WGMMA.tile_tokens}",
            f"treemla::kRunRows == {launch.RUN_ROWS}",
            f"treemla::kHeadroom < {RISE}f",
        ]
    claims += [
        f"treemla::plan_shared_bytes({batch}, {parts}) == {launch.plan_shared_bytes(batch, parts)}"
        for batch, parts in ((1, 1), (8, 132), (tiles.MAX_BATCH, tiles.MAX_PARTS))
    ]
    # shared-memory sizes are those of device code: the claims stand inside a kernel
    body = "\n".join(f'static_assert({claim}, "{claim}");' for claim in claims)
    unit = tmp_path / "claims.cu"
    unit.write_text(f'#include <cstddef>\n#include "treemla.cu"\n__global__ void claims() {{\n{body}\n}}\n')
    command = [
        nvcc.find(),
        f"-arch={arch}",
        "-cubin",
        "-std=c++17",
        "-O0",
        f"-I{cubins.CSRC}",
        unit,
        "-o",
        tmp_path / "x",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
