//! The memory that the launches of a pass share, and the offsets of its parts.

use fa_core::lengths::SideRows;
use fa_core::{Problem, Side};

use crate::Error;

/// Parts start on multiples of this: TMA asks for 16, cache lines for 128.
const PART_ALIGN: usize = 256;

/// A workspace that is larger than the address space.
const TOO_LONG: Error =
    Error::TooLong { name: "bytes of workspace", value: usize::MAX, limit: isize::MAX as usize };

/// A range of the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Bytes from the workspace's start.
    pub offset: usize,
    /// Its length in bytes.
    pub bytes: usize,
}

/// The layout of a workspace; parts that a pass does not need are `None`. What a part holds is documented at
/// the kernel parameter of the same name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workspace {
    /// Bytes in all.
    pub bytes: usize,
    /// What its address must be a multiple of.
    pub align: u64,
    /// Whether it must be zero before the first call; each call then leaves `tile_counter` zero, of which
    /// alone this is read.
    pub starts_zero: bool,
    /// LSE of each row in base 2.
    pub lse_log2: Option<Part>,
    /// Sum of O * dO of each row.
    pub dpsum: Option<Part>,
    /// dQ in f32.
    pub dq_accum: Option<Part>,
    /// dK in f32.
    pub dk_accum: Option<Part>,
    /// dV in f32.
    pub dv_accum: Option<Part>,
    /// Progress of each tile of dQ.
    pub dq_semaphores: Option<Part>,
    /// Progress of each tile of dK and of dV.
    pub dkv_semaphores: Option<Part>,
    /// The next tile to be drawn; of a forward also the number of CTAs that are done.
    pub tile_counter: Option<Part>,
    /// The work plan, where a call brings none of its own.
    pub plan: Option<Part>,
    /// O of parts of the keys, in f32.
    pub out_partial: Option<Part>,
    /// LSE of parts of the keys.
    pub lse_partial: Option<Part>,
    /// The tiles that a mask's program leaves to be visited.
    pub map_lists: Option<Part>,
    /// Their states, of a backward.
    pub map_tiles: Option<Part>,
}

/// Bytes of a forward's counters, at the beginning of its workspace.
const COUNTERS: usize = 8;

/// Memory that a forward needs besides its tensors.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ForwardParts {
    /// Whether tiles are drawn from a counter.
    pub draws_tiles: bool,
    /// Bytes of a work plan.
    pub plan: usize,
    /// Rows of partial results.
    pub rows: usize,
    /// Columns of O.
    pub columns: usize,
    /// Bytes of the lists of a program's mask.
    pub map_lists: usize,
}

/// What a backward's kernel and division ask of its workspace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BackwardParts {
    /// What the head dims are padded to.
    pub head_dims: (u32, u32),
    /// Queries and keys of a tile.
    pub tile: (u32, u32),
    /// Whether dQ is summed in f32.
    pub sums_dq: bool,
    /// Semaphores of a tile of dQ.
    pub turns: usize,
    /// Whether additions are ordered: tiles are then drawn.
    pub deterministic: bool,
    /// CTAs that share the query heads of a K/V head.
    pub splits: usize,
}

impl Workspace {
    /// The workspace of a forward: the counters of a dynamic scheduler, a work plan, partial results; may be
    /// empty.
    ///
    /// # Errors
    /// [`Error::TooLong`] when it is larger than the address space.
    pub(crate) fn forward(parts: ForwardParts) -> Result<Workspace, Error> {
        Workspace::forward_parts(parts).ok_or(TOO_LONG)
    }

    fn forward_parts(parts: ForwardParts) -> Option<Workspace> {
        let ForwardParts { draws_tiles, plan, rows, columns, map_lists } = parts;
        let tile_counter = draws_tiles.then_some(Part { offset: 0, bytes: COUNTERS });
        // The space of the counters is reserved, with or without counters: kernels may take turns at one
        // workspace.
        let mut end = if draws_tiles || plan > 0 || rows > 0 || map_lists > 0 { COUNTERS } else { 0 };
        let mut part = |bytes: usize| -> Option<Option<Part>> {
            if bytes == 0 {
                return Some(None);
            }
            let offset = end.checked_next_multiple_of(PART_ALIGN)?;
            end = offset.checked_add(bytes)?;
            Some(Some(Part { offset, bytes }))
        };
        let plan = part(plan)?;
        let lse_partial = part(rows.checked_mul(4)?)?;
        let out_partial = part(rows.checked_mul(columns)?.checked_mul(4)?)?;
        let map_lists = part(map_lists)?;
        let align = if end > COUNTERS { 16 } else { 4 };
        Some(Workspace {
            bytes: end,
            align,
            starts_zero: true,
            tile_counter,
            plan,
            out_partial,
            lse_partial,
            map_lists,
            ..Workspace::default()
        })
    }

    /// Adds a work plan of so many bytes at the end; none for 0.
    ///
    /// # Errors
    /// [`Error::TooLong`] when it is then larger than the address space.
    pub(crate) fn add_plan(&mut self, bytes: usize) -> Result<(), Error> {
        if bytes > 0 {
            self.plan = Some(self.add(bytes)?);
        }
        Ok(())
    }

    /// Adds the counter that a backward's tiles are drawn from, unless it has one.
    ///
    /// # Errors
    /// [`Error::TooLong`] when it is then larger than the address space.
    pub(crate) fn add_tile_counter(&mut self) -> Result<(), Error> {
        if self.tile_counter.is_none() {
            self.tile_counter = Some(self.add(4)?);
        }
        Ok(())
    }

    /// Adds the map of a program's mask to a backward's: its lists and the tiles' states.
    ///
    /// # Errors
    /// [`Error::TooLong`] when it is then larger than the address space.
    pub(crate) fn add_map(&mut self, lists: usize, tiles: usize) -> Result<(), Error> {
        self.align = self.align.max(16);
        self.map_lists = Some(self.add(lists)?);
        self.map_tiles = Some(self.add(tiles)?);
        Ok(())
    }

    fn add(&mut self, bytes: usize) -> Result<Part, Error> {
        let offset = self.bytes.checked_next_multiple_of(PART_ALIGN);
        let end = offset.and_then(|offset| Some((offset, offset.checked_add(bytes)?)));
        let (offset, end) = end.ok_or(TOO_LONG)?;
        self.bytes = end;
        Ok(Part { offset, bytes })
    }

    /// The workspace of a backward.
    ///
    /// # Errors
    /// [`Error::TooLong`] when it is larger than the address space.
    pub(crate) fn backward(problem: &Problem, parts: BackwardParts) -> Result<Workspace, Error> {
        Workspace::backward_parts(problem, parts).ok_or(TOO_LONG)
    }

    fn backward_parts(problem: &Problem, parts: BackwardParts) -> Option<Workspace> {
        let BackwardParts { head_dims, tile, sums_dq, turns, deterministic, splits } = parts;
        let [head_dim, head_dim_v] = [head_dims.0 as usize, head_dims.1 as usize];
        let [tile_m, tile_n] = [tile.0 as usize, tile.1 as usize];
        let Problem { lengths, heads_q, heads_kv, .. } = problem;
        let rows_of = |side: Side, heads: usize, tile: usize| {
            let (entries, tiles) = room(side, lengths.sequences(), tile);
            entries.checked_mul(tiles)?.checked_mul(heads)?.checked_mul(tile)
        };
        let rows = rows_of(lengths.q(), *heads_q, tile_m)?;
        let keys = rows_of(lengths.k(), *heads_kv, tile_n)?;
        let mut end = 0usize;
        // Of 4-byte elements.
        let mut part = |elements: usize| -> Option<Part> {
            let (offset, bytes) = (end, elements.checked_mul(4)?);
            end = offset.checked_add(bytes)?.checked_next_multiple_of(PART_ALIGN)?;
            Some(Part { offset, bytes })
        };
        let mut parts = Workspace { align: 16, ..Workspace::default() };
        parts.lse_log2 = Some(part(rows)?);
        parts.dpsum = Some(part(rows)?);
        if sums_dq {
            parts.dq_accum = Some(part(rows.checked_mul(head_dim)?)?);
        }
        if splits > 1 {
            parts.dk_accum = Some(part(keys.checked_mul(head_dim)?)?);
            parts.dv_accum = Some(part(keys.checked_mul(head_dim_v)?)?);
        }
        if turns > 0 {
            parts.dq_semaphores = Some(part((rows / tile_m).checked_mul(turns)?)?);
        }
        if deterministic {
            parts.tile_counter = Some(part(1)?);
            if splits > 1 {
                parts.dkv_semaphores = Some(part((keys / tile_n).checked_mul(2)?)?);
            }
        }
        Some(Workspace { bytes: end, ..parts })
    }
}

/// The entries of a backward's workspace, and tiles of `tile` rows that a head of an entry has room for.
/// Padded sequences are entries. Packed ones, whose starts the device alone knows, are one entry, in which
/// each starts on tile `first_row / tile` plus its number, so that it never reaches the next one's.
pub(crate) fn room(side: Side, sequences: usize, tile: usize) -> (usize, usize) {
    match side.rows {
        SideRows::Packed { total, .. } => (1, (total / tile).saturating_add(sequences)),
        SideRows::Padded { len: max } | SideRows::Paged { max, .. } => (sequences, max.div_ceil(tile)),
    }
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Mask};
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_map_leaves_the_counters_of_other_forwards_alone() {
        for draws_tiles in [false, true] {
            let parts = ForwardParts { draws_tiles, map_lists: 1000, ..ForwardParts::default() };
            let own = Workspace::forward(parts).unwrap();
            assert!(own.map_lists.unwrap().offset >= COUNTERS);
        }
    }

    #[test]
    fn the_workspace_holds_the_parts_that_the_kernel_needs() {
        let problem = Problem::square(3, 1000, 8, 128, Mask::CAUSAL, Dtype::Bf16).with_heads_kv(2);
        for (tile_m, tile_n) in [(64usize, 128usize), (80, 128)] {
            for (dq_turns, deterministic) in [(0, false), (1, false), (1, true), (2, true)] {
                for splits in [1, 4] {
                    let own = BackwardParts {
                        head_dims: (128, 128),
                        tile: (tile_m as u32, tile_n as u32),
                        sums_dq: true,
                        turns: dq_turns,
                        deterministic,
                        splits,
                    };
                    let parts = Workspace::backward(&problem, own).expect("it is small");
                    let bare = Workspace::backward(&problem, BackwardParts { sums_dq: false, ..own });
                    let bare = bare.expect("it is smaller");
                    assert_eq!(bare.dq_accum, None);
                    assert_eq!(bare.bytes, parts.bytes - parts.dq_accum.expect("sums").bytes);
                    let rows = 3 * 8 * 1000usize.next_multiple_of(tile_m);
                    let keys = 3 * 2 * 1000usize.next_multiple_of(tile_n);
                    let part = |elements: usize| (elements * 4).next_multiple_of(256);
                    let mut bytes = 2 * part(rows) + part(rows * 128);
                    bytes += if splits > 1 { 2 * part(keys * 128) } else { 0 };
                    bytes += part(rows / tile_m * dq_turns);
                    bytes += if deterministic { part(1) } else { 0 };
                    let turns = deterministic && splits > 1;
                    bytes += if turns { part(keys / tile_n * 2) } else { 0 };
                    assert_eq!(parts.bytes, bytes);
                    let offset = |part: Option<Part>| part.expect("every backward has it").offset;
                    assert_eq!((offset(parts.lse_log2), offset(parts.dpsum)), (0, part(rows)));
                    assert_eq!(
                        (parts.dk_accum.is_some(), parts.dv_accum.is_some()),
                        (splits > 1, splits > 1)
                    );
                    assert_eq!(parts.dq_semaphores.is_some(), dq_turns > 0);
                    assert_eq!(parts.tile_counter.is_some(), deterministic);
                    assert_eq!(parts.dkv_semaphores.is_some(), turns);
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        #[test]
        fn packed_sequences_have_tiles_of_their_own(
            tile in prop::sample::select(vec![64usize, 80, 128]),
            lengths in (1..=400usize).prop_flat_map(|most| vec(0..most, 1..=40)),
            unused in 0..100usize,
        ) {
            let (mut row, mut free) = (0, 0);
            for (number, len) in lengths.iter().enumerate() {
                let first = row / tile + number;
                prop_assert!(first >= free, "sequence {number}");
                free = first + len.div_ceil(tile);
                row += len;
            }
            let longest = lengths.iter().copied().max().unwrap_or(0);
            let (entries, tiles) = room(Side::packed(row + unused, longest), lengths.len(), tile);
            prop_assert!(entries == 1 && free <= tiles);
        }
    }

    #[test]
    fn padded_sequences_have_entries_of_their_own() {
        assert_eq!(room(Side::padded(65).with_used(), 3, 64), (3, 2));
    }

    #[test]
    fn a_workspace_beyond_the_address_space_is_refused() {
        let problem = Problem::square(1 << 40, 1 << 30, 64, 128, Mask::FULL, Dtype::Bf16);
        let (head_dims, tile) = ((128, 128), (64, 128));
        let parts =
            BackwardParts { head_dims, tile, sums_dq: true, turns: 0, deterministic: false, splits: 1 };
        assert!(matches!(
            Workspace::backward(&problem, parts),
            Err(Error::TooLong { name: "bytes of workspace", .. })
        ));
    }
}
