// Tree-verify MLA attention over one row block and one part of the KV.
//
// Grid: x = row block of the request (kRows of its T*H query rows), y = part of the plan. CTAs of one part are
// neighbours and read the same KV, so all but the first find it in L2. A CTA walks the pieces of its part: four
// producer warps gather KV rows into a ring of stages, eight consumer warps compute.
//
// The query rows are the *columns* of both products, so they pad to 8 and not to 16, and a shared-memory KV row
// serves twice:
//   S^T[token][row] = K Q^T    K row-major by ldmatrix; each warp owns 16 tokens x 144 of the 576 dims, Q in registers
//   O^T[dim][row]  += V^T P^T  V = the row's first 512, transposed by ldmatrix; each warp owns 64 dims, O in registers
// Between them, per tile of 32 tokens: partial scores through shared memory, then warp w does the softmax of rows
// w, w+8, ... with one token a lane, and writes P and the rescale factor back.
//
// Who waits for whom, tile i in stage i % kStages:
//   full[stage]    128 producer threads arrive, each when its copies have landed; consumers wait before reading K
//   empty[stage]   8 consumer warps arrive after reading V; producers wait before copying over it
//   consumers()    scores of a tile are complete, and so is everything the consumers wrote before them
#pragma once
#include <climits>

#include "ptx.cuh"
#include "tile.cuh"

namespace treemla {

constexpr float kLowestScore = -1e30f;  // finite, so that exp2(old max - new max) never sees inf - inf
constexpr float kLn2 = 0.6931471805599453f;
constexpr int kChunksAThread = kHeadDim * 2 / 16 / 8;  // 8 threads copy a row, 16 bytes at a time
constexpr int kSlotBatchTiles = 4;                     // a producer warp's 8 rows of 4 tiles: one slot a lane
constexpr int kNoSlot = INT_MIN;                       // a token that nobody sees, or behind the piece

// What a row whose slot lies outside the pool is filled with: the fault shows as NaN and nothing outside is read.
__device__ const uint4 kNanChunk = {0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu};

// Maximum over the warp. Floats order like their bits with the magnitude of negatives flipped.
__device__ __forceinline__ float warp_max(float x) {
  int bits = __float_as_int(x);
  bits ^= (bits >> 31) & 0x7fffffff;
  bits = __reduce_max_sync(0xffffffffu, bits);
  bits ^= (bits >> 31) & 0x7fffffff;
  return __int_as_float(bits);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

__device__ __forceinline__ int tiles_of(const Piece& piece) {
  return (max(0, piece.kv_end - piece.kv_begin) + kTileTokens - 1) / kTileTokens;
}

// The ring's position: producer and consumers step through the same tiles, across pieces.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// Byte offsets in a CTA's dynamic shared memory.
template <int kRowsOfBlock>
struct SharedLayout {
  static constexpr int kRows = kRowsOfBlock;
  static constexpr int kStages = stages(kRows);
  static constexpr int kScores = kStages * kStageBytes;                                    // KV stages come first
  static constexpr int kProbs = kScores + kBuffers * kKSplits * kRows * kScoreStride * 4;  // [kBuffers][kRows][kProbStride]
  static constexpr int kScale = kProbs + kBuffers * kRows * kProbStride * 2;               // [kBuffers][kRows]
  static constexpr int kFull = kScale + kBuffers * kRows * 4;                              // barriers [kMaxStages]
  static constexpr int kEmpty = kFull + 8 * kMaxStages;
  static_assert(!kOverlap || kStages >= 4);
  static_assert(kEmpty + 8 * kMaxStages <= kSharedLimitBytes);
};

// ---- producer ------------------------------------------------------------------------------------------------------

template <class Layout>
struct Producer {
  const VerifyParams& p;
  const uint32_t kv, full, empty;  // shared addresses: stages [kStages][32][kKvRowBytes], barriers [kMaxStages]
  const int warp = threadIdx.x / 32 - kWarps, lane = threadIdx.x % 32;
  RingPosition<Layout::kStages> at;

  __device__ Producer(const VerifyParams& params, char* shared)
      : p(params), kv(shared_address(shared)), full(kv + Layout::kFull), empty(kv + Layout::kEmpty) {}

  // Tree tokens that some row of the request sees. The others are not read: their slots may hold anything.
  __device__ uint64_t visible_tree(const Piece& piece, int committed) const {
    if (!p.words || piece.kv_end <= committed) return ~0ull;
    uint64_t seen = 0;
    for (int i = lane; i < p.tree_tokens; i += 32) seen |= p.words[int64_t(piece.request) * p.tree_tokens + i];
    const uint32_t high = __reduce_or_sync(0xffffffffu, uint32_t(seen >> 32));
    return uint64_t(high) << 32 | __reduce_or_sync(0xffffffffu, uint32_t(seen));
  }

  __device__ void run(const Piece piece) {
    const int tiles = tiles_of(piece), committed = p.committed[piece.request];
    const int64_t first = load_index(p.slots.row, piece.request, p.slots.row_is_64) * p.slots.stride;
    const uint64_t visible = visible_tree(piece, committed);
    // Lane l: slot of tile `tile` + l / 8, this warp's row l % 8 of it: rows 4 warp .. + 3 and 16 + 4 warp .. + 3.
    auto load_slots = [&](int tile) {
      const int row = (lane & 4) * 4 + 4 * warp + (lane & 3);
      const int token = piece.kv_begin + (tile + lane / 8) * kTileTokens + row;
      if (token >= piece.kv_end || (token >= committed && !(visible >> (token - committed) & 1))) return kNoSlot;
      const int64_t slot = load_index(p.slots.index, first + token, p.slots.index_is_64);
      return slot >= 0 && slot < p.num_slots ? int(slot) : -1;
    };
    int slots = load_slots(0), next_slots = load_slots(kSlotBatchTiles);
    for (int tile = 0; tile < tiles; ++tile, at.advance()) {
      barrier_wait(empty + 8 * at.stage, at.parity ^ 1);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        copy_row(16 * half + 4 * warp + lane / 8, __shfl_sync(0xffffffffu, slots, tile % kSlotBatchTiles * 8 + half * 4 + lane / 8));
      arrive_after_copies(full + 8 * at.stage);
      if (tile % kSlotBatchTiles == kSlotBatchTiles - 1) {
        slots = next_slots;
        next_slots = load_slots(tile + 1 + kSlotBatchTiles);
      }
    }
  }

  // A row without a slot is zeroed, so that 0 * garbage is not NaN.
  __device__ void copy_row(int row, int slot) {
    const uint32_t to = kv + at.stage * kStageBytes + row * kKvRowBytes + lane % 8 * 16;
    const auto* from = reinterpret_cast<const char*>(p.kv + int64_t(max(slot, 0)) * p.kv_stride) + lane % 8 * 16;
    const bool outside = slot < 0 && slot != kNoSlot;
    if (outside) from = reinterpret_cast<const char*>(&kNanChunk);
    const int step_bytes = outside ? 0 : 128;
#pragma unroll
    for (int i = 0; i < kChunksAThread; ++i) copy_16_bytes(to + i * 128, from + i * step_bytes, slot != kNoSlot);
  }
};

// ---- consumers -----------------------------------------------------------------------------------------------------

template <int kRowTiles>
struct Consumer {
  using Layout = SharedLayout<kRowTiles * kRowTile>;
  static constexpr int kRows = Layout::kRows;
  // Q passes into registers through the scores' and probabilities' buffers, in as many passes as they need.
  static constexpr int kQueryPasses = kRows * kKvRowBytes <= Layout::kScale - Layout::kScores ? 1 : 2;
  static constexpr int kQueryRowBytes = kHeadDim * 2 / kQueryPasses + 16;  // 73 or 37 times 16

  static constexpr int kAhead = 2;  // KV fragments loaded ahead of their mma: ldmatrix takes about 30 clocks

  const VerifyParams& p;
  char* const kv;              // [kStages][32][kKvRowBytes]
  float* const scores;         // [kBuffers][kKSplits][kRows][kScoreStride]
  __nv_bfloat16* const probs;  // [kBuffers][kRows][kProbStride]
  float* const scale;          // [kBuffers][kRows]: factor that brings older accumulators to the tile's maximum
  const uint32_t full, empty;  // barriers [kMaxStages]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, pair = lane % 4;       // the fragment coordinates
  const int row0 = blockIdx.x * kRows;               // first query row of the block
  RingPosition<Layout::kStages> at, behind;          // next tiles whose K and whose V is read

  int request, committed, kv_begin, kv_end;
  uint64_t row_word;  // lane j: tree word of this warp's softmax row warp + 8 j

  uint32_t q[kKSteps][kRowTiles][2];
  float o[4][kRowTiles][4];
  float row_max[kRowTiles], row_sum[kRowTiles];

  __device__ Consumer(const VerifyParams& params, char* shared)
      : p(params),
        kv(shared),
        scores(reinterpret_cast<float*>(shared + Layout::kScores)),
        probs(reinterpret_cast<__nv_bfloat16*>(shared + Layout::kProbs)),
        scale(reinterpret_cast<float*>(shared + Layout::kScale)),
        full(shared_address(shared) + Layout::kFull),
        empty(shared_address(shared) + Layout::kEmpty) {}

  static __device__ void consumers() { named_barrier<1, 32 * kWarps>(); }

  __device__ uint64_t tree_word(int row) const {
    const int token = row / p.heads;
    if (token >= p.tree_tokens) return 0;
    return p.words ? p.words[int64_t(request) * p.tree_tokens + token] : ~0ull >> (63 - token);
  }

  // Rows behind T*H are zero.
  __device__ void load_query() {
    char* staged = reinterpret_cast<char*>(scores);
    constexpr int kColumns = kHeadDim / kQueryPasses;
#pragma unroll
    for (int pass = 0; pass < kQueryPasses; ++pass) {
      for (int row = threadIdx.x / 8; row < kRows; row += 32 * kWarps / 8) {
        const bool held = row0 + row < p.tree_tokens * p.heads;
        const int64_t token = int64_t(request) * p.tree_tokens + (held ? (row0 + row) / p.heads : 0);
        const int64_t head = held ? (row0 + row) % p.heads : 0;
        const auto* latent = p.q_latent + token * p.q_latent_token_stride + head * p.q_latent_head_stride;
        const auto* rope = p.q_rope + token * p.q_rope_token_stride + head * p.q_rope_head_stride;
        for (int column = threadIdx.x % 8 * 8; column < kColumns; column += 64) {
          const int dim = pass * kColumns + column;
          const auto* from = dim < kLatentDim ? latent + dim : rope + (dim - kLatentDim);
          copy_16_bytes(shared_address(staged + row * kQueryRowBytes + column * 2), from, held);
        }
      }
      wait_copies();
      consumers();  // this pass of Q has arrived
      const int split = warp % kKSplits - pass * kKSplits / kQueryPasses;
      if (split >= 0 && split < kKSplits / kQueryPasses) read_query(staged, split);
      consumers();  // and is read
    }
  }

  __device__ void read_query(const char* staged, int split) {
    const uint32_t base = shared_address(staged) + lane % 8 * kQueryRowBytes + split * kKSteps * 32 + (lane / 8 & 1) * 16;
#pragma unroll
    for (int k = 0; k < kKSteps; ++k)
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n)
        ldmatrix_x2(q[k][n][0], q[k][n][1], base + n * kRowTile * kQueryRowBytes + k * 32);
  }

  // ---- one tile

  __device__ void scores_of_next(int buffer) {
    barrier_wait(full + 8 * at.stage, at.parity);
    const int split = warp % kKSplits, tokens = warp / kKSplits * 16;
    const uint32_t base = shared_address(kv + at.stage * kStageBytes) + (tokens + lane % 16) * kKvRowBytes +
                          split * kKSteps * 32 + lane / 16 * 16;
    float s[kRowTiles][4] = {};
    uint32_t a[kAhead + 1][4];
#pragma unroll
    for (int k = 0; k < kKSteps + kAhead; ++k) {
      if (k < kKSteps) ldmatrix_x4(a[k % (kAhead + 1)], base + k * 32);
      if (k < kAhead) continue;
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) mma_16x8x16(s[n], a[(k - kAhead) % (kAhead + 1)], q[k - kAhead][n][0], q[k - kAhead][n][1]);
    }
    float* to = scores + ((buffer * kKSplits + split) * kRows + 2 * pair) * kScoreStride + tokens + group;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      float* row = to + n * kRowTile * kScoreStride;
      row[0] = s[n][0];
      row[kScoreStride] = s[n][1];
      row[8] = s[n][2];
      row[kScoreStride + 8] = s[n][3];
    }
    at.advance();
  }

  // Warp w: rows w, w + 8, ...; a token a lane. The rows go side by side, for their latencies to overlap.
  __device__ void softmax_of(int tile, int buffer) {
    float s[kRowTiles];
    const float* from = scores + (buffer * kKSplits * kRows + warp) * kScoreStride + lane;
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      s[j] = from[8 * j * kScoreStride];
#pragma unroll
      for (int split = 1; split < kKSplits; ++split) s[j] += from[(split * kRows + 8 * j) * kScoreStride];
      s[j] *= p.score_scale;
    }
    if (kv_begin + (tile + 1) * kTileTokens > min(committed, kv_end)) hide(s, kv_begin + tile * kTileTokens + lane);
    float factor[kRowTiles];
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const float most = fmaxf(row_max[j], warp_max(s[j]));
      factor[j] = exp2_approx(row_max[j] - most);
      s[j] = exp2_approx(s[j] - most);
      row_sum[j] = row_sum[j] * factor[j] + s[j];
      row_max[j] = most;
    }
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      probs[(buffer * kRows + warp + 8 * j) * kProbStride + lane] = __float2bfloat16_rn(s[j]);
      if (lane == 0) scale[buffer * kRows + warp + 8 * j] = factor[j];
    }
  }

  __device__ void hide(float (&s)[kRowTiles], int token) const {
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const uint64_t word = __shfl_sync(0xffffffffu, row_word, j);
      if (token >= kv_end || (token >= committed && !(word >> (token - committed) & 1))) s[j] = -INFINITY;
    }
  }

  __device__ void rescale(int buffer) {
    float2 factor[kRowTiles];
    bool moved = false;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      factor[n] = *reinterpret_cast<const float2*>(&scale[buffer * kRows + 8 * n + 2 * pair]);
      moved |= factor[n].x != 1.f || factor[n].y != 1.f;
    }
    if (!__any_sync(0xffffffffu, moved)) return;
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) o[m][n][c] *= c & 1 ? factor[n].y : factor[n].x;
  }

  __device__ void accumulate_next(int buffer) {
    rescale(buffer);
    uint32_t b[kRowTiles][4];
    const uint32_t prob = shared_address(probs + (buffer * kRows + lane % 8) * kProbStride + lane / 8 * 8);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) ldmatrix_x4(b[n], prob + n * kRowTile * kProbStride * 2);
    const uint32_t value = shared_address(kv + behind.stage * kStageBytes) + (lane % 8 + lane / 16 * 8) * kKvRowBytes +
                           warp * 128 + (lane / 8 & 1) * 16;
    uint32_t a[kAhead + 1][4];
    constexpr int kSteps = kTileTokens / 16 * 4;  // step i: tokens 16 (i / 4) and on, dims 16 (i % 4) and on
#pragma unroll
    for (int i = 0; i < kSteps + kAhead; ++i) {
      if (i < kSteps) ldmatrix_x4_trans(a[i % (kAhead + 1)], value + i / 4 * 16 * kKvRowBytes + i % 4 * 32);
      if (i < kAhead) continue;
      const int k = (i - kAhead) / 4, m = (i - kAhead) % 4;
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) mma_16x8x16(o[m][n], a[(i - kAhead) % (kAhead + 1)], b[n][2 * k], b[n][2 * k + 1]);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + 8 * behind.stage);
    behind.advance();
  }

  // ---- one piece

  __device__ void run(const Piece piece) {
    request = piece.request;
    kv_begin = piece.kv_begin;
    kv_end = piece.kv_end;
    committed = p.committed[request];
    row_word = lane < kRowTiles ? tree_word(row0 + warp + 8 * lane) : 0;
    load_query();
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) o[m][n][c] = 0.f;
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) row_max[j] = kLowestScore, row_sum[j] = 0.f;

    const int tiles = tiles_of(piece);
    if constexpr (kOverlap) walk_overlapped(tiles);
    else walk(tiles);
    finish(piece.slot);
  }

  __device__ void walk(int tiles) {
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      scores_of_next(0);
      consumers();
      softmax_of(i, 0);
      consumers();  // probabilities are complete
      accumulate_next(0);
    }
  }

  // Iteration i: scores of tile i + 1, a barrier, softmax of tile i + 1 and PV of tile i. One of the two warps on each
  // sub-partition does the softmax first and the other last, so that it hides behind the neighbour's mma.
  __device__ void walk_overlapped(int tiles) {
#pragma unroll 1
    for (int i = -1; i < tiles; ++i) {
      const bool more = i + 1 < tiles;
      if (more) scores_of_next((i + 1) & 1);
      consumers();
      if (more && warp < kWarps / 2) softmax_of(i + 1, (i + 1) & 1);
      if (i >= 0) accumulate_next(i & 1);
      if (more && warp >= kWarps / 2) softmax_of(i + 1, (i + 1) & 1);
    }
  }

  // ---- results

  __device__ void finish(int partial_slot) {
    const int rows = p.tree_tokens * p.heads;
    const int64_t first_partial = (int64_t(partial_slot) * gridDim.x + blockIdx.x) * kRows;
    consumers();  // everyone is done with the rescale factors
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const int row = warp + 8 * j;
      const float sum = warp_sum(row_sum[j]);
      if (lane) continue;
      const float lse = sum == 0.f ? -INFINITY : row_max[j] + log2f(sum);
      scale[row] = sum == 0.f ? 0.f : p.v_scale / sum;
      if (partial_slot != kDirect) p.partial_lse[first_partial + row] = lse;
      else if (row0 + row < rows) p.lse[int64_t(request) * rows + row0 + row] = lse * kLn2;
    }
    consumers();  // the final factors are complete
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const int row = 8 * n + 2 * pair;
      const float2 factor = *reinterpret_cast<const float2*>(&scale[row]);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float x = o[m][n][2 * half] * factor.x, y = o[m][n][2 * half + 1] * factor.y;
          const int dim = warp * 64 + m * 16 + half * 8 + group;
          if (partial_slot != kDirect) {
            float* to = p.partial_out + (first_partial + row) * kLatentDim + dim;
            to[0] = x;
            to[kLatentDim] = y;
          } else {
            store_direct(int64_t(request) * rows + row0, row, dim, x, y, rows - row0);
          }
        }
      }
    }
  }

  // Lanes of dims d and d+1 trade values, so that each stores two neighbouring dims of one row.
  __device__ void store_direct(int64_t first_row, int row, int dim, float x, float y, int rows_left) const {
    const bool odd = group & 1;
    const float traded = __shfl_xor_sync(0xffffffffu, odd ? x : y, 4);
    const int mine = row + odd;
    if (mine >= rows_left) return;
    const __nv_bfloat162 both = odd ? __floats2bfloat162_rn(traded, y) : __floats2bfloat162_rn(x, traded);
    *reinterpret_cast<__nv_bfloat162*>(p.out + (first_row + mine) * kLatentDim + (dim & ~1)) = both;
  }
};

template <int kRowTiles>
__device__ __forceinline__ void verify(const VerifyParams& p) {
  using Layout = SharedLayout<kRowTiles * kRowTile>;
  allow_dependents();
  extern __shared__ __align__(128) char shared[];
  if (threadIdx.x < Layout::kStages) {
    barrier_init(shared_address(shared) + Layout::kFull + 8 * threadIdx.x, 32 * kProducers);
    barrier_init(shared_address(shared) + Layout::kEmpty + 8 * threadIdx.x, kWarps);
  }
  __syncthreads();
  const int end = p.part_ptr[blockIdx.y + 1];
  if (threadIdx.x >= 32 * kWarps) {
    release_registers<40>();
    Producer<Layout> producer(p, shared);
    for (int i = p.part_ptr[blockIdx.y]; i < end; ++i) producer.run(p.pieces[i]);
    wait_copies();
  } else {
    claim_registers<232>();  // with the producers' 40: what 384 threads were launched with, 168 each
    Consumer<kRowTiles> consumer(p, shared);
    for (int i = p.part_ptr[blockIdx.y]; i < end; ++i) consumer.run(p.pieces[i]);
  }
}

}  // namespace treemla
