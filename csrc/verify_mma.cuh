// Tree-verify MLA attention over one row block and one part of the KV, by mma.sync: the path of sm_120.
//
// Grid: x = row block of the request (kRows of its T*H query rows), y = part of the plan. CTAs of one part are
// neighbours and read the same KV, so all but the first find it in L2. A CTA walks the pieces of its part: four
// producer warps gather KV rows into a ring of two stages, eight consumer warps compute.
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
//   (e4m3 rows: when it has stored them, widened)
//   empty[stage]   256 consumer threads arrive after reading V; producers wait before copying over it
//   consumers()    scores, then probabilities of a tile are complete, and everything the consumers wrote before them
#pragma once
#include "fp8.cuh"
#include "work.cuh"

namespace treemla {

constexpr int kChunksAThread = kHeadDim * 2 / 16 / 8;  // 8 threads copy a row, 16 bytes at a time
// Registers a thread: together what the launch takes, 168 each; a claim beyond it would wait forever.
constexpr int kConsumerRegisters = 224, kProducerRegisters = 56;
static_assert(kWarps * kConsumerRegisters + kProducers * kProducerRegisters <= (kWarps + kProducers) * launch_registers(kThreads));

constexpr int kSlotBatchTiles = 4;                     // a producer warp's 8 rows of 4 tiles: one slot a lane

// Byte offsets in a CTA's dynamic shared memory.
template <int kRowsOfBlock>
struct MmaLayout {
  static constexpr int kRows = kRowsOfBlock;
  static constexpr int kScores = kStages * kStageBytes;                       // float [kKSplits][kRows][kScoreStride]
  static constexpr int kProbs = kScores + kKSplits * kRows * kScoreStride * 4;  // bf16 [kRows][kProbStride]
  static constexpr int kScale = kProbs + kRows * kProbStride * 2;               // float [kRows]
  static constexpr int kFull = kScale + kRows * 4;                              // barriers [kStages]
  static constexpr int kEmpty = kFull + 8 * kStages;
  static constexpr int kBytes = kEmpty + 8 * kStages;
  static_assert(kBytes <= 101376, "a block of sm_120 has no more");
};

// ---- producer ------------------------------------------------------------------------------------------------------

template <class Layout>
struct MmaProducer {
  const VerifyParams& p;
  const uint32_t base;  // shared address
  const int64_t row_of_0;
  const int warp = threadIdx.x / 32 - kWarps, lane = threadIdx.x % 32;
  RingPosition at{kStages};

  __device__ void run(const Piece piece) {
    const int tiles = tiles_of(piece, kTileTokens);
    const SlotReader slots(p, piece, row_of_0);
    // Lane l: token of tile `tile` + l / 8, this warp's row l % 8 of it: rows 4 warp .. + 3 and 16 + 4 warp .. + 3.
    auto token_of = [&](int tile) { return (tile + lane / 8) * kTileTokens + (lane & 4) * 4 + 4 * warp + (lane & 3); };
    int next = slots.load(token_of(0));
    const Visible visible(p, piece.request);
#pragma unroll 1
    for (int first = 0; first < tiles; first += kSlotBatchTiles) {
      const int here = min(kSlotBatchTiles, tiles - first);
      int held = arrived(next);
      next = slots.load(token_of(first + kSlotBatchTiles));
      if (!visible.has(piece.kv_begin + token_of(first))) held = kNoSlot;
#pragma unroll 1
      for (int tile = 0; tile < here; ++tile, at.advance()) {
        barrier_wait(base + Layout::kEmpty + 8 * at.stage, at.parity ^ 1);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const SourceRow row(p, __shfl_sync(0xffffffffu, held, tile * 8 + half * 4 + lane / 8));
          const uint32_t to = base + at.stage * kStageBytes + (16 * half + 4 * warp + lane / 8) * kKvRowBytes;
#pragma unroll
          for (int i = 0; i < kChunksAThread; ++i) row.copy(to + (8 * i + lane % 8) * 16, (8 * i + lane % 8) * 16);
        }
        arrive_after_copies(base + Layout::kFull + 8 * at.stage);
      }
    }
  }
};

// Lane l of warp w: row 8 w + l / 4 of every tile, its 16-byte columns l % 4, l % 4 + 4, ... of e4m3. Chunks are loaded
// kAhead before they are stored, across tiles.
template <class Layout>
struct MmaFp8Producer {
  static constexpr int kChunks = kHeadDim / 16 / 4, kAhead = 3;
  static_assert(kChunks % kAhead == 0);
  const VerifyParams& p;
  const uint32_t base;  // shared address
  const int64_t row_of_0;
  const int warp = threadIdx.x / 32 - kWarps, lane = threadIdx.x % 32;
  RingPosition at{kStages};

  __device__ void run(const Piece piece) {
    const int tiles = tiles_of(piece, kTileTokens);
    const SlotReader slots(p, piece, row_of_0);
    const int token = 8 * warp + lane % 8;
    int slot = slots.load(token);  // lane l: of this warp's row l % 8 of the tile whose loads are due next
    const Visible visible(p, piece.request);
    auto row_of = [&](int tile) {
      if (!visible.has(piece.kv_begin + tile * kTileTokens + token)) slot = kNoSlot;
      const char* row = fp8_row(p, __shfl_sync(0xffffffffu, slot, lane / 4)) + lane % 4 * 16;
      slot = slots.load((tile + 1) * kTileTokens + token);
      return row;
    };
    const char* row = row_of(0);
    uint4 held[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) held[i] = load_16_bytes(row + 64 * i);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile, at.advance()) {
      const char* next_row = row_of(tile + 1);  // behind the piece: zeros
      barrier_wait(base + Layout::kEmpty + 8 * at.stage, at.parity ^ 1);
      const uint32_t to = base + at.stage * kStageBytes + (8 * warp + lane / 4) * kKvRowBytes + lane % 4 * 32;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        store_widened(to + 128 * i, to + 128 * i + 16, held[i % kAhead]);
        held[i % kAhead] = load_16_bytes((i + kAhead < kChunks ? row : next_row) + (i + kAhead) % kChunks * 64);
      }
      row = next_row;
      barrier_arrive(base + Layout::kFull + 8 * at.stage);
    }
  }
};

// ---- consumers -----------------------------------------------------------------------------------------------------

template <int kRowTiles>
struct MmaConsumer {
  using Layout = MmaLayout<kRowTiles * kRowTile>;
  static constexpr int kRows = Layout::kRows;
  // Q passes into registers through the scores' and probabilities' buffers, half of its dims at a time.
  static constexpr int kQueryPasses = 2;
  static constexpr int kQueryRowBytes = kHeadDim * 2 / kQueryPasses + 16;  // 37 * 16: odd, as a KV row's
  static_assert(kRows * kQueryRowBytes <= Layout::kScale - Layout::kScores);

  static constexpr int kAhead = 2;  // KV fragments loaded ahead of their mma: ldmatrix takes about 30 clocks

  const VerifyParams& p;
  char* const kv;              // [kStages][32][kKvRowBytes]
  float* const scores;         // [kKSplits][kRows][kScoreStride]
  __nv_bfloat16* const probs;  // [kRows][kProbStride]
  float* const scale;          // [kRows]: factor that brings older accumulators to the tile's maximum
  const uint32_t full, empty;  // barriers [kStages]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, pair = lane % 4;       // the fragment coordinates
  const int row0 = blockIdx.x * kRows;               // first query row of the block
  RingPosition at{kStages};                          // the tile in work

  int request, committed, kv_begin, kv_end;
  uint64_t row_word;  // lane j: tree word of this warp's softmax row warp + 8 j

  uint32_t q[kKSteps][kRowTiles][2];
  float o[4][kRowTiles][4];
  float row_max[kRowTiles], row_sum[kRowTiles];

  __device__ MmaConsumer(const VerifyParams& params, char* shared)
      : p(params),
        kv(shared),
        scores(reinterpret_cast<float*>(shared + Layout::kScores)),
        probs(reinterpret_cast<__nv_bfloat16*>(shared + Layout::kProbs)),
        scale(reinterpret_cast<float*>(shared + Layout::kScale)),
        full(shared_address(shared) + Layout::kFull),
        empty(shared_address(shared) + Layout::kEmpty) {}

  static __device__ void consumers() { named_barrier<1, 32 * kWarps>(); }

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

  __device__ void score() {
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
    float* to = scores + (split * kRows + 2 * pair) * kScoreStride + tokens + group;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      float* row = to + n * kRowTile * kScoreStride;
      row[0] = s[n][0];
      row[kScoreStride] = s[n][1];
      row[8] = s[n][2];
      row[kScoreStride + 8] = s[n][3];
    }
  }

  // Warp w: rows w, w + 8, ...; a token a lane. The rows go side by side, for their latencies to overlap.
  __device__ void softmax(int tile) {
    float s[kRowTiles];
    const float* from = scores + warp * kScoreStride + lane;
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
      probs[(warp + 8 * j) * kProbStride + lane] = __float2bfloat16_rn(s[j]);
      if (lane == 0) scale[warp + 8 * j] = factor[j];
    }
  }

  __device__ void hide(float (&s)[kRowTiles], int token) const {
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const uint64_t word = __shfl_sync(0xffffffffu, row_word, j);
      if (token >= kv_end || (token >= committed && !(word >> (token - committed) & 1))) s[j] = -INFINITY;
    }
  }

  __device__ void rescale() {
    float2 factor[kRowTiles];
    bool moved = false;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      factor[n] = *reinterpret_cast<const float2*>(&scale[8 * n + 2 * pair]);
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

  __device__ void accumulate() {
    rescale();
    uint32_t b[kRowTiles][4];
    const uint32_t prob = shared_address(probs + lane % 8 * kProbStride + lane / 8 * 8);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) ldmatrix_x4(b[n], prob + n * kRowTile * kProbStride * 2);
    const uint32_t value = shared_address(kv + at.stage * kStageBytes) + (lane % 8 + lane / 16 * 8) * kKvRowBytes +
                           dim_of(warp, 0, lane / 8 & 1, 0) * 2;
    uint32_t a[kAhead + 1][4];
    constexpr int kSteps = kTileTokens / 16 * 4;  // step i: tokens 16 (i / 4) and on, block i % 4 of dims
#pragma unroll
    for (int i = 0; i < kSteps + kAhead; ++i) {
      if (i < kSteps) ldmatrix_x4_trans(a[i % (kAhead + 1)], value + i / 4 * 16 * kKvRowBytes + i % 4 * 256);
      if (i < kAhead) continue;
      const int k = (i - kAhead) / 4, m = (i - kAhead) % 4;
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) mma_16x8x16(o[m][n], a[(i - kAhead) % (kAhead + 1)], b[n][2 * k], b[n][2 * k + 1]);
    }
    barrier_arrive(empty + 8 * at.stage);  // every lane: racecheck does not see that one speaks for its warp
    at.advance();
  }

  // ---- one piece

  __device__ void run(const Piece piece) {
    request = piece.request;
    kv_begin = piece.kv_begin;
    kv_end = piece.kv_end;
    committed = p.committed[request];
    const int token = (row0 + warp + 8 * lane) / p.heads;
    row_word = lane < kRowTiles && token < p.tree_tokens ? tree_word(p, request, token) : 0;
    load_query();
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) o[m][n][c] = 0.f;
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) row_max[j] = kLowestScore, row_sum[j] = 0.f;

    const int tiles = tiles_of(piece, kTileTokens);
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      score();
      consumers();
      softmax(i);
      consumers();
      accumulate();
    }
    finish(piece);
  }

  // ---- results

  __device__ void finish(const Piece& piece) {
    const int rows = p.tree_tokens * p.heads, partial_slot = piece.slot;
    const int64_t first_partial = RowBlock(kRows).partial_row(partial_slot);
    consumers();  // everyone is done with the rescale factors
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const int row = warp + 8 * j;
      const float sum = warp_sum(row_sum[j]);
      if (lane) continue;
      scale[row] = sum == 0.f ? 0.f : p.v_scale / sum;
      if (partial_slot != kDirect) p.partial_lse[first_partial + row] = make_float2(row_max[j], sum);
      else if (row0 + row < rows) p.lse[int64_t(request) * rows + row0 + row] = sum == 0.f ? -INFINITY : (row_max[j] + log2f(sum)) * kLn2;
    }
    consumers();  // the final factors are complete
    const BlockOutput to(p, piece, RowBlock(kRows), warp);
    if (piece.slot == kDirect) store<true>(to);
    else store<false>(to);
  }

  template <bool direct>
  __device__ void store(const BlockOutput& to) const {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const float2 factor = *reinterpret_cast<const float2*>(&scale[8 * n + 2 * pair]);
      float v[4][4];
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int c = 0; c < 4; ++c) v[m][c] = !direct ? o[m][n][c] : o[m][n][c] * (c % 2 ? factor.y : factor.x);
      if constexpr (direct) to.store_out(n, v);
      else to.store_partial(n, v);
    }
  }
};

template <int kRowTiles, KvType kKv>
__device__ __forceinline__ void verify_mma(const VerifyParams& p) {
  using Layout = MmaLayout<kRowTiles * kRowTile>;
  extern __shared__ __align__(1024) char shared[];
  if (threadIdx.x < kStages) {
    barrier_init(shared_address(shared) + Layout::kFull + 8 * threadIdx.x, 32 * kProducers);
    barrier_init(shared_address(shared) + Layout::kEmpty + 8 * threadIdx.x, 32 * kWarps);
  }
  __syncthreads();
  wait_for_dependency();
  allow_dependents();
  const PartPieces pieces(p);
  if (threadIdx.x >= 32 * kWarps) {
    release_registers<kProducerRegisters>();
    using Producer = std::conditional_t<kKv == KvType::bf16, MmaProducer<Layout>, MmaFp8Producer<Layout>>;
    Producer producer{p, shared_address(shared), pieces.row_of_0};
    for (int i = pieces.begin(); i < pieces.end(); ++i) producer.run(pieces.at(i));
    wait_copies();
  } else {
    claim_registers<kConsumerRegisters>();
    MmaConsumer<kRowTiles> consumer(p, shared);
    for (int i = pieces.begin(); i < pieces.end(); ++i) consumer.run(p.pieces[i]);
  }
}

}  // namespace treemla
