// cp.async: copies of 16 bytes that a thread issues, closes into groups and waits for.
#include <cstring>

#include "machine.h"

namespace emu {

void cp_async_16(u32 dst, const void* src, int bytes) {
    ENTER();
    Thread& thread = *current;
    Cta& cta = *thread.cta;
    u8* const to = shared(dst, 16, 16);
    if (bytes) {
        if (u64(src) % 16) fatal("misaligned", me() + ": the source of cp.async is no multiple of 16");
        machine->global.access(u64(src), 16, Use::Read, "copies by cp.async");
    }
    if (thread.copies_slot < 0) {
        thread.copies_slot = new_slot(*cta.cluster, "cp.async of thread " + std::to_string(thread.id));
    }
    const u32 group = thread.copies.start();
    if (machine->options.order) {
        cta.shadow.access(
            cta, dst - kSharedBase, 16, true,
            {Slot(thread.copies_slot), group, Proxy::Generic, false, &thread.order, site_of(pc), "writes"});
    }
    poison(to, 16);
    machine->counters.cp_async_bytes += u32(bytes);
    add_agent(cta, 30, [=, &thread] {
        if (bytes) {
            memcpy(to, src, 16);
        } else {
            memset(to, 0, 16);
        }
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
