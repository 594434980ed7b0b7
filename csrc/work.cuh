// What both verify kernels share: a piece's slots, the order of pipeline stages, reductions, and where results go.
#pragma once
#include <climits>

#include "ptx.cuh"
#include "tile.cuh"

namespace treemla {

constexpr float kLowestScore = -1e30f;  // finite, so that exp2(old max - new max) never sees inf - inf
constexpr float kLn2 = 0.6931471805599453f;
constexpr int kNoSlot = INT_MIN;  // of a token that nobody sees, or behind the piece

// What a row whose slot lies outside the pool is filled with: the fault shows as NaN and nothing outside is read.
extern __device__ const uint4 kNanChunk = {0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu};

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

// Source of a KV row's copies.
struct SourceRow {
  const char* from;
  bool held;     // else the copies fill with zero, so that 0 * garbage is not NaN
  bool outside;  // of the pool: all copies come from kNanChunk

  __device__ SourceRow(const VerifyParams& p, int slot) {
    held = slot != kNoSlot;
    outside = held && uint32_t(slot) >= uint32_t(p.num_slots);
    from = outside ? reinterpret_cast<const char*>(&kNanChunk)
                   : reinterpret_cast<const char*>(p.kv + int64_t(held ? slot : 0) * p.kv_stride);
  }
  __device__ void copy(uint32_t to, int byte) const { copy_16_bytes(to, from + (outside ? 0 : byte), held); }
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
    partial = piece.slot == kDirect ? nullptr : p.partial_out + first_partial * kLatentDim;
    out = p.out + (int64_t(piece.request) * rows + row0) * kLatentDim;
    rows_left = rows - row0;
  }

  // x, y: dim `dim` of rows `row` and `row` + 1. Lane l holds dim + (l / 4) % 8 of it, row + 2 * (l % 4).
  __device__ void store(int row, int dim, float x, float y) const {
    if (partial) {
      partial[int64_t(row) * kLatentDim + dim] = x;
      partial[int64_t(row + 1) * kLatentDim + dim] = y;
      return;
    }
    // Lanes of dims d and d + 1 trade values, so that each stores two neighbouring dims of one row.
    const bool odd = threadIdx.x / 4 & 1;
    const float traded = __shfl_xor_sync(0xffffffffu, odd ? x : y, 4);
    if (row + odd >= rows_left) return;
    const __nv_bfloat162 both = odd ? __floats2bfloat162_rn(traded, y) : __floats2bfloat162_rn(x, traded);
    *reinterpret_cast<__nv_bfloat162*>(out + int64_t(row + odd) * kLatentDim + (dim & ~1)) = both;
  }
};

}  // namespace treemla
