// Named barriers, the cluster's barrier, and the proxy fence.
#include "machine.h"

namespace emu {

namespace {

void open_barrier(Cta& cta, NamedBarrier& barrier) {
    ++barrier.generation;
    barrier.arrived = barrier.expected = 0;
    wake_on(cta, &barrier);
}

void open_cluster(Cluster& cluster) {
    int alive = 0;
    for (auto& cta : cluster.ctas) alive += cta->alive;
    if (cluster.arrived == 0 || cluster.arrived < alive) return;
    cluster.arrived = 0;
    ++cluster.generation;
    for (auto& cta : cluster.ctas) {
        for (Thread& thread : cta->threads) {
            if (thread.waits_on == &cluster && thread.state == State::Blocked) {
                thread.order.learn(cluster.order);
                thread.tick();
                wake(thread);
            }
        }
    }
    if (current && current->state == State::Ready) {
        current->order.learn(cluster.order);
        current->tick();
    }
    cluster.order.forget();
}

const char* barrier_name(int id) {
    static const char* names[16] = {"__syncthreads", "bar.sync 1",  "bar.sync 2",  "bar.sync 3",
                                    "bar.sync 4",    "bar.sync 5",  "bar.sync 6",  "bar.sync 7",
                                    "bar.sync 8",    "bar.sync 9",  "bar.sync 10", "bar.sync 11",
                                    "bar.sync 12",   "bar.sync 13", "bar.sync 14", "bar.sync 15"};
    return names[id];
}

// The thread's arrival; true when it is the last one.
bool arrive(Cta& cta, NamedBarrier& barrier, int id, int threads) {
    const int expected = threads ? threads : cta.alive;
    if (barrier.expected && threads && barrier.expected != expected) {
        fatal("named barrier", me() + " arrives at barrier " + std::to_string(id) + " of " +
                                   std::to_string(expected) + " threads, which others use with " +
                                   std::to_string(barrier.expected));
    }
    barrier.expected = expected;
    barrier.order.learn(current->order);
    current->tick();
    return ++barrier.arrived >= barrier.expected;
}

void release_waiting(Cta& cta, NamedBarrier& barrier) {
    for (Thread& thread : cta.threads) {
        if (thread.state == State::Blocked && thread.waits_on == &barrier) {
            thread.order.learn(barrier.order);
            thread.tick();
        }
    }
    barrier.order.forget();
    open_barrier(cta, barrier);
}

}  // namespace

void barrier(int id, int threads, bool wait, bool aligned) {
    ENTER();
    current->polled = nullptr;  // no loop that only reads
    if (id < 0 || id > 15) fatal("named barrier", me() + ": there is no barrier " + std::to_string(id));
    if (threads % 32)
        fatal("named barrier", me() + ": " + std::to_string(threads) + " threads are no whole warps");
    if (aligned) rendezvous(barrier_name(id), nullptr, [](Warp&) {});
    Cta& cta = *current->cta;
    NamedBarrier& barrier = cta.named[id];
    const u32 generation = barrier.generation;
    if (arrive(cta, barrier, id, threads)) {
        if (wait) {
            current->order.learn(barrier.order);
            current->tick();
        }
        release_waiting(cta, barrier);
    } else if (wait) {
        wait_until(barrier_name(id), &barrier, [&] { return barrier.generation != generation; });
    }
}

void cluster_barrier(bool releases) {
    ENTER();
    rendezvous("barrier.cluster", nullptr, [](Warp&) {});
    Cluster& cluster = *current->cta->cluster;
    const u32 generation = cluster.generation;
    ++cluster.arrived;
    if (releases) cluster.order.learn(current->order);
    current->tick();
    open_cluster(cluster);
    wait_until("barrier.cluster", &cluster, [&] { return cluster.generation != generation; });
}

u32 cluster_rank() { return current->cta->rank; }

u32 cluster_size() { return u32(current->cta->cluster->ctas.size()); }

Cta& cta_of_cluster(u32 rank, const char* does) {
    Cluster& cluster = *current->cta->cluster;
    if (rank >= cluster.ctas.size())
        fatal("cluster", me() + " " + does + " of CTA " + std::to_string(rank) + " of a cluster of " +
                             std::to_string(cluster.ctas.size()));
    Cta& cta = *cluster.ctas[rank];
    if (cta.finished())
        fatal("cluster", me() + " " + does + " of CTA " + std::to_string(cta.index) + ", which has ended");
    return cta;
}

void barriers_after_exit(Cta& cta) {
    NamedBarrier& all = cta.named[0];
    if (all.arrived > 0 && all.arrived >= cta.alive) release_waiting(cta, all);
    open_cluster(*cta.cluster);
}

void fence_async() {
    ENTER();
    current->order.visible = current->order.before;
    current->tick();
}

void pause() {
    ENTER();
    yield();
}

}  // namespace emu
