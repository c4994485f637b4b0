#include "shadow.h"

#include <string>

#include "machine.h"
#include "report.h"

namespace emu {

namespace {

u8 byte_mask(u32 begin, u32 end) { return u8((1u << end) - (1u << begin)); }

}  // namespace

std::string Shadow::shared_place(u32 index) { return " shared memory +" + std::to_string(4 * index); }

// `did`: "read" or "write".
void Shadow::race(Cta& cta, u32 index, const Actor& actor, const Access& other, const char* did) const {
    const std::string by = std::string("the ") + did + " by " + slot_name(cta, other.slot);
    const bool unfenced = actor.synchronised && other.clock <= actor.synchronised->before[other.slot];
    const char* const lacks =
        unfenced ? "; no tcgen05.fence::after_thread_sync orders it after " : "; nothing orders it after ";
    Finding& found = report(unfenced ? "missing tcgen05.fence" : "data race",
                            actor_name(cta, actor) + " " + actor.doing + place_(index) + lacks + by);
    if (found.others.empty()) found.others.push_back({by, site_stack(other.site), 1});
}

void Shadow::reset(u32 begin, u32 end) {
    for (u32 index = begin; index < end; ++index) {
        Cell& cell = cells_[index];
        if (cell.more) {
            more_[cell.more - 1].clear();
            free_.push_back(cell.more);
        }
        cell = Cell{};
    }
}

template <class F>
void Shadow::for_reads(Cell& cell, F each) {
    for (int i = 0; i < std::min<int>(cell.reads, kInline); ++i) each(cell.read[i]);
    if (cell.more) {
        for (Access& read : more_[cell.more - 1]) each(read);
    }
}

// Keeps the reads that nothing has ordered yet: a later write has to come after each of them.
void Shadow::add_read(Cell& cell, const Actor& actor) {
    const auto& before = actor.order->before;
    const Access own{actor.clock, actor.slot, actor.site};
    auto replaced = [&](const Access& read) {
        return read.slot == actor.slot ? read.clock <= own.clock : read.clock <= before[read.slot];
    };
    int kept = 0;
    for (int i = 0; i < cell.reads; ++i) {
        if (!replaced(cell.read[i])) cell.read[kept++] = cell.read[i];
    }
    if (cell.more) {
        auto& more = more_[cell.more - 1];
        std::erase_if(more, replaced);
        while (kept < kInline && !more.empty()) {
            cell.read[kept++] = more.back();
            more.pop_back();
        }
        if (more.empty()) {
            free_.push_back(cell.more);
            cell.more = 0;
        }
    }
    if (kept < kInline) {
        cell.read[kept++] = own;
    } else {
        if (!cell.more) {
            if (free_.empty()) {
                more_.emplace_back();
                cell.more = u32(more_.size());
            } else {
                cell.more = free_.back();
                free_.pop_back();
            }
        }
        more_[cell.more - 1].push_back(own);
    }
    cell.reads = u8(kept);
}

void Shadow::word(Cta& cta, u32 index, u8 mask, bool write, const Actor& actor) {
    Cell& cell = cells_[index];
    const auto& before = actor.order->before;
    if (cell.proxy == Proxy::Barrier) {
        report("mbarrier overwritten",
               actor_name(cta, actor) + " " + actor.doing + place_(index) + ", where an mbarrier lives");
        return;
    }
    if (cell.proxy == Proxy::None) {
        if (!write) {
            report("uninitialised read",
                   actor_name(cta, actor) + " " + actor.doing + place_(index) + ", which nobody has written");
        }
    } else if ((cell.bytes & mask) != 0) {
        const bool own = actor.in_order && cell.write.slot == actor.slot;
        if (!own && cell.write.clock > before[cell.write.slot]) {
            race(cta, index, actor, cell.write, "write");
        } else if (actor.proxy == Proxy::Async && cell.proxy == Proxy::Generic &&
                   cell.write.clock > actor.order->visible[cell.write.slot]) {
            const std::string by = "the write by " + slot_name(cta, cell.write.slot);
            Finding& found =
                report("missing proxy fence",
                       actor_name(cta, actor) + " " + actor.doing + place_(index) +
                           " through the async proxy; no fence.proxy.async has made visible to it " + by);
            if (found.others.empty()) found.others.push_back({by, site_stack(cell.write.site), 1});
        }
    }
    if (!write) {
        add_read(cell, actor);
        return;
    }
    for_reads(cell, [&](const Access& read) {
        if (!(actor.in_order && read.slot == actor.slot) && read.clock > before[read.slot]) {
            race(cta, index, actor, read, "read");
        }
    });
    if (cell.more) {
        more_[cell.more - 1].clear();
        free_.push_back(cell.more);
        cell.more = 0;
    }
    cell.reads = 0;
    cell.bytes = cell.proxy == actor.proxy && cell.write.slot == actor.slot ? cell.bytes | mask : mask;
    cell.proxy = actor.proxy;
    cell.write = {actor.clock, actor.slot, actor.site};
}

void Shadow::access(Cta& cta, u32 offset, u32 bytes, bool write, const Actor& actor) {
    const u32 end = offset + bytes;
    for (u32 index = offset / 4; 4 * index < end; ++index) {
        const u32 first = std::max(offset, 4 * index) - 4 * index,
                  last = std::min(end, 4 * index + 4) - 4 * index;
        word(cta, index, byte_mask(first, last), write, actor);
    }
}

void Shadow::place_barrier(Cta& cta, u32 offset, const Actor& actor) {
    access(cta, offset, 8, true, actor);
    for (u32 index = offset / 4; index < offset / 4 + 2; ++index) cells_[index].proxy = Proxy::Barrier;
}

}  // namespace emu
