// Merges the partials of a request that was cut into several pieces.
//
// A *unit* is 128 dims of one query row of one request, so that even one request with few rows spreads over the GPU.
// `unit_warps` warps of a CTA share a unit: warp w takes pieces w, w + unit_warps, ... in order, four dims a lane, with
// weights relative to its own largest lse; then the warps merge in order. The order never depends on timing, so equal
// inputs give equal bits. Grid: x = units, 8 / unit_warps a CTA.
#pragma once
#include "work.cuh"

namespace treemla {

constexpr int kCombineWarps = 8;
constexpr int kCombineThreads = 32 * kCombineWarps;
constexpr int kCombineDims = 128;
constexpr int kRowsAtOnce = 9;              // partials that a warp has in flight
constexpr int kHeldRows = 3 * kRowsAtOnce;  // that its lanes know
constexpr int kUnitsARow = kLatentDim / kCombineDims;

struct MergedPieces {
  float4 sum = {0.f, 0.f, 0.f, 0.f};  // of weight * partial
  float weight = 0.f;
  float most = -INFINITY;  // base-2 lse that the weights are relative to

  __device__ void scale_to(float reference) {
    const float factor = most == -INFINITY ? 0.f : exp2_approx(most - reference);
    sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor, weight *= factor;
    most = reference;
  }
  __device__ void add(float w, float4 o) {
    sum.x += w * o.x, sum.y += w * o.y, sum.z += w * o.z, sum.w += w * o.w, weight += w;
  }
  __device__ void add(const MergedPieces& o) {
    sum.x += o.sum.x, sum.y += o.sum.y, sum.z += o.sum.z, sum.w += o.sum.w, weight += o.weight;
  }
};

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

__device__ __forceinline__ MergedPieces merge_pieces(const VerifyParams& p, PartialRows rows, int row, int dim) {
  MergedPieces merged;
  for (; rows.first < rows.count; rows.first += kHeldRows * rows.stride, row = rows.load()) {
    const int here = min(kHeldRows, (rows.count - rows.first + rows.stride - 1) / rows.stride);
    float4 partial[kRowsAtOnce];
    auto read = [&](int first) {  // behind the last row the last once more: a branch would order the loads
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const int64_t from = __shfl_sync(0xffffffffu, row, min(first + i, here - 1));
        partial[i] = *reinterpret_cast<const float4*>(p.partial_out + from * kLatentDim + dim);
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

__device__ __forceinline__ void combine(const VerifyParams& p, int batch, int slot_rows, int unit_warps) {
  __shared__ MergedPieces shared[kCombineWarps][32];
  allow_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = p.tree_tokens * p.heads;
  const int nth = warp % unit_warps, unit = blockIdx.x * (kCombineWarps / unit_warps) + warp / unit_warps;
  const int dim = unit % kUnitsARow * kCombineDims + 4 * lane, out_row = unit / kUnitsARow, request = out_row / rows;
  // The plan was complete before the verify kernel let this one start; the partials are so after the wait.
  int pieces = 0, begin = 0, committed = 0;
  if (request < batch) {
    begin = p.request_ptr[request];
    pieces = p.request_ptr[request + 1] - begin;
    committed = p.committed[request];
  }
  const PartialRows mine_of{p.pieces + begin, nth, unit_warps, pieces > 1 ? pieces : 0, slot_rows, out_row % rows};
  const int row = mine_of.load();
  wait_for_dependency();
  MergedPieces mine = merge_pieces(p, mine_of, row, dim);
  shared[warp][lane] = mine;
  __syncthreads();
  // One piece wrote the output itself; none is a request that the plan refused.
  if (nth || request >= batch || pieces == 1) return;

  float most = mine.most;
#pragma unroll 1
  for (int w = 1; w < unit_warps; ++w) most = fmaxf(most, shared[warp + w][lane].most);
  mine.scale_to(most);
#pragma unroll 1
  for (int w = 1; w < unit_warps; ++w) {
    MergedPieces other = shared[warp + w][lane];
    other.scale_to(most);
    mine.add(other);
  }
  const bool refused = committed == kOverlong, blind = mine.weight == 0.f;
  const float factor = refused ? NAN : blind ? 0.f : 1.f / mine.weight;
  auto* out = reinterpret_cast<__nv_bfloat162*>(p.out + int64_t(out_row) * kLatentDim + dim);
  out[0] = __floats2bfloat162_rn(mine.sum.x * factor, mine.sum.y * factor);
  out[1] = __floats2bfloat162_rn(mine.sum.z * factor, mine.sum.w * factor);
  if (dim == 0) p.lse[out_row] = refused ? NAN : blind ? -INFINITY : (most + log2f(mine.weight)) * kLn2;
}

}  // namespace treemla
