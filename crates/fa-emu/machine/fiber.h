// Threads of a kernel: stacks of their own, switched in a few nanoseconds.
#pragma once
#include <cstddef>
#include <vector>

namespace emu {

struct Fiber {
    void* stack_pointer = nullptr;
    char* stack = nullptr;  // its lowest byte
};

constexpr size_t kStackBytes = 256 << 10;

// Saves the running stack's place in `save` and continues at `load`.
extern "C" void emu_switch(void** save, void* load);

// Stacks, used again by the next threads; pages are committed as they are touched.
class Stacks {
  public:
    ~Stacks();
    Fiber make(void (*entry)());
    void give_back(Fiber& fiber);

  private:
    std::vector<char*> free_;
};

// The frame pointer that a fiber had when it was left.
void* frame_of(const Fiber& fiber);

}  // namespace emu
