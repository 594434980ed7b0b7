// The one translation unit: every kernel of the package, by the names in src/treemla/tiles.py.
#include "combine.cuh"
#include "pack_mask.cuh"
#include "plan.cuh"
#include "verify.cuh"

using namespace treemla;

extern "C" __global__ void __launch_bounds__(kPlanThreads) treemla_plan(const __grid_constant__ PlanParams p) { plan(p); }

extern "C" __global__ void __launch_bounds__(kPackThreads) treemla_pack_mask(const __grid_constant__ PackMaskParams p) {
  pack_mask(p);
}

extern "C" __global__ void __launch_bounds__(kCombineThreads)
    treemla_combine(const __grid_constant__ VerifyParams p, int slot_rows) {
  combine(p, slot_rows);
}

#define TREEMLA_VERIFY(rows)                                                                                     \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)                                                      \
      treemla_verify_r##rows(const __grid_constant__ VerifyParams p) {                                           \
    verify<rows / kRowTile>(p);                                                                                  \
  }

TREEMLA_VERIFY(8)
TREEMLA_VERIFY(16)
TREEMLA_VERIFY(24)
TREEMLA_VERIFY(32)
TREEMLA_VERIFY(40)
