// Loads and stores of plain C++: units are compiled with -fsanitize=thread, and its runtime's functions are
// these.
#include "machine.h"

namespace emu {

namespace {

void check_registers(Thread& thread, const char* begin, u32 bytes, bool write) {
    for (Operand& operand : thread.operands) {
        if (begin >= operand.end || begin + bytes <= operand.begin) continue;
        if (operand.in_flight && (operand.accumulator || write) && machine->options.hazards) {
            report("register hazard", me() + (write ? " writes " : " reads ") +
                                          (operand.accumulator ? "accumulators" : "registers of A") +
                                          " of a wgmma that has not been waited for");
        }
        operand.touched = true;
    }
}

void check_loads(Thread& thread, const char* begin, u32 bytes, bool write) {
    for (const Load& load : thread.loads) {
        if (begin >= load.end || begin + bytes <= load.begin || !machine->options.hazards) continue;
        report("register hazard", me() + (write ? " writes " : " reads ") +
                                      "registers of a tcgen05.ld that has not been waited for");
    }
}

void plain(const void* place, u32 bytes, bool write, void* from) {
    Thread* thread = current;
    if (!thread) return;
    ++machine->counters.plain;
    const char* at = static_cast<const char*>(place);
    if (u64(at - thread->fiber.stack) < kStackBytes) {
        if (!thread->operands.empty()) {
            pc = from;
            check_registers(*thread, at, bytes, write);
        }
        if (!thread->loads.empty()) {
            pc = from;
            check_loads(*thread, at, bytes, write);
        }
        return;
    }
    pc = from;
    const u64 offset = u64(reinterpret_cast<const u8*>(at) - thread->cta->memory);
    const u64 size = machine->launch.smem_bytes;
    if (offset < size + kBeyondShared) {
        if (offset + bytes > size) {
            fatal("out of bounds", me() + ": " + std::to_string(bytes) + " bytes at shared memory +" +
                                       std::to_string(offset) + " of " + std::to_string(size));
        }
        generic_access(u32(offset), bytes, write);
        return;
    }
    machine->global.access(u64(at), bytes, write ? Use::Write : Use::Read, write ? "writes" : "reads");
}

}  // namespace

}  // namespace emu

#define HOOK(name, bytes, write) \
    void __tsan_##name(void* place) { emu::plain(place, bytes, write, __builtin_return_address(0)); }
#define HOOKS(bytes)                                                          \
    HOOK(read##bytes, bytes, false)                                           \
    HOOK(write##bytes, bytes, true) HOOK(unaligned_read##bytes, bytes, false) \
        HOOK(unaligned_write##bytes, bytes, true)

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* place, unsigned long bytes) {
    emu::plain(place, emu::u32(bytes), false, __builtin_return_address(0));
}
void __tsan_write_range(void* place, unsigned long bytes) {
    emu::plain(place, emu::u32(bytes), true, __builtin_return_address(0));
}
void* __tsan_memcpy(void* to, const void* from, unsigned long bytes) {
    emu::plain(from, emu::u32(bytes), false, __builtin_return_address(0));
    emu::plain(to, emu::u32(bytes), true, __builtin_return_address(0));
    return __builtin_memcpy(to, from, bytes);
}
void* __tsan_memset(void* to, int value, unsigned long bytes) {
    emu::plain(to, emu::u32(bytes), true, __builtin_return_address(0));
    return __builtin_memset(to, value, bytes);
}
void __tsan_vptr_update(void**, void*) {}
}
