// Device memory of a host process: pages of its own, right against one that cannot be touched.
#include <sys/mman.h>

#include "interface.h"

namespace {

constexpr emu::u64 kPage = 4096;
emu::u64 whole(emu::u64 bytes, emu::u64 unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

extern "C" {

__attribute__((visibility("default"))) emu::u8* emu_map(emu::u64 bytes) {
    const emu::u64 body = whole(bytes, kPage);
    void* all =
        mmap(nullptr, body + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) return nullptr;
    auto* begin = static_cast<emu::u8*>(all) + kPage;
    if (body > 0 && mprotect(begin, body, PROT_READ | PROT_WRITE) != 0) return nullptr;
    // Tensors start on multiples of 16.
    return begin + body - whole(bytes, 16);
}

__attribute__((visibility("default"))) void emu_unmap(emu::u8* begin, emu::u64 bytes) {
    const emu::u64 body = whole(bytes, kPage);
    munmap(begin + whole(bytes, 16) - body - kPage, body + 2 * kPage);
}
}
