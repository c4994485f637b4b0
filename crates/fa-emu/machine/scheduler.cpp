// Who runs next. A seed decides: agents as soon as there are any and warps in turn; agents only when nothing
// else can run; or both by chance, with warp priorities that are drawn again now and then, as in
// probabilistic concurrency testing.
#include <array>
#include <cstring>

#include "machine.h"

namespace emu {

constinit thread_local View* view EMU_TLS = nullptr;
constinit thread_local u8* shared_window EMU_TLS = nullptr;
constinit thread_local Machine* machine EMU_TLS = nullptr;
constinit thread_local Thread* current EMU_TLS = nullptr;
constinit thread_local void* pc EMU_TLS = nullptr;

namespace {

// Without a thread going on or an operation finishing for so long, what spins will spin for ever.
constexpr u64 kLivelockSteps = 400000;
// When nothing has gone on for so long, who spins may be waiting for a warp of lower priority or for an
// operation in flight.
constexpr u64 kStarvedSteps = 1000;

void check_thread_exit(Thread& thread) {
    Warp& warp = *thread.warp;
    if (!thread.copies.idle()) report("exit in flight", me() + " ends with cp.async copies in flight");
    if (!thread.bulk_reads.idle())
        report("exit in flight", me() + " ends while its bulk copies still read shared memory");
    if (!warp.queue.empty()) report("exit in flight", me() + " ends with wgmma in flight");
    if (warp.arrived > 0) {
        Finding& found = report("divergence", me() + " ends while " + std::to_string(warp.arrived) +
                                                  " lanes of its warp are at " + warp.instruction);
        found.others.push_back(
            {std::string("the others, at ") + warp.instruction, site_stack(site_of(warp.pc)), warp.arrived});
    }
}

void thread_main() {
    machine->launch.body();
    check_thread_exit(*current);
    Cta& cta = *current->cta;
    current->state = State::Done;
    --current->warp->ready;
    --cta.alive;
    machine->progress = machine->step;
    if (cta.alive == 0 && cta.agents > 0) {
        report("exit in flight", "CTA " + std::to_string(cta.index) + " ends with " +
                                     std::to_string(cta.agents) + " asynchronous operations in flight");
    }
    if (cta.alive == 0) check_tensor_memory(cta);
    barriers_after_exit(cta);
    leave();
}

std::unique_ptr<Cta> make_cta(Machine& machine, Cluster& cluster, u32 index, u32 rank) {
    const Launch& launch = machine.launch;
    const u32 count = launch.threads;
    auto cta = std::make_unique<Cta>(launch.smem_bytes);
    cta->index = index;
    cta->rank = rank;
    cta->cluster = &cluster;
    cta->memory =
        static_cast<u8*>(aligned_alloc(1024, (launch.smem_bytes + kBeyondShared + 1023) / 1024 * 1024));
    memset(cta->memory, 0xff, launch.smem_bytes);
    cta->alive = int(count);
    cta->threads = std::vector<Thread>(count);
    cta->warps.resize(count / 32);
    const bool by_chance = machine.options.pace == Pace::Random;
    for (u32 i = 0; i < count; ++i) {
        Thread& thread = cta->threads[i];
        thread.view = {i, count, index, launch.grid, int(i % 32), int(i / 32)};
        thread.cta = cta.get();
        thread.warp = &cta->warps[i / 32];
        thread.id = int(i);
        thread.slot = Slot(rank * count + i);
        thread.order = Order(machine.slots);
        thread.tick();
        thread.fiber = machine.stacks.make(thread_main);
    }
    for (u32 i = 0; i < count / 32; ++i) {
        Warp& warp = cta->warps[i];
        warp.cta = cta.get();
        warp.id = int(i);
        warp.lanes = &cta->threads[32 * i];
        warp.priority = by_chance ? machine.rng() : ~0ull;
        warp.leader = by_chance ? int(machine.rng() % 32) : 0;
        warp.registers = launch.registers;
    }
    for (NamedBarrier& barrier : cta->named) barrier.order = Order(machine.slots);
    return cta;
}

void run_thread(Machine& machine, Thread& thread) {
    current = &thread;
    view = &thread.view;
    shared_window = thread.cta->memory;
    ++machine.counters.switches;
    emu_switch(&machine.scheduler_stack, thread.fiber.stack_pointer);
    current = nullptr;
}

void run_warp(Machine& machine, Warp& warp) {
    const u32 first = machine.options.pace == Pace::Random ? u32(machine.rng() % 32) : 0;
    for (u32 i = 0; i < 32 && !machine.aborting; ++i) {
        Thread& thread = warp.lanes[(first + i) % 32];
        if (thread.state == State::Ready) run_thread(machine, thread);
    }
}

void retire(Machine& machine, Cluster& cluster) {
    for (auto& cta : cluster.ctas) {
        if (machine.touched.size() < cta->shadow.words()) machine.touched.resize(cta->shadow.words());
        for (size_t i = 0; i < cta->shadow.words(); ++i) machine.touched[i] |= cta->shadow.touched(i);
        for (Thread& thread : cta->threads) machine.stacks.give_back(thread.fiber);
        free(cta->memory);
    }
}

// What a barrier that threads wait on has not got yet.
std::string still_missing(Cta& cta, const void* on) {
    for (const NamedBarrier& barrier : cta.named) {
        if (on == &barrier) {
            return " (" + std::to_string(barrier.arrived) + " of " + std::to_string(barrier.expected) +
                   " threads have arrived)";
        }
    }
    for (auto& [offset, bar] : cta.mbarriers) {
        if (on == bar.get()) {
            return " (the mbarrier at shared memory +" + std::to_string(offset) + " is in phase " +
                   std::to_string(bar->phase) + ", " + std::to_string(bar->expected - bar->pending) + " of " +
                   std::to_string(bar->expected) + " have arrived, " + std::to_string(bar->bytes) +
                   " bytes are to come)";
        }
    }
    return {};
}

void report_stuck(Machine& machine, const char* kind) {
    // Threads of a CTA that wait at one place, by their warps.
    struct Waiting {
        u32 cta;
        std::string what;
        Stack stack;
        std::vector<int> warps;
        int threads;
    };
    std::vector<Waiting> all;
    for (auto& cluster : machine.resident) {
        for (auto& cta : cluster->ctas) {
            for (Thread& thread : cta->threads) {
                if (thread.state == State::Done) continue;
                std::string what = thread.state == State::Blocked ? thread.waits_for : "a loop that goes on";
                if (thread.state == State::Blocked) what += still_missing(*cta, thread.waits_on);
                Stack stack = walk(frame_of(thread.fiber), thread.fiber.stack);
                auto same = [&](const Waiting& own) {
                    return own.cta == cta->index && own.what == what && own.stack == stack;
                };
                auto known = std::find_if(all.begin(), all.end(), same);
                if (known == all.end())
                    known = all.insert(all.end(), {cta->index, what, std::move(stack), {}, 0});
                if (known->warps.empty() || known->warps.back() != thread.view.warp)
                    known->warps.push_back(thread.view.warp);
                ++known->threads;
            }
        }
    }
    std::string text = std::to_string(all.size()) + " groups of threads wait, and no operation is in flight";
    if (!strcmp(kind, "livelock"))
        text = "no thread has passed a wait and no operation has finished for " +
               std::to_string(kLivelockSteps) + " steps";
    if (!strcmp(kind, "step limit"))
        text = "given up after " + std::to_string(machine.options.step_limit) + " steps";
    Finding& found = report(kind, text);
    for (Waiting& waiting : all) {
        std::string who = "CTA " + std::to_string(waiting.cta) + " warp";
        if (waiting.warps.size() > 1) who += "s";
        for (size_t i = 0; i < waiting.warps.size(); ++i)
            who += (i ? ", " : " ") + std::to_string(waiting.warps[i]);
        found.others.push_back({who + ": " + waiting.what, std::move(waiting.stack), waiting.threads});
    }
}

double chance(std::mt19937_64& rng) { return double(rng() >> 11) * 0x1p-53; }

}  // namespace

void leave() {
    if (current->state != State::Done) machine->aborting = true;
    emu_switch(&current->fiber.stack_pointer, machine->scheduler_stack);
    __builtin_unreachable();
}

void yield() { emu_switch(&current->fiber.stack_pointer, machine->scheduler_stack); }

void block(const char* waits_for, const void* on) {
    Thread& thread = *current;
    thread.state = State::Blocked;
    thread.waits_for = waits_for;
    thread.waits_on = on;
    thread.blocked_at = machine->step;
    --thread.warp->ready;
    yield();
}

// Adds a wait of the traced CTA to the timeline, once for the lanes of a warp.
static void trace_wait(Thread& thread, const char* end) {
    Warp& warp = *thread.warp;
    // The lanes of a warp wait for the same; that they wait for each other is no wait of the warp.
    const bool told = warp.told_begin == thread.blocked_at && warp.told_what == thread.waits_for;
    if (int(thread.cta->index) != machine->options.trace_cta || told || thread.waits_on == &warp.arrived)
        return;
    if (machine->step <= thread.blocked_at + 1) return;
    warp.told_begin = thread.blocked_at;
    warp.told_what = thread.waits_for;
    machine->trace.add({"warp " + std::to_string(warp.id), std::string(thread.waits_for) + end,
                        thread.blocked_at, machine->step, walk(frame_of(thread.fiber), thread.fiber.stack)});
}

void wake(Thread& thread) {
    if (thread.state != State::Blocked) return;
    thread.state = State::Ready;
    ++thread.warp->ready;
    machine->progress = machine->step;
    trace_wait(thread, "");
}

// The waits that have not ended where the machine stops.
static void trace_unfinished() {
    for (auto& cluster : machine->resident) {
        for (auto& cta : cluster->ctas) {
            for (Thread& thread : cta->threads) {
                if (thread.state == State::Blocked) trace_wait(thread, ", which never ends");
            }
        }
    }
}

void wake_on(Cta& cta, const void* on) {
    for (Thread& thread : cta.threads) {
        if (thread.state == State::Blocked && thread.waits_on == on) wake(thread);
    }
}

void add_agent(Cta& cta, u64 latency, std::function<void()> run, bool outlives) {
    if (!outlives) ++cta.agents;
    machine->agents.push_back({&cta, std::move(run), machine->step + latency, outlives});
}

Slot new_slot(Cluster& cluster, const std::string& name) {
    const u32 slot = u32(cluster.ctas.size()) * machine->launch.threads + u32(cluster.slots.size());
    if (slot >= machine->slots)
        fatal("emulator", "more actors than the " + std::to_string(machine->slots) + " clock slots");
    cluster.slots.push_back(name);
    return Slot(slot);
}

std::string slot_name(const Cta& cta, Slot slot) {
    const u32 threads = machine->launch.threads, all = threads * u32(cta.cluster->ctas.size());
    if (slot >= all) return cta.cluster->slots[slot - all];
    std::string text = "warp " + std::to_string(slot % threads / 32) + " lane " + std::to_string(slot % 32) +
                       " (thread " + std::to_string(slot % threads) + ")";
    if (cta.cluster->ctas.size() > 1)
        text += " of CTA " + std::to_string(cta.index - cta.rank + slot / threads);
    return text;
}

std::string actor_name(const Cta& cta, const Actor& actor) {
    if (current && actor.slot == current->slot) return me();
    return slot_name(cta, actor.slot) + (current ? ", issued by " + me() + "," : "");
}

bool run(Machine& machine) {
    const Launch& launch = machine.launch;
    const Options& options = machine.options;
    const u32 width = launch.cluster;
    machine.slots =
        (launch.threads * width * (launch.cp_async ? 2 : 1) + width * (launch.threads / 16 + 96) + 15) / 16 *
        16;
    machine.rng.seed(options.seed * 7919 + 1);
    machine.aborting = false;
    machine.polling = 0;
    machine.step = machine.progress = 0;
    machine.agents.clear();
    machine.resident.clear();
    machine.global.next_launch();
    const bool by_chance = options.pace == Pace::Random;
    const double agents_share = std::array{0.005, 0.05, 0.3, 0.7, 0.95}[machine.rng() % 5];
    const double redraw = std::array{0.001, 0.02, 0.3}[machine.rng() % 3];
    u32 next = 0;
    auto fill = [&] {
        while (next < launch.grid &&
               (machine.resident.size() + 1) * width <= std::max(width, launch.resident)) {
            auto cluster = std::make_unique<Cluster>();
            cluster->id = next / width;
            cluster->order = Order(machine.slots);
            cluster->ctas.reserve(width);
            for (u32 rank = 0; rank < width; ++rank) {
                cluster->ctas.push_back(make_cta(machine, *cluster, next, rank));
                ++next;
            }
            machine.resident.push_back(std::move(cluster));
        }
    };
    fill();
    while (!machine.resident.empty() && !machine.aborting) {
        ++machine.step;
        Warp* best = nullptr;
        for (auto& cluster : machine.resident) {
            for (auto& cta : cluster->ctas) {
                for (Warp& warp : cta->warps) {
                    if (warp.ready > 0 && (!best || warp.priority > best->priority)) best = &warp;
                }
            }
        }
        auto& agents = machine.agents;
        if (!best && agents.empty()) {
            trace_unfinished();
            report_stuck(machine, "deadlock");
            break;
        }
        if (machine.step - machine.progress > kLivelockSteps) {
            trace_unfinished();
            report_stuck(machine, "livelock");
            break;
        }
        if (options.step_limit && machine.step > options.step_limit) {
            trace_unfinished();
            report_stuck(machine, "step limit");
            break;
        }
        size_t chosen = 0;
        const bool starved = machine.step - machine.progress > kStarvedSteps;
        bool agent = !agents.empty() && (!best || starved || options.pace == Pace::Eager);
        if (options.pace == Pace::Paced && !agents.empty()) {
            for (size_t i = 1; i < agents.size(); ++i) {
                if (agents[i].due < agents[chosen].due) chosen = i;
            }
            if (!best) machine.step = std::max(machine.step, agents[chosen].due);
            agent = agent || agents[chosen].due <= machine.step;
        } else if (by_chance && !agents.empty()) {
            agent = agent || chance(machine.rng) < agents_share;
            chosen = machine.rng() % agents.size();
        }
        if (agent) {
            Agent own = std::move(agents[chosen]);
            agents[chosen] = std::move(agents.back());
            agents.pop_back();
            if (!own.outlives) --own.cta->agents;
            ++machine.counters.agents;
            machine.progress = machine.step;
            own.run();
        } else {
            run_warp(machine, *best);
            if (!by_chance) {
                best->priority = ~machine.step;  // in turn
            } else if (chance(machine.rng) < redraw || starved) {
                best->priority = machine.rng();
            }
        }
        for (size_t i = 0; i < machine.resident.size();) {
            if (!machine.resident[i]->finished()) {
                ++i;
                continue;
            }
            // What a CTA left in flight would write to memory that is gone; sums for device memory still get
            // there.
            std::vector<Agent> left;
            std::erase_if(agents, [&](Agent& agent) {
                const bool own = agent.cta->cluster == machine.resident[i].get();
                if (own && agent.outlives) left.push_back(std::move(agent));
                return own;
            });
            for (Agent& agent : left) agent.run();
            retire(machine, *machine.resident[i]);
            machine.resident.erase(machine.resident.begin() + long(i));
            if (options.progress)
                options.progress(options.context, next - u32(machine.resident.size()) * width, launch.grid);
        }
        fill();
    }
    machine.counters.steps += machine.step;
    const bool through = machine.resident.empty() && !machine.aborting;
    for (auto& cluster : machine.resident) retire(machine, *cluster);
    machine.agents.clear();
    machine.resident.clear();
    return through;
}

}  // namespace emu
