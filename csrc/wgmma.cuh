// wgmma.mma_async m64nNk16, bf16 in, float32 accumulators, both operands in shared memory (128-byte swizzle).
//
// d[4 n + c]: row 16 * (warp of the group) + lane / 4 + 8 * (c / 2), column 8 n + 2 * (lane % 4) + c % 2.
// A is K-major (kTransposeA 0) or M-major (1); B is K-major. Sources: PTX ISA, "Asynchronous wgmma instructions".
#pragma once
#include <cstdint>

namespace treemla {

// Matrix descriptor of an operand made of atoms of 8 rows of 128 bytes, one atom after another: 1,024 bytes between
// atoms (bits 32-45), 128-byte swizzle (bits 62-63). The base of the first atom is a multiple of 1,024.
__device__ __forceinline__ uint64_t operand(uint32_t shared) {
  return uint64_t(1) << 62 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 16 | (shared >> 4 & 0x3fff);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// d = a * b, plus d where `add`. Of 8 kColumnTiles columns.
template <int kColumnTiles, int kTransposeA>
__device__ __forceinline__ void wgmma(float (&d)[4 * kColumnTiles], uint64_t a, uint64_t b, bool add);

#define F(i) "+f"(d[i])
#define F4(i) F(i), F(i + 1), F(i + 2), F(i + 3)
#define TREEMLA_WGMMA(tiles, columns, registers, at_a, at_b, at_add, ...)                                              \
  template <>                                                                                                          \
  __device__ __forceinline__ void wgmma<tiles, 0>(float (&d)[4 * tiles], uint64_t a, uint64_t b, bool add) {           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" at_add ", 0;\n"                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" registers "}, %" at_a ", %" at_b    \
                 ", p, 1, 1, 0, 0;\n}"                                                                                 \
                 : __VA_ARGS__ : "l"(a), "l"(b), "r"(int(add)));                                                       \
  }                                                                                                                    \
  template <>                                                                                                          \
  __device__ __forceinline__ void wgmma<tiles, 1>(float (&d)[4 * tiles], uint64_t a, uint64_t b, bool add) {           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" at_add ", 0;\n"                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" registers "}, %" at_a ", %" at_b    \
                 ", p, 1, 1, 1, 0;\n}"                                                                                 \
                 : __VA_ARGS__ : "l"(a), "l"(b), "r"(int(add)));                                                       \
  }

#define R1 "%0, %1, %2, %3"
#define D1 F4(0)
#define R2 R1 ", %4, %5, %6, %7"
#define D2 D1, F4(4)
#define R3 R2 ", %8, %9, %10, %11"
#define D3 D2, F4(8)
#define R4 R3 ", %12, %13, %14, %15"
#define D4 D3, F4(12)
#define R5 R4 ", %16, %17, %18, %19"
#define D5 D4, F4(16)
#define R6 R5 ", %20, %21, %22, %23"
#define D6 D5, F4(20)
#define R7 R6 ", %24, %25, %26, %27"
#define D7 D6, F4(24)
#define R8 R7 ", %28, %29, %30, %31"
#define D8 D7, F4(28)
#define R9 R8 ", %32, %33, %34, %35"
#define D9 D8, F4(32)
TREEMLA_WGMMA(1, "8", R1, "4", "5", "6", D1)
TREEMLA_WGMMA(2, "16", R2, "8", "9", "10", D2)
TREEMLA_WGMMA(3, "24", R3, "12", "13", "14", D3)
TREEMLA_WGMMA(4, "32", R4, "16", "17", "18", D4)
TREEMLA_WGMMA(5, "40", R5, "20", "21", "22", D5)
TREEMLA_WGMMA(6, "48", R6, "24", "25", "26", D6)
TREEMLA_WGMMA(7, "56", R7, "28", "29", "30", D7)
TREEMLA_WGMMA(8, "64", R8, "32", "33", "34", D8)
TREEMLA_WGMMA(9, "72", R9, "36", "37", "38", D9)
#undef R1
#undef D1
#undef R2
#undef D2
#undef R3
#undef D3
#undef R4
#undef D4
#undef R5
#undef D5
#undef R6
#undef D6
#undef R7
#undef D7
#undef R8
#undef D8
#undef R9
#undef D9
#undef F
#undef F4
#undef TREEMLA_WGMMA

}  // namespace treemla
