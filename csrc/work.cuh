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

// A value that is the same in all lanes, so that the compiler knows it: else it doubles all code that shuffles.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// Tokens of a piece in tiles of `tile_tokens`.
__device__ __forceinline__ int tiles_of(const Piece& piece, int tile_tokens) {
  return (max(0, piece.kv_end - piece.kv_begin) + tile_tokens - 1) / tile_tokens;
}

// Rows of each share of a block but the last, which has what is left.
__host__ __device__ constexpr int share_rows(int block_rows, int shares) {
  return (block_rows / kRowTile + shares - 1) / shares * kRowTile;
}

// The query rows of a CTA, in their request's order; the rows of all blocks are what a slot of the workspace holds.
struct RowBlock {
  int row0, held, slot_rows;

  // Block blockIdx.x or, of all blocks' shares, share * gridDim.x + blockIdx.x: neighbours have the same block.
  __device__ RowBlock(int block_rows, int shares = 1, int share = 0) : slot_rows(gridDim.x * block_rows) {
    const int nth = share * gridDim.x + blockIdx.x, of_block = nth % shares * share_rows(block_rows, shares);
    row0 = nth / shares * block_rows + of_block;
    held = min(share_rows(block_rows, shares), block_rows - of_block);
  }
  __device__ int64_t partial_row(int slot) const { return int64_t(slot) * slot_rows + row0; }
};

// The pieces of a CTA.
struct PartPieces {
  const Piece* pieces;
  PartWork work;
  int64_t row_of_0;  // of request 0's slots: read beside the work and not after it

  __device__ explicit PartPieces(const VerifyParams& p)
      : pieces(p.pieces), work(p.part_work[blockIdx.y]), row_of_0(load_index(p.slots.row, 0, p.slots.row_is_64)) {}
  __device__ int begin() const { return work.begin; }
  __device__ int end() const { return work.end; }
  __device__ Piece at(int i) const { return i == work.begin ? work.first : pieces[i]; }
};

// Which of a request's tree tokens its token `token` sees.
__device__ __forceinline__ uint64_t tree_word(const VerifyParams& p, int request, int token) {
  return p.words ? p.words[int64_t(request) * p.tree_tokens + token] : ~0ull >> (63 - token);
}

// Slots of a piece's tokens. Of a 64-bit index the low word is read; pools have fewer than 2^31 slots.
struct SlotReader {
  int kv_begin, kv_end;
  const int32_t* first;  // low word of the piece's first slot
  int shift;             // 1 for 64-bit indices

  __device__ SlotReader(const VerifyParams& p, const Piece& piece, int64_t row_of_0)
      : kv_begin(piece.kv_begin), kv_end(piece.kv_end), shift(p.slots.index_is_64) {
    const int64_t row = piece.request ? load_index(p.slots.row, piece.request, p.slots.row_is_64) : row_of_0;
    first = static_cast<const int32_t*>(p.slots.index) + ((row * p.slots.stride + kv_begin) << shift);
  }

  // Slot of the piece's token `at`. Judged by its user and not here: nothing may wait for it before the tile is due.
  __device__ int load(int at) const { return kv_begin + at < kv_end ? first[int64_t(at) << shift] : kNoSlot; }
};

// What a request's rows see of its tokens: nobody's slot may hold anything.
struct Visible {
  int committed;
  uint64_t tree;  // tokens that some row sees

  // Called by a whole warp.
  __device__ Visible(const VerifyParams& p, int request) : committed(p.committed[request]), tree(~0ull) {
    if (!p.words) return;
    uint64_t seen = 0;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < p.tree_tokens; i += 32) seen |= p.words[int64_t(request) * p.tree_tokens + i];
    tree = uint64_t(__reduce_or_sync(0xffffffffu, uint32_t(seen >> 32))) << 32 |
           __reduce_or_sync(0xffffffffu, uint32_t(seen));
  }
  __device__ bool has(int token) const { return token < committed || tree >> (token - committed) & 1; }
};

// `loaded`, waited for here. The compiler counts loads in flight by groups: a later wait for this one would be a wait for
// the next one too, which has queued behind the copies.
__device__ __forceinline__ int arrived(int loaded) { return __shfl_sync(0xffffffffu, loaded, threadIdx.x % 32); }

// `address`, which the compiler then does not split. Of a sum of a thread's own and a CTA's part ptxas 13.0 makes a copy
// with a uniform register beside its policy, [R + UR + n] and desc[UR], which is an illegal instruction.
__device__ __forceinline__ uint32_t in_register(uint32_t address) { return __shfl_sync(0xffffffffu, address, threadIdx.x % 32); }

// Source of a bf16 KV row's copies.
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

// A position in a ring of stages: whoever fills it and whoever empties it step alike, across pieces. `stages` is mostly constant.
struct RingPosition {
  int stages;
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// Which latent dim a thread's value is, alike in both verify kernels: of eight warps that share the 512 dims, warp
// `warp` has four blocks m of 16 dims, halves of eight, and lane / 4 = `group` one dim of each.
__device__ __forceinline__ int dim_of(int warp, int m, int half, int group) {
  return (2 * m + warp / 4) * 64 + 16 * (warp % 4) + 8 * half + group;
}

// Where a row block's outputs of a piece go: the partial of its slot, or, of a request's only piece, the output itself.
// A partial value is the upper three bytes of a float: beside the two roundings to bf16, of probabilities and of the
// result, 2^-15 is nothing, and a third would not be. A row is 64 chunks of eight values, one a thread, chunk 8 * warp +
// group, values in order 2 m + half: first all chunks' upper two bytes, 16 a chunk, then their third bytes, 8 a chunk. So
// a warp writes whole lines, and the merge reads them as they are.
constexpr int kRowChunks = kLatentDim / 8;
constexpr int kPartialRowBytes = 3 * kLatentDim;

struct Chunk {
  uint4 upper;
  uint2 third;

  Chunk() = default;
  __device__ Chunk(const float (&v)[8]) {
    uint32_t bits[8], two[4];
#pragma unroll
    for (int i = 0; i < 8; ++i) bits[i] = __float_as_uint(v[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i) two[i] = __byte_perm(bits[2 * i], bits[2 * i + 1], 0x0051);
    upper = make_uint4(__byte_perm(bits[0], bits[1], 0x7632), __byte_perm(bits[2], bits[3], 0x7632),
                       __byte_perm(bits[4], bits[5], 0x7632), __byte_perm(bits[6], bits[7], 0x7632));
    third = make_uint2(__byte_perm(two[0], two[1], 0x5410), __byte_perm(two[2], two[3], 0x5410));
  }
  // row: of kPartialRowBytes; zero, and nothing read, where there is none.
  __device__ Chunk(const char* row, int chunk, bool there)
      : upper(load_16_bytes(row + 16 * chunk, there)), third(load_8_bytes(row + 2 * kLatentDim + 8 * chunk, there)) {}
  __device__ void store(char* row, int chunk) const {
    reinterpret_cast<uint4*>(row)[chunk] = upper;
    reinterpret_cast<uint2*>(row + 2 * kLatentDim)[chunk] = third;
  }
  __device__ float value(int i) const {
    const uint32_t pair = i / 2 == 0 ? upper.x : i / 2 == 1 ? upper.y : i / 2 == 2 ? upper.z : upper.w;
    const uint32_t thirds = i < 4 ? third.x : third.y;
    // Lowest byte first: the third also in the fourth's place, where nothing better is known.
    return __uint_as_float(__byte_perm(pair, thirds, (i % 2 ? 0x3200 : 0x1000) | (4 + i % 4) << 4 | (4 + i % 4)));
  }
};

struct BlockOutput {
  char* partial;
  __nv_bfloat16* out;
  int rows_left;  // of the request, from the block's first on
  int warp, group = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;

  __device__ BlockOutput(const VerifyParams& p, const Piece& piece, const RowBlock& block, int warp) : warp(warp) {
    const int rows = p.tree_tokens * p.heads;
    partial = p.partial_out + block.partial_row(piece.slot) * kPartialRowBytes;
    out = p.out + (int64_t(piece.request) * rows + block.row0) * kLatentDim;
    rows_left = min(block.held, rows - block.row0);
  }

  // v[m][2 * half + c]: of row 8 n + 2 * pair + c.
  __device__ void store_partial(int n, const float (&v)[4][4]) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const Chunk chunk({v[0][c], v[0][2 + c], v[1][c], v[1][2 + c], v[2][c], v[2][2 + c], v[3][c], v[3][2 + c]});
      chunk.store(partial + (8 * n + 2 * pair + c) * kPartialRowBytes, 8 * warp + group);
    }
  }

  __device__ void store_out(int n, const float (&v)[4][4]) const {
    // Lanes of dims d and d + 1 trade values, so that each stores two neighbouring dims of one row.
    const bool odd = group & 1;
    // One address, from which all else is constant: an offset for each dim would hold a register over all pieces.
    const int row = 2 * pair + odd;
    __nv_bfloat16* const to = out + row * kLatentDim + dim_of(warp, 0, 0, group & ~1);
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float x = v[m][2 * half], y = v[m][2 * half + 1];
        const float traded = __shfl_xor_sync(0xffffffffu, odd ? x : y, 4);
        const __nv_bfloat162 both = odd ? __floats2bfloat162_rn(traded, y) : __floats2bfloat162_rn(x, traded);
        if (8 * n + row < rows_left) *reinterpret_cast<__nv_bfloat162*>(to + 8 * n * kLatentDim + dim_of(0, m, half, 0)) = both;
      }
  }
};

}  // namespace treemla
