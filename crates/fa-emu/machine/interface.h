// The machine as a kernel's thread sees it: what the host twins of ptx/ call.
//
// Every function is one instruction, or a few that always stand together. Where the kernel called it is read
// from the return address, so nothing here takes a location.
#pragma once

namespace emu {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// Where a thread is: within its warp, its CTA and the grid, all one-dimensional.
struct View {
    u32 thread, cta_threads, cta, ctas;
    int lane, warp;
};

#define EMU_TLS __attribute__((tls_model("initial-exec")))
extern constinit thread_local View* view EMU_TLS;         // of the thread that runs
extern constinit thread_local u8* shared_window EMU_TLS;  // shared memory of its CTA

// ---- Shared memory, generic proxy ----

u32 shared_address(const void* pointer);
void load_shared(void* to, u32 address, u32 bytes);
void store_shared(u32 address, const void* from, u32 bytes);
// The same word in the shared memory of CTA `rank` of the cluster.
u32 load_of_cluster(const void* place, u32 rank);

// ---- Warp ----

u32 shuffle(u32 value, int lane);
bool any(bool value);
u32 ballot(bool value);
void sync_warp();
bool elect();
void set_registers(int count, bool take);

// ---- Matrix fragments of one warp ----

void ldmatrix(u32* m, u32 address, bool transposed);
void stmatrix(u32 address, const u32* m, int count, bool transposed);
void mma_m16n8k16(bool bf16, float* d, const u32* a, u32 b0, u32 b1);

// ---- Barriers and fences ----

// Barrier 0 with no thread count is __syncthreads. `aligned`: by all lanes of a warp at once.
void barrier(int id, int threads, bool wait, bool aligned);
// `releases`: whether the other threads see afterwards what this thread wrote before.
void cluster_barrier(bool releases);
u32 cluster_rank();
u32 cluster_size();
void fence_async();
void pause();
void mbarrier_init(void* bar, u32 arrivals);
void mbarrier_init_fence();
void mbarrier_arrive(void* bar, u32 expect_bytes);
void mbarrier_arrive_remote(void* bar, u32 rank);
bool mbarrier_test(void* bar, u32 parity);
void mbarrier_wait(void* bar, u32 parity);

// ---- Asynchronous copies ----

void cp_async(u32 dst, const void* src, int size, int bytes);
void cp_async_commit();
void cp_async_wait(int pending);
// `blocks`: the CTAs of the cluster that a multicast writes to, a bit each; 0 for this one alone.
void tma_load(void* dst, const void* map, void* bar, const int* coordinates, int rank, u32 blocks);
void bulk_load(void* dst, const void* src, u32 bytes, void* bar);
void bulk_add(float* dst, u32 src, u32 bytes);
void bulk_store(void* dst, u32 src, u32 bytes);
void tma_store(const void* map, u32 src, const int* coordinates, int rank);
void bulk_commit();
void bulk_wait(bool read_only);

// ---- Warpgroup products ----

enum class Element { F16, Bf16, E4m3 };
struct Wgmma {
    Element element;
    int n;
    bool a_mn_major, b_mn_major;
    float* d;
    const u32* a;  // registers, or null for shared memory
    u64 desc_a, desc_b;
    bool accumulate;
};
void wgmma(const Wgmma& op);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);

// ---- Tensor memory ----

// By a whole warp. The address goes to shared memory at `holder`.
void tensor_alloc(void* holder, u32 columns);
void tensor_dealloc(u32 address, u32 columns);
void tensor_relinquish();
// 32 lanes by 32 bits, so many columns: registers of the whole warp, a lane of tensor memory a thread.
void tensor_load(u32* to, u32 columns, u32 address);
void tensor_store(u32 address, const u32* from, u32 columns);
void tensor_wait_load();
void tensor_wait_store();
// By a thread.
void tensor_fence_before();
void tensor_fence_after();
struct TensorProduct {
    u32 d;
    bool a_in_tensor_memory;
    u64 a, b;  // matrix descriptors, or for a the address
    u32 instruction;
    bool accumulate;
};
void tensor_product(const TensorProduct& op);
void tensor_commit(void* bar);

// ---- Device memory ----

void add_global(float* to, const float* values, int count);
u32 atomic_add(u32* to, u32 value);
u32 load_acquire(const u32* from);
void add_release(u32* to, u32 value);
void fence_device();

// ---- The emulator's own tensor map, in the bytes of the driver's ----

struct TensorMap {
    u64 address;
    u32 rank, swizzle;        // bytes of a swizzled row: 128, 64 or 32
    u64 dims[5], strides[5];  // elements; bytes
    u16 box[5], element;      // elements; bytes of one
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace emu
