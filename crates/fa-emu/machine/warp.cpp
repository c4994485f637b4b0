// Instructions that a warp executes as one: shuffles, votes, elect.sync, __syncwarp, setmaxnreg.
#include "machine.h"

namespace emu {

void rendezvous(const char* instruction, void* payload, const std::function<void(Warp&)>& run) {
    Warp& warp = *current->warp;
    const int lane = current->view.lane;
    warp.payload[lane] = payload;
    if (warp.arrived == 0) {
        warp.instruction = instruction;
        warp.pc = pc;
    } else if (warp.instruction != instruction || warp.pc != pc) {
        // A compiler may have copied the instruction: whoever resolves the places drops what is one line of
        // the source.
        const bool same = warp.instruction == instruction;
        Finding& found = report(
            same ? "divergence?" : "divergence",
            me() + " is at " + instruction + " while other lanes of its warp are at " + warp.instruction);
        if (found.others.empty()) {
            found.others.push_back({std::string("the others, at ") + warp.instruction,
                                    site_stack(site_of(warp.pc)), warp.arrived});
        }
        if (!same) leave();
    }
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        ++warp.generation;
        ++machine->counters.collectives;
        for (int i = 0; i < 32; ++i)
            warp.lanes[i].order.reach_round(current->warp_of_cluster(), warp.generation);
        run(warp);
        for (int i = 0; i < 32; ++i) {
            if (i != lane && warp.lanes[i].waits_on == &warp.arrived) wake(warp.lanes[i]);
        }
    } else {
        const u32 generation = warp.generation;
        wait_until(instruction, &warp.arrived, [&] { return warp.generation != generation; });
    }
}

u32 shuffle(u32 value, int lane) {
    ENTER();
    struct Lane {
        u32 in, out;
        int from;
    } own{value, 0, lane & 31};
    rendezvous("shfl.sync", &own, [](Warp& warp) {
        for (void* payload : warp.payload) {
            Lane& to = *static_cast<Lane*>(payload);
            to.out = static_cast<Lane*>(warp.payload[to.from])->in;
        }
    });
    return own.out;
}

bool any(bool value) {
    ENTER();
    struct Lane {
        bool in, out;
    } own{value, false};
    rendezvous("vote.sync", &own, [](Warp& warp) {
        bool any = false;
        for (void* payload : warp.payload) any |= static_cast<Lane*>(payload)->in;
        for (void* payload : warp.payload) static_cast<Lane*>(payload)->out = any;
    });
    return own.out;
}

u32 ballot(bool value) {
    ENTER();
    struct Lane {
        bool in;
        u32 out;
    } own{value, 0};
    rendezvous("vote.sync.ballot", &own, [](Warp& warp) {
        u32 all = 0;
        for (int i = 0; i < 32; ++i) all |= u32(static_cast<Lane*>(warp.payload[i])->in) << i;
        for (void* payload : warp.payload) static_cast<Lane*>(payload)->out = all;
    });
    return own.out;
}

void sync_warp() {
    ENTER();
    rendezvous("bar.warp.sync", nullptr, [](Warp& warp) {
        Order all(machine->slots);
        for (int i = 0; i < 32; ++i) all.learn(warp.lanes[i].order);
        for (int i = 0; i < 32; ++i) {
            warp.lanes[i].order = all;
            warp.lanes[i].tick();
        }
    });
}

bool elect() {
    ENTER();
    bool elected = false;
    rendezvous("elect.sync", &elected,
               [](Warp& warp) { *static_cast<bool*>(warp.payload[warp.leader]) = true; });
    return elected;
}

namespace {

bool grant(Warp& warp, int count) {
    const int need = (count - warp.registers) * 32;
    if (need > warp.cta->free_registers) return false;
    warp.cta->free_registers -= need;
    warp.registers = count;
    warp.wants = 0;
    machine->progress = machine->step;
    return true;
}

}  // namespace

void set_registers(int count, bool take) {
    ENTER();
    rendezvous("setmaxnreg", nullptr, [&](Warp& warp) {
        if (take ? count < warp.registers : count > warp.registers) {
            report("setmaxnreg", me() + " goes from " + std::to_string(warp.registers) + " to " +
                                     std::to_string(count) +
                                     " registers by an instruction for the other direction");
        }
        if (!grant(warp, count)) {
            warp.wants = count;
            return;
        }
        for (Warp& other : warp.cta->warps) {
            if (other.wants && grant(other, other.wants)) wake_on(*warp.cta, &other.wants);
        }
    });
    Warp& warp = *current->warp;
    wait_until("setmaxnreg: no registers are left", &warp.wants, [&] { return warp.wants == 0; });
}

}  // namespace emu
