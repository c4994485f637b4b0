// Tensor memory and the tcgen05 instructions: allocation, products, loads and stores by warps, and what
// orders them (PTX ISA, "TensorCore 5th Generation Family Instructions").
//
// What is modelled: cta_group::1, kind::f16 into f32 with M of 128, A in shared or tensor memory, loads and
// stores of shape 32x32b. All of these touch whole quarters of 32 lanes, so a quarter's column is the grain
// of the shadow. A thread's `order` has what it was told; `tensor`, what its tcgen05 operations come after: a
// fence::after_thread_sync takes the one into the other, a fence::before_thread_sync tells others of the
// second.
#include <deque>

#include "machine.h"
#include "operand.h"

namespace emu {

namespace {

constexpr u32 kLanes = 128, kColumns = 512, kQuarters = 4;
constexpr u32 kFewestColumns = 32;

std::string tensor_place(u32 index) {
    const u32 quarter = index / kColumns;
    return " tensor memory lanes " + std::to_string(32 * quarter) + "-" + std::to_string(32 * quarter + 31) +
           ", column " + std::to_string(index % kColumns);
}

// An instruction descriptor of kind::f16.
struct Instruction {
    bool bf16, a_mn_major, b_mn_major;
    u32 n;
};

struct Product {
    TensorProduct op;
    Instruction instruction;
    u64 issued;
    Stack stack;
};

// Products that run one after another: of one accumulator, or of a thread where products keep the order of
// their issue.
struct Pipe {
    const Thread* thread;
    u32 d, instruction;
    int slot;
    u32 issued = 0, done = 0;
    std::deque<Product> queue;
};

// A commit: it arrives once the products that its thread had issued before are done.
struct Commit {
    std::vector<std::pair<const Pipe*, u32>> after;
    Mbarrier* bar;
    Order order;
    u16 site;
};

}  // namespace

struct TensorMemory {
    std::vector<u32> cells = std::vector<u32>(kLanes * kColumns);
    Shadow shadow{4 * kQuarters * kColumns, tensor_place};
    std::map<u32, u32> allocations;  // columns by first column
    bool relinquished = false;
    u32 last_columns = kColumns;
    std::deque<Pipe> pipes;
    std::vector<Commit> commits;

    u32* row(u32 lane) { return cells.data() + lane * kColumns; }

    // The first of so many free columns, on a multiple of their number; or kColumns.
    u32 room(u32 columns) const {
        for (u32 at = 0; at + columns <= kColumns; at += columns) {
            const bool free = std::none_of(allocations.begin(), allocations.end(), [&](const auto& own) {
                return own.first < at + columns && at < own.first + own.second;
            });
            if (free) return at;
        }
        return kColumns;
    }
    bool allocated(u32 column, u32 columns) const {
        auto own = allocations.upper_bound(column);
        if (own == allocations.begin()) return false;
        --own;
        return column + columns <= own->first + own->second;
    }
};

namespace {

Order& tensor_order(Thread& thread) {
    if (thread.tensor.before.empty()) thread.tensor = Order(machine->slots);
    return thread.tensor;
}

// The slot of asynchronous operations on tensor memory.
Slot tensor_slot(Cluster& cluster, const std::string& name) {
    cluster.tensor_slots.push_back(new_slot(cluster, name));
    return cluster.tensor_slots.back();
}

std::string columns_name(u32 column, u32 columns) {
    return "columns " + std::to_string(column) + " to " + std::to_string(column + columns - 1) +
           " of tensor memory";
}

// The CTA's tensor memory, of which the thread uses these columns.
TensorMemory& used(const char* instruction, u32 column, u32 columns) {
    TensorMemory* const memory = current->cta->tensor.get();
    if (!memory || !memory->allocated(column, columns)) {
        fatal("tensor memory", me() + " uses " + columns_name(column, columns) + " by " + instruction +
                                   ", which are not allocated");
    }
    return *memory;
}

void access(TensorMemory& memory, u32 quarter, u32 column, u32 columns, bool write, const Actor& actor) {
    if (machine->options.order)
        memory.shadow.access(*current->cta, 4 * (quarter * kColumns + column), 4 * columns, write, actor);
}

// What all lanes of the warp come after.
Order common_order(Warp& warp) {
    Order common = tensor_order(warp.lanes[0]);
    for (int lane = 1; lane < 32; ++lane) {
        const Order& own = tensor_order(warp.lanes[lane]);
        for (size_t i = 0; i < common.before.size(); ++i)
            common.before[i] = std::min(common.before[i], own.before[i]);
    }
    return common;
}

void check_power(u32 columns) {
    if (columns < kFewestColumns || columns > kColumns || (columns & (columns - 1)) != 0) {
        fatal("tensor memory", me() + " asks for " + std::to_string(columns) +
                                   " columns of tensor memory, which is no power of two from " +
                                   std::to_string(kFewestColumns) + " to " + std::to_string(kColumns));
    }
}

}  // namespace

// ---- Allocation ----

void tensor_alloc(void* holder, u32 columns) {
    ENTER();
    check_power(columns);
    Cta& cta = *current->cta;
    if (!cta.tensor) cta.tensor = std::make_shared<TensorMemory>();
    TensorMemory& memory = *cta.tensor;
    rendezvous("tcgen05.alloc", nullptr, [&](Warp&) {
        if (memory.relinquished) {
            report("tensor memory",
                   me() + " allocates tensor memory after the CTA's relinquish_alloc_permit");
        }
        if (columns > memory.last_columns) {
            report("tensor memory", me() + " allocates " + std::to_string(columns) +
                                        " columns after an allocation of " +
                                        std::to_string(memory.last_columns) + ": sizes must not grow");
        }
        memory.last_columns = columns;
    });
    if (current->view.lane == 0) {
        wait_until("tcgen05.alloc", &memory, [&] { return memory.room(columns) < kColumns; });
        const u32 first = memory.room(columns);
        memory.allocations[first] = columns;
        for (u32 quarter = 0; quarter < kQuarters; ++quarter)
            memory.shadow.reset(quarter * kColumns + first, quarter * kColumns + first + columns);
        for (u32 lane = 0; lane < kLanes; ++lane)
            poison(reinterpret_cast<u8*>(memory.row(lane) + first), 4 * columns);
        const u32 offset = offset_of(holder, 4, 4);
        generic_access(offset, 4, true);
        memcpy(cta.memory + offset, &first, 4);
    }
    rendezvous("tcgen05.alloc", nullptr, [](Warp&) {});
}

void tensor_dealloc(u32 address, u32 columns) {
    ENTER();
    check_power(columns);
    Cta& cta = *current->cta;
    rendezvous("tcgen05.dealloc", nullptr, [&](Warp& warp) {
        TensorMemory* const memory = cta.tensor.get();
        const auto own = memory ? memory->allocations.find(address) : decltype(memory->allocations.end()){};
        if (!memory || own == memory->allocations.end() || own->second != columns) {
            report("tensor memory", me() + " frees " + columns_name(address, columns) +
                                        ", which is no allocation of the CTA's");
            return;
        }
        // Everything that touched it has happened.
        const Order order = common_order(warp);
        const Actor actor{current->slot, current->clock(), Proxy::Generic, true,
                          &order,        site_of(pc),      "frees",        &current->order};
        for (u32 quarter = 0; quarter < kQuarters; ++quarter) {
            access(*memory, quarter, address, columns, true, actor);
            memory->shadow.reset(quarter * kColumns + address, quarter * kColumns + address + columns);
        }
        memory->allocations.erase(own);
        wake_on(cta, memory);
    });
}

void tensor_relinquish() {
    ENTER();
    Cta& cta = *current->cta;
    rendezvous("tcgen05.relinquish_alloc_permit", nullptr, [&](Warp&) {
        if (!cta.tensor) cta.tensor = std::make_shared<TensorMemory>();
        cta.tensor->relinquished = true;
    });
}

void check_tensor_memory(Cta& cta) {
    if (!cta.tensor) return;
    for (const auto& [column, columns] : cta.tensor->allocations) {
        report("leaked tensor memory", "CTA " + std::to_string(cta.index) + " ends with " +
                                           columns_name(column, columns) + " allocated");
    }
}

// ---- Loads and stores ----

namespace {

struct Transfer {
    u32* to;
    const u32* from;
    u32 address;
};

// Issues a load (`to`) or a store of the warp: at once all that is checked, later the transfer.
void transfer(const char* instruction, Transfer own, u32 columns) {
    const bool is_store = own.from != nullptr;
    if (!is_store)
        current->loads.push_back(
            {reinterpret_cast<const char*>(own.to), reinterpret_cast<const char*>(own.to + columns)});
    rendezvous(instruction, &own, [&](Warp& warp) {
        Cta& cta = *warp.cta;
        for (void* payload : warp.payload) {
            if (static_cast<Transfer*>(payload)->address != own.address)
                fatal("tensor memory",
                      me() + " and another lane of its warp give " + instruction + " different addresses");
        }
        const u32 lane = own.address >> 16, column = own.address & 0xffff;
        const u32 quarter = u32(warp.id) % kQuarters;
        if (lane != 32 * quarter) {
            fatal("tensor memory", me() + " reaches lanes from " + std::to_string(lane) + " by " +
                                       instruction + ": its warp has lanes " + std::to_string(32 * quarter) +
                                       " to " + std::to_string(32 * quarter + 31));
        }
        TensorMemory& memory = used(instruction, column, columns);
        auto& own_kind = warp.tensor[is_store];
        if (own_kind.slot < 0)
            own_kind.slot = tensor_slot(*cta.cluster, instruction + (" of warp " + std::to_string(warp.id)));
        const Order order = common_order(warp);
        const u32 number = ++own_kind.issued;
        access(memory, quarter, column, columns, is_store,
               {Slot(own_kind.slot), number, Proxy::Generic, false, &order, site_of(pc),
                is_store ? "writes" : "reads", &current->order});
        std::vector<u32> values;
        std::vector<u32*> targets;
        for (void* payload : warp.payload) {
            const Transfer& of_lane = *static_cast<Transfer*>(payload);
            if (is_store) {
                values.insert(values.end(), of_lane.from, of_lane.from + columns);
            } else {
                targets.push_back(of_lane.to);
                poison(reinterpret_cast<u8*>(of_lane.to), 4 * columns);
            }
        }
        add_agent(cta, 10,
                  [&warp, &memory, &own_kind, is_store, lane, column, columns, values = std::move(values),
                   targets = std::move(targets)] {
                      for (u32 i = 0; i < 32; ++i) {
                          u32* const cells = memory.row(lane + i) + column;
                          if (is_store) {
                              memcpy(cells, values.data() + i * columns, 4 * columns);
                          } else {
                              memcpy(targets[i], cells, 4 * columns);
                          }
                      }
                      ++own_kind.done;
                      for (int i = 0; i < 32; ++i) {
                          if (warp.lanes[i].waits_on == &own_kind) wake(warp.lanes[i]);
                      }
                  });
    });
}

void wait_for_transfers(const char* instruction, bool stores) {
    rendezvous(instruction, nullptr, [](Warp&) {});
    Thread& thread = *current;
    auto& own_kind = thread.warp->tensor[stores];
    const u32 due = own_kind.issued;
    wait_until(instruction, &own_kind, [&] { return own_kind.done >= due; });
    if (own_kind.slot >= 0) tensor_order(thread).reach(Slot(own_kind.slot), due);
    if (!stores) thread.loads.clear();
}

}  // namespace

void tensor_load(u32* to, u32 columns, u32 address) {
    ENTER();
    transfer("tcgen05.ld", {to, nullptr, address}, columns);
}

void tensor_store(u32 address, const u32* from, u32 columns) {
    ENTER();
    transfer("tcgen05.st", {nullptr, from, address}, columns);
}

void tensor_wait_load() {
    ENTER();
    wait_for_transfers("tcgen05.wait::ld", false);
}

void tensor_wait_store() {
    ENTER();
    wait_for_transfers("tcgen05.wait::st", true);
}

// ---- Fences ----

void tensor_fence_before() {
    ENTER();
    const Order& tensor = tensor_order(*current);
    for (const Slot slot : current->cta->cluster->tensor_slots)
        current->order.reach(slot, tensor.before[slot]);
}

void tensor_fence_after() {
    ENTER();
    Order& tensor = tensor_order(*current);
    for (const Slot slot : current->cta->cluster->tensor_slots)
        tensor.reach(slot, current->order.before[slot]);
}

// ---- Products ----

namespace {

Instruction decoded_instruction(u32 bits) {
    auto field = [&](int shift, int width) { return bits >> shift & ((1u << width) - 1); };
    auto bad = [&](const std::string& why) {
        fatal("bad descriptor", me() + " issues a tcgen05.mma by an instruction descriptor " + why);
    };
    const u32 format = field(7, 3), n = 8 * field(17, 6), m = 16 * field(24, 5);
    if (field(4, 2) != 1) bad("whose sums are not f32");
    if (format > 1 || field(10, 3) != format) bad("whose operands are neither both f16 nor both bf16");
    if (field(0, 4) || field(6, 1) || field(13, 2) || field(23, 1) || field(29, 3))
        bad("with sparsity, negation, a shift or a reserved bit, which the emulation does not know");
    if (m != 128) bad("of M = " + std::to_string(m) + ": the emulation knows 128");
    if (n == 0 || n % 16 || n > 256) bad("of N = " + std::to_string(n) + ": N is a multiple of 16 up to 256");
    return {format == 1, field(15, 1) != 0, field(16, 1) != 0, n};
}

MatrixDescriptor decoded_operand(u64 bits) {
    const u32 code = u32(bits >> 61);
    const u32 swizzle = code == 2 ? 128 : code == 4 ? 64 : code == 6 ? 32 : 16;
    if ((bits >> 46 & 7) != 1) {
        report("bad descriptor", me() +
                                     " issues a tcgen05.mma by a matrix descriptor whose bits 46 to 48 "
                                     "are not the constant 1");
    }
    if ((bits >> 49 & 15) != 0) {
        report("bad descriptor",
               me() +
                   " issues a tcgen05.mma by a matrix descriptor with a base offset or absolute leading "
                   "offsets, which no tile here is laid out for");
    }
    return MatrixDescriptor::of(bits, swizzle);
}

Pipe& pipe_of(TensorMemory& memory, const Thread& thread, u32 d, u32 instruction) {
    const bool one = machine->options.products_in_order;
    for (Pipe& pipe : memory.pipes) {
        if (pipe.thread == &thread && (one || (pipe.d == d && pipe.instruction == instruction))) return pipe;
    }
    const std::string name = one ? "the products of thread " + std::to_string(thread.id)
                                 : "the products into column " + std::to_string(d & 0xffff);
    const int slot = tensor_slot(*thread.cta->cluster, "tcgen05.mma, " + name);
    memory.pipes.push_back({&thread, d, instruction, slot, 0, 0, {}});
    return memory.pipes.back();
}

void settle_commits(Cta& cta);

void multiply(Cta& cta, Pipe& pipe) {
    TensorMemory& memory = *cta.tensor;
    const Product own = std::move(pipe.queue.front());
    pipe.queue.pop_front();
    const TensorProduct& op = own.op;
    const Instruction& instruction = own.instruction;
    const u32 n = instruction.n;
    alignas(64) float a[kLanes][16], b[16][256];
    const MatrixDescriptor of_b = MatrixDescriptor::of(op.b, 0x80u >> ((op.b >> 62) - 1));
    read_operand(cta, instruction.bf16, of_b, instruction.b_mn_major, 0, int(n), &b[0][0], 1, 256);
    if (op.a_in_tensor_memory) {
        for (u32 lane = 0; lane < kLanes; ++lane) {
            const u32* const cells = memory.row(lane) + (op.a & 0xffff);
            for (u32 k = 0; k < 16; ++k)
                a[lane][k] = from16(instruction.bf16, u16(cells[k / 2] >> 16 * (k % 2)));
        }
    } else {
        const MatrixDescriptor of_a = MatrixDescriptor::of(op.a, 0x80u >> ((op.a >> 62) - 1));
        read_operand(cta, instruction.bf16, of_a, instruction.a_mn_major, 0, int(kLanes), &a[0][0], 16, 1);
    }
    for (u32 lane = 0; lane < kLanes; ++lane) {
        alignas(64) float d[256];
        u32* const cells = memory.row(lane) + (op.d & 0xffff);
        if (op.accumulate) {
            memcpy(d, cells, 4 * n);
        } else {
            std::fill(d, d + n, 0.f);
        }
        for (u32 k = 0; k < 16; ++k) {
            const float factor = a[lane][k];
            for (u32 column = 0; column < n; ++column) d[column] += factor * b[k][column];
        }
        memcpy(cells, d, 4 * n);
    }
    ++machine->counters.tcgen05;
    machine->counters.flops += 2 * kLanes * 16 * u64(n);
    if (int(cta.index) == machine->options.trace_cta)
        machine->trace.add({"tensor core", "tcgen05.mma", own.issued, machine->step, own.stack});
    ++pipe.done;
    settle_commits(cta);
}

void settle_commits(Cta& cta) {
    std::vector<Commit>& all = cta.tensor->commits;
    for (size_t i = 0; i < all.size();) {
        const bool done = std::all_of(all[i].after.begin(), all[i].after.end(),
                                      [](const auto& own) { return own.first->done >= own.second; });
        if (!done) {
            ++i;
            continue;
        }
        add_agent(cta, 10, [own = std::move(all[i])]() mutable {
            Mbarrier& bar = *own.bar;
            if (bar.pending <= 0) {
                Finding& found = report("over-arrival",
                                        "a tcgen05.commit arrives at the mbarrier at shared "
                                        "memory +" +
                                            std::to_string(bar.offset) + ", whose phase already has its " +
                                            std::to_string(bar.expected) + " arrivals");
                if (found.others.empty()) found.others.push_back({"the commit", site_stack(own.site), 1});
                return;
            }
            --bar.pending;
            bar.arrived.learn(own.order);
            complete_phases(bar);
        });
        all.erase(all.begin() + long(i));
    }
}

}  // namespace

void tensor_product(const TensorProduct& op) {
    ENTER();
    Thread& thread = *current;
    Cta& cta = *thread.cta;
    const Instruction instruction = decoded_instruction(op.instruction);
    if (op.d >> 16)
        fatal("tensor memory",
              me() + " issues a tcgen05.mma of 128 rows into lanes from " + std::to_string(op.d >> 16));
    TensorMemory& memory = used("tcgen05.mma", op.d & 0xffff, instruction.n);
    Pipe& pipe = pipe_of(memory, thread, op.d, op.instruction & 0x1f7e0000u);
    const u32 number = ++pipe.issued;
    const Actor reads{Slot(pipe.slot), number,      Proxy::Async, false,
                      &thread.order,   site_of(pc), "reads",      nullptr};
    Actor tensor{Slot(pipe.slot),       number,      Proxy::Generic, true,
                 &tensor_order(thread), site_of(pc), "reads",        &thread.order};
    if (op.a_in_tensor_memory) {
        if (instruction.a_mn_major)
            report("bad descriptor", me() + " issues a tcgen05.mma with A in tensor memory as M-major");
        used("tcgen05.mma", u32(op.a) & 0xffff, 8);
        for (u32 quarter = 0; quarter < kQuarters; ++quarter)
            access(memory, quarter, u32(op.a) & 0xffff, 8, false, tensor);
    } else {
        access_operand(cta, "tcgen05.mma", decoded_operand(op.a), instruction.a_mn_major, 0, int(kLanes),
                       reads);
    }
    access_operand(cta, "tcgen05.mma", decoded_operand(op.b), instruction.b_mn_major, 0, int(instruction.n),
                   reads);
    for (u32 quarter = 0; quarter < kQuarters; ++quarter) {
        if (op.accumulate) access(memory, quarter, op.d & 0xffff, instruction.n, false, tensor);
        tensor.doing = "writes";
        access(memory, quarter, op.d & 0xffff, instruction.n, true, tensor);
        tensor.doing = "reads";
    }
    const bool traced = int(cta.index) == machine->options.trace_cta;
    pipe.queue.push_back({op, instruction, machine->step, traced ? stack_here() : Stack{}});
    add_agent(cta, 12, [&cta, &pipe] { multiply(cta, pipe); });
}

// It implies a fence::before_thread_sync. Of what its thread knows, asynchronous operations (those that its
// products read the results of among them) and what has been executed are taken to come with the arrival, and
// no thread's ordinary access of memory.
void tensor_commit(void* place) {
    ENTER();
    Thread& thread = *current;
    Cta& cta = *thread.cta;
    if (!cta.tensor) cta.tensor = std::make_shared<TensorMemory>();
    Commit own{{}, &mbarrier_at(cta, place, true), tensor_order(thread), site_of(pc)};
    own.order.learn_rounds(thread.order);
    own.order.learn_executed(thread.order.before);
    const u32 threads = u32(cta.cluster->ctas.size()) * machine->launch.threads;
    for (u32 slot = threads; slot < machine->slots; ++slot)
        own.order.reach(Slot(slot), thread.order.before[slot]);
    for (const Pipe& pipe : cta.tensor->pipes) {
        if (pipe.thread != &thread) continue;
        own.after.push_back({&pipe, pipe.issued});
        own.order.reach(Slot(pipe.slot), pipe.issued);
    }
    thread.tick();
    cta.tensor->commits.push_back(std::move(own));
    settle_commits(cta);
}

}  // namespace emu
