"""What the performance layers measure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar


class Case(Protocol):
    @property
    def id(self) -> str: ...


AnyCase = TypeVar("AnyCase", bound=Case)


@dataclass(frozen=True)
class VerifyCase:
    """One verify call in bf16: the committed tokens of each request, T, H, the page size of its slots; fp8_kv: KV rows
    of 576 bytes, e4m3."""

    metric: ClassVar[str] = "verify"
    contexts: tuple[int, ...]
    tree_tokens: int
    heads: int
    page_size: int = 1
    fp8_kv: bool = False

    @property
    def row_bytes(self) -> int:
        """Of a KV row."""
        return 576 * (1 if self.fp8_kv else 2)

    @property
    def batch(self) -> int:
        return len(self.contexts)

    @property
    def id(self) -> str:
        """verify-b8-c16384-t9-h8-p1-bf16; -c4096_512- where lengths differ; -bf16-fp8 with fp8 KV."""
        same = len(set(self.contexts)) == 1
        context = "_".join(map(str, self.contexts[:1] if same else self.contexts))
        dtypes = "bf16-fp8" if self.fp8_kv else "bf16"
        return f"verify-b{self.batch}-c{context}-t{self.tree_tokens}-h{self.heads}-p{self.page_size}-{dtypes}"


@dataclass(frozen=True)
class PlanCase:
    """What a step does once before the layers of `verify`: packing the tree mask, and the plan."""

    metric: ClassVar[str] = "plan"
    verify: VerifyCase

    @property
    def id(self) -> str:
        """plan-b8-c16384-t9-h8-p1-bf16"""
        return self.verify.id.replace("verify", "plan", 1)


@dataclass(frozen=True)
class EngineCase:
    """One request in SGLang's Engine, as tests/e2e measures it: NGRAM, 9 draft tokens, 61 layers of 48 experts."""

    context: int

    @property
    def id(self) -> str:
        """engine-b1-c65536-ngram9-61x48"""
        return f"engine-b1-c{self.context}-ngram9-61x48"


def _case(
    batch: int, context: int, tree_tokens: int, heads: int, page_size: int = 1, fp8_kv: bool = False
) -> VerifyCase:
    return VerifyCase((context,) * batch, tree_tokens, heads, page_size, fp8_kv)


CASES = (
    _case(1, 4096, 9, 8),
    _case(1, 16384, 9, 8),
    _case(1, 16384, 9, 16),
    _case(1, 65536, 1, 8),
    _case(1, 65536, 9, 8),
    _case(1, 65536, 16, 8),
    _case(1, 65536, 32, 8),
    _case(8, 4096, 9, 8),
    _case(8, 16384, 1, 8),
    _case(8, 16384, 9, 8),
    _case(8, 16384, 9, 64),
    _case(32, 4096, 9, 8),
    _case(1, 65536, 9, 8, page_size=64),
    VerifyCase((65536, 16384, 4096, 512), 9, 8),
    _case(1, 16384, 9, 8, fp8_kv=True),
    _case(1, 65536, 1, 8, fp8_kv=True),
    _case(1, 65536, 9, 8, fp8_kv=True),
    _case(8, 16384, 1, 8, fp8_kv=True),
    _case(8, 16384, 9, 8, fp8_kv=True),
    _case(8, 16384, 9, 64, fp8_kv=True),
)

PEER_CASES = (
    _case(1, 4096, 9, 8),
    _case(1, 16384, 9, 8),
    _case(1, 65536, 9, 8),
    _case(1, 65536, 1, 8),
    _case(1, 65536, 32, 8),
    _case(8, 16384, 9, 8),
    _case(32, 4096, 9, 8),
    _case(8, 16384, 1, 8),
    _case(8, 16384, 9, 64),
    _case(8, 16384, 9, 64, page_size=64),
)

WARM_CASES = tuple(_case(1, context, tree_tokens, 8) for tree_tokens in (1, 9, 16, 32) for context in (4096, 16384))

GATED_KERNELS = (
    _case(1, 4096, 9, 8),
    _case(1, 16384, 9, 8),
    _case(1, 65536, 9, 8),
    _case(1, 65536, 32, 8),
    _case(8, 16384, 9, 8),
    VerifyCase((65536, 16384, 4096, 512), 9, 8),
    _case(8, 16384, 9, 8, fp8_kv=True),
)

# What blocks a change: few, so that noise in one of many does not.
GATED_CASES: tuple[VerifyCase | PlanCase, ...] = (*GATED_KERNELS, PlanCase(_case(8, 16384, 9, 8)))
GATED_ENGINES = (EngineCase(4096), EngineCase(16384), EngineCase(65536))


def case_of(text: str) -> VerifyCase | None:
    """The case that has this id, measured here or not; None for any other text."""
    size = "[1-9][0-9]{0,%d}"
    pattern = f"verify-b({size % 3})-c([0-9_]+)-t({size % 1})-h({size % 2})-p({size % 3})-bf16(-fp8)?"
    if not (found := re.fullmatch(pattern, text)) or len(found.group(2)) > 1000:
        return None
    batch, tree_tokens, heads, page_size = (int(found.group(n)) for n in (1, 3, 4, 5))
    contexts = [int(part or 0) for part in found.group(2).split("_")]
    made = VerifyCase(tuple(contexts * batch)[:batch], tree_tokens, heads, page_size, found.group(6) is not None)
    return made if made.id == text and all(contexts) else None


def chosen(cases: Sequence[AnyCase], texts: Sequence[str] | None) -> list[AnyCase]:
    """All without texts; else those whose id one of the texts is, or is part of. An id chooses its case alone."""
    ids = {case.id for case in cases}
    return [
        case
        for case in cases
        if not texts or any(text == case.id or (text not in ids and text in case.id) for text in texts)
    ]
