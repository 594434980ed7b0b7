// The PTX this project uses, one wrapper an instruction. All of it exists on sm_90a and sm_120a; setmaxnreg is what
// plain sm_90 and sm_120 lack.
#pragma once
#include <cstdint>

namespace treemla {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void ldmatrix_x2(uint32_t& r0, uint32_t& r1, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r0), "=r"(r1) : "r"(address) : "memory");
}

__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

__device__ __forceinline__ void stmatrix_x2_trans(uint32_t address, uint32_t r0, uint32_t r1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(address), "r"(r0), "r"(r1) : "memory");
}

// d += a * b: a [16 x 16] row-major, b [16 x 8] column-major, bf16; d float32.
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two bf16 in a word, x in the low half.
__device__ __forceinline__ uint32_t bf16_pair(float x, float y) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  return pair;
}

// threadIdx.x, read anew: what is computed from it occupies no register elsewhere.
__device__ __forceinline__ int thread_again() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// L2 policy of bytes that are not read again soon.
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Asynchronous 16-byte copy; where `valid` is false the target becomes zero and the source is not read.
__device__ __forceinline__ void copy_16_bytes(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_16_bytes(uint32_t shared, const void* global, bool valid, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
               ::"r"(shared), "l"(global), "r"(valid ? 16 : 0), "l"(policy) : "memory");
}

// A load that is not waited for before its value is used, past L1: nothing here is read twice.
__device__ __forceinline__ uint4 load_16_bytes(const char* global) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(global));
  return x;
}

// The same; where not `there`, zero. No branch: loads that follow one another stay so.
__device__ __forceinline__ uint4 load_16_bytes(const char* global, bool there) {
  uint4 x;
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.s32 there, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@there ld.global.L1::no_allocate.v4.b32 {%0,%1,%2,%3}, [%4];\n"
      "}" : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w) : "l"(global), "r"(int(there)));
  return x;
}
__device__ __forceinline__ uint2 load_8_bytes(const char* global, bool there) {
  uint2 x;
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "setp.ne.s32 there, %3, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "@there ld.global.L1::no_allocate.v2.b32 {%0,%1}, [%2];\n"
      "}" : "=&r"(x.x), "=&r"(x.y) : "l"(global), "r"(int(there)));
  return x;
}

__device__ __forceinline__ uint4 load_shared_16_bytes(uint32_t shared) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(shared) : "memory");
  return x;
}

__device__ __forceinline__ void store_16_bytes(uint32_t shared, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Four e4m3 values as four halves, two a register. Exact.
__device__ __forceinline__ void e4m3_to_halves(uint32_t& first_two, uint32_t& last_two, uint32_t four_values) {
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n"
      "}" : "=r"(first_two), "=r"(last_two) : "r"(four_values));
}

// The copies since the last call are a group; wait until all but the last `pending` groups of this thread have landed.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void wait_copies_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// This thread arrives at `barrier` once all its copies so far have landed.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Whether the phase of the given parity is over.
__device__ __forceinline__ bool barrier_test(uint32_t barrier, uint32_t parity) {
  int over;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.s32 %0, 1, 0, done;\n"
      "}" : "=r"(over) : "r"(barrier), "r"(parity) : "memory");
  return over;
}

// Waits until the phase of the given parity is over.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}" ::"r"(barrier), "r"(parity) : "memory");
}

// What a rows-by-columns box of a matrix in global memory is copied by. Made by the driver (launch.py).
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// The phase of `barrier` does not end before so many more bytes have arrived.
__device__ __forceinline__ void barrier_expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Asynchronous copy of the map's box from (row, column) on; its bytes arrive at `barrier`.
__device__ __forceinline__ void copy_box(uint32_t shared, const TensorMap* map, int row, int column, uint32_t barrier, uint64_t policy) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
               " [%0], [%1, {%2, %3}], [%4], %5;"
               ::"r"(shared), "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy) : "memory");
}

// Orders this thread's ordinary shared-memory accesses, and those it has synchronised with, before later ones by wgmma.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barrier of the first `threads` threads' warps only; 0 is __syncthreads's.
template <int id, int threads>
__device__ __forceinline__ void named_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(id), "n"(threads) : "memory");
}

// The same, and whether any of the threads says yes.
template <int id, int threads>
__device__ __forceinline__ bool vote_any(bool yes) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred mine, one;\n"
      "setp.ne.s32 mine, %1, 0;\n"
      "bar.red.or.pred one, %2, %3, mine;\n"
      "selp.s32 %0, 1, 0, one;\n"
      "}" : "=r"(any) : "r"(int(yes)), "n"(id), "n"(threads) : "memory");
  return any;
}

// Hands registers of this warpgroup back to the pool, or takes more. Every warp of the group executes it.
template <int registers>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// Programmatic dependent launch: the next kernel of the stream may be set up from here on ...
__device__ __forceinline__ void allow_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ... and there, everything that the kernel before it wrote is visible from here on.
__device__ __forceinline__ void wait_for_dependency() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace treemla
