"""Which cases the parity suites run: one list a device, each the sum of sweeps that turn one knob of a base case."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from cases import FAMILIES, FP8_DTYPES, LOW, MIXES, RISING, SLOTS, TREES, Case

from treemla import cubins
from treemla.tiles import MAX_PARTS, WGMMA

TREE_TOKENS = (1, 2, 8, 9, 16, 17, 32, 33, 63, 64)
HEADS = (1, 2, 3, 5, 8, 16, 20, 64, 128)
PAGES = (1, 16, 64)


def sweep(base: Case, **knobs: tuple[Any, ...]) -> Iterator[Case]:
    """All combinations of the knobs' values, the rest as in `base`."""
    for values in product(*knobs.values()):
        yield replace(base, **dict(zip(knobs, values, strict=True)))


def _cpu_cases() -> Iterator[Case]:
    base = Case(MIXES[4], tree_tokens=9, heads=2, dtype="fp32")
    yield from sweep(base, family=FAMILIES, tree=("ddtree", "none"))
    yield from sweep(base, tree=TREES, family=("mean", "diffuse"))
    yield from sweep(base, tree_tokens=TREE_TOKENS, parts=(0, 3))
    yield from sweep(base, heads=HEADS[:6])
    yield from sweep(base, page_size=PAGES, slots=SLOTS)
    yield from sweep(base, parts=(1, 2, 3, 7, 64), family=("diffuse", "needle.cut", "needle.precut"))
    yield from sweep(base, split=(32, 64))
    yield from sweep(base, k=(1.0, 0.06, 3.7), v=(1.0, 0.06, 3.7))
    yield from sweep(base, dtype=("fp16", "bf16"), family=FAMILIES)
    yield from sweep(base, dtype=("bf16",), family=(LOW, RISING))
    yield from sweep(base, lengths=((1000, 300),), dtype=("bf16",), family=(RISING,), parts=(0, 1, 3))
    yield from sweep(base, lengths=(MIXES[1], MIXES[2], (260, 388), (0,), (0, 0, 0), (63,)), heads=(2,), parts=(0, 7))
    yield from sweep(replace(base, lengths=(20,) * 9), family=("needle.tree",), tree=TREES)
    yield from sweep(replace(base, lengths=(40, 3, 0, 0)), padding=(1, 2), tree=("chain", "random"))
    yield from sweep(replace(base, tree_tokens=1, tree="none"), tail=(0, 1))
    yield replace(base, pair=1)
    fp8 = replace(base, kv="fp8")
    yield from sweep(fp8, dtype=FP8_DTYPES, family=FAMILIES)
    yield from sweep(fp8, k=(1.0, 0.06, 3.7), v=(1.0, 0.06, 3.7), tree=("random", "none"))
    yield from sweep(fp8, tree=TREES, family=("mean", "diffuse"))
    yield from sweep(fp8, page_size=PAGES, slots=SLOTS)
    yield from sweep(base, path=("mma", "wgmma"), heads=(8,), tree_tokens=(9, 33))


def _gpu_cases() -> Iterator[Case]:
    base = Case(MIXES[1], tree_tokens=9, heads=8)
    for lengths in ((4096,), (16384,), (65536,), (16384,) * 8, (65536,) * 2):
        yield from sweep(replace(base, lengths=lengths), family=(*FAMILIES, LOW))
        yield from sweep(replace(base, lengths=lengths), tree=("chain", "none"))
    yield from sweep(
        base, lengths=((2000, 900),), tree_tokens=(9, 16, 32), heads=(8, 64), family=(RISING,), parts=(0, 1, 3)
    )
    yield from sweep(base, lengths=((4096,), MIXES[3]), tree_tokens=(9, 32), heads=(16, 64), family=FAMILIES)
    yield from sweep(base, lengths=(MIXES[1], MIXES[2], MIXES[3]), tree_tokens=TREE_TOKENS)
    yield from sweep(base, tree_tokens=(1, 9, 64), heads=HEADS)
    yield from sweep(replace(base, lengths=(65536,)), tree_tokens=(1, 8, 17, 64), heads=(8, 16))
    yield from sweep(replace(base, lengths=MIXES[3]), page_size=PAGES, slots=SLOTS)
    yield from sweep(base, parts=(1, 2, 3, 7, 64, 500), family=("diffuse", LOW, "needle.cut", "needle.precut"))
    yield from sweep(replace(base, lengths=(4096,)), parts=(1, 2, 3, 7, 64, 500), tree_tokens=(9, 64))
    yield from sweep(replace(base, lengths=(260, 388, 33, 36)), tree_tokens=(8,), heads=(16,), parts=(0, 2, 3, 7, 64))
    yield from sweep(replace(base, lengths=MIXES[3]), split=(32, 64, 1024))
    yield from sweep(base, tree=TREES, family=("mean", "diffuse"))
    yield from sweep(
        replace(base, lengths=(100,) * 64), tree_tokens=(9, 33, 64), tree=("ddtree", "comb"), family=("needle.tree",)
    )
    yield from sweep(base, lengths=(MIXES[4],), k=(1.0, 0.06, 3.7), v=(1.0, 0.06, 3.7))
    yield from sweep(replace(base, lengths=(4096, 1, 300, 0, 0)), padding=(1, 2), tree=("chain", "ddtree"))
    yield from sweep(base, lengths=((0,), (0,) * 16, (0, 0, 5000, 0), (1,), (1, 1, 1)), heads=(8, 16))
    yield from sweep(replace(base, tree_tokens=1, tree="none", lengths=MIXES[3]), tail=(0, 1), heads=(8, 16, 128))
    yield from sweep(replace(base, tree_tokens=1, tree="none"), lengths=((16384,) * 2, (16384,) * 4))
    yield from sweep(base, pair=(1,), lengths=(MIXES[1], (4096,)))
    fp8 = replace(base, kv="fp8")
    for lengths in ((4096,), (65536,), (16384,) * 8):
        yield from sweep(replace(fp8, lengths=lengths), family=FAMILIES)
    yield from sweep(fp8, lengths=(MIXES[1], MIXES[2], MIXES[3]), tree_tokens=TREE_TOKENS)
    yield from sweep(fp8, tree_tokens=(1, 9, 64), heads=HEADS)
    yield from sweep(replace(fp8, lengths=MIXES[3]), page_size=PAGES, slots=SLOTS)
    yield from sweep(fp8, parts=(1, 2, 3, 7, 64, 500), family=("diffuse", LOW, "needle.cut", "needle.precut"))
    yield from sweep(fp8, tree=TREES, family=("mean", "diffuse"))
    yield from sweep(fp8, lengths=(MIXES[4],), k=(1.0, 0.06, 3.7), v=(1.0, 0.06, 3.7))
    yield from sweep(replace(fp8, lengths=(4096, 1, 300, 0, 0)), padding=(1, 2), tree=("chain", "ddtree"))
    yield replace(fp8, lengths=(1000, 333), high=1)
    yield replace(base, lengths=(1000, 333), high=1)
    yield replace(base, lengths=(1000, 333), high=1, page_size=64, slots="ranges64")


def _on_each_path(cases: Iterator[Case]) -> list[Case]:
    """On the device's default kernel; on mma, which every GPU has and a Hopper GPU does not choose; and where a plan may
    take row blocks by shares, by each number of them."""
    distinct = dict.fromkeys(cases)
    by_shares = [replace(case, shares=shares) for case in distinct for shares in _shares(case)]
    return [*distinct, *(replace(case, path="mma") for case in distinct), *by_shares]


MOST_BLOCKS = 16  # more leave a plan fewer parts than a block has shares


def _shares(case: Case) -> range:
    """Of few tokens, as plans have them."""
    has_wgmma = not torch.cuda.is_available() or cubins.target_of(torch.device("cuda")).paths[0] is WGMMA
    if case.split or case.path or sum(case.lengths) > 25_000 or not has_wgmma:
        return range(0)
    blocks, rows = WGMMA.row_blocks(case.shape)
    most = WGMMA.usable_shares(case.shape, rows, case.parts or MAX_PARTS)
    if most == 1 or blocks > MOST_BLOCKS:
        return range(0)
    return range(1, 1 + most)


CASES = {"cpu": list(dict.fromkeys(_cpu_cases())), "cuda": _on_each_path(_gpu_cases())}
