// Merges the partials of a request that was cut into several pieces.
//
// A *unit* is 32 / 2^piece_shift chunks of one query row of one request. 2^warp_shift warps share its pieces, and in each
// of them 2^piece_shift groups of lanes, each with kRowsAtOnce pieces in flight. Where a unit is one warp's, nothing but
// shuffles is left to do; else the warps meet in shared memory. A request has as many groups as its pieces take at once, up
// to what the launch has warps for. This kernel runs with cold instruction caches: what it executes once costs more than
// what it computes (docs/kernel-log.md, fifth round).
// The order of additions never depends on timing, so equal inputs give equal bits.
// Grid: x = as many CTAs as a request takes with 2^most_shift groups; y = requests.
#pragma once
#include "work.cuh"

namespace treemla {

constexpr int kCombineWarps = 8;
constexpr int kCombineThreads = 32 * kCombineWarps;
constexpr int kRowsAtOnce = 5;      // partials that a lane has in flight
constexpr int kMaxPieceShift = 2;   // a warp's lanes know kRowsAtOnce << kMaxPieceShift pieces
constexpr int kMaxGroupShift = 5;   // of a unit: four groups in each of eight warps
constexpr int kSumStride = 40;      // floats; 8 mod 32: a warp's reads of four values of eight chunks meet no bank twice

// How a request is cut, by powers of two: a division's code takes longer to arrive than to execute.
struct CombineCut {
  int piece_shift, warp_shift;

  // `pieces` among the fewest groups that take them at once. 1, 2 and 4 groups are one warp's, 8 and 16 two of each warp, 32
  // four of each.
  __device__ CombineCut(int pieces, int most_shift) {
    int shift = 0;
#pragma unroll
    for (int i = 0; i < kMaxGroupShift; ++i) shift += pieces > kRowsAtOnce << i;
    shift = min(shift, most_shift);
    piece_shift = shift <= kMaxPieceShift ? shift : shift == kMaxGroupShift ? kMaxPieceShift : 1;
    warp_shift = shift - piece_shift;
  }

  __device__ int chunk_shift() const { return 5 - piece_shift; }
  // Of the CTA's units.
  __device__ int first_chunk(int unit) const { return ((blockIdx.x * kCombineWarps >> warp_shift) + unit) << chunk_shift(); }
};

// Sums over a warp's pieces: `sum` over those of the lane's group, `weight` over those that the lane knows.
struct MergedPieces {
  float sum[8] = {};       // of partials, in a chunk's order
  float weight = 0.f;      // of sums of weights
  float most = -INFINITY;  // base-2 reference that both are relative to; alike in a warp

  // row: of the workspace, with the partial of the piece that the lane knows, -1: of none. Lane i << piece_shift | g knows the
  // ith piece of group g. The whole warp calls it; lane 0 knows a piece.
  __device__ void add(const VerifyParams& p, int row, int chunk, int group, int piece_shift) {
    const float2 state = row < 0 ? make_float2(-INFINITY, 0.f) : p.partial_lse[row];
    Chunk partial[kRowsAtOnce];
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      const int from = __shfl_sync(0xffffffffu, row, (k << piece_shift) + group);
      partial[k] = Chunk(p.partial_out + int64_t(from) * kPartialRowBytes, chunk, from >= 0);
    }
    const float above = warp_max(fmaxf(most, state.x));
    const float older = exp2_approx(most - above), factor = exp2_approx(state.x - above);
#pragma unroll
    for (float& x : sum) x *= older;
    weight = fmaf(factor, state.y, weight * older);
    most = above;
#pragma unroll
    for (int k = 0; k < kRowsAtOnce; ++k) {
      const float f = __shfl_sync(0xffffffffu, factor, (k << piece_shift) + group);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] = fmaf(f, partial[k].value(i), sum[i]);
    }
  }
};

struct CombineSpace {
  float sums[kCombineWarps][8 * kSumStride];  // a warp's lanes as they are: groups add up when warps do
  float weights[kCombineWarps], mosts[kCombineWarps];
};

// What becomes of a row's sums.
struct ClosedRow {
  float scale, lse;

  __device__ ClosedRow(const VerifyParams& p, int pieces, float most, float weight)
      : scale(pieces == 0 ? NAN : weight == 0.f ? 0.f : __fdividef(p.v_scale, weight)),
        lse(pieces == 0 ? NAN : weight == 0.f ? -INFINITY : (most + __log2f(weight)) * kLn2) {}
};

// slot_rows: of a slot of the workspace. most_shift: of a unit's groups, at most kMaxGroupShift.
__device__ __forceinline__ void combine(const VerifyParams& p, int slot_rows, int most_shift) {
  __shared__ __align__(8) CombineSpace space;
  allow_dependents();
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32, request = blockIdx.y, rows = p.tree_tokens * p.heads;
  const int begin = uniform(p.request_ptr[request]), count = uniform(p.request_ptr[request + 1]) - begin;
  const CombineCut cut(count, most_shift);
  if (cut.first_chunk(0) >= rows * kRowChunks) return;  // fewer groups than the launch has warps for
  const int unit_warps = 1 << cut.warp_shift, chunk_lanes = 1 << cut.chunk_shift(), group = lane >> cut.chunk_shift();
  const int first_chunk = cut.first_chunk(warp >> cut.warp_shift), row = first_chunk / kRowChunks;
  const int pieces = row < rows ? count : 0, at_once = kRowsAtOnce << cut.piece_shift;
  // The piece that this lane knows.
  int piece = lane < at_once ? ((warp & unit_warps - 1) << cut.piece_shift) + (lane & (1 << cut.piece_shift) - 1) +
                                   (lane >> cut.piece_shift << cut.piece_shift + cut.warp_shift)
                             : INT_MAX / 2;
  const auto row_of_piece = [&] { return piece < pieces ? p.pieces[begin + piece].slot * slot_rows + row : -1; };
  int known = row_of_piece();
  // The plan was complete before the verify kernel let this one start; the partials are so after the wait.
  wait_for_dependency();
  if (count == 1) return;  // the piece wrote the output itself
  MergedPieces merged;
#pragma unroll 1
  while (__shfl_sync(0xffffffffu, known, 0) >= 0) {
    merged.add(p, known, first_chunk % kRowChunks + (lane & chunk_lanes - 1), group, cut.piece_shift);
    piece += at_once << cut.warp_shift;
    known = row_of_piece();
  }
  merged.weight = warp_sum(merged.weight);
  const int64_t first_row = int64_t(request) * rows;
  if (unit_warps == 1) {
#pragma unroll 1
    for (int offset = chunk_lanes; offset < 32; offset *= 2)
#pragma unroll
      for (float& x : merged.sum) x += __shfl_xor_sync(0xffffffffu, x, offset);
    if (group > 0 || row >= rows) return;
    const int chunk = first_chunk % kRowChunks + lane;
    const ClosedRow closed(p, count, merged.most, merged.weight);
    __nv_bfloat16* out = p.out + (first_row + row) * kLatentDim + dim_of(chunk / 8, 0, 0, chunk % 8);
#pragma unroll
    for (int i = 0; i < 8; ++i) out[dim_of(0, i / 2, i % 2, 0)] = __float2bfloat16_rn(merged.sum[i] * closed.scale);
    if (chunk == 0) p.lse[first_row + row] = closed.lse;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) space.sums[warp][i * kSumStride + lane] = merged.sum[i];
  if (lane == 0) space.weights[warp] = merged.weight, space.mosts[warp] = merged.most;
  __syncthreads();
  // A warp adds up eight chunks of a unit, 64 dims, two a lane.
  const int slice_shift = kMaxPieceShift - cut.piece_shift;
#pragma unroll 1
  for (int i = warp; i < kCombineWarps << slice_shift >> cut.warp_shift; i += kCombineWarps) {
    const int unit = i >> slice_shift, slice = i & (1 << slice_shift) - 1, w0 = unit << cut.warp_shift;
    const int chunk = cut.first_chunk(unit) + 8 * slice;
    if (chunk >= rows * kRowChunks) return;
    // Lane w: factor of warp w0 + w.
    const float own = lane < unit_warps ? space.mosts[w0 + lane] : -INFINITY, most = warp_max(own);
    const float factor = own == -INFINITY ? 0.f : exp2_approx(own - most);
    const float weight = warp_sum(lane < unit_warps ? factor * space.weights[w0 + lane] : 0.f);
    const float* at = &space.sums[w0][lane / 4 * kSumStride + 8 * slice + 2 * (lane % 4)];
    float2 sum = {0.f, 0.f};
#pragma unroll 1
    for (int first = 0; first < unit_warps << cut.piece_shift; first += 4) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {  // group `first + k` of all warps'
        const int w = first + k >> cut.piece_shift, of = first + k & (1 << cut.piece_shift) - 1;
        const float f = __shfl_sync(0xffffffffu, factor, w);
        const float2 term = *reinterpret_cast<const float2*>(at + w * 8 * kSumStride + (of << cut.chunk_shift()));
        sum.x = fmaf(f, term.x, sum.x);
        sum.y = fmaf(f, term.y, sum.y);
      }
    }
    const int64_t to = first_row + chunk / kRowChunks;
    const int dim = dim_of(chunk % kRowChunks / 8, lane / 8, lane / 4 % 2, 2 * (lane % 4));
    const ClosedRow closed(p, count, most, weight);
    *reinterpret_cast<__nv_bfloat162*>(p.out + to * kLatentDim + dim) =
        __floats2bfloat162_rn(sum.x * closed.scale, sum.y * closed.scale);
    if (dim == 0) p.lse[to] = closed.lse;
  }
}

}  // namespace treemla
