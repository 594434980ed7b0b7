// Rows of many buffers from slots to slots, 16 bytes a thread at a time. A CTA owns one slice of a row's columns, in one
// buffer, for a group of moves, and has read all of it before it writes. Where one group holds all moves, a slot may be
// source and destination: no other CTA touches the slice. Several groups are for plans in which no slot is both.
//
// grid (groups * slices, buffers): the slices of a group are neighbours, so that a row is read and written by CTAs that
// run together. Threads beyond the last whole row of a slice wait at the barrier.
#pragma once
#include "ptx.cuh"
#include "tile.cuh"

namespace treemla {

constexpr int kMoveThreads = 576;  // 8 rows of 1,152 bytes, 16 of 576: none idle
constexpr int kMoveChunks = 8;     // 16-byte chunks a thread moves
constexpr int kMoveBuffers = 256;  // of one launch; the table lies in the parameters, which CUDA graphs keep

struct MoveRowsParams {
  void* buffers[kMoveBuffers];
  const int64_t* source;       // [moves] slots
  const int64_t* destination;  // [moves]
  int64_t stride_bytes;        // from slot to slot, in every buffer
  int32_t moves, num_slots;
  int32_t row_chunks;          // 16-byte chunks of a row
  int32_t slice_chunks;        // of these, a CTA's; divides them
};

__device__ __forceinline__ void move_rows(const MoveRowsParams& p) {
  const int slices = p.row_chunks / p.slice_chunks;
  const int group = blockIdx.x / slices, slice = blockIdx.x % slices;
  const int rows = kMoveThreads / p.slice_chunks;  // that the CTA reads at a time
  const int row = threadIdx.x / p.slice_chunks, chunk = threadIdx.x % p.slice_chunks;
  char* column = static_cast<char*>(p.buffers[blockIdx.y]) + 16 * (slice * p.slice_chunks + chunk);

  int64_t from[kMoveChunks], to[kMoveChunks];
#pragma unroll
  for (int k = 0; k < kMoveChunks; k++) {  // the last move again beyond the end: no branch, so that all loads are one wait
    const int move = min((group * kMoveChunks + k) * rows + row, p.moves - 1);
    from[k] = p.source[move];
    to[k] = p.destination[move];
  }
  extern __shared__ uint4 held[];  // [kMoveChunks][kMoveThreads]
  uint4* mine = held + threadIdx.x;
#pragma unroll
  for (int k = 0; k < kMoveChunks; k++) {
    const bool is_move = row < rows && (group * kMoveChunks + k) * rows + row < p.moves;
    const bool in_pool = uint64_t(from[k]) < p.num_slots && uint64_t(to[k]) < p.num_slots;
    if (!is_move || !in_pool) to[k] = -1;
    if (to[k] >= 0) copy_16_bytes(shared_address(mine + k * kMoveThreads), column + from[k] * p.stride_bytes, true);
  }
  wait_copies();
  __syncthreads();  // every thread has read before one writes
#pragma unroll
  for (int k = 0; k < kMoveChunks; k++) {
    if (to[k] >= 0) __stcs(reinterpret_cast<uint4*>(column + to[k] * p.stride_bytes), mine[k * kMoveThreads]);
  }
}

}  // namespace treemla
