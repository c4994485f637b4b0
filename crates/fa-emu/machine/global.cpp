#include "global.h"

#include <cstring>

#include "machine.h"

namespace emu {

namespace {

enum Kind : u8 { kNobody, kWritten, kAdded, kEarlier };

// Whether an access by `slot` of `cluster` happened before what the thread that runs does now.
bool ordered(u32 cluster, Slot slot, u32 clock) {
    const Order& order = current->order;
    if (cluster == current->cta->cluster->id) return slot == current->slot || clock <= order.before[slot];
    if (!order.remote) return false;
    const auto known = order.remote->find(cluster);
    return known != order.remote->end() && slot < known->second.size() && clock <= known->second[slot];
}

std::string author_name(u32 cluster, Slot slot) {
    const u32 width = machine->launch.cluster, threads = machine->launch.threads;
    if (slot >= threads * width) return "a copy of CTA " + std::to_string(cluster * width);
    return "thread " + std::to_string(slot % threads) + " of CTA " +
           std::to_string(cluster * width + slot / threads);
}

}  // namespace

void Global::add(Region region) {
    if (region.writable) {
        Region::Cell cell{};
        cell.kind = region.initialised ? kEarlier : kNobody;
        region.cells.assign((region.bytes + 3) / 4, cell);
    }
    const u64 from = region.begin - region.before;
    regions_.insert_or_assign(from, std::move(region));
    last_ = nullptr;
}

void Global::forbid(u64 begin, u64 bytes) {
    auto next = regions_.upper_bound(begin);
    if (next == regions_.begin()) return;
    Region& region = std::prev(next)->second;
    if (!region.holds(begin, bytes)) return;
    region.foreign.resize((region.bytes + 15) / 16);
    const u64 first = (begin - region.begin + 15) / 16, end = (begin + bytes - region.begin) / 16;
    for (u64 index = first; index < end; ++index) region.foreign[index] = true;
}

void Global::next_launch() {
    for (auto& [from, region] : regions_) {
        for (Region::Cell& cell : region.cells) {
            const bool nobody = cell.kind == kNobody;
            cell = Region::Cell{};
            cell.kind = nobody ? kNobody : kEarlier;
        }
    }
    released_.clear();
    additions_.clear();
}

void Global::word(Region& region, u64 index, u8 mask, Use use, const char* doing, const Author& author) {
    Region::Cell& cell = region.cells[index];
    const u32 own = current->cta->cluster->id;
    auto what = [&] { return me() + " " + doing + " " + region.name + " +" + std::to_string(4 * index); };
    auto found = [&](const char* kind, u32 cluster, Slot slot, u16 site, const char* did) {
        const std::string by = std::string("the ") + did + " by " + author_name(cluster, slot);
        Finding& finding = report(kind, what() + "; nothing orders it after " + by);
        if (finding.others.empty()) finding.others.push_back({by, site_stack(site), 1});
    };
    const bool adds = use == Use::Atomic || use == Use::Add || use == Use::Neutral;
    const u64 address = region.begin + 4 * index;
    const bool counter = use == Use::Write && additions_.count(address) > 0;
    if (cell.kind == kNobody) {
        if (use != Use::Write) {
            report("uninitialised read", what() + ", which nobody has written");
        }
    } else if (cell.kind == kWritten || (cell.kind == kAdded && !adds && !counter)) {
        if ((cell.mask & mask) && !ordered(cell.cluster, cell.slot, cell.clock)) {
            found("data race", cell.cluster, cell.slot, cell.site,
                  cell.kind == kAdded ? "addition" : "write");
        }
    } else if (cell.kind == kAdded && use == Use::Add && machine->options.ordered_additions) {
        if (!ordered(cell.cluster, cell.slot, cell.clock))
            found("unordered addition", cell.cluster, cell.slot, cell.site, "addition");
    }
    if (counter) {
        // Whoever has added last has seen all additions before; accesses of one word by one thread keep their
        // order.
        const std::vector<Addition>& all = additions_[address];
        const bool last = !all.empty() && all.back().cluster == own && all.back().slot == author.slot;
        for (const Addition& other : all) {
            if (last || ordered(other.cluster, other.slot, other.clock)) continue;
            found("data race", other.cluster, other.slot, other.site, "addition");
        }
        additions_.erase(address);
    } else if (use == Use::Atomic) {
        additions_[address].push_back({own, author.clock, author.slot, site_of(pc)});
    }
    if (use == Use::Neutral) return;
    if (use == Use::Read) {
        cell.read_clock = author.clock;
        cell.read_cluster = own;
        cell.read_slot = author.slot;
        cell.read_site = site_of(pc);
        return;
    }
    if (cell.read_clock && !ordered(cell.read_cluster, cell.read_slot, cell.read_clock)) {
        found("data race", cell.read_cluster, cell.read_slot, cell.read_site, "read");
    }
    cell.read_clock = 0;
    cell.mask =
        cell.kind == kWritten && cell.slot == author.slot && cell.cluster == own ? cell.mask | mask : mask;
    cell.clock = author.clock;
    cell.cluster = own;
    cell.slot = author.slot;
    cell.site = site_of(pc);
    cell.kind = adds ? kAdded : kWritten;
}

void Global::access(u64 address, u32 bytes, Use use, const char* doing, const Author* copy) {
    if (!last_ || address < last_->begin - last_->before ||
        address >= last_->begin + last_->bytes + last_->after) {
        auto next = regions_.upper_bound(address);
        if (next == regions_.begin()) return;
        Region& region = std::prev(next)->second;
        if (address >= region.begin + region.bytes + region.after) return;
        last_ = &region;
    }
    Region& region = *last_;
    if (!region.holds(address, bytes)) {
        fatal("out of bounds", me() + " " + doing + " " + std::to_string(bytes) + " bytes at " + region.name +
                                   " +" + std::to_string((long long)(address - region.begin)) + " of " +
                                   std::to_string(region.bytes));
    }
    if (!region.foreign.empty()) {
        const u64 first = (address - region.begin) / 16, end = (address + bytes - region.begin + 15) / 16;
        for (u64 index = first; index < end; ++index) {
            if (!region.foreign[index]) continue;
            report("foreign row", me() + " " + doing + " " + region.name + " +" + std::to_string(16 * index) +
                                      ", in a row that no sequence has");
            break;
        }
    }
    if (!region.writable) {
        if (use != Use::Read) fatal("write to an input", me() + " " + doing + " " + region.name);
        return;
    }
    if (use == Use::Write && bytes == 4) wake_pollers(reinterpret_cast<const void*>(address));
    if (!machine->options.order) return;
    const Author own{current->slot, current->clock()};
    const u64 first = address - region.begin, end = first + bytes;
    for (u64 index = first / 4; 4 * index < end; ++index) {
        const u64 low = std::max(first, 4 * index) - 4 * index,
                  high = std::min(end, 4 * index + 4) - 4 * index;
        word(region, index, u8((1u << high) - (1u << low)), use, doing, copy ? *copy : own);
    }
}

void Global::release(u64 address, const Order& order, u32 cluster) {
    Remote& released = released_[address];
    auto learn = [&](u32 from, const std::vector<u32>& clocks) {
        auto& known = released[from];
        known.resize(clocks.size());
        join(known, clocks);
    };
    learn(cluster, order.before);
    if (order.remote) {
        for (const auto& [from, clocks] : *order.remote) learn(from, clocks);
    }
}

void Global::acquire(u64 address, Order& order, u32 cluster) const {
    const auto found = released_.find(address);
    if (found == released_.end()) return;
    const auto own = found->second.find(cluster);
    if (own != found->second.end()) join(order.before, own->second);
    if (found->second.size() > (own != found->second.end()))
        order.learn(std::make_shared<const Remote>(found->second));
}

void wake_pollers(const void* word) {
    if (machine->polling == 0) return;
    for (auto& cluster : machine->resident) {
        for (auto& cta : cluster->ctas) wake_on(*cta, word);
    }
}

// ---- Instructions ----

void add_global(float* to, const float* values, int count) {
    ENTER();
    const u32 bytes = u32(count) * 4;
    if (u64(to) % bytes) fatal("misaligned", me() + ": red.global of " + std::to_string(bytes) + " bytes");
    const bool zero = std::all_of(values, values + count, [](float value) { return value == 0.f; });
    machine->global.access(u64(to), bytes, zero ? Use::Neutral : Use::Add, "adds to");
    machine->counters.red_bytes += bytes;
    for (int i = 0; i < count; ++i) to[i] += values[i];
}

u32 atomic_add(u32* to, u32 value) {
    ENTER();
    Thread& thread = *current;
    if (u64(reinterpret_cast<u8*>(to) - thread.cta->memory) < machine->launch.smem_bytes) {
        const u32 offset = offset_of(to, 4, 4);
        atomic_access(offset);
        const u32 old = *to;
        *to += value;
        return old;
    }
    Global& global = machine->global;
    global.access(u64(to), 4, Use::Atomic, "adds to");
    const u32 cluster = thread.cta->cluster->id;
    // What follows depends on what was there, so it comes after what others had released by a fence and their
    // own addition.
    global.acquire(u64(to), thread.order, cluster);
    if (thread.fenced) global.release(u64(to), *thread.fenced, cluster);
    thread.polled = nullptr;
    machine->progress = machine->step;
    const u32 old = *to;
    *to += value;
    wake_pollers(to);
    return old;
}

// A loop that reads the same value again, without an addition or a barrier in between, waits for the word to
// change.
u32 load_acquire(const u32* from) {
    ENTER();
    Thread& thread = *current;
    if (thread.polled == from && thread.polled_value == *from) {
        ++machine->polling;
        wait_until("ld.acquire in a loop", from, [&] { return *from != thread.polled_value; });
        --machine->polling;
    } else {
        yield();
    }
    machine->global.access(u64(from), 4, Use::Neutral, "reads");
    machine->global.acquire(u64(from), thread.order, thread.cta->cluster->id);
    thread.polled = from;
    thread.polled_value = *from;
    return *from;
}

void add_release(u32* to, u32 value) {
    ENTER();
    Thread& thread = *current;
    machine->global.access(u64(to), 4, Use::Atomic, "adds to");
    machine->global.release(u64(to), thread.order, thread.cta->cluster->id);
    thread.tick();
    machine->progress = machine->step;
    *to += value;
    wake_pollers(to);
}

void fence_device() {
    ENTER();
    current->fenced = std::make_unique<Order>(current->order);
    current->tick();
}

}  // namespace emu
