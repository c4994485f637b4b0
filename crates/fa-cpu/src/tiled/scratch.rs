//! Scratch memory of a worker of the backward.

use fa_core::Problem;

use super::buffer::Buffer;
use super::cut::{Cut, Sizes, TILE_N};
use super::long::Sums;
use super::programs::{ArraySums, OwnTiles};
use crate::batch::Batch;

/// A tile of queries, in the forms that the five products read.
pub(super) struct QueryTile {
    /// Qt `[head_dim][tile_m]`, scaled: B of the scores.
    pub qt: Buffer,
    /// Q `[tile_m][ld]`: B of dK.
    pub q: Buffer,
    /// dOt `[head_dim_v][tile_m]`: B of dP.
    pub dot: Buffer,
    /// dO `[tile_m][ld]`: B of dV.
    pub dout: Buffer,
    /// LSE in base 2, +inf for rows that see nothing.
    pub lse: Buffer,
    /// Row sums of dO * O.
    pub delta: Buffer,
    /// Rows without any probability: they see no key, or all their scores are -inf. Q and dO hold zeros for
    /// them.
    pub dead: Vec<usize>,
    /// Rows where Q or dO holds infinities or NaN; only found where the mask hides something.
    pub wild: Vec<usize>,
}

/// Scratch memory of one worker.
pub(super) struct Scratch<'a> {
    pub own: Option<OwnTiles<'a>>,
    /// What an item adds to the gradients of a program's arrays.
    pub sums: ArraySums,
    pub queries: Vec<QueryTile>,
    /// K and V of the item's keys, where they have to be converted.
    pub k: Buffer,
    pub v: Buffer,
    /// dK `[keys of the item][ldq]`, dV the same.
    pub dk: Buffer,
    pub dv: Buffer,
    /// Sums of dK and dV over earlier stretches, for many queries.
    pub before: [Sums; 2],
    /// St then Pt, and dPt then dSt: `[TILE_N][tile_m]`.
    pub s: Buffer,
    pub ds: Buffer,
    /// Rows of O that are read, rows of dQ that are written: `[tile_m][ldq or ldo]`.
    pub rows: Buffer,
    /// dQt of one head, where no other thread adds to it.
    pub dq: Buffer,
}

impl<'a> Scratch<'a> {
    pub(super) fn new(
        problem: &Problem,
        batch: &'a Batch<'a>,
        sizes: &Sizes,
        cuts: &[Cut],
        converts: bool,
    ) -> Scratch<'a> {
        let Sizes { tile_m, ldq, ldo, .. } = *sizes;
        let tile = || QueryTile {
            qt: Buffer::new(problem.head_dim * tile_m),
            q: Buffer::new(tile_m * ldq),
            dot: Buffer::new(problem.head_dim_v * tile_m),
            dout: Buffer::new(tile_m * ldo),
            lse: Buffer::new(tile_m),
            delta: Buffer::new(tile_m),
            dead: Vec::new(),
            wild: Vec::new(),
        };
        let most = |of: fn(&Cut) -> usize| cuts.iter().map(of).max().unwrap_or(0);
        let keys = most(|cut| cut.keys.min(cut.band.k));
        let converted = if converts { keys } else { 0 };
        Scratch {
            own: OwnTiles::new(problem, batch, tile_m, true),
            sums: ArraySums::default(),
            queries: (0..most(|cut| cut.m_tiles)).map(|_| tile()).collect(),
            k: Buffer::new(converted * ldq),
            v: Buffer::new(converted * ldo),
            dk: Buffer::new(keys * ldq),
            dv: Buffer::new(keys * ldo),
            before: <[Sums; 2]>::default(),
            s: Buffer::new(TILE_N * tile_m),
            ds: Buffer::new(TILE_N * tile_m),
            rows: Buffer::new(tile_m * ldq.max(ldo)),
            dq: Buffer::new(most(|cut| if cut.parts == 1 { cut.dq_len } else { 0 })),
        }
    }
}
