//! What the emulation knows of each kernel beyond the planner's numbers.

use fa_core::spec::{Scheduler, TileOrder};
use fa_core::{
    Kernel, MaskKind, Problem, Sm80Bwd, Sm80Fwd, Sm90Bwd, Sm90Fwd, Sm90FwdFp8, Sm90Wide, Sm100Fwd,
    each_kernel,
};
use fa_lab::random::Random;

/// A kernel as the emulation sees it.
pub(crate) trait EmulatedKernel {
    /// Whether matrix loads and stores find its layout of shared memory without bank conflicts.
    fn is_conflict_free(&self) -> bool;

    /// Whether every warp computes every step of its tile: none skips those that its rows do not see.
    fn computes_whole_steps(&self, problem: &Problem) -> bool;

    /// Whether it loads every tile of queries of a CTA, also those that no sequence has or that see no key.
    fn loads_whole_tiles(&self) -> bool {
        true
    }

    /// The name of a random switch, and the kernel with it changed, which may contradict itself; `None` for
    /// the switch of the spec, `split`.
    fn changed(&self, random: &mut Random) -> Option<(&'static str, Kernel)>;
}

/// A switch that random kernels change: its name, and the change.
type Switch<K> = (&'static str, fn(&mut K, &mut Random));

/// `kernel` with one of `switches` changed; `None` as often as each of them where it `splits` keys.
fn changed<K: Clone + Into<Kernel>>(
    kernel: &K,
    switches: &[Switch<K>],
    splits: bool,
    random: &mut Random,
) -> Option<(&'static str, Kernel)> {
    let &(name, change) = switches.get(random.below(switches.len() + usize::from(splits)))?;
    let mut kernel = kernel.clone();
    change(&mut kernel, random);
    Some((name, kernel.into()))
}

const fn other(order: TileOrder) -> TileOrder {
    match order {
        TileOrder::Natural => TileOrder::LongestFirst,
        TileOrder::LongestFirst => TileOrder::Natural,
    }
}

/// 2 for 1, 1 for 2 and more.
fn other_of_two(count: u32) -> u32 {
    3 - count.clamp(1, 2)
}

impl EmulatedKernel for Sm80Fwd {
    fn is_conflict_free(&self) -> bool {
        self.swizzle && self.ldmatrix
    }

    fn computes_whole_steps(&self, problem: &Problem) -> bool {
        !self.loop_split || problem.mask.is_full()
    }

    fn changed(&self, random: &mut Random) -> Option<(&'static str, Kernel)> {
        changed(
            self,
            &[
                ("stages", |k, random| k.stages = 1 + random.below(4) as u32),
                ("q_in_regs", |k, _| k.q_in_regs = !k.q_in_regs),
                ("loop_split", |k, _| k.loop_split = !k.loop_split),
                ("reverse_blocks", |k, _| k.reverse_blocks = !k.reverse_blocks),
                ("pack_gqa", |k, _| k.pack_gqa = !k.pack_gqa),
                ("exact_div", |k, _| k.exact_div = !k.exact_div),
                ("divide_keys", |k, _| k.divide_keys = !k.divide_keys),
            ],
            true,
            random,
        )
    }
}

impl EmulatedKernel for Sm90Fwd {
    /// Rows of 128 bytes spread over all banks.
    fn is_conflict_free(&self) -> bool {
        self.pv_is_rs || self.tile_n.is_multiple_of(64)
    }

    fn computes_whole_steps(&self, problem: &Problem) -> bool {
        !self.skips_blocks(MaskKind::of(&problem.mask))
    }

    fn changed(&self, random: &mut Random) -> Option<(&'static str, Kernel)> {
        changed(
            self,
            &[
                ("scheduler", |k, random| {
                    k.scheduler = random.of(&[Scheduler::PerTile, Scheduler::Static, Scheduler::Dynamic]);
                }),
                ("tile_order", |k, _| k.tile_order = other(k.tile_order)),
                ("ping_pong", |k, _| k.ping_pong = !k.ping_pong),
                ("cluster_m", |k, _| {
                    k.cluster_m = other_of_two(k.cluster_m);
                    k.scheduler = Scheduler::Static;
                }),
                ("exp_poly_of_16", |k, random| k.exp_poly_of_16 = random.of(&[0, 1, 5, 8, 16])),
                ("rescale_threshold", |k, random| k.rescale_threshold = random.of(&[0, 1, 8, 15])),
                ("kv_stages", |k, random| k.kv_stages = 1 + random.below(4) as u32),
                ("gather", |k, _| k.gather = !k.gather),
                ("blocks_per_sm", |k, random| k.blocks_per_sm = 2 + random.below(2) as u32),
            ],
            true,
            random,
        )
    }
}

impl EmulatedKernel for Sm90FwdFp8 {
    /// V is read and written in whole swizzled chunks.
    fn is_conflict_free(&self) -> bool {
        true
    }

    fn computes_whole_steps(&self, _: &Problem) -> bool {
        true
    }

    fn changed(&self, random: &mut Random) -> Option<(&'static str, Kernel)> {
        changed(
            self,
            &[
                ("scheduler", |k, random| {
                    k.scheduler = random.of(&[Scheduler::PerTile, Scheduler::Static, Scheduler::Dynamic]);
                }),
                ("tile_order", |k, _| k.tile_order = other(k.tile_order)),
                ("ping_pong", |k, _| k.ping_pong = !k.ping_pong),
                ("overlap_wg", |k, _| k.overlap_wg = !k.overlap_wg),
                ("two_level", |k, _| k.two_level = !k.two_level),
                ("exp_poly_of_16", |k, random| k.exp_poly_of_16 = random.of(&[0, 1, 5, 8, 16])),
                ("kv_stages", |k, random| k.kv_stages = 1 + random.below(4) as u32),
                ("v_stages", |k, _| k.v_stages = other_of_two(k.v_stages)),
            ],
            true,
            random,
        )
    }
}

impl EmulatedKernel for Sm100Fwd {
    /// It has no matrix loads and stores by warps.
    fn is_conflict_free(&self) -> bool {
        true
    }

    /// Of two tiles of queries one may see fewer keys, or have no queries.
    fn computes_whole_steps(&self, _: &Problem) -> bool {
        self.q_tiles == 1
    }

    fn loads_whole_tiles(&self) -> bool {
        self.q_tiles == 1
    }

    fn changed(&self, random: &mut Random) -> Option<(&'static str, Kernel)> {
        changed(
            self,
            &[
                ("scheduler", |k, random| k.scheduler = random.of(&[Scheduler::PerTile, Scheduler::Static])),
                ("tile_order", |k, _| k.tile_order = other(k.tile_order)),
                ("kv_stages", |k, random| k.kv_stages = random.of(&[2, 3, 5])),
                ("exp_poly_of_16", |k, random| k.exp_poly_of_16 = random.of(&[0, 1, 5, 8, 16])),
                ("rescale_threshold", |k, random| k.rescale_threshold = random.of(&[0, 1, 8, 15])),
            ],
            false,
            random,
        )
    }
}

impl EmulatedKernel for Sm90Wide {
    /// Rows of 128 bytes spread over all banks.
    fn is_conflict_free(&self) -> bool {
        self.tile_n == 64
    }

    fn computes_whole_steps(&self, _: &Problem) -> bool {
        true
    }

    fn changed(&self, random: &mut Random) -> Option<(&'static str, Kernel)> {
        changed(
            self,
            &[
                ("scheduler", |k, random| k.scheduler = random.of(&[Scheduler::PerTile, Scheduler::Static])),
                ("tile_order", |k, _| k.tile_order = other(k.tile_order)),
                ("overlap", |k, _| k.overlap = !k.overlap),
                ("tile_n", |k, _| k.tile_n = 96 - k.tile_n.clamp(32, 64)),
                ("exp_poly_of_16", |k, random| k.exp_poly_of_16 = random.of(&[0, 1, 5, 8, 16])),
                ("rescale_threshold", |k, random| k.rescale_threshold = random.of(&[0, 1, 8, 15])),
                ("kv_stages", |k, random| k.kv_stages = 1 + random.below(4) as u32),
                ("gather", |k, _| k.gather = !k.gather),
            ],
            true,
            random,
        )
    }
}

impl EmulatedKernel for Sm80Bwd {
    fn is_conflict_free(&self) -> bool {
        true
    }

    fn computes_whole_steps(&self, _: &Problem) -> bool {
        true
    }

    fn changed(&self, random: &mut Random) -> Option<(&'static str, Kernel)> {
        changed(
            self,
            &[
                ("tile_order", |k, _| k.tile_order = other(k.tile_order)),
                ("blocks_per_sm", |k, random| k.blocks_per_sm = 1 + random.below(2) as u32),
            ],
            false,
            random,
        )
    }
}

impl EmulatedKernel for Sm90Bwd {
    fn is_conflict_free(&self) -> bool {
        self.tile_m.is_multiple_of(64) && self.tile_n.is_multiple_of(64)
    }

    fn computes_whole_steps(&self, _: &Problem) -> bool {
        true
    }

    fn changed(&self, random: &mut Random) -> Option<(&'static str, Kernel)> {
        changed(
            self,
            &[
                // Twice, for it changes the most.
                ("persistent", |k, _| k.persistent = !k.persistent),
                ("persistent", |k, _| k.persistent = !k.persistent),
                ("do_stages", |k, _| k.do_stages = other_of_two(k.do_stages)),
                ("q_stages", |k, _| k.q_stages = other_of_two(k.q_stages)),
                ("pds_stages", |k, _| k.pds_stages = other_of_two(k.pds_stages)),
                ("tile_order", |k, _| k.tile_order = other(k.tile_order)),
            ],
            false,
            random,
        )
    }
}

/// The kernel of a spec.
pub(crate) fn of(kernel: &Kernel) -> &dyn EmulatedKernel {
    each_kernel!(kernel, params => params)
}
