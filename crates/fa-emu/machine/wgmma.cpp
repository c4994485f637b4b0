// wgmma: products of four warps that run while the warps go on, each warp its 16 rows of the 64.
#include "machine.h"
#include "operand.h"

namespace emu {

namespace {

MatrixDescriptor decoded(u64 bits) {
    const u32 swizzles[4] = {16, 128, 64, 32};
    return MatrixDescriptor::of(bits, swizzles[bits >> 62]);
}

// Tells the timeline of the groups that are done, by the first warp of each warpgroup.
void tell_groups(Warp& warp) {
    while (!warp.started.empty() && warp.products.done(warp.started.front().group)) {
        Warp::Started& own = warp.started.front();
        machine->trace.add({"tensor core of warpgroup " + std::to_string(warp.id / 4), "wgmma group",
                            own.step, machine->step, std::move(own.stack)});
        warp.started.pop_front();
    }
}

void multiply(Warp& warp) {
    const WgmmaOp own = std::move(warp.queue.front());
    warp.queue.pop_front();
    const Wgmma& op = own.op;
    const int n = op.n;
    const bool bytes = op.element == Element::E4m3, bf16 = op.element == Element::Bf16;
    const int steps = bytes ? 32 : 16;  // the k of the instruction
    alignas(64) float a[16][32], b[32][256], d[16][256];
    auto read = [&](u64 descriptor, bool mn_major, int first, int rows, float* out, int row_stride,
                    int k_stride) {
        const MatrixDescriptor own = decoded(descriptor);
        if (bytes) {
            read_bytes(*warp.cta, own, first, rows, out, row_stride, k_stride);
        } else {
            read_operand(*warp.cta, bf16, own, mn_major, first, rows, out, row_stride, k_stride);
        }
    };
    read(op.desc_b, op.b_mn_major, 0, n, &b[0][0], 1, 256);
    if (own.a[0]) {
        // A register has rows lane / 4 or 8 further, and 4 bytes of 16.
        for (int lane = 0; lane < 32; ++lane) {
            for (int i = 0; i < 4; ++i) {
                float* const to = a[lane / 4 + i % 2 * 8] + i / 2 * steps / 2 + lane % 4 * steps / 8;
                const u32 word = own.a[lane][i];
                for (int j = 0; j < steps / 8; ++j) {
                    to[j] = bytes ? from_e4m3(u8(word >> 8 * j)) : from16(bf16, u16(word >> 16 * j));
                }
            }
        }
    } else {
        read(op.desc_a, op.a_mn_major, warp.id % 4 * 16, 16, &a[0][0], 32, 1);
    }
    // Register i of a lane: rows lane / 4 and 8 further, columns in pairs of every eight.
    auto row_of = [](int lane, int i) { return lane / 4 + 8 * (i / 2 & 1); };
    auto column_of = [](int lane, int i) { return 8 * (i / 4) + 2 * (lane % 4) + (i & 1); };
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < n / 2; ++i)
            d[row_of(lane, i)][column_of(lane, i)] = op.accumulate ? own.d[lane][i] : 0.f;
    }
    for (int row = 0; row < 16; ++row) {
        for (int k = 0; k < steps; ++k) {
            const float factor = a[row][k];
            for (int column = 0; column < n; ++column) d[row][column] += factor * b[k][column];
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < n / 2; ++i) own.d[lane][i] = d[row_of(lane, i)][column_of(lane, i)];
    }
    ++machine->counters.wgmma;
    machine->counters.flops += 2 * 16 * u64(steps) * u64(n);
    warp.products.finish(own.group);
    for (int lane = 0; lane < 32; ++lane) {
        if (warp.lanes[lane].waits_on == &warp.products) wake(warp.lanes[lane]);
    }
}

// Remembers registers that a product uses, and asks for a fence where they were accessed since the last one.
void use_registers(Thread& thread, const void* registers, u32 bytes, bool accumulator) {
    const char* begin = static_cast<const char*>(registers);
    const u32 group = thread.warp->products.open();
    for (Operand& operand : thread.operands) {
        if (operand.begin != begin || operand.end != begin + bytes || operand.accumulator != accumulator)
            continue;
        if (operand.touched && machine->options.hazards) {
            report("missing wgmma.fence", me() + (accumulator ? ": accumulators" : ": registers of A") +
                                              " were accessed since the last wgmma.fence");
        }
        operand.in_flight = true;
        operand.group = group;
        return;
    }
    // Places on the stack are used again by other arrays: the oldest that is not in flight goes.
    if (thread.operands.size() >= 96) {
        std::erase_if(thread.operands, [](const Operand& operand) { return !operand.in_flight; });
    }
    if (!thread.warp->fenced && machine->options.hazards)
        report("missing wgmma.fence", me() + " issues its first wgmma without one");
    thread.operands.push_back({begin, begin + bytes, accumulator, true, false, group});
}

}  // namespace

void wgmma(const Wgmma& op) {
    ENTER();
    use_registers(*current, op.d, u32(op.n) * 2, true);
    if (op.a) use_registers(*current, op.a, 16, false);
    rendezvous("wgmma.mma_async", const_cast<Wgmma*>(&op), [&op](Warp& warp) {
        Cta& cta = *warp.cta;
        WgmmaOp own{op, {}, {}, warp.products.start()};
        for (int lane = 0; lane < 32; ++lane) {
            const Wgmma& other = *static_cast<Wgmma*>(warp.payload[lane]);
            own.d[lane] = other.d;
            own.a[lane] = other.a;
            if (other.desc_b != op.desc_b || (!op.a && other.desc_a != op.desc_a) ||
                other.accumulate != op.accumulate) {
                report("bad descriptor",
                       me() + " and another lane of its warp issue a wgmma with different operands");
            }
        }
        // The four warps of a group issue the same products.
        warp.issued.push_back(op.desc_b ^ u64(op.n) << 50 ^ op.desc_a * 3 ^ u64(op.accumulate));
        for (int i = 0; i < 4; ++i) {
            const Warp& other = cta.warps[size_t(warp.id / 4 * 4 + i)];
            if (other.issued.size() >= warp.issued.size() &&
                other.issued[warp.issued.size() - 1] != warp.issued.back()) {
                report("bad descriptor",
                       me() + " issues another wgmma than the other warps of its warpgroup");
            }
        }
        if (warp.wgmma_slot < 0)
            warp.wgmma_slot = new_slot(*cta.cluster, "wgmma of warp " + std::to_string(warp.id));
        Order order(machine->slots);
        if (machine->options.order) {
            for (int lane = 0; lane < 32; ++lane) order.learn(warp.lanes[lane].order);
        }
        const Actor actor{Slot(warp.wgmma_slot), own.group, Proxy::Async, false, &order,
                          site_of(pc),           "reads"};
        access_operand(cta, "wgmma", decoded(op.desc_b), op.b_mn_major, 0, op.n, actor);
        if (!op.a) {
            access_operand(cta, "wgmma", decoded(op.desc_a), op.a_mn_major, warp.id % 4 * 16, 16, actor);
        }
        if (!op.accumulate) {
            for (float* d : own.d) poison(reinterpret_cast<u8*>(d), u32(op.n) * 2);
        }
        warp.queue.push_back(std::move(own));
        const bool traced = int(cta.index) == machine->options.trace_cta && warp.id % 4 == 0;
        const u32 group = warp.products.open();
        if (traced && (warp.started.empty() || warp.started.back().group != group)) {
            warp.started.push_back({group, machine->step, stack_here()});
        }
        add_agent(cta, 12, [&warp] {
            multiply(warp);
            tell_groups(warp);
        });
    });
}

void wgmma_fence() {
    ENTER();
    rendezvous("wgmma.fence", nullptr, [](Warp& warp) {
        warp.fenced = true;
        for (int lane = 0; lane < 32; ++lane) {
            for (Operand& operand : warp.lanes[lane].operands) operand.touched = false;
        }
    });
}

void wgmma_commit() {
    ENTER();
    rendezvous("wgmma.commit_group", nullptr, [](Warp& warp) {
        warp.products.commit();
        tell_groups(warp);
    });
}

void wgmma_wait(int pending) {
    ENTER();
    rendezvous("wgmma.wait_group", nullptr, [](Warp&) {});
    Thread& thread = *current;
    Warp& warp = *thread.warp;
    const u32 due = warp.products.due(u32(pending));
    wait_until("wgmma.wait_group", &warp.products, [&] { return warp.products.done(due); });
    if (warp.wgmma_slot >= 0) thread.order.reach(Slot(warp.wgmma_slot), due);
    for (Operand& operand : thread.operands) {
        if (operand.group <= due) operand.in_flight = false;
    }
}

}  // namespace emu
