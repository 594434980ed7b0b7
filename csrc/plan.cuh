// The device planner: one CTA writes the schedule of a step. src/treemla/schedule.py says what it computes and
// mirrors it integer for integer; the names agree. Every step is a parallel search or a prefix sum, so a batch of
// 4,096 costs little more than one request.
#pragma once
#include "tile.cuh"

namespace treemla {

constexpr int kPlanThreads = 256;

// a[0 .. count-1] becomes its exclusive prefix sum, a[count] the total. Not inlined: each instruction that a step runs
// once is a read of its code from memory.
__noinline__ __device__ void prefix_sum(int32_t* a, int count) {
  __shared__ int32_t warp_total[kPlanThreads / 32];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  int32_t carried = 0;
  for (int first = 0; first < count; first += kPlanThreads) {
    const int32_t mine = first + thread < count ? a[first + thread] : 0;
    int32_t sum = mine;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, sum, offset);
      if (lane >= offset) sum += other;
    }
    if (lane == 31) warp_total[warp] = sum;
    __syncthreads();
    int32_t before = 0, all = 0;
#pragma unroll
    for (int w = 0; w < kPlanThreads / 32; ++w) {
      if (w < warp) before += warp_total[w];
      all += warp_total[w];
    }
    if (first + thread < count) a[first + thread] = carried + before + sum - mine;
    carried += all;
    __syncthreads();
  }
  if (thread == 0) a[count] = carried;
  __syncthreads();
}

// Number of entries of the sorted a[0 .. count-1] that are below x.
__device__ __forceinline__ int lower_bound(const int32_t* a, int count, int32_t x) {
  int low = 0;
  while (count > 0) {
    const int half = count / 2;
    if (a[low + half] < x) low += half + 1, count -= half + 1;
    else count = half;
  }
  return low;
}

__device__ __forceinline__ int32_t committed_tokens(const PlanParams& p, int request) {
  int64_t n = load_index(p.seq_lens, request, p.seq_lens_is_64) - p.tail;
  if (n < 0) n = 0;
  int64_t capacity = p.capacity;
  if (p.slots_are_ranges) {
    const int64_t held = load_index(p.slots.row, request + 1, p.slots.row_is_64) -
                         load_index(p.slots.row, request, p.slots.row_is_64);
    capacity = held < capacity ? held : capacity;
  }
  return n > capacity - p.tree_tokens ? kOverlong : int32_t(n);
}

__device__ __forceinline__ int32_t held_tiles(const PlanParams& p, int32_t committed) {
  return committed == kOverlong ? 0 : (committed + p.tree_tokens - 1 >> p.tile_shift) + 1;
}

__device__ void plan_fixed(const PlanParams& p, const int32_t* committed, int32_t* first_piece) {
  for (int r = threadIdx.x; r < p.batch; r += kPlanThreads) {
    const int32_t n = committed[r];
    first_piece[r] = n == kOverlong ? 0 : max(1, (n + p.split_tokens - 1) / p.split_tokens);
  }
  __syncthreads();
  prefix_sum(first_piece, p.batch);
  const int32_t count = first_piece[p.batch];
  for (int r = threadIdx.x; r <= p.batch; r += kPlanThreads) p.request_ptr[r] = first_piece[r];
  const auto piece = [&](int i) {
    const int request = lower_bound(first_piece, p.batch + 1, i + 1) - 1;
    const int nth = i - first_piece[request], own = first_piece[request + 1] - first_piece[request];
    const int end = nth + 1 < own ? (nth + 1) * p.split_tokens : committed[request] + p.tree_tokens;
    return Piece{request, nth * p.split_tokens, end, own == 1 ? kDirect : i};
  };
  for (int i = threadIdx.x; i < count; i += kPlanThreads) p.pieces[i] = piece(i);
  for (int i = threadIdx.x; i < p.parts; i += kPlanThreads) {
    const int first = int64_t(i) * count / p.parts, end = int64_t(i + 1) * count / p.parts;
    p.part_work[i] = PartWork{first < end ? piece(first) : Piece{}, first, end, 1, 0};
  }
}

// Shared memory, int32: committed, line_begin, first_piece and first_cut [B+1]; cut_request, cut_tile, cuts_before and
// edge [parts+2]. Behind launch.plan_shared_bytes.
__host__ __device__ constexpr int plan_shared_bytes(int batch, int parts) { return 4 * (4 * (batch + 1) + 4 * (parts + 2)); }

__device__ void plan_balanced(const PlanParams& p, const int32_t* committed, int32_t* shared) {
  const int batch = p.batch, thread = threadIdx.x;
  int32_t* line_begin = shared;
  int32_t* first_piece = line_begin + batch + 1;
  int32_t* first_cut = first_piece + batch + 1;  // effective cuts before the request
  int32_t* cut_request = first_cut + batch + 1;
  int32_t* cut_tile = cut_request + p.parts + 2;
  int32_t* cuts_before = cut_tile + p.parts + 2;   // effective cuts before the part
  int32_t* edge = cuts_before + p.parts + 2;       // tile of the nth effective cut

  for (int r = thread; r < batch; r += kPlanThreads)
    line_begin[r] = held_tiles(p, committed[r]) + p.overhead_tiles;
  __syncthreads();
  prefix_sum(line_begin, batch);
  const int32_t total = line_begin[batch] - p.overhead_tiles;
  const auto within = [&](int32_t tiles) { return tiles > 0 && total <= tiles; };
  const int shares = within(p.third_tiles) ? 3 : within(p.halved_tiles) ? 2 : 1;  // of a row block
  const int parts = p.parts / shares;
  const int32_t part_tiles = max(kMinPartTokens >> p.tile_shift, (total + parts - 1) / parts);

  for (int i = thread; i <= parts; i += kPlanThreads) {
    int request = i == parts ? batch : lower_bound(line_begin, batch + 1, i * part_tiles + 1) - 1;
    int tile = 0;
    if (request < batch) {
      tile = i * part_tiles - line_begin[request];
      if (tile >= held_tiles(p, committed[request])) request += 1, tile = 0;
      else tile = min(tile, committed[request] >> p.tile_shift);
    }
    cut_request[i] = request;
    cut_tile[i] = tile;
  }
  __syncthreads();
  auto effective = [&](int i) {
    return 0 < i && i < parts && cut_tile[i] > 0 &&
           (cut_request[i] != cut_request[i - 1] || cut_tile[i] != cut_tile[i - 1]);
  };
  for (int i = thread; i <= parts; i += kPlanThreads) cuts_before[i] = effective(i);
  __syncthreads();
  prefix_sum(cuts_before, parts + 1);
  for (int i = thread; i < parts; i += kPlanThreads)
    if (effective(i)) edge[cuts_before[i]] = cut_tile[i];
  for (int r = thread; r <= batch; r += kPlanThreads)
    first_cut[r] = cuts_before[lower_bound(cut_request, parts + 1, r)];
  __syncthreads();
  for (int r = thread; r < batch; r += kPlanThreads)
    first_piece[r] = (committed[r] != kOverlong) + first_cut[r + 1] - first_cut[r];
  __syncthreads();
  prefix_sum(first_piece, batch);

  for (int r = thread; r <= batch; r += kPlanThreads) p.request_ptr[r] = first_piece[r];
  const int32_t pieces = first_piece[batch], left = shares * parts + thread;  // CTAs of no part
  if (left < p.parts) p.part_work[left] = PartWork{Piece{}, pieces, pieces, shares, thread};
  // A piece is the first of a part or of a request, mostly of one of them.
  const auto begin = [&](int part) {
    const int r = cut_request[part];
    return first_piece[r] + cuts_before[part] - first_cut[r] + effective(part);
  };
  for (int i = thread; i < parts + batch; i += kPlanThreads) {
    const bool is_part = i < parts;
    int r = is_part ? cut_request[i] : i - parts;
    const int at = is_part ? begin(i) : first_piece[r], end = is_part ? begin(i + 1) : first_piece[r + 1];
    Piece piece{};
    if (at < end) {
      while (first_piece[r + 1] <= at) ++r;  // a request without pieces was cut
      const int nth = at - first_piece[r], cut = first_cut[r] + nth, last_cut = first_cut[r + 1];  // effective ones
      piece = Piece{r, nth == 0 ? 0 : edge[cut - 1] << p.tile_shift,
                    cut == last_cut ? committed[r] + p.tree_tokens : edge[cut] << p.tile_shift,
                    first_cut[r] == last_cut ? kDirect : nth == 0 ? 2 * cut : 2 * cut - 1};
      p.pieces[at] = piece;
    }
    if (!is_part) continue;
#pragma unroll 1
    for (int share = 0; share < shares; ++share) p.part_work[shares * i + share] = PartWork{piece, at, end, shares, share};
  }
}

__device__ __forceinline__ void plan(const PlanParams& p) {
  extern __shared__ int32_t plan_shared[];
  int32_t* committed = plan_shared;
  for (int r = threadIdx.x; r < p.batch; r += kPlanThreads) p.committed[r] = committed[r] = committed_tokens(p, r);
  __syncthreads();
  if (p.split_tokens) plan_fixed(p, committed, committed + p.batch + 1);
  else plan_balanced(p, committed, committed + p.batch + 1);
}

}  // namespace treemla
