// What both verify kernels share: a piece's slots, the order of pipeline stages, reductions, and where results go.
#pragma once
#include <climits>

#include "ptx.cuh"
#include "tile.cuh"

namespace treemla {

constexpr float kLowestScore = -1e30f;  // finite, so that exp2(old max - new max) never sees inf - inf
constexpr float kLn2 = 0.6931471805599453f;
constexpr int kNoSlot = INT_MIN;  // of a token that nobody sees, or behind the piece

// The row that a slot outside the pool stands for: the fault shows as NaN and nothing outside is read.
struct NanRow {
  uint32_t bits[kHeadDim / 2];
  constexpr NanRow() : bits() {
    for (uint32_t& two : bits) two = 0xffffffffu;
  }
};
extern __device__ const NanRow kNanRow = {};

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

// Tokens of a piece in tiles of `tile_tokens`.
__device__ __forceinline__ int tiles_of(const Piece& piece, int tile_tokens) {
  return (max(0, piece.kv_end - piece.kv_begin) + tile_tokens - 1) / tile_tokens;
}

// The pieces of this CTA's part. With one request piece i is part i's first: read beside part_ptr and not after it.
struct PartPieces {
  const Piece* const pieces;
  const int begin, end;
  const Piece guess;

  __device__ PartPieces(const VerifyParams& p)
      : pieces(p.pieces), begin(p.part_ptr[blockIdx.y]), end(p.part_ptr[blockIdx.y + 1]), guess(p.pieces[blockIdx.y]) {}
  __device__ Piece at(int i) const { return i == blockIdx.y ? guess : pieces[i]; }
};

// The tree word of query row `row` of a request; 0 behind the last row.
__device__ __forceinline__ uint64_t tree_word(const VerifyParams& p, int request, int row) {
  const int token = row / p.heads;
  if (token >= p.tree_tokens) return 0;
  return p.words ? p.words[int64_t(request) * p.tree_tokens + token] : ~0ull >> (63 - token);
}

// Slots of a piece's tokens.
struct SlotReader {
  int kv_begin, kv_end, committed;
  uint64_t visible;      // tree tokens that some row of the request sees; the others' slots may hold anything
  const int32_t* first;  // low word of the piece's first slot
  int shift;             // 1 for 64-bit indices

  // Called by a whole warp.
  __device__ SlotReader(const VerifyParams& p, const Piece& piece)
      : kv_begin(piece.kv_begin), kv_end(piece.kv_end), committed(p.committed[piece.request]), shift(p.slots.index_is_64) {
    const int64_t row = load_index(p.slots.row, piece.request, p.slots.row_is_64) * p.slots.stride;
    first = static_cast<const int32_t*>(p.slots.index) + ((row + kv_begin) << shift);
    visible = ~0ull;
    if (!p.words) return;
    uint64_t seen = 0;  // read also where the piece has no tree tokens: waiting for `committed` first costs more
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < p.tree_tokens; i += 32) seen |= p.words[int64_t(piece.request) * p.tree_tokens + i];
    visible = uint64_t(__reduce_or_sync(0xffffffffu, uint32_t(seen >> 32))) << 32 |
              __reduce_or_sync(0xffffffffu, uint32_t(seen));
  }

  // Slot of the piece's token `at`. Checked by its user and not here: nothing may wait for the load before the tile is
  // due. Of a 64-bit index the low word is read; pools have fewer than 2^31 slots.
  __device__ int load(int at) const {
    const int token = kv_begin + at;
    int slot = kNoSlot;
    if (token < kv_end && (token < committed || visible >> (token - committed) & 1)) slot = first[int64_t(at) << shift];
    return slot;
  }
};

// `loaded`, waited for here. The compiler counts loads in flight by groups: a later wait for this one would be a wait for
// the next one too, which has queued behind the copies.
__device__ __forceinline__ int arrived(int loaded) { return __shfl_sync(0xffffffffu, loaded, threadIdx.x % 32); }

// Source of a KV row's copies.
struct SourceRow {
  const char* from;
  bool held;  // else the copies fill with zero, so that 0 * garbage is not NaN

  __device__ SourceRow(const VerifyParams& p, int slot) : from(reinterpret_cast<const char*>(p.kv)), held(slot != kNoSlot) {
    if (uint32_t(slot) < uint32_t(p.num_slots)) from += int64_t(slot) * p.kv_stride * 2;
    else if (held) from = reinterpret_cast<const char*>(&kNanRow);
  }
  // KV is streamed: what stays in L2 is the plan, the slots, Q, the partials and the code.
  __device__ void copy(uint32_t to, int byte) const { copy_16_bytes(to, from + byte, held, evict_first()); }
};

// A position in a ring of stages: whoever fills it and whoever empties it step alike, across pieces.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// Where a row block's outputs of a piece go: the partial of its slot, or, of a request's only piece, the output itself.
struct BlockOutput {
  float* partial;
  __nv_bfloat16* out;
  int rows_left;  // of the request, from the block's first on

  __device__ BlockOutput(const VerifyParams& p, const Piece& piece, int block_rows) {
    const int rows = p.tree_tokens * p.heads, row0 = blockIdx.x * block_rows;
    const int64_t first_partial = (int64_t(piece.slot) * gridDim.x + blockIdx.x) * block_rows;
    partial = p.partial_out + first_partial * kLatentDim;
    out = p.out + (int64_t(piece.request) * rows + row0) * kLatentDim;
    rows_left = rows - row0;
  }

  // x, y: dim `dim` of rows `row` and `row` + 1. Lane l holds dim + (l / 4) % 8 of it, row + 2 * (l % 4).
  __device__ void store_partial(int row, int dim, float x, float y) const {
    partial[row * kLatentDim + dim] = x;
    partial[(row + 1) * kLatentDim + dim] = y;
  }
  __device__ void store_out(int row, int dim, float x, float y) const {
    // Lanes of dims d and d + 1 trade values, so that each stores two neighbouring dims of one row.
    const bool odd = threadIdx.x / 4 & 1;
    const float traded = __shfl_xor_sync(0xffffffffu, odd ? x : y, 4);
    if (row + odd >= rows_left) return;
    const __nv_bfloat162 both = odd ? __floats2bfloat162_rn(traded, y) : __floats2bfloat162_rn(x, traded);
    *reinterpret_cast<__nv_bfloat162*>(out + (row + odd) * kLatentDim + (dim & ~1)) = both;
  }
};

}  // namespace treemla
