// cp.async: copies of 4 or 16 bytes that a thread issues, closes into groups and waits for.
#include <cstring>

#include "machine.h"

namespace emu {

void cp_async(u32 dst, const void* src, int size, int bytes) {
    ENTER();
    Thread& thread = *current;
    Cta& cta = *thread.cta;
    u8* const to = shared(dst, u32(size), u32(size));
    if (bytes) {
        if (u64(src) % u64(size)) {
            fatal("misaligned", me() + ": the source of cp.async is no multiple of " + std::to_string(size));
        }
        machine->global.access(u64(src), u64(bytes), Use::Read, "copies by cp.async");
    }
    if (thread.copies_slot < 0) {
        thread.copies_slot = new_slot(*cta.cluster, "cp.async of thread " + std::to_string(thread.id));
    }
    const u32 group = thread.copies.start();
    if (machine->options.order) {
        cta.shadow.access(
            cta, dst - kSharedBase, u32(size), true,
            {Slot(thread.copies_slot), group, Proxy::Generic, false, &thread.order, site_of(pc), "writes"});
    }
    poison(to, size);
    machine->counters.cp_async_bytes += u32(bytes);
    add_agent(cta, 30, [=, &thread] {
        memcpy(to, src, size_t(bytes));
        memset(to + bytes, 0, size_t(size - bytes));
        thread.copies.finish(group);
        if (thread.waits_on == &thread.copies) wake(thread);
    });
}

void cp_async_commit() {
    ENTER();
    current->copies.commit();
}

void cp_async_wait(int pending) {
    ENTER();
    Thread& thread = *current;
    const u32 due = thread.copies.due(u32(pending));
    wait_until("cp.async.wait_group", &thread.copies, [&] { return thread.copies.done(due); });
    if (thread.copies_slot >= 0) thread.order.reach(Slot(thread.copies_slot), due);
}

}  // namespace emu
