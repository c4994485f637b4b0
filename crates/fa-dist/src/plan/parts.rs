//! The problems of a plan's parts: what kernels' calls compute of the whole.

use std::ops::Range;

use fa_core::program::{Axis, Var};
use fa_core::{Lengths, Mask, Problem};
use fa_cpu::check;

use super::{ArrayGradient, Scheme, ShardPlan};
use crate::block::{Block, block, packed_block};
use crate::moved::{LAST, Place, scalar};
use crate::program::{Part, Window};
use crate::shard::overlap;

impl ShardPlan {
    /// Whether parts compute ALiBi by programs: kernels count distances from the corner of the last row and
    /// key, where a causal mask keeps the diagonal.
    pub(super) fn has_own_slopes(&self) -> bool {
        let Mask { right, offset, .. } = self.problem.mask;
        let has_corner = match self.scheme {
            Scheme::Gather => right == Some(0) && offset == 0,
            Scheme::Ring => false,
            Scheme::Ulysses | Scheme::Decode => true,
        };
        self.problem.score.alibi.is_some() && !has_corner
    }

    /// Whether parts have a program, which sees the numbers of the whole.
    pub(crate) fn has_program(&self) -> bool {
        self.program.is_some()
    }

    /// What a part's program sees otherwise than the part: those of the whole.
    pub(super) fn variables(&self) -> &'static [Var] {
        match self.scheme {
            Scheme::Gather | Scheme::Ring if self.starts.is_none() => {
                &[Var::H, Var::Hk, Var::Q, Var::K, Var::Sq, Var::Sk, Var::Off]
            }
            Scheme::Gather | Scheme::Ring => {
                &[Var::B, Var::H, Var::Hk, Var::Q, Var::K, Var::Sq, Var::Sk, Var::Off]
            }
            Scheme::Ulysses => &[Var::H, Var::Hk],
            Scheme::Decode => &[],
        }
    }

    /// What of the mask is visible between some rows and some keys; of the rows of a chunk without the keys
    /// at both ends that a program hides.
    pub(crate) fn block(&self, rows: Range<usize>, keys: Range<usize>) -> Option<Block> {
        let cut = |keys| block(self.problem.mask, self.len(), rows.clone(), keys, self.tiles.1);
        if let Some(starts) = &self.starts {
            return packed_block(self.problem.mask, starts, rows, keys, self.tiles.1);
        }
        let whole = cut(keys.clone())?;
        let Some((_, seen)) = self.seen.iter().find(|(chunk, _)| *chunk == rows) else { return Some(whole) };
        let found = seen.as_ref().and_then(|seen| cut(overlap(seen, &keys)?));
        // Rows without a key have their sink yet.
        let is_kept = |found: &Block| found.rows == whole.rows;
        if self.problem.score.sinks && !found.as_ref().is_some_and(is_kept) { Some(whole) } else { found }
    }

    /// The problem of a kernel's call between rows and keys of the whole, of packed sequences that begin at
    /// `starts` among them.
    pub(crate) fn part(
        &self,
        (rows, keys): (&Range<usize>, &Range<usize>),
        (mask, starts): (Mask, &Option<[Vec<i32>; 2]>),
        heads: &Range<usize>,
        kv_heads: usize,
    ) -> Part {
        let first = (rows.start, keys.start);
        let (rows, keys) = (rows.len(), keys.len());
        let lengths = match starts {
            None => Lengths::uniform(check::q_shape(&self.problem)[0], rows, keys),
            Some(starts) => {
                let [q, k] = starts.each_ref().map(|starts| longest(starts));
                Lengths::packed(starts[0].len() - 1, rows, keys, q, k)
            }
        };
        self.part_of((lengths, first), starts.clone(), heads, kv_heads, mask)
    }

    /// The problem of a rank's call on its cache.
    pub(crate) fn cache_part(&self) -> Part {
        let Problem { lengths, heads_q, heads_kv, .. } = self.problem;
        self.part_of((lengths, (0, 0)), None, &(0..heads_q), heads_kv, Mask::FULL)
    }

    /// The whole problem for some heads.
    pub(crate) fn heads_part(&self, heads: &Range<usize>, kv_heads: usize) -> Part {
        let starts = self.starts.clone().map(|starts| [starts.clone(), starts]);
        self.part_of((self.problem.lengths, (0, 0)), starts, heads, kv_heads, self.problem.mask)
    }

    fn part_of(
        &self,
        (lengths, (row, key)): (Lengths, (usize, usize)),
        starts: Option<[Vec<i32>; 2]>,
        heads: &Range<usize>,
        kv_heads: usize,
        mask: Mask,
    ) -> Part {
        // The scale follows from the head dim alone: parts have the whole's.
        let problem = self.problem.with_lengths(lengths).with_heads(heads.len(), kv_heads).with_mask(mask);
        // What is merged gets its sinks then.
        let sinks = problem.score.sinks && !matches!(self.scheme, Scheme::Ring | Scheme::Decode);
        let score = problem.score.with_sinks(sinks).with_dropout(None);
        // Under a causal mask packed sequences of a rank's own end where its diagonals do.
        let has_corner = starts.is_some() && self.problem.mask.right == Some(0) && score.program.is_none();
        let score = match self.has_own_slopes() {
            false => score.with_program(self.program),
            true if has_corner => score,
            true => score.with_alibi(None).with_softcap(None).with_program(self.program),
        };
        let places = match score.program {
            None => Vec::new(),
            Some(_) => self.places((row, key), starts.as_ref(), heads),
        };
        let cut = self.arrays.iter().filter(|own| own.axes.is_ok());
        let arrays = cut.map(|own| (own.array, self.window(own, (lengths, (row, key)), heads, kv_heads)));
        let arrays = arrays.collect();
        Part { problem: problem.with_score(score), heads: heads.clone(), starts, places, arrays }
    }

    /// What the program of a part is told that begins at this row and key, of packed sequences that begin at
    /// `starts` among its rows.
    fn places(
        &self,
        (row, key): (usize, usize),
        starts: Option<&[Vec<i32>; 2]>,
        heads: &Range<usize>,
    ) -> Vec<Place> {
        let (rows, keys) = self.len();
        // The part's first sequence, which has rows, and its last one: where they begin, and their lengths.
        let of_sequence = |number: usize| {
            let bounds = self.starts.as_deref().and_then(|starts| starts.get(number..number + 2));
            bounds.map_or((0, rows, keys), |own| {
                let len = (own[1] - own[0]) as usize;
                (own[0] as usize, len, len)
            })
        };
        let first = self.starts.as_deref().map_or(0, |all| all.partition_point(|at| *at as usize <= row));
        let (first, count) = (first.saturating_sub(1), starts.map_or(1, |[own, _]| own.len() - 1));
        let ((begin, sq, sk), (_, end, _)) = (of_sequence(first), of_sequence(first + count - 1));
        let number = |var: Var| match var {
            Var::S => 0,
            Var::B => first as i64,
            Var::H => heads.start as i64,
            Var::Hk => (heads.start / self.problem.group_size().max(1)) as i64,
            Var::Q => (row - begin) as i64,
            Var::K => (key - begin) as i64,
            Var::Sq => sq as i64,
            Var::Sk => sk as i64,
            Var::Off => sk as i64 - sq as i64 + self.problem.mask.offset,
        };
        let own = self.variables().iter().filter_map(|var| Some((scalar(*var)?, number(*var) as i32)));
        let [last, of_last] = LAST;
        own.chain([(last, count as i32 - 1), (of_last, end as i32)]).collect()
    }

    /// What of an array a part has that begins at this row and key.
    fn window(
        &self,
        own: &ArrayGradient,
        (lengths, (row, key)): (Lengths, (usize, usize)),
        heads: &Range<usize>,
        kv_heads: usize,
    ) -> Window {
        let mut window = Window::whole(own.extents);
        for (axis, range) in own.axes.iter().flatten().zip(&mut window.ranges) {
            let kv = heads.start / self.problem.group_size().max(1);
            let of_part = match axis {
                Axis::Head => heads.clone(),
                Axis::HeadKv => kv..kv + kv_heads,
                Axis::Query => row..row + lengths.max_q(),
                Axis::Key => key..key + lengths.max_k(),
                Axis::Batch | Axis::Tile | Axis::Diagonal | Axis::Other => continue,
            };
            // All share an axis of one element.
            if range.len() > 1 {
                *range = of_part;
            }
        }
        window
    }
}

/// Rows of the longest sequence.
fn longest(starts: &[i32]) -> usize {
    starts.windows(2).map(|pair| (pair[1] - pair[0]) as usize).max().unwrap_or(0)
}
