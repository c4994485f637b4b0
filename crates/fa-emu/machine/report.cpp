#include "report.h"

#include <dlfcn.h>

#include <cstdio>

#include "machine.h"

namespace emu {

namespace {
constexpr size_t kMaxFindings = 200;
constexpr int kMaxFrames = 24;

char* module_of(const void* pc) {
    Dl_info info;
    return dladdr(pc, &info) ? static_cast<char*>(info.dli_fbase) : nullptr;
}
}  // namespace

Stack walk(void* frame, const char* stack, u64 innermost) {
    Stack found;
    auto add = [&](void* pc) {
        // A return address is the instruction after the call.
        if (module_of(pc) == machine->unit_begin)
            found.push_back(u64(static_cast<char*>(pc) - machine->unit_begin) - 1);
    };
    if (innermost) add(reinterpret_cast<void*>(innermost));
    char* at = static_cast<char*>(frame);
    for (int i = 0; i < kMaxFrames && at >= stack && at < stack + kStackBytes - 16; ++i) {
        void** words = reinterpret_cast<void**>(at);
        add(words[1]);
        if (words[0] <= at) break;
        at = static_cast<char*>(words[0]);
    }
    return found;
}

Stack stack_here() { return current ? walk(__builtin_frame_address(0), current->fiber.stack) : Stack{}; }

u16 site_of(void* pc) {
    auto [entry, fresh] = machine->site_numbers.try_emplace(pc, u16(machine->sites.size()));
    if (fresh) {
        if (machine->sites.size() >= 0xffff) {
            entry->second = 0;
        } else {
            machine->sites.push_back(pc);
        }
    }
    return entry->second;
}

Stack site_stack(u16 site) {
    void* at = machine->sites[site];
    if (!at) return {};
    return {u64(static_cast<char*>(at) - machine->unit_begin) - 1};
}

Finding& report(const char* kind, const std::string& text) {
    Stack stack = stack_here();
    for (Finding& found : machine->findings) {
        const bool same_place = stack.empty() ? found.stack.empty() && found.text == text
                                              : !found.stack.empty() && found.stack[0] == stack[0];
        if (found.kind == kind && same_place) {
            ++found.count;
            return found;
        }
    }
    if (machine->findings.size() >= kMaxFindings)
        return ++machine->findings.back().count, machine->findings.back();
    const int cta = current ? int(current->cta->index) : -1, thread = current ? current->id : -1;
    machine->findings.push_back({kind, text, cta, thread, 1, std::move(stack), {}, machine->launch.name});
    return machine->findings.back();
}

void fatal(const char* kind, const std::string& text) {
    report(kind, text);
    leave();
}

std::string me() {
    if (!current) return "the machine";
    return "CTA " + std::to_string(current->cta->index) + " warp " + std::to_string(current->view.warp) +
           " lane " + std::to_string(current->view.lane) + " (thread " + std::to_string(current->id) + ")";
}

std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') {
            out += '\\';
            out += c;
        } else if (u8(c) < 0x20) {
            char code[8];
            snprintf(code, sizeof code, "\\u%04x", c);
            out += code;
        } else {
            out += c;
        }
    }
    return out + '"';
}

std::string json(const Stack& stack) {
    std::string out = "[";
    for (size_t i = 0; i < stack.size(); ++i) out += (i ? "," : "") + std::to_string(stack[i]);
    return out + "]";
}

std::string json(const Finding& found) {
    std::string out =
        "{\"kind\":" + quoted(found.kind) + ",\"text\":" + quoted(found.text) +
        ",\"cta\":" + std::to_string(found.cta) + ",\"thread\":" + std::to_string(found.thread) +
        ",\"entry\":" + quoted(found.entry) + ",\"count\":" + std::to_string(found.count) + ",\"stack\":" + json(found.stack) + ",\"others\":[";
    for (size_t i = 0; i < found.others.size(); ++i) {
        const Party& party = found.others[i];
        out += std::string(i ? "," : "") + "{\"who\":" + quoted(party.who) +
               ",\"threads\":" + std::to_string(party.threads) + ",\"stack\":" + json(party.stack) + "}";
    }
    return out + "]}";
}

}  // namespace emu
