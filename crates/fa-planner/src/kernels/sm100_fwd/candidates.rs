//! The shapes of SM100 forwards that are tried.

use serde::Serialize;

use crate::head_dims::HeadDims;

/// Rows of a query tile: the lanes of tensor memory.
pub const Q_ROWS: u32 = 128;

/// Keys per step that are tried; a 16-bit product of 128 rows has N in multiples of 16 up to 256.
pub const TILE_N: [u32; 6] = [64, 96, 128, 160, 192, 256];

/// K/V buffers that are tried: tiles of K and V alternate in one ring.
pub const STAGES: [u32; 5] = [2, 3, 4, 5, 6];

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
    /// K/V buffers in flight.
    pub kv_stages: u32,
    /// Resident CTAs per SM.
    pub blocks_per_sm: u32,
}

impl Sm100Tile {
    /// Query rows of a CTA.
    pub const fn tile_m(&self) -> u32 {
        self.q_tiles * Q_ROWS
    }

    /// Its name in tables and reports.
    pub fn name(&self) -> String {
        let Sm100Tile { head_dim, head_dim_v, tile_n, kv_stages, blocks_per_sm, .. } = *self;
        let dims = HeadDims { head_dim, head_dim_v };
        format!("sm100_fwd-hd{dims}-{}x{tile_n}-s{kv_stages}-b{blocks_per_sm}", self.tile_m())
    }
}

/// Every shape that is tried: query tiles, keys per step, stages (most first), CTAs per SM.
pub fn candidates(head_dim: u32, head_dim_v: u32) -> impl Iterator<Item = Sm100Tile> {
    [2, 1]
        .into_iter()
        .flat_map(|q_tiles| TILE_N.into_iter().map(move |tile_n| (q_tiles, tile_n)))
        .flat_map(|tile| STAGES.into_iter().rev().map(move |stages| (tile, stages)))
        .flat_map(|pipe| [1, 2].into_iter().map(move |blocks| (pipe, blocks)))
        .map(move |(((q_tiles, tile_n), kv_stages), blocks_per_sm)| Sm100Tile {
            head_dim,
            head_dim_v,
            q_tiles,
            tile_n,
            kv_stages,
            blocks_per_sm,
        })
}
