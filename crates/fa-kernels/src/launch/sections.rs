//! The longest-first order of tiles, in sections of heads (NB-008, NB-023). The device side is `tile_at` in
//! cuda/attn/scheduler.cuh and `bwd_tile_at` in cuda/attn/bwd_tile.cuh.
//!
//! Within a section the longest tiles of all its heads come first. Small sections keep what a head's tiles
//! share in the L2 while they run: K and V in the forward; Q, dO and dQ in the backward. One queue feeds all
//! SMs, so only the end of the last section matters: its longest tiles start when the run is nearly over.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// `sections` sections of `heads` heads each, then a last section of the remaining heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sections {
    pub heads: usize,
    pub sections: usize,
}

impl Sections {
    /// For `all_heads` heads, counted through all sequences, in groups of `group` that share `head_bytes`,
    /// with `blocks` tiles each.
    ///
    /// What a section's heads share takes `room` bytes at most. The last section has `last` tiles or some
    /// more, two or three for every CTA that computes at once, so that its short ones fill the gaps that its
    /// long ones leave.
    pub(super) fn of(
        all_heads: usize,
        group: usize,
        blocks: usize,
        head_bytes: u64,
        last: usize,
        room: u64,
    ) -> Sections {
        let fit = usize::try_from(room / head_bytes.max(1)).unwrap_or(usize::MAX).max(1);
        let heads = fit.saturating_mul(group).min(all_heads.max(1));
        let last = last.div_ceil(blocks.max(1)).next_multiple_of(group.max(1));
        Sections { heads, sections: all_heads.saturating_sub(last) / heads }
    }

    /// The same with a last section whose heads share `room` bytes at most, or one head: its tiles run all at
    /// once, the longest of every head first. Of 24 x 1024 with 32:8 heads, two tiles for every SM share
    /// 132 MB (NB-136).
    pub(super) fn with_last_within(self, all_heads: usize, head_bytes: u64, room: u64) -> Sections {
        let fit = usize::try_from(room / head_bytes.max(1)).unwrap_or(usize::MAX).max(1);
        Sections { sections: self.sections.max(all_heads.saturating_sub(fit) / self.heads), ..self }
    }

    /// The tile, counted from the shortest, that comes at each place: that of `tile_at`, without its head.
    fn order(self, all_heads: usize, blocks: usize) -> impl Iterator<Item = usize> {
        let in_sections = self.sections * self.heads;
        let sections = (0..self.sections).map(move |_| self.heads);
        sections
            .chain([all_heads.saturating_sub(in_sections)])
            .flat_map(move |heads| (0..blocks).rev().flat_map(move |block| (0..heads).map(move |_| block)))
    }

    /// When the last of `ctas` CTAs that draw the tiles of `all_heads` heads ends, each head's of `lengths`,
    /// in their unit.
    pub(super) fn end(self, all_heads: usize, lengths: &[u64], ctas: usize) -> u64 {
        let mut ends: BinaryHeap<Reverse<u64>> = (0..ctas.max(1)).map(|_| Reverse(0)).collect();
        let mut last = 0;
        for block in self.order(all_heads, lengths.len()) {
            let Some(mut first) = ends.peek_mut() else { break };
            first.0 += lengths[block];
            last = last.max(first.0);
        }
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: u64 = (50 << 20) / 48;
    const SMS: usize = 132;

    /// The query tiles in order, with their heads, as `tile_at` numbers them.
    fn tiles_of(own: Sections, all_heads: usize, m_blocks: usize) -> Vec<(usize, usize)> {
        let tile = |index: usize| {
            let section = (index / (own.heads * m_blocks)).min(own.sections);
            let first_head = section * own.heads;
            let rest = index - first_head * m_blocks;
            let in_section = if section < own.sections { own.heads } else { all_heads - first_head };
            (m_blocks - 1 - rest / in_section, first_head + rest % in_section)
        };
        (0..all_heads * m_blocks).map(tile).collect()
    }

    #[test]
    fn every_tile_comes_once() {
        for all_heads in [1, 2, 7, 33, 100] {
            for (group, m_blocks, head_bytes) in
                [(1, 1, 1), (1, 5, 1 << 20), (4, 3, 1 << 19), (8, 9, 1 << 30)]
            {
                let own = Sections::of(all_heads * group, group, m_blocks, head_bytes, 2 * SMS, ROOM);
                let mut tiles = tiles_of(own, all_heads * group, m_blocks);
                let order: Vec<usize> = own.order(all_heads * group, m_blocks).collect();
                assert!(tiles.iter().map(|&(block, _)| block).eq(order));
                tiles.sort_unstable();
                tiles.dedup();
                assert_eq!(tiles.len(), all_heads * group * m_blocks, "{own:?}");
                assert!(own.heads.is_multiple_of(group) && own.heads > 0);
            }
        }
        assert_eq!(Sections::of(0, 1, 4, 0, 2 * SMS, ROOM), Sections { heads: 1, sections: 0 });
    }

    #[test]
    fn the_last_section_stays_in_its_room() {
        let last = |own: Sections, heads: usize| heads - own.sections * own.heads;
        for (heads, blocks, head_bytes) in
            [(192, 8, 4 << 20), (768, 8, 1 << 20), (64, 64, 8 << 20), (5, 3, 1)]
        {
            let wide = Sections::of(heads, 1, blocks, head_bytes, 2 * SMS, ROOM);
            let own = wide.with_last_within(heads, head_bytes, 50 << 20);
            let room = ((50 << 20) / head_bytes).max(1) as usize;
            assert_eq!(own.heads, wide.heads);
            assert!(last(own, heads) < room.max(1) + own.heads, "{own:?}");
            if last(wide, heads) <= room {
                assert_eq!(own, wide);
            }
            let mut tiles = tiles_of(own, heads, blocks);
            tiles.sort_unstable();
            tiles.dedup();
            assert_eq!(tiles.len(), heads * blocks, "{own:?}");
        }
        // 33 heads of 4 MB before.
        let own = Sections::of(192, 1, 8, 4 << 20, 2 * SMS, ROOM).with_last_within(192, 4 << 20, 50 << 20);
        assert_eq!(last(own, 192), 12);
    }

    /// Causal tiles of 128 rows, or of 128 keys in the backward, drawn by the SMs one by one: SMs are busy
    /// for at least 96 % of the run. (With sections of one tile for every SM and the remainder last it was 86
    /// % at head dim 256: NB-008.)
    #[test]
    fn causal_runs_end_evenly() {
        // Bytes that a head shares, for each of its rows: K and V; or Q, dO and dQ's accumulators.
        // With the room and the tiles for every SM in the last section.
        let passes = [(2, ROOM, 2), (2, (50 << 20) / 12, 2), (2, ROOM, 3), (4, (50 << 20) / 32, 2)];
        for (head_dims, heads) in [(128, 32), (256, 16), (320, 16), (512, 8)] {
            for seqlen in [512, 1024, 2048, 4096, 8192, 16384] {
                for (bytes, room, last) in passes {
                    let (all_heads, blocks) = (heads * 16384 / seqlen, seqlen / 128);
                    let head_bytes = (seqlen * head_dims * bytes) as u64;
                    let own = Sections::of(all_heads, 1, blocks, head_bytes, last * SMS, room);
                    // A step of 128 keys, and half of one for the rest of a tile.
                    let lengths: Vec<u64> = (0..blocks as u64).map(|block| 2 * block + 3).collect();
                    let sum = all_heads as u64 * lengths.iter().sum::<u64>();
                    let busy = sum as f64 / (SMS as u64 * own.end(all_heads, &lengths, SMS)) as f64;
                    assert!(busy > 0.96, "{head_dims} {seqlen}: {busy:.3} with {own:?}");
                }
            }
        }
    }
}
