// Products of a warpgroup (wgmma): 64 rows by N columns, in float32 over bfloat16.
//
// A warpgroup issues products, commits them as a group and waits for groups. Until then no thread may use their
// registers or write the shared memory that they read. Sums are laid out as those of mma m16n8: d[n * 4 + e] is
// row g + 8 (e / 2) of the warp's 16, column n * 8 + (lane & 3) * 2 + e % 2, where g is lane / 4.
#pragma once
#include "device/ptx.cuh"

namespace lora_jax {

// Operands in shared memory lie in blocks of 64 columns, [rows][128 bytes], each 128 bytes swizzled by
// the row's place among 8: what swizzled_map brings.
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t address) {
  const uint64_t eight_rows = 1024 >> 4, swizzle_128 = 1;
  return (address & 0x3ffff) >> 4 | 1ull << 16 | eight_rows << 32 | swizzle_128 << 62;
}
// Or in pieces of 8 rows of 16 bytes; `along` and `across` are the bytes from one to the next along the sum
// and across it. Of an operand whose columns lie beside each other a row of the piece is 8 of these.
__device__ __forceinline__ uint64_t wgmma_pieces(uint32_t address, uint32_t along, uint32_t across) {
  return (address & 0x3ffff) >> 4 | static_cast<uint64_t>(along >> 4) << 16 | static_cast<uint64_t>(across >> 4) << 32;
}
// Operands of which many are `at` some multiples of 16 bytes behind a first one: one sum each.
struct WgmmaOperand {
  uint32_t low, high;
  __device__ __forceinline__ uint64_t at(uint32_t bytes) const {
    return static_cast<uint64_t>(high) << 32 | (low + (bytes >> 4));
  }
};
// The first kind.
__device__ __forceinline__ WgmmaOperand wgmma_lines(uint32_t address) {
  return {(address & 0x3ffff) >> 4 | 1u << 16, 1024 >> 4 | 1u << 30};
}
// The same of an operand whose columns lie beside each other: 64 of them make a row of a block, and the next
// 64 lie `apart` bytes further; the next 8 rows follow.
__device__ __forceinline__ WgmmaOperand wgmma_turned(uint32_t address, uint32_t apart) {
  return {(address & 0x3ffff) >> 4 | (apart >> 4) << 16, 1024 >> 4 | 1u << 30};
}
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all but the last PENDING groups are done.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// What is done with these registers before and after stays on its side.
template <int N>
__device__ __forceinline__ void wgmma_settle(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// The registers of N / 2 sums: their names in the text of an instruction, and the operands; eight more at a time.
#define LORA_JAX_EIGHT(d, i)                                                                                    \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define LORA_JAX_SUMS_8(d) LORA_JAX_EIGHT(d, 0)
#define LORA_JAX_SUMS_16(d) LORA_JAX_SUMS_8(d), LORA_JAX_EIGHT(d, 8)
#define LORA_JAX_SUMS_24(d) LORA_JAX_SUMS_16(d), LORA_JAX_EIGHT(d, 16)
#define LORA_JAX_SUMS_32(d) LORA_JAX_SUMS_24(d), LORA_JAX_EIGHT(d, 24)
#define LORA_JAX_SUMS_40(d) LORA_JAX_SUMS_32(d), LORA_JAX_EIGHT(d, 32)
#define LORA_JAX_SUMS_48(d) LORA_JAX_SUMS_40(d), LORA_JAX_EIGHT(d, 40)
#define LORA_JAX_SUMS_56(d) LORA_JAX_SUMS_48(d), LORA_JAX_EIGHT(d, 48)
#define LORA_JAX_SUMS_64(d) LORA_JAX_SUMS_56(d), LORA_JAX_EIGHT(d, 56)
#define LORA_JAX_SUMS_72(d) LORA_JAX_SUMS_64(d), LORA_JAX_EIGHT(d, 64)
#define LORA_JAX_SUMS_80(d) LORA_JAX_SUMS_72(d), LORA_JAX_EIGHT(d, 72)
#define LORA_JAX_SUMS_88(d) LORA_JAX_SUMS_80(d), LORA_JAX_EIGHT(d, 80)
#define LORA_JAX_SUMS_96(d) LORA_JAX_SUMS_88(d), LORA_JAX_EIGHT(d, 88)
#define LORA_JAX_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define LORA_JAX_NAMES_16 LORA_JAX_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define LORA_JAX_NAMES_24 LORA_JAX_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define LORA_JAX_NAMES_32 LORA_JAX_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define LORA_JAX_NAMES_40 LORA_JAX_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define LORA_JAX_NAMES_48 LORA_JAX_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define LORA_JAX_NAMES_56 LORA_JAX_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define LORA_JAX_NAMES_64 LORA_JAX_NAMES_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define LORA_JAX_NAMES_72 LORA_JAX_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define LORA_JAX_NAMES_80 LORA_JAX_NAMES_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define LORA_JAX_NAMES_88 LORA_JAX_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define LORA_JAX_NAMES_96 LORA_JAX_NAMES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
// d (+)= a b^T over 16 columns of both: a is 64 rows, b N of them. A, B and ADD number the operands behind the sums.
#define LORA_JAX_WGMMA_ROWS(N, SUMS, A, B, ADD)                                                                 \
  __device__ __forceinline__ void wgmma_rows(float (&d)[SUMS], uint64_t a, uint64_t b, bool add) {              \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD ", 0;\n"                                             \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" LORA_JAX_NAMES_##SUMS "}, %" #A   \
                 ", %" #B ", p, 1, 1, 0, 0;\n}"                                                                 \
                 : LORA_JAX_SUMS_##SUMS(d)                                                                      \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                 \
  }
LORA_JAX_WGMMA_ROWS(16, 8, 8, 9, 10)
LORA_JAX_WGMMA_ROWS(32, 16, 16, 17, 18)
LORA_JAX_WGMMA_ROWS(48, 24, 24, 25, 26)
LORA_JAX_WGMMA_ROWS(112, 56, 56, 57, 58)
LORA_JAX_WGMMA_ROWS(192, 96, 96, 97, 98)
#undef LORA_JAX_WGMMA_ROWS
// d += a b over 16 rows of b, whose columns lie beside each other, 80 of them; a is this warp's operand of mma.
__device__ __forceinline__ void wgmma_columns(float (&d)[40], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39"
      "}, {%40, %41, %42, %43}, %44, 1, 1, 1, 1;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
        "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
        "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
        "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
        "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// d (+)= a b^T over 16 columns of both: b has 64 rows; a is this warp's operand of mma.
__device__ __forceinline__ void wgmma_keys(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
        "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
        "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
        "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}
// d += a b over 16 rows of b, whose 64 columns lie beside each other; a is this warp's operand of mma.
__device__ __forceinline__ void wgmma_columns(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
        "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
        "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
        "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// d += a b over 16 rows of b, whose 128 columns lie beside each other; a is this warp's operand of mma.
__device__ __forceinline__ void wgmma_columns(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),
        "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),
        "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
        "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
        "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),
        "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
        "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

}  // namespace lora_jax
