// Findings, and where in the kernel they are: call stacks as addresses, resolved to lines by whoever reads
// them.
#pragma once
#include <string>
#include <vector>

#include "interface.h"

namespace emu {

using Stack = std::vector<u64>;  // return addresses, innermost first, relative to the unit

// Somebody else that a finding is about.
struct Party {
    std::string who;
    Stack stack;
    int threads;
};

struct Finding {
    std::string kind, text;
    int cta, thread;  // -1 for none
    u64 count;
    Stack stack;
    std::vector<Party> others;
    std::string entry;  // of the launch
};

// Adds a finding of the thread that runs, or counts it where the same was found at the same instruction
// before.
Finding& report(const char* kind, const std::string& text);

// The same, after which this launch cannot go on: leaves the thread for good.
[[noreturn]] void fatal(const char* kind, const std::string& text);

// "CTA 3, warp 4, lane 7 (thread 135)" of the thread that runs.
std::string me();

// The frames of the unit, from a frame pointer on.
Stack walk(void* frame, const char* stack, u64 innermost = 0);
Stack stack_here();

// Numbers for instructions, small enough for shadow cells.
u16 site_of(void* pc);
Stack site_stack(u16 site);

std::string quoted(const std::string& text);
std::string json(const Stack& stack);
std::string json(const Finding& finding);

}  // namespace emu
