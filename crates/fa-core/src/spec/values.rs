//! The values that specs of all kernels are made of: masking code, schedulers, orders of tiles, and the
//! traits of every kernel.

use serde::{Deserialize, Serialize};

use crate::{Family, Mask, Pass, Problem};

/// The largest head dim that a kernel's tiles may span.
pub const MAX_HEAD_DIM: u32 = 256;

/// Lengths and counts that kernels hold in 32-bit integers are at most this, with room for a tile beyond the
/// end.
pub const MAX_COUNT: usize = 1 << 30;

/// The largest soft cap of GPU kernels. They compute `cap * (1 - 2 / (1 + e^x))`, which is off by some 2^-23
/// of the cap: beyond this limit, by more than f16's rounding of P.
pub const MAX_SOFTCAP: f64 = 1024.0;

/// Which masking code a kernel holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MaskKind {
    /// Only the end of the keys is masked.
    Full,
    /// The end of the keys and the causal diagonal.
    Causal,
    /// A window with run-time sides; also serves causal windows.
    Window,
}

impl MaskKind {
    /// The cheapest kind that computes `mask`.
    pub const fn of(mask: &Mask) -> MaskKind {
        if mask.is_full() {
            MaskKind::Full
        } else if mask.is_causal() {
            MaskKind::Causal
        } else {
            MaskKind::Window
        }
    }

    /// Whether code of this kind computes `mask`, but for an offset that makes a limit negative.
    pub fn serves(self, mask: &Mask) -> bool {
        self == MaskKind::Window || self == MaskKind::of(mask)
    }

    /// The name used in RON, in spec names and in tables.
    pub const fn name(self) -> &'static str {
        match self {
            MaskKind::Full => "full",
            MaskKind::Causal => "causal",
            MaskKind::Window => "window",
        }
    }
}

/// How a kernel finds the rows of Q, K and V.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reads {
    /// Lengths and starts of sequences are read on the device: packed batches and lengths in use.
    pub varied: bool,
    /// K and V lie in pages, found through a table.
    pub paged: bool,
}

impl Reads {
    /// Uniform lengths, which the launch knows; rows found by strides alone.
    pub const UNIFORM: Reads = Reads { varied: false, paged: false };

    /// What `problem` needs.
    pub const fn of(problem: &Problem) -> Reads {
        Reads { varied: !problem.lengths.is_uniform(), paged: problem.lengths.page().is_some() }
    }
}

/// How tiles are assigned to CTAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Scheduler {
    /// One CTA per tile.
    PerTile,
    /// One CTA per SM; CTA `b` takes the tiles `b`, `b + grid`, and so on.
    Static,
    /// One CTA per SM; tiles are drawn from a counter in device memory.
    Dynamic,
}

/// The order in which tiles are numbered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TileOrder {
    /// Query tiles from first to last within a head.
    Natural,
    /// Longest first: query tiles from last to first, heads of an L2-sized section together.
    LongestFirst,
}

/// The properties that every kernel has, whatever its parameters. Code that is the same for all kernels reads
/// these instead of matching on [`super::Kernel`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Traits {
    /// The kernel's name, as in source files and tables.
    pub name: &'static str,
    /// What it computes.
    pub pass: Pass,
    /// Its family, which says where it runs ([`Family::archs`]).
    pub family: Family,
    /// Query rows and keys of a tile.
    pub tile: (u32, u32),
    /// Threads of a CTA.
    pub threads: u32,
    /// Resident CTAs per SM that its launch bounds ask the compiler for.
    pub blocks_per_sm: u32,
    /// CTAs of a cluster.
    pub cluster: u32,
    /// How tiles are assigned to CTAs.
    pub scheduler: Scheduler,
    /// The order of tiles.
    pub tile_order: TileOrder,
    /// Whether the query heads of a K/V head are folded into the rows of a tile.
    pub packs_gqa: bool,
    /// The tensors that it loads by TMA, in the order in which its entry takes their maps; empty for kernels
    /// whose threads copy all rows (cp.async).
    pub tensor_maps: &'static [&'static str],
    /// Query rows of a box, where it loads by TMA: those of a tile, or of one of its tiles in tensor memory.
    pub query_box: u32,
    /// Whether a kernel that loads by TMA leaves the rows of pages to its threads.
    pub gathers: bool,
}

impl Traits {
    /// Queries of a tile, with `group` query heads per K/V head: see [`tile_queries`].
    pub const fn tile_queries(&self, group: usize) -> usize {
        tile_queries(self.tile.0, self.packs_gqa, group)
    }

    /// Whether it loads by TMA.
    pub const fn uses_tma(&self) -> bool {
        !self.tensor_maps.is_empty()
    }

    /// Whether its threads copy rows of keys one by one, wherever they lie: kernels that load no keys by TMA,
    /// and kernels that gather the rows of pages.
    pub const fn copies_rows(&self) -> bool {
        self.tensor_maps.len() < 2 || self.gathers
    }
}

/// Queries of a tile of `rows` rows, with `group` query heads per K/V head: one for each of its rows, or with
/// packed heads as many as it has room for with all heads of a group. 0 where it has room for none.
pub const fn tile_queries(rows: u32, packs_gqa: bool, group: usize) -> usize {
    let rows = rows as usize;
    match (packs_gqa, group) {
        (false, _) => rows,
        (true, 0) => 0,
        (true, _) => rows / group,
    }
}
