"""The least time a verify call can take on a GPU: the bytes it must move and the flops it must do."""

from collections.abc import Sequence
from dataclasses import dataclass

from treemla.gate.cases import CASES, VerifyCase


@dataclass(frozen=True)
class Ceiling:
    """Measured read bandwidth and bf16 tensor throughput of a GPU, as the best programs reach them."""

    bytes_per_s: float
    flops_per_s: float


CEILINGS = {  # by a part of the name that CUDA reports
    "H200": Ceiling(4.5e12, 790e12),
    "RTX PRO 6000": Ceiling(1.79e12, 503.8e12),
}


def ceiling(gpu: str) -> Ceiling | None:
    """The ceiling of the GPU with this name, None where it was never measured."""
    return next((made for name, made in CEILINGS.items() if name in gpu), None)


def traffic_bytes(case: VerifyCase) -> int:
    """Each KV row (1,152 bytes; fp8 576) and its slot (4) once; q in, out and lse out, the words."""
    rows = case.batch * case.tree_tokens * case.heads
    return sum(case.contexts) * (case.row_bytes + 4) + rows * (1152 + 1024 + 4) + 8 * case.batch * case.tree_tokens


def flops(case: VerifyCase) -> int:
    """Multiply-adds of QK (576) and PV (512), two flops each, for every row and committed token."""
    return 2 * (576 + 512) * case.tree_tokens * case.heads * sum(case.contexts)


def floor_us(case: VerifyCase, made: Ceiling) -> float:
    """The longer of the two: bytes at full bandwidth, flops at full throughput."""
    return 1e6 * max(traffic_bytes(case) / made.bytes_per_s, flops(case) / made.flops_per_s)


def floors_us(gpu: str, cases: Sequence[VerifyCase] = CASES) -> dict[str, float]:
    """{case id: floor} of the cases on this GPU; empty where its ceiling is unknown."""
    made = ceiling(gpu)
    return {case.id: floor_us(case, made) for case in cases} if made else {}
