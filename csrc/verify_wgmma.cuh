// Tree-verify MLA attention on sm_90a: the same work, grid and results as verify_mma.cuh, by wgmma.
//
// A block of up to 72 query rows (T = 9, H = 8 without padding) reads every KV row once. As there the query
// rows are the columns of both products, here of one warpgroup-wide instruction:
//   S^T [64 tokens x rows] = K Q^T     A = K, B = Q, both K-major in shared memory
//   O^T [512 dims x rows] += V^T P^T   A = the same bytes as K, read M-major; B = P; O in registers
//
// Shared memory holds KV as *boxes*: 64 tokens x 64 dims, 8 KB, 128-byte swizzle, nine a tile (the rope first, then the
// latent). Boxes go through a ring in this order, so that the rope's place is free as soon as the scores are computed,
// and the next tile arrives box by box while this one's values are still in use.
//
// With 72 rows 17 boxes fit: the latent of one tile in use and the whole next one, so that it never waits for this one's. Fewer
// rows leave room for more.
// Of e4m3 rows 12 beside a staged tile, from which a place is filled as soon as it is free.
//
// Four warpgroups, each at its own pace:
//   producer      gathers KV rows, 16 bytes a copy, or, of tokens in consecutive slots, 16 rows a copy; e4m3 rows by way
//                 of a staging area, from which it widens them
//   scorer        scores and softmax of a tile; P and the rescale factors into shared memory
//   accumulators  two, 256 dims each: rescale, O += V P
// full[g]    128 copies' arrivals for a third of a tile: a copy's arrival covers the thread's earlier ones; and the bytes
//            of copies of 16 rows
// empty[box] 4 scorer warps and 4 of the accumulator that reads its values
// ready      128 scorer threads: P and factors            spent      8 accumulator warps have read them
// scored     4 scorer warps: two thirds of a tile's scores are there; of a piece's first tile nobody asks
// After the last tile of a piece one more turn of ready and spent hands over the final factors, which a direct piece needs.
#pragma once
#include "fp8.cuh"
#include "work.cuh"
#include "wgmma.cuh"

namespace treemla {

constexpr int kBoxBytes = 8192;
constexpr int kStagedBoxBytes = 4096;  // e4m3
constexpr int kBoxes = 9;              // a tile
constexpr int kWgTileTokens = 64;
constexpr int kMaxRingBoxes = 27;      // what there are barriers for, and what the lowest block fits
constexpr int kGroupBoxes = 3;         // that the scorer waits for at once
constexpr int kGroupsInFlight = 3;     // that producers ask for at most: more would only queue, before what is due sooner
constexpr int kBriefTiles = 3;         // of a CTA's first piece: short code arrives sooner than straight code saves
constexpr int kRunRows = 16;           // of a tensor copy: a producer warp's rows of a box
constexpr int kMaxRingGroups = kMaxRingBoxes / kGroupBoxes + 1;
constexpr int kAccumulators = 2;
constexpr int kBlocksEach = kLatentDim / 64 / kAccumulators;  // of 64 dims
constexpr int kWgThreads = 512;

// The end of a CTA's shared memory, at which every layout has its barriers; 8 more bytes are free.
constexpr int kWgSharedBytes = 232448;
constexpr int kEmptyBarriers = kWgSharedBytes - 8 * (kMaxRingBoxes + kMaxRingGroups + 4);
constexpr int kFullBarriers = kEmptyBarriers + 8 * kMaxRingBoxes;
constexpr int kReadyBarrier = kFullBarriers + 8 * kMaxRingGroups;
constexpr int kSpentBarrier = kReadyBarrier + 8;
constexpr int kScoredBarrier = kSpentBarrier + 8;

constexpr float kHeadroom = 8.f;  // of a row's scores above its reference, base 2

// Registers a thread: together what the launch takes, 128 each; a claim beyond it would wait forever.
constexpr int kCopyRegisters = 40, kScorerRegisters = 120, kAccumulatorRegisters = 176;
static_assert(kCopyRegisters + kScorerRegisters + kAccumulators * kAccumulatorRegisters <= 4 * launch_registers(kWgThreads));

// kMostBoxes: of the ring.
template <int kRowsOfBlock, KvType kKv, int kMostBoxes = kMaxRingBoxes>
struct WgLayout {
  static constexpr int kRows = kRowsOfBlock;
  static constexpr int kRowTiles = kRows / kRowTile;
  static constexpr int kRowBytes = 128 * kRows;  // of a box of Q, or of P
  // Tree tokens whose rows meet in a block. For one head a plan takes no more than kMaxTreeTokens rows.
  static constexpr int kTokens = kRows <= kMaxTreeTokens ? kRows : kRows / 2 + 1;
  static constexpr int kBesideBytes = kRows * 4 + kTokens * 8 + 8 + kRows;
  static constexpr int kSideBytes = (kBoxes + 1) * kRowBytes + (kBesideBytes + 7) / 8 * 8;
  // e4m3 boxes on their way, a tile's: what memory delivers while it is asked. The ring only has to hold what is in use.
  static constexpr int kStaged = kKv == KvType::bf16 ? 0 : kBoxes;
  static constexpr int kFit = (kEmptyBarriers - kSideBytes - kStaged * kStagedBoxBytes) / kBoxBytes;
  // Of e4m3 whole groups: then a group's place says which barrier is its own, and few addresses are computed.
  static constexpr int kRingFit = kFit < kMostBoxes ? kFit : kMostBoxes;
  static constexpr int kRing = kKv == KvType::bf16 ? kRingFit : kRingFit / kGroupBoxes * kGroupBoxes;
  // None is filled again before it was waited for.
  static constexpr int kRingGroups = kRing / kGroupBoxes + (kKv == KvType::bf16 ? 1 : 0);
  static constexpr int kStaging = kRing * kBoxBytes;              // [kStaged][2][128 threads][16 bytes]
  static constexpr int kQuery = kStaging + kStaged * kStagedBoxBytes;  // [kBoxes][kRows][128 bytes]
  static constexpr int kProbs = kQuery + kBoxes * kRowBytes;      // [kRows][128 bytes]
  static constexpr int kWarpValues = kProbs;                      // float [4][kRows], while no P is there
  static constexpr int kScale = kProbs + kRowBytes;               // float [kRows]
  static constexpr int kWords = kScale + kRows * 4;               // uint64 [kTokens]: of the block's tree tokens
  static constexpr int kMoved = kWords + kTokens * 8;             // int [2], by turn: a tile's factors are not all 1
  static constexpr int kTokenOfRow = kMoved + 8;                  // uint8 [kRows]: from the block's first tree token
  static constexpr int kBytes = kWgSharedBytes;
  static_assert(kQuery + kSideBytes <= kEmptyBarriers && kRing > kBoxes);
  static_assert(4 * kRows * 4 <= kRowBytes);

  // Half of a tile's values wait for the next tile's scores: where several row blocks read a tile the tensor cores bound them,
  // and would be idle during softmax. With fewer than 13 boxes both would wait forever; with 17 the whole next tile is there
  // first. One block waits for memory, and hands its boxes back first.
  __device__ static bool values_wait(const RowBlock& block) { return kRing >= 2 * kBoxes - 1 && block.slot_rows > kRows; }
};

// ---- producer ------------------------------------------------------------------------------------------------------

// Warp w copies rows 16 w .. 16 w + 15 of every box: where their slots are consecutive by one tensor copy, elsewhere rows
// 16 w + 4 i + l / 8, i < 4, by lane l, their 16-byte column l % 8. A tensor copy takes no turn of the load and store
// unit, whose queue is what the gather waits in when several row blocks read a tile from L2 (docs/kernel.md).
//
// kUnrolled boxes are one piece of code. Straight code asks for a box sooner, which is what several row blocks need, whose tiles
// come from L2; a short piece takes as long as its code takes to arrive, and is quicker with a third of it.
template <int kUnrolled>
struct WgProducer {
  static constexpr int kRowsEach = 4;
  const VerifyParams& p;
  const TensorMap* const kv_map;
  const uint32_t base;  // shared address
  const int64_t row_of_0;
  RingPosition at, group;  // of the layout's boxes and groups
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  RingPosition landed{group.stages, group.stages - kGroupsInFlight, 1};  // kGroupsInFlight behind `group`

  __device__ void run(const Piece piece) {
    const int tiles = tiles_of(piece, kWgTileTokens);
    const SlotReader slots(p, piece, row_of_0);
    // Lane l: token of tile `tile` + l / 16, this warp's row l % 16 of it.
    auto token_of = [&](int tile) { return (tile + lane / 16) * kWgTileTokens + kRunRows * warp + lane % kRunRows; };
    int next = slots.load(token_of(0));
    const Visible visible(p, piece.request);
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile += 2) {
      int held = arrived(next);
      next = slots.load(token_of(tile + 2));
      if (!visible.has(piece.kv_begin + token_of(tile))) held = kNoSlot;
      const int first = __shfl_sync(0xffffffffu, held, lane & kRunRows);
      const bool follows = held == first + lane % kRunRows && first >= 0 && p.num_slots - first >= kRunRows;
      const uint32_t following = __ballot_sync(0xffffffffu, follows);
#pragma unroll 1
      for (int half = 0; half < min(2, tiles - tile); ++half) {
        const int lane0 = kRunRows * half;  // holds the slot of the warp's first row
        if ((following >> lane0 & 0xffff) == 0xffff) copy_run(__shfl_sync(0xffffffffu, held, lane0));
        else copy_rows(held, lane0);
      }
    }
  }

  __device__ void copy_rows(int held, int lane0) {
    SourceRow rows[kRowsEach] = {
        {p, __shfl_sync(0xffffffffu, held, lane0 + lane / 8)},
        {p, __shfl_sync(0xffffffffu, held, lane0 + lane / 8 + 4)},
        {p, __shfl_sync(0xffffffffu, held, lane0 + lane / 8 + 8)},
        {p, __shfl_sync(0xffffffffu, held, lane0 + lane / 8 + 12)},
    };
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) rows[i].from += lane % 8 * 16;
    const uint32_t column = warp * kRunRows * 128 + lane / 8 * 128 + (lane % 8 ^ lane / 8) * 16;
    each_box([&](int dim, uint32_t to, uint32_t) {
      to += column;
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) rows[i].copy((to ^ i % 2 * 64) + i * 512, dim * 2);
    });
  }

  __device__ void copy_run(int slot) {
    each_box([&](int dim, uint32_t to, uint32_t full) {
      if (lane > 0) return;
      barrier_expect_bytes(full, kRunRows * 128);
      copy_box(to + warp * kRunRows * 128, kv_map, slot, dim, full, evict_first());
    });
  }

  // copy(the box's first dim, where the warp's rows of it go, the barrier of its group) for the boxes of a tile, each when
  // its place is free and the group kGroupsInFlight before has landed.
  template <class Copy>
  __device__ void each_box(const Copy& copy) {
    bool is_free = barrier_test(base + kEmptyBarriers + 8 * at.stage, at.parity ^ 1);
#pragma unroll 1
    for (int first = 0; first < kBoxes; first += kGroupBoxes) {
      barrier_wait(base + kFullBarriers + 8 * landed.stage, landed.parity);
      landed.advance();
      const uint32_t full = base + kFullBarriers + 8 * group.stage;
#pragma unroll kUnrolled
      for (int i = 0; i < kGroupBoxes; ++i) {
        if (!is_free) barrier_wait(base + kEmptyBarriers + 8 * at.stage, at.parity ^ 1);
        const uint32_t to = base + at.stage * kBoxBytes;
        at.advance();
        is_free = barrier_test(base + kEmptyBarriers + 8 * at.stage, at.parity ^ 1);  // answers while the copies queue
        copy(i == 0 && first == 0 ? kLatentDim : (first - 1) * 64 + i * 64, to, full);
      }
      arrive_after_copies(full);
      group.advance();
    }
  }
};

// Lane l of warp w: rows 32 i + 8 w + l / 4, i < 2, of every box, their 16-byte column l % 4 of e4m3. A thread copies
// its own bytes to a place of its own, kStaged boxes ahead and across tiles, and moves them from there to the ring, widened:
// it waits for its copies and for nobody else's. Everything has its answer on the way before it is due: a box's place is
// looked at and its first bytes are read while the box before is stored.
template <class Layout>
struct WgFp8Producer {
  static constexpr int kRowsEach = 2;
  const VerifyParams& p;
  const uint32_t base;  // shared address
  const int64_t row_of_0;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const uint32_t mine = in_register(base + Layout::kStaging + threadIdx.x * 16);
  const uint32_t to = base + (8 * warp + lane / 4) * 128 + (2 * (lane % 4) ^ lane / 4) * 16;  // in the ring's first box
  const char* rows[kRowsEach];
  RingPosition group{Layout::kRingGroups};

  __device__ void run(const Piece piece) {
    const int tiles = tiles_of(piece, kWgTileTokens);
    if (tiles == 0) return;
    const SlotReader slots(p, piece, row_of_0);
    const int token = lane / 8 % 2 * 32 + 8 * warp + lane % 8;
    int slot = slots.load(token);  // lane l: of this warp's row l % 16 of the tile whose rows are due next
    const Visible visible(p, piece.request);
    const auto turn_to = [&](int tile) {
      if (!visible.has(piece.kv_begin + tile * kWgTileTokens + token)) slot = kNoSlot;
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i)
        rows[i] = fp8_row(p, __shfl_sync(0xffffffffu, slot, 8 * i + lane / 4)) + lane % 4 * 16;
      slot = slots.load((tile + 1) * kWgTileTokens + token);
    };
    turn_to(0);
#pragma unroll 1
    for (int box = 0; box < kBoxes; ++box) copy_box(mine + box * kStagedBoxBytes, box == 0 ? kLatentDim : (box - 1) * 64);
    wait_copies_but<kBoxes - 1>();
    uint4 half = load_shared_16_bytes(mine);
    bool is_free = barrier_test(empty(0), group.parity ^ 1);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const bool is_last = tile + 1 == tiles;
      if (!is_last) turn_to(tile + 1);
#pragma unroll 1
      for (int first = 0; first < kBoxes; first += kGroupBoxes) store_group(first, is_last, half, is_free);
    }
  }

  // Moves three staged boxes to the ring and has the next tile's take their places. half, is_free: the next box's first half,
  // read, and its place, looked at, while the one before is stored; behind the last box nobody's.
  __device__ void store_group(int first, bool is_last, uint4& half, bool& is_free) {
#pragma unroll
    for (int i = 0; i < kGroupBoxes; ++i) {
      const uint32_t from = mine + (first + i) * kStagedBoxBytes;
      const uint32_t next = first + i == kBoxes - 1 ? mine : from + kStagedBoxBytes;
      const uint4 second = load_shared_16_bytes(from + kStagedBoxBytes / 2);
      if (!is_free) barrier_wait(empty(i), group.parity ^ 1);
      const uint32_t place = to + (kGroupBoxes * group.stage + i) * kBoxBytes, full = base + kFullBarriers + 8 * group.stage;
      if (i == kGroupBoxes - 1) group.advance();
      is_free = barrier_test(empty((i + 1) % kGroupBoxes), group.parity ^ 1);
      store_widened(place, place ^ 16, half);
      wait_copies_but<kBoxes - 2>();
      half = load_shared_16_bytes(next);
      store_widened(place + kBoxBytes / 2, (place ^ 16) + kBoxBytes / 2, second);
      if (i == kGroupBoxes - 1) barrier_arrive(full);
      if (!is_last) copy_box(from, first + i == 0 ? kLatentDim : (first + i - 1) * 64);
      else commit_copies();  // of nothing: a group a box
    }
  }

  __device__ uint32_t empty(int nth) const { return base + kEmptyBarriers + 8 * (kGroupBoxes * group.stage + nth); }

  __device__ void copy_box(uint32_t staged, int dim) const {
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) copy_16_bytes(staged + i * kStagedBoxBytes / 2, rows[i] + dim, true, evict_first());
    commit_copies();
  }
};

// ---- scorer --------------------------------------------------------------------------------------------------------

template <class Layout>
struct Scorer {
  static constexpr int kRows = Layout::kRows, kRowTiles = Layout::kRowTiles;
  static constexpr int kEarly = 4 * (kRowTiles < 3 ? kRowTiles : 3);  // more of 72 rows would not fit the registers
  const VerifyParams& p;
  char* const shared;
  const uint32_t base;
  const RowBlock block;
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32, group = lane / 4, pair = lane % 4;
  const int row0 = block.row0;
  RingPosition at{Layout::kRing}, full{Layout::kRingGroups};
  uint32_t turn = 0;  // parity of ready and spent

  int request, committed, kv_begin, kv_end;
  float reference[2 * kRowTiles], row_sum[2 * kRowTiles];  // rows 8 n + 2 pair + {0, 1}; sums over this thread's tokens

  __device__ void together() const { named_barrier<2, 128>(); }
  __device__ float* scale() const { return reinterpret_cast<float*>(shared + Layout::kScale); }
  __device__ float* warp_values() const { return reinterpret_cast<float*>(shared + Layout::kWarpValues); }

  // Starts copying a piece's query rows. Q is free once all warps have the last scores of the piece before.
  __device__ void copy_query(int request) const {
    for (int row = thread / 8; row < kRows; row += 16) {
      const bool held = row0 + row < p.tree_tokens * p.heads;
      const int64_t token = int64_t(request) * p.tree_tokens + (held ? (row0 + row) / p.heads : 0);
      const int64_t head = held ? (row0 + row) % p.heads : 0;
      const auto* rope = p.q_rope + token * p.q_rope_token_stride + head * p.q_rope_head_stride + thread % 8 * 8;
      const auto* latent = p.q_latent + token * p.q_latent_token_stride + head * p.q_latent_head_stride + thread % 8 * 8;
      const uint32_t to = base + Layout::kQuery + row * 128 + (thread % 8 ^ row % 8) * 16;
#pragma unroll
      for (int box = 0; box < kBoxes; ++box)
        copy_16_bytes(to + box * Layout::kRowBytes, box == 0 ? rope : latent + (box - 1) * 64, held);
    }
  }

  __device__ void load_words() const {
    const int i = thread_again() % 128, first_token = row0 / p.heads, tokens = min(Layout::kTokens, p.tree_tokens - first_token);
    if (i < kRows) shared[Layout::kTokenOfRow + i] = char(min((row0 + i) / p.heads - first_token, tokens - 1));
    if (i < tokens) reinterpret_cast<uint64_t*>(shared + Layout::kWords)[i] = tree_word(p, request, first_token + i);
  }

  // Three boxes at a time: the proxy fence is too dear for each, and so is a look at a barrier. values_before: of the piece.
  __device__ void score(float (&s)[4 * kRowTiles], bool values_before) {
    for (int first = 0; first < kBoxes; first += kGroupBoxes, full.advance()) {
      barrier_wait(base + kFullBarriers + 8 * full.stage, full.parity);
      fence_async_proxy();
      wgmma_fence();
      for (int i = 0; i < kGroupBoxes; ++i, at.advance()) {
        const uint64_t a = operand(base + at.stage * kBoxBytes), b = operand(base + Layout::kQuery + (first + i) * Layout::kRowBytes);
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma<kRowTiles, 0>(s, a + 2 * k, b + 2 * k, first + i + k > 0);
      }
      wgmma_commit();
    }
    wgmma_wait<1>();
    if (lane == 0 && values_before) barrier_arrive(base + kScoredBarrier);
    wgmma_wait<0>();
  }

  // The tile's boxes, which this warp has read: the rope is nobody else's.
  __device__ void release(int first_stage) const {
    if (lane >= kBoxes) return;
    const int stage = first_stage + lane < Layout::kRing ? first_stage + lane : first_stage + lane - Layout::kRing;
    barrier_arrive(base + kEmptyBarriers + 8 * stage);
    if (lane == 0) barrier_arrive(base + kEmptyBarriers + 8 * stage);
  }

  // Probabilities of a tile, relative to each row's reference: its maximum over the first tile, moved where scores rise
  // far above it. A common tile needs one vote of the warpgroup for that, no reduction over lanes and warps and no rescale
  // of the outputs. Sums and bf16 probabilities lose nothing by a factor of up to 2^kHeadroom.
  __device__ void softmax(float (&s)[4 * kRowTiles], int tile) {
    const int token = kv_begin + tile * kWgTileTokens + 16 * warp + group;
    if (kv_begin + (tile + 1) * kWgTileTokens > min(committed, kv_end)) hide(s, token);
    float above[3] = {-INFINITY, -INFINITY, -INFINITY};  // three chains, not one long one
#pragma unroll
    for (int j = 0; j < 2 * kRowTiles; ++j) above[j % 3] = fmaxf(above[j % 3], fmaf(most_of(s, j), p.score_scale, -reference[j]));
    const bool moves = vote_any<2, 128>(fmaxf(fmaxf(above[0], above[1]), above[2]) > kHeadroom);
    const auto probability = [&](int i) { return exp2_approx(fmaf(s[i], p.score_scale, -reference[i / 4 * 2 + i % 2])); };
    float early[kEarly];  // as if nothing moved; ptxas computes them beside the maxima, before the vote
#pragma unroll
    for (int i = 0; i < kEarly; ++i) early[i] = probability(i);
    if (moves) {
      move_reference(s, tile == 0);
#pragma unroll
      for (int i = 0; i < kEarly; ++i) early[i] = probability(i);
    }
    if (thread == 0) *reinterpret_cast<int*>(shared + Layout::kMoved + 4 * turn) = moves && tile > 0;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 4 * n; i < 4 * n + 4; ++i) s[i] = i < kEarly ? early[i % kEarly] : probability(i);
      row_sum[2 * n] += s[4 * n] + s[4 * n + 2];
      row_sum[2 * n + 1] += s[4 * n + 1] + s[4 * n + 3];
    }
    barrier_wait(base + kSpentBarrier, turn ^ 1);  // of the last P: its values may be multiplied until now
    store_probs(s);
  }

  // Of row j's scores in this thread.
  __device__ static float most_of(const float (&s)[4 * kRowTiles], int j) {
    return fmaxf(s[4 * (j / 2) + j % 2], s[4 * (j / 2) + j % 2 + 2]);
  }

  // A row that rises gets its maximum as reference, and the accumulators the factor that older values need. Each row by
  // itself: its result does not hang on its neighbours. `first`: there is nothing older.
  __device__ void move_reference(const float (&s)[4 * kRowTiles], bool first) {
    float* warp_max = warp_values() + 2 * pair;
    barrier_wait(base + kSpentBarrier, turn ^ 1);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      float2 most = make_float2(most_of(s, 2 * n), most_of(s, 2 * n + 1));
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
        most.x = fmaxf(most.x, __shfl_xor_sync(0xffffffffu, most.x, offset));
        most.y = fmaxf(most.y, __shfl_xor_sync(0xffffffffu, most.y, offset));
      }
      if (group == 0) *reinterpret_cast<float2*>(warp_max + warp * kRows + 8 * n) = most;
    }
    together();
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      float2 seen = make_float2(-INFINITY, -INFINITY);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 other = *reinterpret_cast<const float2*>(warp_max + w * kRows + 8 * n);
        seen = make_float2(fmaxf(seen.x, other.x), fmaxf(seen.y, other.y));
      }
      const float2 moved = make_float2(raised(reference[2 * n], seen.x), raised(reference[2 * n + 1], seen.y));
      if (!first) {
        const float2 factor = make_float2(exp2_approx(reference[2 * n] - moved.x), exp2_approx(reference[2 * n + 1] - moved.y));
        if (warp == 0 && group == 0) *reinterpret_cast<float2*>(scale() + 8 * n + 2 * pair) = factor;
        row_sum[2 * n] *= factor.x;
        row_sum[2 * n + 1] *= factor.y;
      }
      reference[2 * n] = moved.x;
      reference[2 * n + 1] = moved.y;
    }
    together();  // P takes the place of the maxima
  }

  __device__ float raised(float reference, float score) const {
    return fmaf(score, p.score_scale, -reference) > kHeadroom ? score * p.score_scale : reference;  // rounded as for the vote
  }

  // Of tokens `token` and `token` + 8.
  __device__ void hide(float (&s)[4 * kRowTiles], int token) const {
    const auto* words = reinterpret_cast<const uint64_t*>(shared + Layout::kWords);
    const auto* token_of_row = reinterpret_cast<const uchar2*>(shared + Layout::kTokenOfRow) + pair;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int nth = token + 8 * half - committed;  // of the tree
      const bool shown = nth < 0 && token + 8 * half < kv_end;
      const uint64_t bit = nth >= 0 && token + 8 * half < kv_end ? 1ull << nth : 0;
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        const uchar2 of = token_of_row[4 * n];
        if (!shown && !(words[of.x] & bit)) s[4 * n + 2 * half] = -INFINITY;
        if (!shown && !(words[of.y] & bit)) s[4 * n + 2 * half + 1] = -INFINITY;
      }
    }
  }

  // P^T fragments, tokens by rows, become rows of 64 tokens: transposed 8 x 8 stores. Lane l gives the address of row
  // l % 8 of matrix l / 8; matrices are (tokens 0-7, 8-15 of the warp) of one column tile, then of the next.
  __device__ void store_probs(const float (&s)[4 * kRowTiles]) const {
    const int row = 8 * (lane / 16) + lane % 8, chunk = 2 * warp + lane / 8 % 2;
    const uint32_t probs = base + Layout::kProbs + row * 128 + (chunk ^ row % 8) * 16;
#pragma unroll
    for (int n = 0; n < kRowTiles; n += 2) {
      const auto pair_of = [&](int i) { return bf16_pair(s[4 * n + 2 * i], s[4 * n + 2 * i + 1]); };
      if (n + 1 < kRowTiles) stmatrix_x4_trans(probs + n * 1024, {pair_of(0), pair_of(1), pair_of(2), pair_of(3)});
      else stmatrix_x2_trans(probs + n * 1024, pair_of(0), pair_of(1));
    }
  }

  __device__ void hand_over() {
    fence_async_proxy();
    barrier_arrive(base + kReadyBarrier);
    turn ^= 1;
  }

  // Piece `nth`. copy_query(piece.request) has been called; next_request: of the piece after this one, or -1.
  __device__ void run(const Piece piece, int nth, int next_request) {
    request = piece.request;
    kv_begin = piece.kv_begin;
    kv_end = piece.kv_end;
    committed = p.committed[request];
    load_words();
    wait_copies();
    fence_async_proxy();
    together();
#pragma unroll
    for (int j = 0; j < 2 * kRowTiles; ++j) reference[j] = kLowestScore, row_sum[j] = 0.f;
    const int tiles = tiles_of(piece, kWgTileTokens);
    for (int tile = 0; tile < tiles; ++tile) {
      float s[4 * kRowTiles];
      const int first_stage = at.stage;
      score(s, tile > 0);
      release(first_stage);
      softmax(s, tile);
      hand_over();
      // Behind softmax's barrier: no warp reads the old Q for its scores any more.
      if (tile == tiles - 1 && next_request >= 0) copy_query(next_request);
    }
    if (tiles == 0 && next_request >= 0) copy_query(next_request);
    finish(nth);
  }

  // Thread r closes row r. The reference passes to it where the row's final factor then stands.
  __device__ void finish(int nth) {
    const int partial_slot = p.pieces[nth].slot;  // anew: no register holds it meanwhile
    const int rows = p.tree_tokens * p.heads;
    float *warp_sum = warp_values(), *scale = this->scale();
#pragma unroll
    for (int j = 0; j < 2 * kRowTiles; ++j)
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) row_sum[j] += __shfl_xor_sync(0xffffffffu, row_sum[j], offset);
    barrier_wait(base + kSpentBarrier, turn ^ 1);
    if (group == 0)
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        const int row = 8 * n + 2 * pair;
        *reinterpret_cast<float2*>(warp_sum + warp * kRows + row) = make_float2(row_sum[2 * n], row_sum[2 * n + 1]);
        if (warp == 0) *reinterpret_cast<float2*>(scale + row) = make_float2(reference[2 * n], reference[2 * n + 1]);
      }
    together();
    const int row = thread_again() % 128;
    if (row < block.held) {
      const float sum = (warp_sum[row] + warp_sum[kRows + row]) + (warp_sum[2 * kRows + row] + warp_sum[3 * kRows + row]);
      const float reference = scale[row];
      scale[row] = sum == 0.f ? 0.f : __fdividef(p.v_scale, sum);
      if (partial_slot != kDirect) p.partial_lse[block.partial_row(partial_slot) + row] = make_float2(reference, sum);
      else if (row0 + row < rows) p.lse[int64_t(request) * rows + row0 + row] = sum == 0.f ? -INFINITY : (reference + log2f(sum)) * kLn2;
    }
    hand_over();
  }
};

// ---- accumulators --------------------------------------------------------------------------------------------------

template <class Layout>
struct Accumulator {
  static constexpr int kRows = Layout::kRows, kRowTiles = Layout::kRowTiles;
  const VerifyParams& p;
  char* const shared;
  const uint32_t base;
  const RowBlock block;
  const int which = threadIdx.x / 128 - 2;  // its 256 dims
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  int first_stage = 0;  // of the tile's boxes
  uint32_t turn = 0;    // parity of ready and spent
  uint32_t scored = 0;  // parity of it
  float o[kBlocksEach][4 * kRowTiles];

  __device__ float2 factor_of(int n) const {
    return *reinterpret_cast<const float2*>(shared + Layout::kScale + (8 * n + 2 * pair) * 4);
  }

  __device__ void rescale() {
    if (!*reinterpret_cast<const int*>(shared + Layout::kMoved + 4 * turn)) return;
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      const float2 factor = factor_of(n);
#pragma unroll
      for (int m = 0; m < kBlocksEach; ++m)
#pragma unroll
        for (int c = 0; c < 4; ++c) o[m][4 * n + c] *= c % 2 ? factor.y : factor.x;
    }
  }

  // The accumulators take latent boxes in turns: the first two, whose places the next tile waits for, are done together.
  __device__ int latent_box(int m) const { return kAccumulators * m + which; }

  __device__ int stage_of(int box) const {
    return first_stage + box < Layout::kRing ? first_stage + box : first_stage + box - Layout::kRing;
  }

  __device__ void accumulate(bool next_follows) {
    barrier_wait(base + kReadyBarrier, turn);
    rescale();
    wgmma_fence();
    // Two blocks' products queue at a time. A warp that asks for all four at once is held up until the last is taken in, and
    // hands the first boxes back no sooner.
    multiply(0);
    multiply(1);
    release<1>(0);
    release<0>(1);
    if (Layout::values_wait(block) && next_follows) await_scores();
    wgmma_fence();  // ptxas would add it behind a branch
    multiply(2);
    multiply(3);
    release<1>(2);
    release<0>(3);
    if (!Layout::values_wait(block) && next_follows) await_scores();  // so that each phase is waited for; the scorer asks for spent later
    __syncwarp();
    if (lane == 0) barrier_arrive(base + kSpentBarrier);
    turn ^= 1;
    first_stage = stage_of(kBoxes);
  }

  // Of the next tile. Before this one is called spent: the scorer cannot be a phase further then.
  __device__ void await_scores() {
    barrier_wait(base + kScoredBarrier, scored);
    scored ^= 1;
  }

  __device__ void multiply(int m) {
    const uint64_t a = operand(base + stage_of(1 + latent_box(m)) * kBoxBytes), b = operand(base + Layout::kProbs);
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<kRowTiles, 1>(o[m], a + 128 * k, b + 2 * k, true);  // 16 tokens are 2,048 bytes
    wgmma_commit();
  }

  template <int pending>
  __device__ void release(int m) {
    wgmma_wait<pending>();
    if (lane == 0) barrier_arrive(base + kEmptyBarriers + 8 * stage_of(1 + latent_box(m)));
  }

  template <bool direct>
  __device__ void store(const BlockOutput& to) const {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      if (n * kRowTile >= block.held) break;
      const float2 factor = direct ? factor_of(n) : make_float2(1.f, 1.f);
      float v[kBlocksEach][4];
#pragma unroll
      for (int m = 0; m < kBlocksEach; ++m)
#pragma unroll
        for (int c = 0; c < 4; ++c) v[m][c] = !direct ? o[m][4 * n + c] : o[m][4 * n + c] * (c % 2 ? factor.y : factor.x);
      if constexpr (direct) to.store_out(n, v);
      else to.store_partial(n, v);
    }
  }

  __device__ void run(const Piece piece) {
#pragma unroll
    for (int m = 0; m < kBlocksEach; ++m)
#pragma unroll
      for (int i = 0; i < 4 * kRowTiles; ++i) o[m][i] = 0.f;
    const int tiles = tiles_of(piece, kWgTileTokens);
    for (int tile = 0; tile < tiles; ++tile) accumulate(tile + 1 < tiles);

    // A partial needs no final factor: it is on its way while the scorer closes the rows.
    const BlockOutput to(p, piece, block, 4 * which + warp);
    if (piece.slot != kDirect) store<false>(to);
    barrier_wait(base + kReadyBarrier, turn);
    if (piece.slot == kDirect) store<true>(to);
    __syncwarp();
    if (lane == 0) barrier_arrive(base + kSpentBarrier);
    turn ^= 1;
  }
};

// The barriers lie where every layout has them, so that they are ready before a plan says which one it is.
__device__ __forceinline__ void init_barriers(uint32_t base) {
  if (threadIdx.x < kMaxRingBoxes) barrier_init(base + kEmptyBarriers + 8 * threadIdx.x, 8);
  if (threadIdx.x < kMaxRingGroups) barrier_init(base + kFullBarriers + 8 * threadIdx.x, 128);
  if (threadIdx.x == 0) {
    barrier_init(base + kReadyBarrier, 128);
    barrier_init(base + kSpentBarrier, 4 * kAccumulators);
    barrier_init(base + kScoredBarrier, 4);
  }
}

template <class Layout>
__device__ __forceinline__ void score_pieces(const VerifyParams& p, char* shared, const PartPieces& pieces, const RowBlock& block) {
  Scorer<Layout> scorer{p, shared, shared_address(shared), block};
  if (pieces.begin() < pieces.end()) scorer.copy_query(pieces.work.first.request);
  for (int i = pieces.begin(); i < pieces.end(); ++i)
    scorer.run(pieces.at(i), i, i + 1 < pieces.end() ? p.pieces[i + 1].request : -1);
}

template <class Layout>
__device__ __forceinline__ void accumulate_pieces(const VerifyParams& p, char* shared, const PartPieces& pieces, const RowBlock& block) {
  Accumulator<Layout> accumulator{p, shared, shared_address(shared), block};
  for (int i = pieces.begin(); i < pieces.end(); ++i) accumulator.run(p.pieces[i]);
}

// How many CTAs take a block together, and the layout of a share.
template <class LayoutOfShare, int kCount>
struct Shares {
  using Layout = LayoutOfShare;
  static constexpr int count = kCount;
};

// Calls f(Shares<..>); `shares` is at most kMost.
template <int kRows, KvType kKv, int kMost, class F>
__device__ __forceinline__ void with_shares(int shares, const F& f) {
  // Producers run one code for all: no other has to arrive first. So e4m3 boxes are staged at the same place.
  using Whole = WgLayout<kRows, kKv>;
  using Layout = WgLayout<share_rows(kRows, kMost), kKv, kKv == KvType::bf16 ? kMaxRingBoxes : Whole::kRing>;
  static_assert(kKv == KvType::bf16 || Layout::kStaging == Whole::kStaging);
  if (kMost == 1 || shares == kMost) f(Shares<Layout, kMost>{});
  else if constexpr (kMost > 1) with_shares<kRows, kKv, kMost - 1>(shares, f);
}

// A CTA takes a block of the rows and a part of the tokens or, in a short step (PlanParams), one of up to kMostShares shares of
// a block and a longer part: as many CTAs, each with fewer rows to fetch, to close and to write. A share has a row at least.
template <int kRowTiles, KvType kKv, int kMostShares>
__device__ __forceinline__ void verify_wgmma(const VerifyParams& p, const TensorMap* kv_map) {
  constexpr int kRows = kRowTiles * kRowTile;
  extern __shared__ __align__(1024) char shared[];
  const uint32_t base = shared_address(shared);
  init_barriers(base);
  __syncthreads();
  wait_for_dependency();
  allow_dependents();
  const PartPieces pieces(p);
  // f(layout, the CTA's rows)
  const auto with_rows = [&](const auto& f) {
    with_shares<kRows, kKv, kMostShares>(pieces.work.shares, [&](auto taken) {
      using Taken = decltype(taken);
      f(typename Taken::Layout{}, RowBlock(kRows, Taken::count, Taken::count == 1 ? 0 : pieces.work.share));
    });
  };
  const int warpgroup = threadIdx.x / 128;
  if (warpgroup == 0) {
    release_registers<kCopyRegisters>();
    const auto produce = [&](auto producer) {
      for (int i = pieces.begin(); i < pieces.end(); ++i) producer.run(pieces.at(i));
    };
    if constexpr (kKv == KvType::e4m3) produce(WgFp8Producer<WgLayout<kRows, kKv>>{p, base, pieces.row_of_0});
    else {
      RingPosition boxes{}, groups{};
      with_rows([&](auto layout, const RowBlock&) { boxes.stages = layout.kRing, groups.stages = layout.kRingGroups; });
      const bool is_brief = kMostShares > 1 && gridDim.x == 1 && tiles_of(pieces.work.first, kWgTileTokens) <= kBriefTiles;
      if (is_brief) produce(WgProducer<1>{p, kv_map, base, pieces.row_of_0, boxes, groups});
      else produce(WgProducer<kGroupBoxes>{p, kv_map, base, pieces.row_of_0, boxes, groups});
    }
    wait_copies();
  } else if (warpgroup == 1) {
    release_registers<kScorerRegisters>();
    with_rows([&](auto layout, const RowBlock& block) { score_pieces<decltype(layout)>(p, shared, pieces, block); });
  } else {
    claim_registers<kAccumulatorRegisters>();
    with_rows([&](auto layout, const RowBlock& block) { accumulate_pieces<decltype(layout)>(p, shared, pieces, block); });
  }
}

}  // namespace treemla
