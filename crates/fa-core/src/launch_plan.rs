//! What a call launches.

use crate::KernelSpec;

/// What a call launches: a kernel, and how its work is divided among CTAs. The planner decides it once for a
/// problem and a GPU (`fa_planner::divide`); a launch takes it as it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LaunchPlan {
    /// The kernel.
    pub spec: KernelSpec,
    /// CTAs that share a tile, 1 for tiles of one CTA each. In a forward they share the keys of a tile of
    /// queries, in a backward the query heads that use a tile of keys.
    ///
    /// Where a forward's lengths are on the device this is an upper bound, since each tile is divided by its
    /// share of all work: [`LaunchPlan::UNBOUNDED`] for no other than the workspace's.
    pub splits: usize,
    /// CTAs of a cluster, which combine their parts of a tile's keys in shared memory; divides `splits`. 1
    /// for no clusters: a kernel of its own combines the parts.
    pub cluster: usize,
}

impl LaunchPlan {
    /// No bound on `splits` but the workspace's.
    pub const UNBOUNDED: usize = usize::MAX;

    /// The kernel with a CTA for each tile.
    pub const fn whole(spec: KernelSpec) -> LaunchPlan {
        LaunchPlan { spec, splits: 1, cluster: 1 }
    }
}
