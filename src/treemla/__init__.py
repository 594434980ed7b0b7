"""Tree-verify MLA attention: plan once a step, verify once a layer, on CPU or GPU."""

from treemla.ops import MaskLayout, pack_tree_mask, verify_attention
from treemla.plan import VerifyPlan
from treemla.problem import SlotRanges, SlotTable, VerifyShape
from treemla.tree import DraftTree

__version__ = "0.1.0"

__all__ = [
    "DraftTree",
    "MaskLayout",
    "SlotRanges",
    "SlotTable",
    "VerifyPlan",
    "VerifyShape",
    "pack_tree_mask",
    "verify_attention",
]
