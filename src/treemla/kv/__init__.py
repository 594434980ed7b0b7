"""Where tokens lie in the KV pool: how scattered they are, and how to move them together."""

from treemla.kv.compaction import Moves, plan_moves
from treemla.kv.fragmentation import Fragmentation, measure, run_lengths
from treemla.kv.relocation import relocate
from treemla.kv.rows import move_rows

__all__ = ["Fragmentation", "Moves", "measure", "move_rows", "plan_moves", "relocate", "run_lengths"]
