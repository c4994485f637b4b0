//! Which rows of a sequence a rank holds.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// How the rows of a sequence are dealt to ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// Of `2 * world` chunks rank r has chunk r and chunk `2 * world - 1 - r`, in this order: under a causal
    /// mask every rank sees as many pairs as any other.
    #[default]
    Zigzag,
    /// Rank r has chunk r of `world`.
    Contiguous,
}

impl Layout {
    /// The name used on the command line and in plans.
    pub const fn name(self) -> &'static str {
        match self {
            Layout::Zigzag => "zigzag",
            Layout::Contiguous => "contiguous",
        }
    }
}

/// A sequence of `len` rows in chunks, and which rank holds which.
///
/// Chunks begin at multiples of the alignment, so that `world` need not divide the length: some are an
/// alignment longer than others, the last may be shorter, and short sequences leave chunks empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shards {
    layout: Layout,
    world: usize,
    /// Where chunks begin, and the length at the end.
    bounds: Vec<usize>,
}

impl Shards {
    /// Deals `len` rows to `world` ranks, in chunks that begin at multiples of `align`.
    pub fn new(layout: Layout, world: usize, len: usize, align: usize) -> Shards {
        let (world, align) = (world.max(1), align.max(1));
        let chunks = match layout {
            Layout::Zigzag => 2 * world,
            Layout::Contiguous => world,
        };
        let units = len.div_ceil(align) as u128;
        let bound = |chunk: usize| (units * chunk as u128 / chunks as u128) as usize * align;
        let bounds = (0..=chunks).map(|chunk| bound(chunk).min(len)).collect();
        Shards { layout, world, bounds }
    }

    /// Rows of the whole sequence.
    pub fn len(&self) -> usize {
        self.bounds[self.bounds.len() - 1]
    }

    /// Whether the sequence has no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    /// How chunks are dealt.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Where chunks begin, and the length at the end.
    pub fn bounds(&self) -> &[usize] {
        &self.bounds
    }

    /// The rows of a chunk.
    pub fn chunk(&self, chunk: usize) -> Range<usize> {
        self.bounds[chunk]..self.bounds[chunk + 1]
    }

    /// The chunks of `rank`, in the order in which it stores them.
    pub fn chunks_of(&self, rank: usize) -> Vec<usize> {
        match self.layout {
            Layout::Zigzag => vec![rank, 2 * self.world - 1 - rank],
            Layout::Contiguous => vec![rank],
        }
    }

    /// The row ranges of `rank`, in the order in which it stores them; empty ones too.
    pub fn ranges(&self, rank: usize) -> Vec<Range<usize>> {
        self.chunks_of(rank).into_iter().map(|chunk| self.chunk(chunk)).collect()
    }

    /// Ranges with the place of their first row among the rank's own.
    pub fn placed(&self, rank: usize) -> Vec<Placed> {
        let mut local = 0;
        let place = |range: Range<usize>| {
            let placed = Placed { local, range };
            local += placed.range.len();
            placed
        };
        self.ranges(rank).into_iter().map(place).collect()
    }

    /// Rows that `rank` holds.
    pub fn rows(&self, rank: usize) -> usize {
        self.ranges(rank).iter().map(Range::len).sum()
    }

    /// The position in the sequence of each row of `rank`, in the order in which it stores them: those that
    /// rotary embedding takes.
    pub fn positions(&self, rank: usize) -> impl Iterator<Item = usize> {
        self.ranges(rank).into_iter().flatten()
    }

    /// Packed rows of a whole sequence as `rank` stores its own: `elements` of `width` a row.
    pub fn scatter<T: Clone>(&self, rank: usize, elements: &[T], width: usize) -> Vec<T> {
        self.ranges(rank)
            .into_iter()
            .flat_map(|r| elements[r.start * width..r.end * width].to_vec())
            .collect()
    }

    /// The inverse of [`Shards::scatter`]: writes the rows of `rank` to their places in the whole.
    pub fn gather<T: Clone>(&self, rank: usize, local: &[T], width: usize, whole: &mut [T]) {
        for Placed { local: at, range } in self.placed(rank) {
            let from = &local[at * width..][..range.len() * width];
            whole[range.start * width..range.end * width].clone_from_slice(from);
        }
    }
}

/// A range of rows of a sequence, and where a rank stores it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The rank's own number of the first row.
    pub local: usize,
    /// Rows of the sequence.
    pub range: Range<usize>,
}

impl Placed {
    /// The rank's own numbers of `rows`, which lie in the range.
    pub fn locals(&self, rows: &Range<usize>) -> Range<usize> {
        let at = |row: usize| row - self.range.start + self.local;
        at(rows.start)..at(rows.end)
    }
}

/// What two ranges share, if anything.
pub(crate) fn overlap(a: &Range<usize>, b: &Range<usize>) -> Option<Range<usize>> {
    let both = a.start.max(b.start)..a.end.min(b.end);
    (!both.is_empty()).then_some(both)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_one_owner_whatever_the_length() {
        for layout in [Layout::Zigzag, Layout::Contiguous] {
            for (world, len, align) in
                [(1, 7, 1), (2, 100, 16), (3, 1000, 64), (8, 5, 1), (4, 0, 8), (8, 1024, 128)]
            {
                let shards = Shards::new(layout, world, len, align);
                let mut seen: Vec<usize> = (0..world).flat_map(|rank| shards.positions(rank)).collect();
                seen.sort_unstable();
                assert_eq!(seen, (0..len).collect::<Vec<_>>(), "{layout:?} {world} {len} {align}");
                assert_eq!((0..world).map(|rank| shards.rows(rank)).sum::<usize>(), shards.len());
                let aligned = |chunk: usize| shards.chunk(chunk).start;
                let chunks = shards.bounds.len() - 1;
                assert!(
                    (0..chunks).all(|chunk| aligned(chunk).is_multiple_of(align) || aligned(chunk) == len)
                );
            }
        }
    }

    #[test]
    fn zigzag_pairs_the_first_chunk_with_the_last() {
        let shards = Shards::new(Layout::Zigzag, 2, 40, 1);
        assert_eq!(shards.ranges(0), [0..10, 30..40]);
        assert_eq!(shards.ranges(1), [10..20, 20..30]);
        let whole: Vec<usize> = (0..80).collect();
        let mut back = vec![0; 80];
        for rank in 0..2 {
            shards.gather(rank, &shards.scatter(rank, &whole, 2), 2, &mut back);
        }
        assert_eq!(back, whole);
    }
}
