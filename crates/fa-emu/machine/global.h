// Device memory: tensors with names and bounds, who accessed them, and order through acquire and release.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "clock.h"

namespace emu {

// A tensor or a part of a workspace. So many bytes before and after it belong to nobody.
struct Region {
    u64 begin, bytes, before, after;
    std::string name;
    bool writable, initialised;

    struct Cell {
        u32 clock, cluster;
        Slot slot;
        u16 site;
        u8 kind;  // 0 nobody, 1 write, 2 atomic, 3 written in an earlier launch
        u8 mask;
        u32 read_clock, read_cluster;
        Slot read_slot;
        u16 read_site;
    };
    std::vector<Cell> cells;  // of writable ones

    // 16 bytes each: whether they are of no row that a sequence has. Empty where all are of some row.
    std::vector<bool> foreign;

    bool holds(u64 address, u64 count) const { return address >= begin && address + count <= begin + bytes; }
};

// Add: of floating-point numbers, whose order is in the sum; Atomic: of integers, and acquiring reads.
// Neutral leaves what is there as it is: an addition of zero, an acquiring read.
enum class Use : u8 { Read, Write, Atomic, Add, Neutral };

// Who accesses device memory: the thread that runs, or a copy that it issues.
struct Author {
    Slot slot;
    u32 clock;
};

class Global {
  public:
    void add(Region region);
    // Bytes of a region that no access may touch: rows behind the end of a sequence.
    void forbid(u64 begin, u64 bytes);
    // Launches are ordered: all that was written is there, and no access of the last one concerns the next.
    void next_launch();
    // Checks an access, if it is to a tensor or near one.
    void access(u64 address, u32 bytes, Use use, const char* doing, const Author* copy = nullptr);
    // What `order` holds becomes known to whoever acquires the word at `address`.
    void release(u64 address, const Order& order, u32 cluster);
    void acquire(u64 address, Order& order, u32 cluster) const;

  private:
    void word(Region& region, u64 index, u8 mask, Use use, const char* doing, const Author& author);
    std::map<u64, Region> regions_;  // by where their guards begin
    Region* last_ = nullptr;
    std::map<u64, Remote> released_;  // by address, then by cluster
    // Of counters and semaphores all additions since they were written, for whoever writes them next.
    struct Addition {
        u32 cluster, clock;
        Slot slot;
        u16 site;
    };
    std::map<u64, std::vector<Addition>> additions_;
};

}  // namespace emu
