// mbarriers: phases of arrivals and bytes, and what each phase makes known to those who wait for it.
#include "machine.h"

namespace emu {

namespace {

// The phase that ends now frees the lanes of the phase before: they must have seen that one end.
void check_seen(Mbarrier& bar, const Order& done) {
    std::vector<Seen>& all = bar.seen[(bar.phase + 1) & 1];
    for (const Seen& seen : all) {
        if (done.past(seen.slot, seen.clock) || done.beyond(seen.warp, seen.round)) continue;
        Finding& found = report("phase overrun",
                                "the mbarrier at shared memory +" + std::to_string(bar.offset) +
                                    " ends a phase, and nothing says that all who wait for the phase before "
                                    "have seen it end: who comes late waits for ever");
        if (found.others.empty()) {
            const std::string who = slot_name(*bar.cta, seen.slot) + ", which waited for the phase before";
            found.others.push_back({who, site_stack(seen.site), 1});
        }
    }
    all.clear();
}

}  // namespace

void complete_phases(Mbarrier& bar) {
    while (bar.pending == 0 && bar.bytes == 0) {
        Order& done = bar.done[bar.phase & 1];
        std::swap(done, bar.arrived);
        bar.arrived.forget();
        if (machine->options.order) check_seen(bar, done);
        ++bar.phase;
        // The bytes that counted on this phase are in.
        done.before[bar.slot] = done.visible[bar.slot] = bar.phase;
        bar.pending = bar.expected;
        wake_on(*bar.cta, &bar);
        for (auto& cta : bar.cta->cluster->ctas) {
            if (cta.get() != bar.cta) wake_on(*cta, &bar);
        }
    }
}

Mbarrier& mbarrier_at(Cta& cta, const void* place, bool async) {
    const u32 offset = offset_of(place, 8, 8);
    const auto found = cta.mbarriers.find(offset);
    if (found == cta.mbarriers.end()) {
        fatal("mbarrier", me() + " uses the mbarrier at shared memory +" + std::to_string(offset) +
                              " before it is initialised");
    }
    if (machine->options.order) {
        const Access& init = cta.shadow.initialised(offset);
        const Order& order = current->order;
        if (init.clock > order.before[init.slot]) {
            Finding& finding =
                report("mbarrier", me() + " uses an mbarrier whose initialisation is not ordered before");
            if (finding.others.empty())
                finding.others.push_back(
                    {slot_name(cta, init.slot) + ", which initialised it", site_stack(init.site), 1});
        } else if (async && init.clock > order.visible[init.slot]) {
            Finding& finding =
                report("missing proxy fence", me() +
                                                  " gives TMA an mbarrier, which no "
                                                  "fence.mbarrier_init has made visible to it");
            if (finding.others.empty())
                finding.others.push_back(
                    {slot_name(cta, init.slot) + ", which initialised it", site_stack(init.site), 1});
        }
    }
    return *found->second;
}

void mbarrier_init(void* place, u32 arrivals) {
    ENTER();
    Thread& thread = *current;
    Cta& cta = *thread.cta;
    const u32 offset = offset_of(place, 8, 8);
    auto& bar = cta.mbarriers[offset];
    if (bar) {
        report("mbarrier",
               me() + " initialises the mbarrier at shared memory +" + std::to_string(offset) + " again");
        return;
    }
    if (arrivals == 0) fatal("mbarrier", me() + " initialises an mbarrier for no arrivals");
    bar = std::make_unique<Mbarrier>();
    bar->cta = &cta;
    bar->offset = offset;
    bar->expected = bar->pending = int(arrivals);
    bar->arrived = bar->done[0] = bar->done[1] = Order(machine->slots);
    bar->slot = new_slot(*cta.cluster, "TMA, on the mbarrier at +" + std::to_string(offset));
    cta.shadow.place_barrier(
        cta, offset,
        {thread.slot, thread.clock(), Proxy::Generic, true, &thread.order, site_of(pc), "writes"});
}

void mbarrier_init_fence() {
    ENTER();
    current->order.visible = current->order.before;
    current->tick();
}

namespace {

void arrive(Mbarrier& bar, u32 expect_bytes) {
    if (bar.pending <= 0) {
        fatal("over-arrival", me() + " arrives at the mbarrier at shared memory +" +
                                  std::to_string(bar.offset) + ", whose phase already has its " +
                                  std::to_string(bar.expected) + " arrivals and waits for " +
                                  std::to_string(bar.bytes) + " bytes");
    }
    --bar.pending;
    bar.bytes += expect_bytes;
    bar.arrived.learn(current->order);
    current->tick();
    machine->progress = machine->step;
    complete_phases(bar);
}

}  // namespace

void mbarrier_arrive(void* place, u32 expect_bytes) {
    ENTER();
    arrive(mbarrier_at(*current->cta, place, false), expect_bytes);
}

void mbarrier_arrive_remote(void* place, u32 rank) {
    ENTER();
    arrive(mbarrier_at(cta_of_cluster(rank, "arrives at an mbarrier"), place, false), 0);
}

// Nothing is learnt from it: what follows has to wait all the same.
bool mbarrier_test(void* place, u32 parity) {
    ENTER();
    return (mbarrier_at(*current->cta, place, false).phase & 1) != parity;
}

void mbarrier_wait(void* place, u32 parity) {
    ENTER();
    Mbarrier& bar = mbarrier_at(*current->cta, place, false);
    wait_until("mbarrier.try_wait", &bar, [&] { return (bar.phase & 1) != parity; });
    Thread& thread = *current;
    // Of the wait, not of what comes after: a release has to be told of it.
    bar.seen[parity].push_back(
        {thread.slot, thread.clock(), thread.warp_of_cluster(), thread.warp->generation, site_of(pc)});
    thread.order.learn(bar.done[parity]);
}

}  // namespace emu
