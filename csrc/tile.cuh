// Constants of the verify tile and the parameter structs that host and device share.
// src/treemla/tiles.py and src/treemla/launch.py repeat them; tests/static/test_device_constants.py compares the two.
#pragma once
#include <cuda_bf16.h>
#include <cstdint>
#include <type_traits>

namespace treemla {

constexpr int kLatentDim = 512;
constexpr int kRopeDim = 64;
constexpr int kHeadDim = kLatentDim + kRopeDim;
constexpr int kRowTile = 8;      // query rows of one mma column tile
constexpr int kMaxTreeTokens = 64;
constexpr int kTileTokens = 32;  // of the mma kernel's loop

// The mma.sync path's CTA.
constexpr int kWarps = 8;      // consumers: the arithmetic
constexpr int kProducers = 4;  // warps that only copy KV rows
constexpr int kThreads = 32 * (kWarps + kProducers);
constexpr int kKvRowBytes = kHeadDim * 2 + 16;  // 73 * 16: odd, so ldmatrix meets no bank conflict, plain or transposed
constexpr int kStages = 2;                       // what sm_120's shared memory holds beside the rest
constexpr int kStageBytes = kTileTokens * kKvRowBytes;
constexpr int kKSplits = 4;                     // warps that share one token group's 576-long dot product
constexpr int kKSteps = kHeadDim / 16 / kKSplits;
constexpr int kScoreStride = kTileTokens + 4;   // floats; 2 * stride = 8 mod 32: conflict-free fragment stores
constexpr int kProbStride = kTileTokens + 8;    // bf16; 5 * 16 bytes: conflict-free ldmatrix

enum class KvType { bf16, e4m3 };  // of the KV rows in global memory; in shared memory they are bf16

constexpr int kMinPartTokens = 64;
constexpr int kDirect = -1;
constexpr int kOverlong = -1;

// Registers a thread of a kernel that takes the whole register file with one CTA of `threads`. tiles.py says the same,
// and the static layer compares it with what the compiler gave.
__host__ __device__ constexpr int launch_registers(int threads) { return 65536 / threads / 8 * 8; }

// Where tokens live: token j of request b is index[row[b] * stride + j]. A table has stride C and row =
// req_pool_indices; ranges have stride 1 and row = kv_indptr.
struct Slots {
  const void* index;  // int32 or int64
  const void* row;    // [B] or [B+1], int32 or int64
  int64_t stride;     // elements
  int32_t index_is_64;
  int32_t row_is_64;
};

// A part of a request's KV: tokens kv_begin .. kv_end-1; slot of its partial, or kDirect.
struct alignas(16) Piece {
  int32_t request, kv_begin, kv_end, slot;
};

// What a CTA reads before all else, so that no load of its first piece waits for another: a part's pieces begin .. end-1, the
// first of them beside, in how many shares row blocks are taken, by neighbours with the same part, and which is the CTA's.
struct alignas(16) PartWork {
  Piece first;
  int32_t begin, end, shares, share;
};

struct PlanParams {
  const void* seq_lens;  // [B] int32 or int64
  Slots slots;           // capacity of request b: `capacity`, or row[b+1] - row[b] for ranges
  int32_t* committed;    // [B]
  Piece* pieces;         // [max_pieces]
  PartWork* part_work;   // [parts]
  int32_t* request_ptr;  // [B + 1]
  int32_t batch, parts, tree_tokens, tail;
  int32_t seq_lens_is_64;
  int32_t slots_are_ranges;
  int32_t capacity;      // slots a request may hold, tree included
  int32_t split_tokens;  // 0: balanced
  int32_t overhead_tiles;  // what a request costs beside its tiles
  int32_t tile_shift;      // a tile of the kernel has 1 << tile_shift tokens
  int32_t halved_tiles, third_tiles;  // row blocks are taken by two, or by three, in steps that cost at most so many
};

struct PackMaskParams {
  const uint8_t* mask;   // flat, 1 = visible
  const void* seq_lens;  // [B] int32 or int64
  uint64_t* words;       // [B * T]
  int64_t mask_bytes;
  int32_t batch, tree_tokens, num_padding;
  int32_t seq_lens_is_64;
  int32_t full_layout;   // rows span seq_len + T columns; else T
};

struct VerifyParams {
  const __nv_bfloat16* q_latent;  // [B*T, H, 512], strides below
  const __nv_bfloat16* q_rope;    // [B*T, H, 64]
  const void* kv;                 // [num_slots, 576] bf16 or e4m3
  const uint64_t* words;          // [B * T], or null: a chain
  Slots slots;
  const int32_t* committed;       // [B]
  const Piece* pieces;
  const PartWork* part_work;      // [parts]
  const int32_t* request_ptr;     // [B + 1]
  char* partial_out;              // [slots, blocks, block_rows, 512 * 3 bytes], sums of weight * value; as work.cuh has them
  float2* partial_lse;            // [slots, blocks, block_rows]: base-2 reference of the weights, and their sum
  __nv_bfloat16* out;             // [B*T, H, 512]
  float* lse;                     // [B*T, H], natural
  int64_t q_latent_token_stride, q_latent_head_stride;  // elements
  int64_t q_rope_token_stride, q_rope_head_stride;      // elements
  int64_t kv_stride;                                    // elements
  int32_t num_slots, heads, tree_tokens;
  float score_scale;  // sm_scale * k_scale * log2(e)
  float v_scale;
};

__device__ __forceinline__ int64_t load_index(const void* p, int64_t i, bool is_64) {
  return is_64 ? static_cast<const int64_t*>(p)[i] : static_cast<const int32_t*>(p)[i];
}

}  // namespace treemla
