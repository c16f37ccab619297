// The Hopper instructions that the sm_90a kernels use, one function each: barriers in shared memory, bulk copies,
// wgmma.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "violin/kernels/cuda/common.cuh"

namespace violin::kernels::cuda::sm90 {

// Barriers in shared memory: a phase ends when `count` threads have arrived and the announced bytes have landed.
// Held by address: going from a pointer to the address in every step costs instructions.
class Barrier {
 public:
  __device__ __forceinline__ explicit Barrier(std::uint32_t at) : at_(at) {}
  __device__ __forceinline__ std::uint32_t address() const { return at_; }
  __device__ __forceinline__ Barrier operator+(int n) const { return Barrier(at_ + 8 * n); }

 private:
  std::uint32_t at_;
};

__device__ __forceinline__ void init(Barrier b, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b.address()), "r"(count));
}
// How many lanes of a warp arrive when the warp has read what a barrier guards. One is enough, after __syncwarp; but
// compute-sanitizer's racecheck takes the reads of a lane as done only when that lane arrives itself.
#ifdef VIOLIN_RACECHECK
constexpr int kSpeakers = 32;
#else
constexpr int kSpeakers = 1;
#endif
// A barrier that warps release.
__device__ __forceinline__ void init_for_warps(Barrier b, int warps) {
  init(b, warps * kSpeakers);
}
__device__ __forceinline__ void fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(Barrier b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b.address()) : "memory");
}
// True for one lane of a warp. Asking for the thread's number would wait behind loads and stores.
__device__ __forceinline__ bool elect() {
  std::uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(elected));
  return elected != 0;
}
// Called by all lanes of a warp when the warp has read what the barrier guards; one of them speaks for it.
__device__ __forceinline__ void release(Barrier b, bool speaker) {
  __syncwarp();
  if (kSpeakers > 1 || speaker) arrive(b);
}
__device__ __forceinline__ void release(Barrier b) {
  release(b, elect());
}
__device__ __forceinline__ void arrive_and_expect(Barrier b, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b.address()), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(Barrier b, int phase) {
  std::uint32_t done = 0;
  while (!done) {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done)
                 : "r"(b.address()), "r"(phase)
                 : "memory");
  }
}

// A box of a [B,h,N,d] tensor into shared memory; rows and columns outside become 0.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, Barrier b, int column, int row, int head,
                                         int image) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(b.address()), "r"(column), "r"(row), "r"(head), "r"(image)
      : "memory");
}
// The same box into the same place of every block of the cluster that is in the mask, each with its own barrier.
__device__ __forceinline__ void copy_box_to(std::uint16_t blocks, void* to, const CUtensorMap* map, Barrier b,
                                            int column, int row, int head, int image) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)),
      "l"(map), "r"(b.address()), "r"(column), "r"(row), "r"(head), "r"(image), "h"(blocks)
      : "memory");
}
// Contiguous bytes into shared memory; everything in multiples of 16.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, std::uint32_t bytes, Barrier b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(b.address())
               : "memory");
}

// A box from shared memory to where the map says; what lies outside is not written. The store belongs to the calling
// thread's group, which commit_stores ends; wait_until_read waits until nothing of the thread's groups is left to read.
// What other threads wrote to shared memory must be behind their fence_stores and a barrier.
__device__ __forceinline__ void store_box(const CUtensorMap* map, const void* from, int column, int row, int head,
                                          int image) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(shared_address(from)), "r"(column), "r"(row), "r"(head), "r"(image)
               : "memory");
}
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void wait_until_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void fence_stores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Clusters of blocks.
__device__ __forceinline__ int cluster_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// For threads of a warp that has lost others to an early return.
__device__ __forceinline__ void cluster_sync_unaligned() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// A barrier of another block of the cluster.
__device__ __forceinline__ std::uint32_t address_in(Barrier b, int block) {
  std::uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(b.address()), "r"(block));
  return address;
}
// Says that this warp's reads of shared memory are done. With release semantics for the whole cluster this would wait
// until every earlier write of the thread has arrived in L2, and nothing that was written is handed over here.
__device__ __forceinline__ void arrive_at(std::uint32_t address) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}

// Kernels that may overlap: the next one's blocks may start as soon as this one's have left room for them; and this one
// is not complete before the one before it is.
__device__ __forceinline__ void let_next_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void await_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Moves registers between warpgroups; every warp of the warpgroup takes part. A block starts with equal shares of
// 65536, in eights; who takes more than others give waits for ever.
constexpr bool registers_suffice(int consumer_groups, int give, int take) {
  const int share = 65536 / ((consumer_groups + 1) * 128) / 8 * 8;
  return consumer_groups * (take - share) <= share - give;
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Barriers among some warps of a block.
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Tiles in shared memory are rows of 64 numbers (128 bytes), aligned to 1024 bytes, with the 16-byte pieces of row r
// swapped by exclusive or with r % 8 as the bulk copy leaves them. A step of 16 along the row is 32 bytes; a step of 16
// rows is 2048.
// Of a descriptor, the low half holds the address and the high half is the same for all tiles.
__device__ __forceinline__ std::uint32_t low_descriptor(std::uint32_t tile) {
  return tile >> 4 | 1u << 16;
}
__device__ __forceinline__ std::uint32_t low_descriptor(const void* tile) {
  return low_descriptor(shared_address(tile));
}
__device__ __forceinline__ std::uint64_t descriptor(std::uint32_t low) {
  return std::uint64_t{1u << 30 | 1024 >> 4} << 32 | low;
}
constexpr std::uint32_t kColumnStep = 32 >> 4;
constexpr std::uint32_t kRowStep = 2048 >> 4;

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kLeft>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// Stands in a branch that is rarely taken, so that the compiler does not turn it into selects.
__device__ __forceinline__ void keep_branch() {
  asm volatile("");
}
// Keeps the compiler from moving uses of an accumulator's first kCount numbers across a wait.
template <int kCount, int kSize>
__device__ __forceinline__ void pin_first(float (&c)[kSize]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(c[i])::"memory");
}
template <int kSize>
__device__ __forceinline__ void pin(float (&c)[kSize]) {
  pin_first<kSize>(c);
}
// The same for left sides in registers: they stay where they are until the products that read them are done.
__device__ __forceinline__ void pin(std::uint32_t (&a)[4][4]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}
// What an accumulator holds is not needed any more, and until here its registers are free.
template <int kSize>
__device__ __forceinline__ void clear(float (&c)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) c[i] = 0;
  pin(c);
}

// The inverse of load_matrices<false>.
__device__ __forceinline__ void store_matrices(std::uint32_t row, const std::uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(from[0]), "r"(from[1]),
               "r"(from[2]), "r"(from[3])
               : "memory");
}

// C [64,64] = A [64,16] B [16,64] (+ C when add), both from shared memory.
template <class T, int kTransposed>
__device__ __forceinline__ void wgmma(float (&c)[32], std::uint64_t a, std::uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31"
        "}, "
        "%32, %33, p, 1, 1, 0, %35;\n}\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),
          "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),
          "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposed));
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31"
        "}, "
        "%32, %33, p, 1, 1, 0, %35;\n}\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),
          "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),
          "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposed));
  }
}

// C [64,64] = A [64,16] B [16,64] (+ C when add), A from registers.
template <class T, int kTransposed>
__device__ __forceinline__ void wgmma(float (&c)[32], const std::uint32_t (&a)[4], std::uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31"
        "}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),
          "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),
          "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposed));
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31"
        "}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),
          "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),
          "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposed));
  }
}

// C += A B for the first kColumns columns alone, 16 or 32; A from registers.
template <class T, int kTransposed, int kColumns>
__device__ __forceinline__ void wgmma_narrow(float (&c)[32], const std::uint32_t (&a)[4], std::uint64_t b) {
  static_assert(kColumns == 16 || kColumns == 32);
  if constexpr (std::is_same_v<T, __half> && kColumns == 16) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9, %10, %11}, %12, 1, 1, 1, %13;\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed));
  } else if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, 1, 1, 1, %21;\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed));
  } else if constexpr (kColumns == 16) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9, %10, %11}, %12, 1, 1, 1, %13;\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed));
  } else {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, 1, 1, 1, %21;\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),
          "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposed));
  }
}

}  // namespace violin::kernels::cuda::sm90
