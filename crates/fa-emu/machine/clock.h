// What happened before a point: a vector clock over the actors of a cluster, and what is known of other
// clusters.
#pragma once
#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "interface.h"

namespace emu {

// Actors of a cluster are numbered by slots: its threads; of each thread the cp.async groups; of each warp
// the wgmma and the bulk groups, and its loads and stores of tensor memory; of each accumulator there its
// products; of each mbarrier the bytes that count on it. A slot's clock is an epoch of a thread, the number
// of a group, of an operation, or of a phase.
using Slot = u16;

// Clocks of other clusters' slots, learnt by acquiring what they released in device memory.
using Remote = std::map<u32, std::vector<u32>>;

inline void join(std::vector<u32>& to, const std::vector<u32>& from) {
    u32* a = to.data();
    const u32* b = from.data();
    const size_t count = from.size();
    for (size_t i = 0; i < count; ++i) a[i] = std::max(a[i], b[i]);
}

struct Order {
    std::vector<u32> before;   // accesses up to these clocks happened before
    std::vector<u32> visible;  // generic accesses up to these clocks are visible to the async proxy as well
    // What has been executed before, beside `before`: it says nothing of memory. Empty for nothing.
    std::vector<u32> executed;
    std::vector<u32> rounds;  // of each warp: instructions that its lanes have executed as one before
    std::shared_ptr<const Remote> remote;

    explicit Order(size_t slots = 0) : before(slots), visible(slots) {}

    void learn(const Order& other) {
        join(before, other.before);
        join(visible, other.visible);
        learn_rounds(other);
        learn(other.remote);
    }
    // What has been executed before, which says nothing of memory.
    void learn_rounds(const Order& other) {
        if (rounds.size() < other.rounds.size()) rounds.resize(other.rounds.size());
        join(rounds, other.rounds);
        learn_executed(other.executed);
    }
    void learn_executed(const std::vector<u32>& other) {
        if (executed.size() < other.size()) executed.resize(other.size());
        join(executed, other);
    }
    void learn(const std::shared_ptr<const Remote>& other) {
        if (!other || other == remote) return;
        if (!remote) {
            remote = other;
            return;
        }
        auto both = std::make_shared<Remote>(*remote);
        for (const auto& [cluster, clocks] : *other) {
            auto& known = (*both)[cluster];
            known.resize(clocks.size());
            join(known, clocks);
        }
        remote = both;
    }
    // Whether the thread of this slot has come so far.
    bool past(Slot slot, u32 clock) const {
        return clock <= before[slot] || (slot < executed.size() && clock <= executed[slot]);
    }
    // Whether the warp has executed an instruction as one after its `count` first ones.
    bool beyond(u32 warp, u32 count) const { return warp < rounds.size() && rounds[warp] > count; }
    void reach_round(u32 warp, u32 count) {
        if (rounds.size() <= warp) rounds.resize(warp + 1);
        rounds[warp] = count;
    }
    void reach(Slot slot, u32 clock) { before[slot] = std::max(before[slot], clock); }
    void forget() {
        std::fill(before.begin(), before.end(), 0);
        std::fill(visible.begin(), visible.end(), 0);
        std::fill(executed.begin(), executed.end(), 0);
        std::fill(rounds.begin(), rounds.end(), 0);
        remote.reset();
    }
};

// Asynchronous operations closed into groups that finish in order.
class Groups {
  public:
    u32 open() const { return first_ + u32(unfinished_.size()) - 1; }
    u32 start() { return ++unfinished_.back(), open(); }
    void commit() { unfinished_.push_back(0), settle(); }
    void finish(u32 group) { --unfinished_[group - first_], settle(); }
    // The newest group that has to be finished for `pending` of the committed ones to be left.
    u32 due(u32 pending) const { return open() - 1 > pending ? open() - 1 - pending : 0; }
    bool done(u32 group) const { return first_ > group; }
    bool idle() const {
        return std::all_of(unfinished_.begin(), unfinished_.end(), [](u32 left) { return left == 0; });
    }

  private:
    void settle() {
        size_t finished = 0;
        while (finished + 1 < unfinished_.size() && unfinished_[finished] == 0) ++finished;
        unfinished_.erase(unfinished_.begin(), unfinished_.begin() + finished);
        first_ += finished;
    }
    std::vector<u32> unfinished_{0};
    u32 first_ = 1;
};

}  // namespace emu
