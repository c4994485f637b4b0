// Shared memory through the generic proxy.
#include <cstring>

#include "machine.h"

namespace emu {

u32 offset_of(const void* pointer, u32 bytes, u32 align) {
    const u64 offset = u64(static_cast<const u8*>(pointer) - current->cta->memory);
    if (offset + bytes > machine->launch.smem_bytes) {
        fatal("out of bounds", me() + ": " + std::to_string(bytes) + " bytes at shared memory +" +
                                   std::to_string((long long)offset) + " of " +
                                   std::to_string(machine->launch.smem_bytes));
    }
    if (offset % align) {
        fatal("misaligned", me() + ": shared memory +" + std::to_string(offset) + " is no multiple of " +
                                std::to_string(align));
    }
    return u32(offset);
}

u8* shared(u32 address, u32 bytes, u32 align) {
    u8* const at = current->cta->memory + int(address - kSharedBase);
    offset_of(at, bytes, align);
    return at;
}

namespace {

// Of the shared memory of `cta`, by a thread of its cluster.
void access_of(Cta& cta, u32 offset, u32 bytes, bool write) {
    if (!machine->options.order) return;
    Thread& thread = *current;
    const char* doing = write ? "writes" : "reads";
    cta.shadow.access(
        cta, offset, bytes, write,
        {thread.slot, thread.clock(), Proxy::Generic, true, &thread.order, site_of(pc), doing});
}

}  // namespace

void generic_access(u32 offset, u32 bytes, bool write) { access_of(*current->cta, offset, bytes, write); }

void atomic_access(u32 offset) {
    if (!machine->options.order) return;
    Thread& thread = *current;
    auto& others = thread.cta->atomics[offset];
    // Whoever has written the word otherwise since knew of the others, or has been reported.
    Order order = thread.order;
    for (const auto& [slot, clock] : others) order.reach(slot, clock);
    const Actor actor{thread.slot, thread.clock(), Proxy::Generic, true, &order, site_of(pc), "adds to"};
    for (const bool write : {false, true}) thread.cta->shadow.access(*thread.cta, offset, 4, write, actor);
    std::erase_if(others, [&](const auto& own) {
        return own.first == thread.slot || own.second <= thread.order.before[own.first];
    });
    others.push_back({thread.slot, thread.clock()});
}

void poison(u8* to, u32 bytes) {
    if (machine->options.poison) memset(to, 0xff, bytes);
}

u32 shared_address(const void* pointer) {
    ENTER();
    const u64 offset = u64(static_cast<const u8*>(pointer) - current->cta->memory);
    if (offset > machine->launch.smem_bytes)
        fatal("not shared", me() + " asks for the shared address of something outside shared memory");
    return kSharedBase + u32(offset);
}

void load_shared(void* to, u32 address, u32 bytes) {
    ENTER();
    const u8* from = shared(address, bytes, bytes);
    generic_access(address - kSharedBase, bytes, false);
    memcpy(to, from, bytes);
}

void store_shared(u32 address, const void* from, u32 bytes) {
    ENTER();
    u8* to = shared(address, bytes, bytes);
    generic_access(address - kSharedBase, bytes, true);
    memcpy(to, from, bytes);
}

u32 load_of_cluster(const void* place, u32 rank) {
    ENTER();
    const u32 offset = offset_of(place, 4, 4);
    Cta& cta = cta_of_cluster(rank, "reads shared memory");
    access_of(cta, offset, 4, false);
    u32 value;
    memcpy(&value, cta.memory + offset, 4);
    return value;
}

}  // namespace emu
