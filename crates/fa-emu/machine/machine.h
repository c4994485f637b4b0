// The state of a launch: threads, warps, CTAs and what they wait for.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "clock.h"
#include "fiber.h"
#include "global.h"
#include "interface.h"
#include "report.h"
#include "shadow.h"
#include "trace.h"

namespace emu {

// Shared memory starts here in its window, so that address 0 is nobody's.
constexpr u32 kSharedBase = 1024;

// So many bytes beyond a CTA's shared memory are nobody's, so that an access there is known for what it is.
constexpr u32 kBeyondShared = 64 << 10;

struct Cta;
struct Warp;
struct Cluster;
struct TensorMemory;

enum class State : u8 { Ready, Blocked, Done };

// Registers that a wgmma reads or writes until it is waited for.
struct Operand {
    const char *begin, *end;
    bool accumulator;
    bool in_flight;
    bool touched;  // accessed since the last wgmma.fence
    u32 group;
};

// Registers that a tcgen05.ld writes until it is waited for.
struct Load {
    const char *begin, *end;
};

struct Thread {
    View view;
    Cta* cta;
    Warp* warp;
    int id;  // within the CTA
    Slot slot;
    Fiber fiber;
    State state = State::Ready;
    const char* waits_for = nullptr;  // an instruction
    const void* waits_on = nullptr;   // what wakes it
    Order order;
    std::unique_ptr<Order> fenced;  // what the last __threadfence covers
    Groups copies;
    Groups bulk_reads, bulk;  // bulk reductions whose shared memory has been read, that are done
    int copies_slot = -1;
    std::vector<Operand> operands;
    Order tensor;                // what its next tcgen05 operations come after; empty until there is one
    std::vector<Load> loads;     // tcgen05.ld that have not been waited for
    const u32* polled = nullptr;  // the word that ld.acquire read last, and what it held
    u32 polled_value = 0;
    u64 blocked_at = 0;

    u32 clock() const { return order.before[slot]; }
    u32 warp_of_cluster() const;
    // Later accesses are not covered by what has been released so far.
    void tick() { ++order.before[slot]; }
};

struct WgmmaOp {
    Wgmma op;
    float* d[32];
    const u32* a[32];
    u32 group;
};

struct Warp {
    Cta* cta;
    int id;
    Thread* lanes;
    int ready = 32;
    u64 priority;
    int leader;  // that elect.sync picks

    // The rendezvous of the 32 lanes at one instruction.
    const char* instruction = nullptr;
    void* pc = nullptr;
    int arrived = 0;
    u32 generation = 0;
    void* payload[32];

    Groups products;
    std::deque<WgmmaOp> queue;
    std::vector<u64> issued;  // a word for each product, to compare with the other warps of the group
    bool fenced = false;
    int wgmma_slot = -1, bulk_read_slot = -1, bulk_slot = -1;
    // tcgen05.ld [0] and .st [1]: how many were issued, and how many of them are done.
    struct {
        int slot = -1;
        u32 issued = 0, done = 0;
    } tensor[2];
    int registers, wants = 0;

    // For the timeline: groups of products in flight, and the wait that was told last.
    struct Started {
        u32 group;
        u64 step;
        Stack stack;
    };
    std::deque<Started> started;
    u64 told_begin = 0;
    const char* told_what = nullptr;
};

struct NamedBarrier {
    int arrived = 0, expected = 0;
    u32 generation = 0;
    Order order;
};

// A lane that has seen a phase end: it must have done so before the next one ends, or it waits for a phase
// that has passed.
struct Seen {
    Slot slot;
    u32 clock, warp, round;
    u16 site;
};

struct Mbarrier {
    Cta* cta;
    u32 offset;
    int expected, pending;
    long long bytes = 0;  // that are still to come
    u32 phase = 0;
    Slot slot;
    Order arrived, done[2];
    std::vector<Seen> seen[2];  // of the last two phases
};

struct Cta {
    u32 index, rank;
    Cluster* cluster;
    u8* memory;
    Shadow shadow;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    NamedBarrier named[16];
    std::map<u32, std::unique_ptr<Mbarrier>> mbarriers;
    std::shared_ptr<TensorMemory> tensor;  // from its first allocation on
    std::unordered_map<u32, std::vector<std::pair<Slot, u32>>> atomics;  // of a word since it was written
    int alive;
    int agents = 0;
    int free_registers = 0;  // that setmaxnreg has given back

    explicit Cta(u32 smem_bytes) : shadow(smem_bytes) {}
    bool finished() const { return alive == 0; }
};

// The CTAs that share a clock space: of a cluster, or one alone.
struct Cluster {
    u32 id;
    std::vector<std::unique_ptr<Cta>> ctas;
    std::vector<std::string> slots;  // names of those beyond the threads'
    std::vector<Slot> tensor_slots;  // of them, those of operations on tensor memory
    int arrived = 0;
    u32 generation = 0;
    Order order;

    bool finished() const {
        return std::all_of(ctas.begin(), ctas.end(), [](const auto& cta) { return cta->finished(); });
    }
};

// Something asynchronous that the scheduler runs some time between its issue and the wait that needs it.
struct Agent {
    Cta* cta;
    std::function<void()> run;
    u64 due;        // the step at which a paced schedule runs it
    bool outlives;  // needs nothing of its CTA, which may end before
};

enum class Pace : u32 { Eager, Lazy, Random, Paced };

struct Options {
    u64 seed = 0;
    Pace pace = Pace::Eager;
    bool order = true;               // happens-before, uninitialised reads and proxy fences
    bool poison = true;              // NaN where something is on its way
    bool hazards = true;             // registers of products in flight
    // Whether all products of a thread run in the order of their issue, as the matrix pipe is built. The PTX
    // ISA promises it of those with one accumulator alone.
    bool products_in_order = false;
    bool ordered_additions = false;  // of floating-point numbers in device memory: of a deterministic kernel
    int trace_cta = -1;
    u64 step_limit = 0;  // 0 for none
    void (*progress)(void* context, u32 done, u32 all) = nullptr;
    void* context = nullptr;
};

struct Launch {
    std::function<void()> body;
    const char* name;
    u32 grid, threads, cluster, resident;
    u32 smem_bytes;
    int registers;
    bool cp_async;
};

struct Counters {
    u64 switches = 0, collectives = 0, agents = 0, steps = 0, plain = 0;
    u64 mma_sync = 0, wgmma = 0, tcgen05 = 0, flops = 0;
    u64 tma_boxes = 0, tma_bytes = 0, tma_bytes_inside = 0, bulk_bytes = 0, cp_async_bytes = 0, red_bytes = 0;
    u64 load_phases = 0, load_wavefronts = 0, store_phases = 0, store_wavefronts = 0;
};

struct Machine {
    Options options;
    Launch launch;
    u32 slots = 0;
    Stacks stacks;
    std::vector<std::unique_ptr<Cluster>> resident;
    std::vector<Agent> agents;
    void* scheduler_stack = nullptr;
    std::mt19937_64 rng;
    bool aborting = false;
    u32 polling = 0;  // threads that wait for a word of device memory to change
    u64 step = 0, progress = 0;

    std::vector<Finding> findings;
    Counters counters;
    std::vector<u8> touched;  // words of shared memory, over all CTAs of the main kernel
    Global global;
    Trace trace;
    std::unordered_map<void*, u16> site_numbers;
    std::vector<void*> sites{nullptr};
    char* unit_begin = nullptr;  // where the unit lies in memory
};

extern constinit thread_local Machine* machine EMU_TLS;
extern constinit thread_local Thread* current EMU_TLS;
extern constinit thread_local void* pc EMU_TLS;  // of the machine's caller in the unit

// First in every function that a unit calls.
#define ENTER() (pc = __builtin_return_address(0))

// ---- Scheduling ----

// Runs the launch to its end; false when it had to be given up.
bool run(Machine& machine);
// Blocks the thread that runs until `done`; woken by wake_on(on) and by nothing else.
void block(const char* waits_for, const void* on);
template <class Done>
void wait_until(const char* waits_for, const void* on, Done done) {
    while (!done()) block(waits_for, on);
}
void wake(Thread& thread);
void wake_on(Cta& cta, const void* on);
void yield();
// A word of device memory changes.
void wake_pollers(const void* word);
[[noreturn]] void leave();
void add_agent(Cta& cta, u64 latency, std::function<void()> run, bool outlives = false);
Slot new_slot(Cluster& cluster, const std::string& name);
std::string slot_name(const Cta& cta, Slot slot);
std::string actor_name(const Cta& cta, const Actor& actor);

// ---- Shared between instructions ----

// A place in shared memory by its address in the window, checked for bounds and alignment.
u8* shared(u32 address, u32 bytes, u32 align);
u32 offset_of(const void* pointer, u32 bytes, u32 align);
void generic_access(u32 offset, u32 bytes, bool write);
// CTA `rank` of the cluster, which has not ended, for a thread that `does` something there.
Cta& cta_of_cluster(u32 rank, const char* does);
// An atomic of the word at `offset`: ordered after the other atomics of it, which tells it of nothing else.
void atomic_access(u32 offset);
void poison(u8* to, u32 bytes);
void complete_phases(Mbarrier& bar);
Mbarrier& mbarrier_at(Cta& cta, const void* bar, bool async);
// All threads of the CTA have ended: its tensor memory must have been given back.
void check_tensor_memory(Cta& cta);
// A thread has ended: barriers that count it as arrived may open.
void barriers_after_exit(Cta& cta);

inline u32 Thread::warp_of_cluster() const {
    return cta->rank * u32(cta->warps.size()) + u32(view.warp);
}

inline float from_e4m3(u8 code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const float size = exponent == 0 ? float(mantissa) / 512.f : ldexpf(float(8 + mantissa), exponent - 10);
    const float own = (code & 0x7f) == 0x7f ? NAN : size;
    return code & 0x80 ? -own : own;
}

inline float from16(bool bf16, u16 bits) {
    if (bf16) return __builtin_bit_cast(float, u32(bits) << 16);
    return float(__builtin_bit_cast(_Float16, bits));
}

// All 32 lanes of a warp at one instruction: `run` computes for all once the last one has arrived.
void rendezvous(const char* instruction, void* payload, const std::function<void(Warp&)>& run);

}  // namespace emu
