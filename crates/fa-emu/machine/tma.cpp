// TMA: boxes of tensors and plain bytes to shared memory, bytes and sums from shared memory to
// device memory.
#include <cstring>
#include <numeric>

#include "machine.h"

namespace emu {

namespace {

struct Chunk {
    u32 offset;      // in shared memory
    const u8* from;  // null for zeros
    u32 bytes;       // of 16 that are inside the tensor
};

// Brings chunks and counts their bytes, at a random pace in up to four parts.
void bring(Cta& cta, Mbarrier& bar, const char* what, std::vector<Chunk> all) {
    const size_t parts = machine->options.pace == Pace::Random ? 1 + machine->rng() % 4 : 1;
    const u64 issued = machine->step;
    for (size_t part = 0; part < parts; ++part) {
        std::vector<Chunk> own(all.begin() + long(all.size() * part / parts),
                               all.begin() + long(all.size() * (part + 1) / parts));
        if (own.empty()) continue;
        const bool traced = int(cta.index) == machine->options.trace_cta;
        Stack stack = traced ? stack_here() : Stack{};
        add_agent(cta, 40,
                  [&cta, &bar, own = std::move(own), traced, issued, what, stack = std::move(stack)] {
                      for (const Chunk& chunk : own) {
                          u8 bytes[16] = {};
                          if (chunk.from) memcpy(bytes, chunk.from, chunk.bytes);
                          memcpy(cta.memory + chunk.offset, bytes, 16);
                      }
                      bar.bytes -= 16 * (long long)own.size();
                      if (traced) machine->trace.add({"TMA", what, issued, machine->step, stack});
                      complete_phases(bar);
                  });
    }
}

// A row of a box.
struct BoxRow {
    bool inside;      // in the tensor, by all axes but the first
    u64 address;      // of its first column
    long long start;  // bytes from the tensor's first column to its own
    long long left;   // bytes from there to the tensor's end
};

BoxRow row_of(const TensorMap& map, const int* coordinates, int rank, u32 row) {
    const long long start = (long long)coordinates[0] * map.element;
    BoxRow found{true, map.address + u64(start), start, (long long)map.dims[0] * map.element - start};
    for (int axis = 1; axis < rank; ++axis) {
        const long long index = coordinates[axis] + (long long)(row % map.box[axis]);
        row /= map.box[axis];
        found.inside = found.inside && index >= 0 && u64(index) < map.dims[axis];
        found.address += u64(index) * map.strides[axis];
    }
    return found;
}

}  // namespace

void tma_load(void* dst, const void* map_, void* bar, const int* coordinates, int rank, u32 blocks) {
    ENTER();
    const TensorMap& map = *static_cast<const TensorMap*>(map_);
    Cta& own = *current->cta;
    if (int(map.rank) != rank)
        fatal("tensor map",
              me() + " loads " + std::to_string(rank) + " axes by a map of " + std::to_string(map.rank));
    const u32 inner = map.box[0] * map.element;
    u32 rows = 1;
    for (int axis = 1; axis < rank; ++axis) rows *= map.box[axis];
    const u32 first = offset_of(dst, rows * inner, 128);
    const u32 mask = map.swizzle / 16 - 1;
    // A swizzle repeats after eight rows; a box that starts within them, but for a part of a tile whose parts
    // have fewer rows or others, is laid out otherwise than its readers think.
    const u32 atom = std::gcd(rows, 8u) * map.swizzle;
    if (first % atom) {
        report("bad swizzle", me() + " loads a box to shared memory +" + std::to_string(first) +
                                  ", which is no multiple of " + std::to_string(atom) +
                                  ", of its rows in a swizzle of " + std::to_string(map.swizzle) + " bytes");
    }

    // The rows of the box, those outside the tensor as zeros.
    std::vector<Chunk> all;
    u32 inside_bytes = 0;
    for (u32 row = 0; row < rows; ++row) {
        const auto [inside, from, start, left] = row_of(map, coordinates, rank, row);
        // Bytes [begin, end) of the row are in the tensor.
        const u32 begin = start < 0 ? u32(std::min<long long>(-start, inner)) : 0;
        const u32 end = inside && left > 0 ? std::max(begin, u32(std::min<long long>(left, inner))) : begin;
        if (begin % 16) fatal("tensor map", me() + " loads columns before the first by no multiple of 16 bytes");
        if (begin < end) machine->global.access(from + begin, end - begin, Use::Read, "loads a row by TMA,");
        inside_bytes += end - begin;
        for (u32 column = 0; column < inner; column += 16) {
            u32 at = kSharedBase + first + row * inner + column;
            at ^= (at >> 7 & mask) << 4;
            const u32 bytes = column >= begin && end > column ? std::min(end - column, 16u) : 0;
            all.push_back(
                {at - kSharedBase, bytes ? reinterpret_cast<const u8*>(from + column) : nullptr, bytes});
        }
    }
    Cluster& cluster = *own.cluster;
    for (u32 target = 0; target < cluster.ctas.size(); ++target) {
        if (blocks ? !(blocks >> target & 1) : target != own.rank) continue;
        Cta& cta = *cluster.ctas[target];
        if (cta.finished())
            fatal("cluster", me() + " loads into CTA " + std::to_string(cta.index) + ", which has ended");
        Mbarrier& counts = mbarrier_at(cta, bar, true);
        counts.arrived.learn_rounds(current->order);
        const Actor actor{counts.slot,     counts.phase + 1, Proxy::Async, false,
                          &current->order, site_of(pc),      "writes"};
        for (const Chunk& chunk : all) {
            if (machine->options.order) cta.shadow.access(cta, chunk.offset, 16, true, actor);
            poison(cta.memory + chunk.offset, 16);
        }
        bring(cta, counts, "TMA box", all);
    }
    ++machine->counters.tma_boxes;
    machine->counters.tma_bytes += u64(rows) * inner;
    machine->counters.tma_bytes_inside += inside_bytes;
}

void bulk_load(void* dst, const void* src, u32 bytes, void* bar) {
    ENTER();
    Cta& cta = *current->cta;
    const u32 first = offset_of(dst, bytes, 16);
    if (bytes % 16 || u64(src) % 16) fatal("misaligned", me() + ": a bulk copy takes multiples of 16 bytes");
    machine->global.access(u64(src), bytes, Use::Read, "loads by a bulk copy");
    Mbarrier& counts = mbarrier_at(cta, bar, true);
    counts.arrived.learn_rounds(current->order);
    if (machine->options.order) {
        cta.shadow.access(
            cta, first, bytes, true,
            {counts.slot, counts.phase + 1, Proxy::Async, false, &current->order, site_of(pc), "writes"});
    }
    poison(cta.memory + first, bytes);
    std::vector<Chunk> all;
    for (u32 at = 0; at < bytes; at += 16) all.push_back({first + at, static_cast<const u8*>(src) + at, 16});
    machine->counters.bulk_bytes += bytes;
    bring(cta, counts, "bulk copy", std::move(all));
}

namespace {

// Gives the warp its places in the order of events, for its bulk groups.
void name_bulk_slots(const std::string& of) {
    Warp& warp = *current->warp;
    if (warp.bulk_slot >= 0) return;
    const std::string name = "the bulk " + of + " of warp " + std::to_string(warp.id);
    warp.bulk_read_slot = new_slot(*current->cta->cluster, name);
    warp.bulk_slot = new_slot(*current->cta->cluster, name);
}

// A bulk copy to device memory: it reads shared memory, and some time later writes or adds what it has read.
void bulk_out(u8* dst, u32 src, u32 bytes, bool adds) {
    Thread& thread = *current;
    Cta& cta = *thread.cta;
    Warp& warp = *thread.warp;
    const u8* const from = shared(src, bytes, 16);
    if (bytes % 16 || u64(dst) % 16) {
        fatal("misaligned", me() + ": a bulk " + (adds ? "reduction" : "store") + " takes multiples of 16 bytes");
    }
    name_bulk_slots(adds ? "reduction" : "store");
    const u32 group = thread.bulk.start();
    thread.bulk_reads.start();
    if (machine->options.order) {
        cta.shadow.access(
            cta, src - kSharedBase, bytes, false,
            {Slot(warp.bulk_read_slot), group, Proxy::Async, false, &thread.order, site_of(pc), "reads"});
    }
    const Author copy{Slot(warp.bulk_slot), group};
    machine->global.access(u64(dst), bytes, adds ? Use::Add : Use::Write,
                           adds ? "adds by a bulk reduction to" : "stores by a bulk copy to", &copy);
    if (adds) machine->counters.red_bytes += bytes;
    const bool traced = int(cta.index) == machine->options.trace_cta;
    const u64 issued = machine->step;
    Stack stack = traced ? stack_here() : Stack{};
    add_agent(cta, 20, [=, &thread, &cta, stack = std::move(stack)] {
        std::vector<float> values(bytes / 4);
        memcpy(values.data(), from, bytes);
        auto write = [=, &thread, values = std::move(values)] {
            if (adds) {
                float* sums = reinterpret_cast<float*>(dst);
                for (size_t i = 0; i < values.size(); ++i) sums[i] += values[i];
            } else {
                memcpy(dst, values.data(), bytes);
            }
            if (traced) {
                const char* name = adds ? "bulk add" : "bulk store";
                machine->trace.add({"TMA", name, issued, machine->step, stack});
            }
            thread.bulk.finish(group);
            if (thread.waits_on == &thread.bulk) wake(thread);
        };
        add_agent(cta, 20, std::move(write), true);
        thread.bulk_reads.finish(group);
        if (thread.waits_on == &thread.bulk_reads) wake(thread);
    });
}

}  // namespace

void bulk_add(float* dst, u32 src, u32 bytes) {
    ENTER();
    bulk_out(reinterpret_cast<u8*>(dst), src, bytes, true);
}

void bulk_store(void* dst, u32 src, u32 bytes) {
    ENTER();
    bulk_out(static_cast<u8*>(dst), src, bytes, false);
}

void tma_store(const void* map_, u32 src, const int* coordinates, int rank) {
    ENTER();
    Thread& thread = *current;
    Cta& cta = *thread.cta;
    Warp& warp = *thread.warp;
    const TensorMap& map = *static_cast<const TensorMap*>(map_);
    if (int(map.rank) != rank)
        fatal("tensor map",
              me() + " stores " + std::to_string(rank) + " axes by a map of " + std::to_string(map.rank));
    const u32 inner = map.box[0] * map.element;
    u32 rows = 1;
    for (int axis = 1; axis < rank; ++axis) rows *= map.box[axis];
    const u8* const from = shared(src, rows * inner, 128);
    const u32 first = src - kSharedBase, mask = map.swizzle / 16 - 1;
    if (first % (8 * map.swizzle)) {
        report("bad swizzle", me() + " stores a box from shared memory +" + std::to_string(first) +
                                  ", where no swizzle of " + std::to_string(map.swizzle) + " bytes begins");
    }
    name_bulk_slots("store");
    const u32 group = thread.bulk.start();
    thread.bulk_reads.start();
    if (machine->options.order) {
        cta.shadow.access(
            cta, first, rows * inner, false,
            {Slot(warp.bulk_read_slot), group, Proxy::Async, false, &thread.order, site_of(pc), "reads"});
    }
    const Author copy{Slot(warp.bulk_slot), group};
    struct Part {
        u8* to;
        u32 offset, bytes;  // in the box
    };
    std::vector<Part> parts;
    for (u32 row = 0; row < rows; ++row) {
        const auto [inside, to, start, left] = row_of(map, coordinates, rank, row);
        if (start < 0) fatal("tensor map", me() + " stores columns before the first");
        if (!inside || left <= 0) continue;
        const u32 bytes = u32(std::min<long long>(left, inner));
        machine->global.access(to, bytes, Use::Write, "stores a row by TMA to", &copy);
        for (u32 column = 0; column < bytes; column += 16) {
            u32 at = kSharedBase + first + row * inner + column;
            at ^= (at >> 7 & mask) << 4;
            parts.push_back({reinterpret_cast<u8*>(to + column), at - src, std::min(bytes - column, 16u)});
        }
    }
    const bool traced = int(cta.index) == machine->options.trace_cta;
    const u64 issued = machine->step;
    Stack stack = traced ? stack_here() : Stack{};
    add_agent(cta, 20, [=, &thread, &cta, parts = std::move(parts), stack = std::move(stack)] {
        std::vector<u8> values(from, from + rows * inner);
        auto write = [=, &thread, values = std::move(values)] {
            for (const Part& part : parts) memcpy(part.to, values.data() + part.offset, part.bytes);
            if (traced) machine->trace.add({"TMA", "TMA store", issued, machine->step, stack});
            thread.bulk.finish(group);
            if (thread.waits_on == &thread.bulk) wake(thread);
        };
        add_agent(cta, 20, std::move(write), true);
        thread.bulk_reads.finish(group);
        if (thread.waits_on == &thread.bulk_reads) wake(thread);
    });
}

void bulk_commit() {
    ENTER();
    current->bulk_reads.commit();
    current->bulk.commit();
}

void bulk_wait(bool read_only) {
    ENTER();
    Thread& thread = *current;
    Warp& warp = *thread.warp;
    Groups& groups = read_only ? thread.bulk_reads : thread.bulk;
    const u32 due = groups.due(0);
    wait_until(read_only ? "cp.async.bulk.wait_group.read" : "cp.async.bulk.wait_group", &groups,
               [&] { return groups.done(due); });
    if (warp.bulk_slot < 0) return;
    thread.order.reach(Slot(warp.bulk_read_slot), due);
    if (!read_only) thread.order.reach(Slot(warp.bulk_slot), due);
}

}  // namespace emu
