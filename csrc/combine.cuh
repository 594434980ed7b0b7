// Merges the partials of a request that was cut into several pieces.
//
// A *unit* is half of one query row of one request: 32 chunks, one a lane. `unit_warps` warps of a CTA share a unit:
// warp w takes pieces w, w + unit_warps, ... in order, with weights relative to its own largest lse; then the CTA's
// threads, two dims each, add up the warps in order. The order never depends on timing, so equal inputs give equal bits.
// Grid: x = units of a request, kCombineWarps / unit_warps a CTA; y = requests.
#pragma once
#include "work.cuh"

namespace treemla {

constexpr int kCombineWarps = 16;
constexpr int kCombineThreads = 32 * kCombineWarps;
constexpr int kUnitsARow = 2;
constexpr int kUnitDims = kLatentDim / kUnitsARow;
constexpr int kRowsAtOnce = 5;              // partials that a warp has in flight
constexpr int kHeldRows = 6 * kRowsAtOnce;  // that its lanes know
constexpr int kSumStride = 48;              // floats; 16 mod 32: a warp's reads of two meet no bank twice

// Rows of the workspace with the partials of one query row that a warp merges: of pieces first, first + stride, ... below
// count. Lane l < kHeldRows knows the l-th of them.
struct PartialRows {
  const Piece* pieces;
  int first, stride, count, slot_rows, row_in_slot;

  __device__ int load() const {
    const int lane = threadIdx.x % 32, piece = first + stride * lane;
    return lane < kHeldRows && piece < count ? pieces[piece].slot * slot_rows + row_in_slot : -1;
  }
};

struct MergedPieces {
  float sum[8] = {};       // of weight * partial, in a chunk's order
  float weight = 0.f;
  float most = -INFINITY;  // base-2 lse that the weights are relative to

  __device__ void scale_to(float reference) {
    const float factor = most == -INFINITY ? 0.f : exp2_approx(most - reference);
#pragma unroll
    for (float& x : sum) x *= factor;
    weight *= factor;
    most = reference;
  }
  __device__ void add(float w, const Chunk& chunk) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = fmaf(w, chunk.value(i), sum[i]);
    weight += w;
  }
};

// chunk: of the lane. row: rows.load().
__device__ __forceinline__ MergedPieces merge_pieces(const VerifyParams& p, PartialRows rows, int row, int chunk) {
  MergedPieces merged;
  for (; rows.first < rows.count; rows.first += kHeldRows * rows.stride, row = rows.load()) {
    const int here = min(kHeldRows, (rows.count - rows.first + rows.stride - 1) / rows.stride);
    Chunk partial[kRowsAtOnce];
    auto read = [&](int first) {  // behind the last row the last once more: a branch would order the loads
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const int from = __shfl_sync(0xffffffffu, row, min(first + i, here - 1));
        partial[i] = Chunk(p.partial_out + int64_t(from) * kPartialRowBytes, chunk);
      }
    };
    read(0);  // before the weights are known: one latency for both
    const float lse = row < 0 ? -INFINITY : p.partial_lse[row];
    const float most = warp_max(fmaxf(merged.most, lse));
    const float weight = lse == -INFINITY ? 0.f : exp2_approx(lse - most);
    merged.scale_to(most);
    for (int first = 0;;) {
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const float w = __shfl_sync(0xffffffffu, weight, first + i);
        if (first + i < here) merged.add(w, partial[i]);
      }
      first += kRowsAtOnce;
      if (first >= here) break;
      read(first);
    }
  }
  return merged;
}

__device__ __forceinline__ void combine(const VerifyParams& p, int slot_rows, int unit_warps) {
  __shared__ __align__(8) float sums[kCombineWarps][8 * kSumStride];
  __shared__ float weights[kCombineWarps], mosts[kCombineWarps];
  allow_dependents();
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32, request = blockIdx.y;
  const int units = kCombineWarps / unit_warps, first_unit = blockIdx.x * units;
  const int rows = p.tree_tokens * p.heads, request_units = rows * kUnitsARow;
  // The plan was complete before the verify kernel let this one start; the partials are so after the wait.
  const int begin = uniform(p.request_ptr[request]), count = uniform(p.request_ptr[request + 1]) - begin;
  const int unit = first_unit + warp / unit_warps;
  const PartialRows mine{p.pieces + begin, warp % unit_warps, unit_warps, unit < request_units ? count : 0,
                         slot_rows, unit / kUnitsARow};
  const int first_row = mine.load();
  wait_for_dependency();
  if (count == 1) return;  // the piece wrote the output itself
  {
    const MergedPieces merged = merge_pieces(p, mine, first_row, unit % kUnitsARow * 32 + lane);
#pragma unroll
    for (int e = 0; e < 8; ++e) sums[warp][e * kSumStride + lane] = merged.sum[e];
    if (lane == 0) weights[warp] = merged.weight, mosts[warp] = merged.most;
  }
  __syncthreads();
  // A warp writes 64 dims: m of a unit's four blocks, two dims a lane.
  for (int i = warp; i < 4 * units; i += kCombineWarps) {
    const int w0 = i / 4 * unit_warps, m = i % 4, done = first_unit + i / 4;
    if (done >= request_units) break;
    // Lane w: factor of warp w0 + w.
    const float own = lane < unit_warps ? mosts[w0 + lane] : -INFINITY, most = warp_max(own);
    const float factor = own == -INFINITY ? 0.f : exp2_approx(own - most);
    const float weight = warp_sum(lane < unit_warps ? factor * weights[w0 + lane] : 0.f);
    const int x = 2 * lane;  // dim % 64: 16 * (warp % 4) + 8 * half + group, as dim_of has it
    const float* from = &sums[w0][(2 * m + x / 8 % 2) * kSumStride + x / 16 * 8 + x % 8];
    float2 sum = {0.f, 0.f};
#pragma unroll 4
    for (int w = 0; w < unit_warps; ++w) {
      const float f = __shfl_sync(0xffffffffu, factor, w);
      const float2 term = *reinterpret_cast<const float2*>(from + w * 8 * kSumStride);
      sum.x = fmaf(f, term.x, sum.x);
      sum.y = fmaf(f, term.y, sum.y);
    }
    const bool refused = count == 0, blind = weight == 0.f;
    const float scale = refused ? NAN : blind ? 0.f : __frcp_rn(weight);
    const int64_t row = int64_t(request) * rows + done / kUnitsARow;
    const int dim = dim_of(done % kUnitsARow * 4, m, 0, 0) + x;
    *reinterpret_cast<__nv_bfloat162*>(p.out + row * kLatentDim + dim) = __floats2bfloat162_rn(sum.x * scale, sum.y * scale);
    if (dim == 0) p.lse[row] = refused ? NAN : blind ? -INFINITY : (most + log2f(weight)) * kLn2;
  }
}

}  // namespace treemla
