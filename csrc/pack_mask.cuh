// SGLang's boolean tree mask -> one 64-bit word a tree token. One warp a word.
#pragma once
#include "tile.cuh"

namespace treemla {

constexpr int kPackThreads = 256;

// No length that the mask could hold exceeds its size: clamped, so that sums of nonsense stay outside and do not wrap.
__device__ __forceinline__ int64_t committed_of(const PackMaskParams& p, int request) {
  const int64_t n = load_index(p.seq_lens, request, p.seq_lens_is_64);
  return n < 0 || n > p.mask_bytes ? p.mask_bytes : n;
}

__device__ __forceinline__ void pack_mask(const PackMaskParams& p) {
  const int lane = threadIdx.x % 32, t = p.tree_tokens;
  const int word = blockIdx.x * (kPackThreads / 32) + threadIdx.x / 32;
  if (word >= p.batch * t) return;
  const int request = word / t, row = word % t;

  int64_t first = (int64_t(request) * t + row) * t;  // of the row's tree columns
  if (p.full_layout) {
    int64_t before = 0;  // committed tokens of earlier requests
    for (int r = lane; r < request; r += 32) before += committed_of(p, r);
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) before += __shfl_xor_sync(0xffffffffu, before, offset);
    const int64_t committed = committed_of(p, request);
    first = t * (before + int64_t(request) * t) + row * (committed + t) + committed;
  }
  // A row that the buffer does not hold becomes a word that sees nothing: never a read outside it.
  const bool held = request < p.batch - p.num_padding && first >= 0 && first + t <= p.mask_bytes;
  const bool low = held && lane < t && p.mask[first + lane];
  const bool high = held && lane + 32 < t && p.mask[first + lane + 32];
  const uint64_t bits = uint64_t(__ballot_sync(0xffffffffu, high)) << 32 | __ballot_sync(0xffffffffu, low);
  if (lane == 0) p.words[word] = bits;
}

}  // namespace treemla
