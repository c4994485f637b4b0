// Shadow of shared or tensor memory: for each word who wrote it and who has read it since, and whether that
// is ordered.
#pragma once
#include <string>
#include <vector>

#include "clock.h"

namespace emu {

struct Access {
    u32 clock;
    Slot slot;
    u16 site;
};

enum class Proxy : u8 { None, Generic, Async, Barrier };  // Barrier: an mbarrier lives here

// Who accesses memory, and what happened before.
struct Actor {
    Slot slot;
    u32 clock;
    Proxy proxy;
    bool in_order;  // its own accesses are ordered: a thread, not a copy
    const Order* order;
    u16 site;
    const char* doing;  // "reads", "writes", ...
    // Of tensor memory: what the thread knows without a tcgen05.fence::after_thread_sync.
    const Order* synchronised = nullptr;
};

struct Cta;

class Shadow {
  public:
    // What a word is called in a finding.
    using Place = std::string (*)(u32 index);

    explicit Shadow(u32 bytes, Place place = shared_place) : cells_((bytes + 3) / 4), place_(place) {}
    static std::string shared_place(u32 index);
    void access(Cta& cta, u32 offset, u32 bytes, bool write, const Actor& actor);
    // An mbarrier's words, written by its initialisation.
    void place_barrier(Cta& cta, u32 offset, const Actor& actor);
    // The initialisation that a use of the mbarrier at `offset` must come after.
    const Access& initialised(u32 offset) const { return cells_[offset / 4].write; }
    // Forgets the words [begin, end): nobody has written them.
    void reset(u32 begin, u32 end);
    bool touched(size_t word) const { return cells_[word].proxy != Proxy::None; }
    size_t words() const { return cells_.size(); }

  private:
    static constexpr int kInline = 3;
    struct Cell {
        Access write{};
        Access read[kInline];
        u32 more = 0;  // index into more_ + 1
        u8 reads = 0, bytes = 0;
        Proxy proxy = Proxy::None;
    };
    void word(Cta& cta, u32 index, u8 mask, bool write, const Actor& actor);
    template <class F>
    void for_reads(Cell& cell, F each);
    void add_read(Cell& cell, const Actor& actor);
    void race(Cta& cta, u32 index, const Actor& actor, const Access& other, const char* did) const;
    std::vector<Cell> cells_;
    Place place_;
    std::vector<std::vector<Access>> more_;  // reads beyond those that fit a cell
    std::vector<u32> free_;
};

}  // namespace emu
