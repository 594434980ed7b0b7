// Merges the partials of a request that was cut into several pieces. Grid: x = query row, y = request, z = which 128
// of the 512 dims; so even one request with few rows spreads over the GPU.
//
// Warp w takes pieces w, w + 8, ... in order, four dims a lane, with weights relative to its own largest lse; then the
// warps merge in order. The order never depends on timing, so equal inputs give equal bits.
#pragma once
#include "tile.cuh"
#include "verify.cuh"

namespace treemla {

constexpr int kCombineWarps = 8;
constexpr int kCombineThreads = 32 * kCombineWarps;
constexpr int kCombineDims = 128;

struct MergedPieces {
  float4 sum = {0.f, 0.f, 0.f, 0.f};  // of weight * partial
  float weight = 0.f;
  float most = -INFINITY;  // base-2 lse that the weights are relative to

  __device__ void scale_to(float reference) {
    const float factor = most == -INFINITY ? 0.f : exp2f(most - reference);
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

__device__ __forceinline__ void combine(const VerifyParams& p, int slot_rows) {  // slot_rows: query rows of a partial slot, padding included
  __shared__ MergedPieces merged[kCombineWarps][32];
  const int row = blockIdx.x, request = blockIdx.y, rows = gridDim.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int dim = blockIdx.z * kCombineDims + 4 * lane;
  const int64_t out_row = int64_t(request) * rows + row;
  auto* out = reinterpret_cast<__nv_bfloat162*>(p.out + out_row * kLatentDim + dim);
  wait_for_dependency();
  const int begin = p.request_ptr[request], pieces = p.request_ptr[request + 1] - begin;
  if (p.committed[request] == kOverlong) {
    if (warp == 0) out[0] = out[1] = __floats2bfloat162_rn(NAN, NAN);
    if (threadIdx.x == 0 && blockIdx.z == 0) p.lse[out_row] = NAN;
    return;
  }
  if (pieces == 1) return;  // its CTAs wrote the output themselves

  MergedPieces mine;
  for (int first = warp; first < pieces; first += 32 * kCombineWarps) {  // lane l: piece first + 8 l
    const int piece = first + kCombineWarps * lane;
    int slot = 0;
    float lse = -INFINITY;
    if (piece < pieces) {
      slot = p.pieces[begin + piece].slot;
      lse = p.partial_lse[int64_t(slot) * slot_rows + row];
    }
    const float most = warp_max(fmaxf(mine.most, lse));
    const float weight = lse == -INFINITY ? 0.f : exp2f(lse - most);
    mine.scale_to(most);
    const int count = min(32, (pieces - first + kCombineWarps - 1) / kCombineWarps);
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      const int64_t partial_row = int64_t(__shfl_sync(0xffffffffu, slot, i)) * slot_rows + row;
      const float4 o = *reinterpret_cast<const float4*>(p.partial_out + partial_row * kLatentDim + dim);
      mine.add(__shfl_sync(0xffffffffu, weight, i), o);
    }
  }
  merged[warp][lane] = mine;
  __syncthreads();
  if (warp) return;
  float most = mine.most;
#pragma unroll
  for (int w = 1; w < kCombineWarps; ++w) most = fmaxf(most, merged[w][lane].most);
  mine.scale_to(most);
#pragma unroll
  for (int w = 1; w < kCombineWarps; ++w) {
    MergedPieces other = merged[w][lane];
    other.scale_to(most);
    mine.add(other);
  }
  const float factor = mine.weight == 0.f ? 0.f : 1.f / mine.weight;
  out[0] = __floats2bfloat162_rn(mine.sum.x * factor, mine.sum.y * factor);
  out[1] = __floats2bfloat162_rn(mine.sum.z * factor, mine.sum.w * factor);
  if (lane == 0 && blockIdx.z == 0) p.lse[out_row] = mine.weight == 0.f ? -INFINITY : (most + log2f(mine.weight)) * kLn2;
}

}  // namespace treemla
