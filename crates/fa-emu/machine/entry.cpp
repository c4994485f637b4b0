// What the host calls: a session of launches over named device memory, and all that was found as JSON.
#include <dlfcn.h>

#include <csignal>
#include <cstring>
#include <mutex>

#include "machine.h"

using namespace emu;

extern "C" {

struct EmuOptions {
    u64 seed;
    u32 pace;  // of emu::Pace
    u32 order, poison, hazards;
    int trace_cta;
    u32 ordered_additions, products_in_order;
    u64 step_limit;
    void (*progress)(void* context, u32 done, u32 all);
    void* context;
};

struct EmuLaunch {
    const char* name;
    void (*entry)(const void* const* arguments);
    const void* const* arguments;  // the parameters, and tensor maps where the entry takes them
    u32 grid, threads, cluster, resident, smem_bytes, cp_async, blocks_per_sm;
};
}

namespace {

struct Session {
    Machine machine;
    std::string launches, text;
};

struct sigaction previous;

// In place of the access that faulted, on its thread's stack.
void faulted() { fatal("out of bounds", me() + " accesses memory that is nobody's"); }

void on_fault(int signal, siginfo_t* info, void* context) {
    if (!current) {
        if (previous.sa_flags & SA_SIGINFO) {
            previous.sa_sigaction(signal, info, context);
        } else if (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN) {
            sigaction(signal, &previous, nullptr);
        } else {
            previous.sa_handler(signal);
        }
        return;
    }
    auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    // As if the instruction had called it: its address is pushed, for the report's frames.
    auto stack = (u64(registers[REG_RSP]) - 256) / 16 * 16 - 8;
    *reinterpret_cast<u64*>(stack) = u64(registers[REG_RIP]) + 1;
    registers[REG_RSP] = greg_t(stack);
    registers[REG_RIP] = greg_t(u64(&faulted));
}

void catch_faults() {
    static std::once_flag once;
    std::call_once(once, [] {
        struct sigaction action{};
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &action, &previous);
    });
}

std::string json(const Counters& c) {
    const std::pair<const char*, u64> all[] = {{"steps", c.steps},
                                               {"switches", c.switches},
                                               {"collectives", c.collectives},
                                               {"agents", c.agents},
                                               {"plain_accesses", c.plain},
                                               {"mma_sync", c.mma_sync},
                                               {"wgmma", c.wgmma},
                                               {"tcgen05", c.tcgen05},
                                               {"flops", c.flops},
                                               {"tma_boxes", c.tma_boxes},
                                               {"tma_bytes", c.tma_bytes},
                                               {"tma_bytes_inside", c.tma_bytes_inside},
                                               {"bulk_bytes", c.bulk_bytes},
                                               {"cp_async_bytes", c.cp_async_bytes},
                                               {"red_bytes", c.red_bytes},
                                               {"load_phases", c.load_phases},
                                               {"load_wavefronts", c.load_wavefronts},
                                               {"store_phases", c.store_phases},
                                               {"store_wavefronts", c.store_wavefronts}};
    std::string out = "{";
    for (const auto& [name, value] : all)
        out += (out.size() > 1 ? "," : "") + quoted(name) + ":" + std::to_string(value);
    return out + "}";
}

}  // namespace

extern "C" {

#define EMU_EXPORT __attribute__((visibility("default")))

EMU_EXPORT void* emu_open(const EmuOptions* options) {
    auto* session = new Session;
    session->machine.options = {options->seed,
                                Pace(options->pace),
                                options->order != 0,
                                options->poison != 0,
                                options->hazards != 0,
                                options->products_in_order != 0,
                                options->ordered_additions != 0,
                                options->trace_cta,
                                options->step_limit,
                                options->progress,
                                options->context};
    return session;
}

// Device memory [begin, begin + bytes); so many bytes before and after it are nobody's.
EMU_EXPORT void emu_region(void* session, const char* name, u64 begin, u64 bytes, u64 before, u64 after,
                           int writable, int initialised) {
    static_cast<Session*>(session)->machine.global.add(
        {begin, bytes, before, after, name, writable != 0, initialised != 0, {}, {}});
}

// Bytes of named memory that no access may touch.
EMU_EXPORT void emu_forbid(void* session, u64 begin, u64 bytes) {
    static_cast<Session*>(session)->machine.global.forbid(begin, bytes);
}

// 1 when the launch came to its end.
EMU_EXPORT int emu_launch(void* session_, const EmuLaunch* launch) {
    catch_faults();
    Session& session = *static_cast<Session*>(session_);
    Machine& m = session.machine;
    m.counters = {};
    m.touched.clear();
    Dl_info info{};
    dladdr(reinterpret_cast<const void*>(launch->entry), &info);
    m.unit_begin = static_cast<char*>(info.dli_fbase);
    const int registers = int(std::min(255u, 65536 / (launch->threads * launch->blocks_per_sm) / 8 * 8));
    const EmuLaunch own = *launch;
    m.launch = {[own] { own.entry(own.arguments); },
                launch->name,
                launch->grid,
                launch->threads,
                launch->cluster,
                launch->resident,
                launch->smem_bytes,
                registers,
                launch->cp_async != 0};
    machine = &m;
    const bool through = run(m);
    machine = nullptr;
    std::string touched;
    for (size_t i = 0; i < m.touched.size();) {
        size_t end = i;
        while (end < m.touched.size() && m.touched[end]) ++end;
        if (end > i)
            touched +=
                (touched.empty() ? "[" : ",[") + std::to_string(4 * i) + "," + std::to_string(4 * end) + "]";
        i = std::max(end, i + 1);
    }
    if (!session.launches.empty()) session.launches += ",";
    session.launches += "{\"entry\":" + quoted(launch->name) +
                        ",\"finished\":" + (through ? "true" : "false") +
                        ",\"counters\":" + json(m.counters) + ",\"touched\":[" + touched + "]}";
    return through;
}

// All that was found so far; valid until the next call.
EMU_EXPORT const char* emu_result(void* session_) {
    Session& session = *static_cast<Session*>(session_);
    std::string out = "{\"findings\":[";
    for (const Finding& found : session.machine.findings)
        out += (out.back() == '[' ? "" : ",") + emu::json(found);
    out += "],\"launches\":[" + session.launches + "],\"spans\":[";
    for (const Span& span : session.machine.trace.spans) {
        out += (out.back() == '[' ? "{" : ",{") + std::string("\"track\":") + quoted(span.track) +
               ",\"what\":" + quoted(span.what) + ",\"begin\":" + std::to_string(span.begin) +
               ",\"end\":" + std::to_string(span.end) + ",\"stack\":" + emu::json(span.stack) + "}";
    }
    session.text = out + "]}";
    return session.text.c_str();
}

EMU_EXPORT void emu_close(void* session) { delete static_cast<Session*>(session); }
}
