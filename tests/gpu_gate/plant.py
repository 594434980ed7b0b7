"""A slowdown of a known share, planted into a copy of csrc/: every CTA of the kernel waits before its work.

The wait stands where a CTA has its dependencies and nothing on its way, so it overlaps with nothing and the layer takes
longer by it. How long it is follows from measured times of batch-1 cases: us = a + b * context, fitted to them.
"""

from collections.abc import Mapping
from pathlib import Path

FILE = "verify_wgmma.cuh"
KERNEL = "void verify_wgmma("
BEFORE = "  allow_dependents();\n"
ROWS = 72  # T = 9, H = 8, bf16: what slows down; everything else stays as it is
WAIT = """  if (kKv == KvType::bf16 && p.tree_tokens * p.heads == {rows}) {{  // planted
    const long long begin = clock64();  // the wait for the length is part of it
    const long long clocks = {fixed} + {per_64k}ll * p.committed[0] / 65536;
    while (clock64() - begin < clocks) {{}}
  }}
"""


def clocks(us_by_context: Mapping[int, float], share: float, sm_mhz: float) -> tuple[int, int]:
    """(fixed, a 65,536 tokens of context) that are `share` of the fitted time of a layer at a clock of `sm_mhz`.

    ValueError unless times of two contexts or more rise with the context.
    """
    import numpy as np

    if len(us_by_context) < 2:
        raise ValueError(f"us_by_context: expected two contexts or more, got {dict(us_by_context)}")
    contexts, us = np.array(list(us_by_context)), np.array(list(us_by_context.values()))
    slope, fixed = np.polyfit(contexts, us, 1, w=1 / us)
    if slope <= 0 or fixed <= 0:
        raise ValueError(f"us_by_context: expected times that rise with the context, got {dict(us_by_context)}")
    return round(share * sm_mhz * fixed), round(share * sm_mhz * slope * 65_536)


def plant(csrc: Path, fixed: int, per_64k: int) -> None:
    """Add the wait to the kernel. RuntimeError where its place is not found once."""
    path = csrc / FILE
    text = path.read_text()
    head, kernel, body = text.partition(KERNEL)
    if not kernel or body.count(BEFORE) != 1:
        raise RuntimeError(f"{path}: expected one {BEFORE.strip()!r} after {KERNEL!r}: the kernel changed, plant anew")
    wait = WAIT.format(rows=ROWS, fixed=fixed, per_64k=per_64k)
    path.write_text(head + kernel + body.replace(BEFORE, BEFORE + wait))
