// The timeline of one CTA: what its warps wait for, and what is in flight.
#pragma once
#include <string>
#include <vector>

#include "interface.h"
#include "report.h"

namespace emu {

struct Span {
    std::string track, what;
    u64 begin, end;
    Stack stack;
};

class Trace {
  public:
    void add(Span span) {
        if (spans.size() < kLimit) spans.push_back(std::move(span));
    }
    std::vector<Span> spans;

  private:
    static constexpr size_t kLimit = 200000;
};

}  // namespace emu
