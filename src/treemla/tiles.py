"""The one dispatch table: which verify kernel runs on which GPU, how query rows are cut into row blocks, what a CTA holds.

Both kernels make the query rows the columns of the matrix products (S^T = K Q^T, O^T = V^T P^T), so a block pads to 8
rows. Registers bound its height: O^T keeps 512 floats a row. `mma` also keeps Q there: 40 rows. `wgmma` keeps Q in
shared memory: 72 rows, so that T = 9 trees of 8 heads read every KV row once and pad nothing.
csrc/ repeats these numbers; tests/static/test_device_constants.py has the compiler compare the two.
"""

from collections.abc import Callable
from dataclasses import dataclass

from treemla.problem import VerifyShape

ROW_TILE = 8  # query rows a block's height is a multiple of
TILE_TOKENS = 32  # the least of any kernel, and what fixed splits are multiples of
MAX_BATCH = 4096  # with MAX_PARTS: what the device planner keeps in shared memory, 80 KB
MAX_PARTS = 2048


@dataclass(frozen=True)
class KernelPath:
    """A verify kernel, for bf16 and for fp8 KV rows. `shared_memory_bytes(block_rows, fp8_kv)`: dynamic shared memory
    of a CTA."""

    name: str
    max_block_rows: int
    threads: int
    shared_memory_bytes: Callable[[int, bool], int]
    tile_tokens: int  # that its loop takes at a time
    copies_runs: bool  # copies rows in consecutive slots together, by a tensor map
    third_block_rows: int | None  # the least height that also has a kernel by shares of a third; None: no shares at all

    def kernel_name(self, block_rows: int, fp8_kv: bool = False, by_shares: bool = False) -> str:
        """by_shares: the kernel that takes the block or, where a step's schedule says so, its shares."""
        most = self.most_shares(block_rows) if by_shares else 1
        shares = "".join(f"_{self.share_rows(block_rows, shares)}" for shares in range(2, most + 1))
        return f"treemla_verify_{self.name}{'_fp8' if fp8_kv else ''}_r{block_rows}{shares}"

    @property
    def registers(self) -> int:
        """Registers a thread that one CTA may be launched with: all of a multiprocessor's 65,536."""
        return 65_536 // self.threads // 8 * 8

    @property
    def block_heights(self) -> range:
        return range(ROW_TILE, self.max_block_rows + 1, ROW_TILE)

    def row_blocks(self, shape: VerifyShape) -> tuple[int, int]:
        """(number of row blocks, rows a block): the fewest blocks that cover `shape.rows`, all of the least height."""
        blocks = -(-shape.rows // self.max_block_rows)
        return blocks, self.block_height(shape, blocks)

    def block_height(self, shape: VerifyShape, blocks: int) -> int:
        """Rows a block, where `blocks` of one height cover `shape.rows`."""
        return -(-shape.rows // (blocks * ROW_TILE)) * ROW_TILE

    def most_shares(self, block_rows: int) -> int:
        """CTAs that may take a full block together, where a step's schedule says so."""
        if self.third_block_rows is None or block_rows == ROW_TILE:
            return 1
        return 2 if block_rows < self.third_block_rows else 3

    def usable_shares(self, shape: VerifyShape, block_rows: int, parts: int) -> int:
        """CTAs that may take each block of a shape together: of the last, too, each has a row, and some part is left."""
        last_rows = (shape.rows - 1) % block_rows + 1
        shares = range(1, self.most_shares(block_rows) + 1)
        return max(n for n in shares if (n - 1) * self.share_rows(block_rows, n) < last_rows and n <= parts)

    def share_rows(self, block_rows: int, shares: int) -> int:
        """Rows of each share of a block but the last, which has what is left."""
        return -(-block_rows // (shares * ROW_TILE)) * ROW_TILE


def _mma_shared_bytes(rows: int, _fp8_kv: bool) -> int:
    """Two stages of 32 bf16 KV rows, each padded to 1,168 bytes; partial scores, probabilities, factors; barriers."""
    return 2 * 32 * (576 * 2 + 16) + rows * (4 * (32 + 4) * 4 + 2 * (32 + 8) + 4) + 8 * 4


def _wgmma_shared_bytes(_rows: int, _fp8_kv: bool) -> int:
    """All there is: Q, probabilities and barriers, and as many 8 KB boxes of KV as fit beside them."""
    return SM_90_SHARED_BYTES


SM_90_SHARED_BYTES = 232_448
SM_120_SHARED_BYTES = 101_376

MMA = KernelPath("mma", 40, 384, _mma_shared_bytes, 32, copies_runs=False, third_block_rows=None)
WGMMA = KernelPath("wgmma", 72, 512, _wgmma_shared_bytes, 64, copies_runs=True, third_block_rows=48)
PATHS = {path.name: path for path in (MMA, WGMMA)}


@dataclass(frozen=True)
class Target:
    """A GPU architecture that a cubin is built for. paths: the kernels in it, the default first.

    sm_90a also holds the mma kernels, with the tiles of sm_120, so that a Hopper GPU can test and time what runs there.
    """

    arch: str  # nvcc's name
    compute_capability: tuple[int, int]
    shared_memory_limit_bytes: int  # a block
    paths: tuple[KernelPath, ...]

    @property
    def verify_kernels(self) -> dict[str, tuple[KernelPath, int]]:
        """{name: (path, dynamic shared memory of a CTA)}."""
        return {
            path.kernel_name(rows, fp8_kv, by_shares): (path, path.shared_memory_bytes(rows, fp8_kv))
            for path in self.paths
            for fp8_kv in (False, True)
            for rows in path.block_heights
            for by_shares in (False, True)[: 2 if path.most_shares(rows) > 1 else 1]
        }

    @property
    def kernel_names(self) -> tuple[str, ...]:
        return ("treemla_plan", "treemla_pack_mask", "treemla_combine", "treemla_move_rows", *self.verify_kernels)


TARGETS = {
    "sm_90a": Target("sm_90a", (9, 0), SM_90_SHARED_BYTES, (WGMMA, MMA)),
    "sm_120a": Target("sm_120a", (12, 0), SM_120_SHARED_BYTES, (MMA,)),
}
