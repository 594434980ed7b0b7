// The one translation unit: every kernel of the package, by the names in src/treemla/tiles.py.
#include "combine.cuh"
#include "move_rows.cuh"
#include "pack_mask.cuh"
#include "plan.cuh"
#include "verify_mma.cuh"
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#include "verify_wgmma.cuh"
#endif

using namespace treemla;

extern "C" __global__ void __launch_bounds__(kPlanThreads) treemla_plan(const __grid_constant__ PlanParams p) {
  allow_dependents();
  wait_for_dependency();
  plan(p);
}

extern "C" __global__ void __launch_bounds__(kPackThreads) treemla_pack_mask(const __grid_constant__ PackMaskParams p) {
  allow_dependents();
  pack_mask(p);
}

extern "C" __global__ void __launch_bounds__(kCombineThreads, 4)
    treemla_combine(const __grid_constant__ VerifyParams p, int slot_rows, int most_shift) {
  combine(p, slot_rows, most_shift);
}

extern "C" __global__ void __launch_bounds__(kMoveThreads, 2) treemla_move_rows(const __grid_constant__ MoveRowsParams p) {
  move_rows(p);
}

#define TREEMLA_VERIFY_MMA(rows)                                                                                     \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)                                                      \
      treemla_verify_mma_r##rows(const __grid_constant__ VerifyParams p) {                                           \
    verify_mma<rows / kRowTile, KvType::bf16>(p);                                                                    \
  }                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)                                                      \
      treemla_verify_mma_fp8_r##rows(const __grid_constant__ VerifyParams p) {                                       \
    verify_mma<rows / kRowTile, KvType::e4m3>(p);                                                                    \
  }

TREEMLA_VERIFY_MMA(8)
TREEMLA_VERIFY_MMA(16)
TREEMLA_VERIFY_MMA(24)
TREEMLA_VERIFY_MMA(32)
TREEMLA_VERIFY_MMA(40)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define TREEMLA_VERIFY_WGMMA(rows, shares, name)                                                                \
  extern "C" __global__ void __launch_bounds__(kWgThreads, 1) treemla_verify_wgmma_r##name(                      \
      const __grid_constant__ VerifyParams p, const __grid_constant__ TensorMap kv_map) {                        \
    verify_wgmma<rows / kRowTile, KvType::bf16, shares>(p, &kv_map);                                             \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(kWgThreads, 1) treemla_verify_wgmma_fp8_r##name(                  \
      const __grid_constant__ VerifyParams p) {                                                                  \
    verify_wgmma<rows / kRowTile, KvType::e4m3, shares>(p, nullptr);                                             \
  }

TREEMLA_VERIFY_WGMMA(8, 1, 8)
TREEMLA_VERIFY_WGMMA(16, 1, 16)
TREEMLA_VERIFY_WGMMA(24, 1, 24)
TREEMLA_VERIFY_WGMMA(32, 1, 32)
TREEMLA_VERIFY_WGMMA(40, 1, 40)
TREEMLA_VERIFY_WGMMA(48, 1, 48)
TREEMLA_VERIFY_WGMMA(56, 1, 56)
TREEMLA_VERIFY_WGMMA(64, 1, 64)
TREEMLA_VERIFY_WGMMA(72, 1, 72)
TREEMLA_VERIFY_WGMMA(16, 2, 16_8)
TREEMLA_VERIFY_WGMMA(24, 2, 24_16)
TREEMLA_VERIFY_WGMMA(32, 2, 32_16)
TREEMLA_VERIFY_WGMMA(40, 2, 40_24)
TREEMLA_VERIFY_WGMMA(48, 3, 48_24_16)
TREEMLA_VERIFY_WGMMA(56, 3, 56_32_24)
TREEMLA_VERIFY_WGMMA(64, 3, 64_32_24)
TREEMLA_VERIFY_WGMMA(72, 3, 72_40_24)
#endif
