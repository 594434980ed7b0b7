// KV rows of 576 e4m3 values, widened to bf16 on their way to where the consumers find them.
//
// The tensor cores get bf16 whatever the rows are: every e4m3 value is a bf16 value, and consumers cannot tell where it
// was widened. cp.async cannot widen, so a producer thread fetches 16 values at a time ahead of their use, into
// registers or a staging area, and stores them as 32 bytes when their place is free. What consumers wait for is then a
// conversion and not memory.
#pragma once
#include <cuda_fp16.h>

#include "work.cuh"

namespace treemla {

// What a row that nobody sees is read from, so that 0 * garbage is not NaN. All bits set, kNanRow's, are NaN in e4m3 too.
struct ZeroRow {
  uint4 bits[kHeadDim / 16];
};
extern __device__ const ZeroRow kFp8ZeroRow = {};

__device__ __forceinline__ const char* fp8_row(const VerifyParams& p, int slot) {
  const void* row = static_cast<const char*>(p.kv) + int64_t(slot) * p.kv_stride;
  if (uint32_t(slot) >= uint32_t(p.num_slots)) row = slot == kNoSlot ? static_cast<const void*>(&kFp8ZeroRow) : &kNanRow;
  return static_cast<const char*>(row);
}

// Two bf16 of two e4m3 in a half each. The upper half of a float is its bf16, and no step rounds; NaN stays NaN.
__device__ __forceinline__ uint32_t bf16_of_halves(uint32_t two_halves) {
  const float2 x = __half22float2(reinterpret_cast<const __half2&>(two_halves));
  return __byte_perm(__float_as_uint(x.x), __float_as_uint(x.y), 0x7632);
}

// Stores 16 e4m3 values as bf16 in two chunks of 16 bytes. 32 instructions convert them, of 35 with load and stores.
__device__ __forceinline__ void store_widened(uint32_t first_chunk, uint32_t second_chunk, const uint4& values) {
  uint32_t h[8];
  e4m3_to_halves(h[0], h[1], values.x);
  e4m3_to_halves(h[2], h[3], values.y);
  e4m3_to_halves(h[4], h[5], values.z);
  e4m3_to_halves(h[6], h[7], values.w);
  store_16_bytes(first_chunk, bf16_of_halves(h[0]), bf16_of_halves(h[1]), bf16_of_halves(h[2]), bf16_of_halves(h[3]));
  store_16_bytes(second_chunk, bf16_of_halves(h[4]), bf16_of_halves(h[5]), bf16_of_halves(h[6]), bf16_of_halves(h[7]));
}

}  // namespace treemla
