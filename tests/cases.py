"""Parity cases: what a verify call is made of, its id, and the inputs that the id stands for. Lists: case_lists.py."""

import re
import zlib
from dataclasses import dataclass, fields

import numpy as np
import torch
from compare import Expected, expected_attention
from families import LOW, RISING, SM_SCALE, kv_rows, needle_direction
from tree_kinds import TREE_KINDS, make_tree

from treemla import SlotRanges, SlotTable, VerifyPlan, VerifyShape, cost, verify_attention
from treemla.tiles import PATHS, WGMMA
from treemla.tree import DraftTree, batch_words

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
KV_DTYPES = {"": None, "fp8": torch.float8_e4m3fn}  # None: the case's dtype
FP8_DTYPES = ("fp32", "bf16")  # beside fp8 rows; sums of their zeros and a small weight end below fp16's smallest steps
SLOTS = ("table32", "table64", "ranges32", "ranges64")  # the number: width of lengths and of row or slot indices
TREES = (*TREE_KINDS, "self", "padded", "none")  # tokens that see only themselves; half a tree; no words: a chain
FAMILIES = ("diffuse", "cold", "mean", "needle.first", "needle.last", "needle.cut", "needle.precut", "needle.tree")
MIXES = {
    1: (0, 1, 31, 32, 33, 63, 64, 65),
    2: (65, 64, 63, 33, 32, 31, 1, 0),
    3: (16384, 37, 4096, 0, 1000, 8191, 1, 250),
    4: (37, 0, 90, 1),
}
# The words of an id.
KINDS = {"kv": KV_DTYPES, "tree": TREES, "family": (*FAMILIES, LOW, RISING), "slots": SLOTS, "path": PATHS}
HIGH_SLOT = 3_800_000  # times 1,152 bytes is past 2^32; times 576 elements, or bytes of fp8, past 2^31
UNSEEN_VALUE = 1e4  # of rows that are a request's and seen by nobody; where the format ends earlier, its largest
UNUSED_COLUMN = 0x7FFF_FF00  # a slot index that no pool has: reading through it faults


@dataclass(frozen=True)
class Case:
    """One verify call. lengths: committed tokens a request; the last `padding` requests are a graph's padding."""

    lengths: tuple[int, ...]
    tree_tokens: int
    heads: int
    page_size: int = 1
    dtype: str = "bf16"
    kv: str = ""  # dtype of the cache; "": as `dtype`
    tree: str = "ddtree"
    family: str = "diffuse"
    slots: str = "table32"
    parts: int = 0  # 0: the plan's own choice
    split: int = 0  # fixed split in tokens; 0: balanced
    k: float = 1.0
    v: float = 1.0
    padding: int = 0
    tail: int = 0
    pair: int = 0  # 1: q as two strided tensors
    high: int = 0  # 1: slots at the far end of a pool of more than 2^32 bytes
    path: str = ""  # the verify kernel; "": the device's default
    shares: int = 0  # of wgmma's row blocks; 0: the plan says

    def __post_init__(self) -> None:
        assert self.tree in TREES and self.family in KINDS["family"] and self.slots in SLOTS, self
        assert self.dtype in DTYPES and self.kv in KV_DTYPES, self
        assert not any(self.lengths[len(self.lengths) - self.padding :]), self
        assert not (self.padding and self.tree == "none"), self
        assert self.tail == 0 or self.tree_tokens == 1, self

    @property
    def id(self) -> str:
        mixes = {lengths: f"mix{n}" for n, lengths in MIXES.items()}
        same = self.lengths == self.lengths[:1] * self.batch
        context = str(self.lengths[0]) if same else mixes.get(self.lengths, "_".join(map(str, self.lengths)))
        parts = [f"verify-b{self.batch}-c{context}-t{self.tree_tokens}-h{self.heads}-p{self.page_size}-{self.dtype}"]
        for field in fields(self)[5:]:
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(value if isinstance(value, str) else f"{field.name}{value:g}")
        return "-".join(parts)

    @classmethod
    def from_id(cls, name: str) -> "Case":
        """The case that an id names; ids are complete."""
        match = re.fullmatch(
            r"verify-b(\d+)-c([\d_]+|mix\d+)-t(\d+)-h(\d+)-p(\d+)-(fp32|fp16|bf16)((?:-[\w.]+)*)", name
        )
        if match is None:
            raise ValueError(f"case id: expected verify-b.-c.-t.-h.-p.-DTYPE[-..], got {name!r}")
        batch, context, tree_tokens, heads, page_size, dtype, rest = match.groups()
        if context.startswith("mix"):
            lengths = MIXES[int(context[3:])]
        else:
            lengths = tuple(map(int, context.split("_")))
            lengths = lengths * int(batch) if len(lengths) == 1 else lengths
        held: dict[str, object] = {}
        words = {word: kind for kind, known in KINDS.items() for word in known}
        numbers = {field.name: type(field.default) for field in fields(cls)[5:]}
        for part in filter(None, rest.split("-")):
            if part in words:
                held[words[part]] = part
            else:
                field = part.rstrip("0123456789.")
                held[field] = numbers[field](part[len(field) :])
        return cls(lengths, int(tree_tokens), int(heads), int(page_size), dtype, **held)

    def rerun(self, device_type: str) -> str:
        """The command that runs this case alone."""
        return f"python -m pytest tests/parity --device {device_type} --case {self.id}"

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def sees_everywhere(self) -> bool:
        """Every row sees a key."""
        return self.padding == 0 and (self.tree != "padded" or min(self.lengths) > 0)

    @property
    def shape(self) -> VerifyShape:
        dtypes = {"dtype": DTYPES[self.dtype], "kv_dtype": KV_DTYPES[self.kv]}
        return VerifyShape(self.heads, self.tree_tokens, page_size=self.page_size, **dtypes)


@dataclass(frozen=True)
class Inputs:
    """A case's tensors. owned: the slots of each request's n_b + T tokens. All other rows of kv_cache, out, lse and
    the plan's partials are NaN."""

    case: Case
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    kv_cache: torch.Tensor
    slots: SlotTable | SlotRanges
    owned: list[torch.Tensor]
    seq_lens: torch.Tensor
    words: torch.Tensor | None
    plan: VerifyPlan
    out: torch.Tensor
    lse: torch.Tensor
    sm_scale: float

    @property
    def scales(self) -> dict[str, float]:
        return {"sm_scale": self.sm_scale, "k_scale": self.case.k, "v_scale": self.case.v}

    @property
    def packed_q(self) -> torch.Tensor:
        return self.q if isinstance(self.q, torch.Tensor) else torch.cat(self.q, dim=-1)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Poison everything that a run must write, then run."""
        for written in (self.out, self.lse, self.plan.partial_out, self.plan.partial_lse):
            written.fill_(torch.nan)
        return verify_attention(
            self.q, self.kv_cache, self.slots, self.words, self.plan, out=self.out, lse=self.lse, **self.scales
        )

    def expected(self) -> Expected:
        return expected_attention(
            self.packed_q, self.kv_cache, self.owned, list(self.case.lengths), self.words, **self.scales
        )


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """The inputs that `case.id` stands for, the same at every call on a device."""
    seed = zlib.crc32(case.id.encode())
    random = torch.Generator(device).manual_seed(seed)
    dtype, width = DTYPES[case.dtype], torch.int64 if case.slots.endswith("64") else torch.int32
    seq_lens = torch.tensor([n + case.tail for n in case.lengths], dtype=width, device=device)

    owned, pool_slots = _place(case, np.random.default_rng(seed), device)
    slots = _slot_table(case, owned, width, random) if case.slots.startswith("table") else _slot_ranges(owned, width)
    plan = VerifyPlan(
        case.shape,
        case.batch,
        device,
        parts=case.parts or None,
        path=case.path or None,
        **_cut(case),
    )
    plan.update(seq_lens, slots, tail=case.tail)

    kv_cache = torch.full((pool_slots, 576), torch.nan, dtype=case.shape.kv_dtype, device=device)
    for request in range(case.batch - case.padding):
        made = _kv_rows(case, request, plan, random).to(kv_cache.dtype)
        kv_cache.view(torch.uint8)[owned[request]] = made.view(
            torch.uint8
        )  # bytes: not every torch writes fp8 by index
    rows = case.batch * case.tree_tokens
    return Inputs(
        case,
        _queries(case, random, dtype),
        kv_cache,
        slots,
        owned,
        seq_lens,
        _words(case, seed, device),
        plan,
        torch.empty(rows, case.heads, 512, dtype=dtype, device=device),
        torch.empty(rows, case.heads, dtype=torch.float32, device=device),
        SM_SCALE * (4 if case.family == "cold" else 1),
    )


def request_tree(case: Case, request: int, seed: int) -> DraftTree:
    """Each request has a tree of its own; a padded one holds about half the tokens."""
    return make_tree("random" if case.tree == "padded" else case.tree, _real_tokens(case, request), seed + request)


def _real_tokens(case: Case, request: int) -> int:
    return max(1, case.tree_tokens // 2 - request % 3) if case.tree == "padded" else case.tree_tokens


def _words(case: Case, seed: int, device: torch.device) -> torch.Tensor | None:
    if case.tree == "none":
        return None
    if case.tree == "self":
        words = np.tile(np.uint64(1) << np.arange(case.tree_tokens, dtype=np.uint64), case.batch).view(np.int64)
    else:
        words = batch_words([request_tree(case, b, seed) for b in range(case.batch)], case.tree_tokens)
    words[len(words) - case.padding * case.tree_tokens :] = 0
    return torch.from_numpy(words).to(device)


def _cut(case: Case) -> dict[str, int]:
    if case.split:
        return {"fixed_split_tokens": case.split, "max_context": max(1, *case.lengths, 0)}
    by = cost.Tiling(*WGMMA.row_blocks(case.shape), case.parts, 0).by_shares(case.shares)
    return {name: getattr(by, name) for name in ("block_rows", "halved_tiles", "third_tiles")} if case.shares else {}


def _place(case: Case, random: np.random.Generator, device: torch.device) -> tuple[list[torch.Tensor], int]:
    """Slots of each request, whole pages in random order, and the pool's size. Page 0 and some others stay unowned."""
    pages = [-(-(n + case.tree_tokens) // case.page_size) for n in case.lengths]
    spare = 2 + sum(pages) // 4
    first = HIGH_SLOT // case.page_size if case.high else 1
    order = first + random.permutation(sum(pages) + spare)[: sum(pages)]
    owned, taken = [], 0
    for n, count in zip(case.lengths, pages, strict=True):
        tokens = order[taken : taken + count, None] * case.page_size + np.arange(case.page_size)
        owned.append(torch.from_numpy(tokens.reshape(-1)[: n + case.tree_tokens]).to(device))
        taken += count
    return owned, (first + sum(pages) + spare) * case.page_size


def _slot_table(case: Case, owned: list[torch.Tensor], width: torch.dtype, random: torch.Generator) -> SlotTable:
    device = owned[0].device
    table = torch.full((case.batch + 2, max(map(len, owned)) + 3), UNUSED_COLUMN, dtype=torch.int32, device=device)
    rows = 1 + torch.randperm(case.batch, generator=random, device=device)
    for row, held in zip(rows.tolist(), owned, strict=True):
        table[row, : len(held)] = held.int()
    return SlotTable(table, rows.to(width))


def _slot_ranges(owned: list[torch.Tensor], width: torch.dtype) -> SlotRanges:
    device = owned[0].device
    unused = torch.full((5,), UNUSED_COLUMN, device=device)  # before and behind: ranges need not start at 0
    indptr = torch.tensor(np.cumsum([len(unused), *map(len, owned)]), dtype=width, device=device)
    return SlotRanges(indptr, torch.cat([unused, *owned, unused]).to(width))


def _queries(
    case: Case, random: torch.Generator, dtype: torch.dtype
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    rows, device = case.batch * case.tree_tokens, random.device
    q = torch.randn(rows, case.heads, 576, generator=random, device=device)
    if case.family == "mean":
        q.zero_()
    if case.family.startswith("needle"):
        q[..., :512] /= 16
    if case.family == RISING:
        q[..., :512] = 0
    if case.family in (LOW, RISING) or case.family.startswith("needle"):
        q[..., 512:] = needle_direction(device)
    q = q.to(dtype)
    if not case.pair:
        return q
    # As a model hands them over: the latent part out of a product batched by head, the rope part inside a wider row.
    latent = torch.full((case.heads, rows, 520), torch.nan, dtype=dtype, device=device)
    latent[..., :512] = q[..., :512].transpose(0, 1)
    rope = torch.full((rows, case.heads, 192), torch.nan, dtype=dtype, device=device)
    rope[..., 128:] = q[..., 512:]
    return latent[..., :512].transpose(0, 1), rope[..., 128:]


def _kv_rows(case: Case, request: int, plan: VerifyPlan, random: torch.Generator) -> torch.Tensor:
    """[n_b + T, 576] float32: this request's latent rows in token order."""
    n = case.lengths[request]
    needle = _needle_position(case, request, plan) if case.family.startswith("needle") else None
    rows = kv_rows(case.family, n, case.tree_tokens, needle, random)
    rows[n + _real_tokens(case, request) :] = min(UNSEEN_VALUE, torch.finfo(case.shape.kv_dtype).max)
    return rows


def _needle_position(case: Case, request: int, plan: VerifyPlan) -> int:
    """The token whose key outweighs all others. cut: the first of the request's last piece; precut: the one before."""
    n = case.lengths[request]
    made = plan.mirror(np.array(case.lengths, np.int32))
    cut = int(made.pieces[made.request_ptr[request + 1] - 1, 1])
    place = {"first": 0, "last": n - 1, "cut": cut, "precut": cut - 1, "tree": n + request % case.tree_tokens}
    return max(0, place[case.family.removeprefix("needle.")])
