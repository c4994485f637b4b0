//! The shapes of SM100 forwards that are tried.

use fa_core::spec::{Scheduler, TileOrder};
use fa_core::{KernelSpec, MaskKind, Problem, Reads, Sm100Fwd};
use serde::Serialize;

use crate::head_dims::HeadDims;

/// Rows of a query tile: the lanes of tensor memory.
pub const Q_ROWS: u32 = 128;

/// Keys per step that are tried: what a softmax thread holds of its row.
pub const TILE_N: [u32; 3] = [64, 96, 128];

/// K/V slots that are tried: tiles of K and V alternate in one ring.
pub const STAGES: [u32; 7] = [2, 3, 4, 5, 6, 8, 10];

/// A kernel shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Sm100Tile {
    /// Tile extent of the head dim of Q and K.
    pub head_dim: u32,
    /// Tile extent of the head dim of V and O.
    pub head_dim_v: u32,
    /// Query tiles of 128 rows of a CTA: 1 or 2.
    pub q_tiles: u32,
    /// Keys per step.
    pub tile_n: u32,
    /// K/V slots in flight.
    pub kv_stages: u32,
}

impl Sm100Tile {
    /// The shape of a kernel.
    pub fn of(spec: &KernelSpec, kernel: &Sm100Fwd) -> Sm100Tile {
        let KernelSpec { head_dim, head_dim_v, .. } = *spec;
        let Sm100Fwd { q_tiles, tile_n, kv_stages, .. } = *kernel;
        Sm100Tile { head_dim, head_dim_v, q_tiles, tile_n, kv_stages }
    }

    /// Query rows of a CTA.
    pub const fn tile_m(&self) -> u32 {
        self.q_tiles * Q_ROWS
    }

    /// Its name in tables and reports.
    pub fn name(&self) -> String {
        let Sm100Tile { head_dim, head_dim_v, tile_n, kv_stages, .. } = *self;
        let dims = HeadDims { head_dim, head_dim_v };
        format!("sm100_fwd-hd{dims}-{}x{tile_n}-s{kv_stages}", self.tile_m())
    }

    /// The kernel of this shape for `problem`: one CTA per SM under the full mask, else the longest tiles
    /// first.
    pub fn spec(&self, problem: &Problem) -> KernelSpec {
        let equal = MaskKind::of(&problem.mask) == MaskKind::Full && !Reads::of(problem).varied;
        let kernel = Sm100Fwd {
            tile_m: self.tile_m(),
            tile_n: self.tile_n,
            q_tiles: self.q_tiles,
            kv_stages: self.kv_stages,
            scheduler: if equal { Scheduler::Static } else { Scheduler::PerTile },
            tile_order: if equal { TileOrder::Natural } else { TileOrder::LongestFirst },
            // The share of polynomials that the cost model takes: an eighth.
            exp_poly_of_16: 2,
            ..Sm100Fwd::default()
        };
        KernelSpec::for_problem(problem, [self.head_dim, self.head_dim_v], kernel)
    }
}

/// Every shape that is tried: query tiles, keys per step, stages (most first).
pub fn candidates(head_dim: u32, head_dim_v: u32) -> impl Iterator<Item = Sm100Tile> {
    [2, 1]
        .into_iter()
        .flat_map(|q_tiles| TILE_N.into_iter().map(move |tile_n| (q_tiles, tile_n)))
        .flat_map(|tile| STAGES.into_iter().rev().map(move |stages| (tile, stages)))
        .map(move |((q_tiles, tile_n), kv_stages)| Sm100Tile {
            head_dim,
            head_dim_v,
            q_tiles,
            tile_n,
            kv_stages,
        })
}
