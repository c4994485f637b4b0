#include "fiber.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#if !defined(__x86_64__)
#error "fibers are written for x86-64: six callee-saved registers"
#endif

asm(R"(
.text
.globl emu_switch
.type emu_switch,@function
emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emu_switch, .-emu_switch
)");

namespace emu {

namespace {
constexpr int kSaved = 6;
}

Stacks::~Stacks() {
    for (char* stack : free_) munmap(stack, kStackBytes);
}

Fiber Stacks::make(void (*entry)()) {
    Fiber fiber;
    if (free_.empty()) {
        void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED) abort();
        fiber.stack = static_cast<char*>(stack);
    } else {
        fiber.stack = free_.back();
        free_.pop_back();
    }
    // At its entry a function finds the stack a word off a multiple of 16, and no caller: frames end here.
    void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes) - 1;
    *top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    top -= kSaved;
    memset(top, 0, kSaved * sizeof(void*));
    fiber.stack_pointer = top;
    return fiber;
}

void Stacks::give_back(Fiber& fiber) {
    if (fiber.stack) free_.push_back(fiber.stack);
    fiber.stack = nullptr;
}

void* frame_of(const Fiber& fiber) { return static_cast<void**>(fiber.stack_pointer)[kSaved - 1]; }

}  // namespace emu
