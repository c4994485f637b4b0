//! The problems of a kernel that the emulation runs in seconds: short rows and few heads, but every edge
//! case. A GPU runs them with the rest of the list.

use fa_core::{Alibi, KernelSpec, Lengths, Problem};

use super::case::{Arrangement, BASE, Case, NamedSpec, Values, case, case_of};
use super::paged::loads_pages;
use super::problem::{descales, narrower, problem_of};
use crate::random::Random;
use crate::sequences::{Ragged, Sequences};

/// `(seqlen_q, seqlen_k)` with heads: single rows, fewer rows than a tile, more queries than keys and fewer,
/// several tiles in both directions, groups of heads.
const SHAPES: [(usize, usize, usize, usize); 7] = [
    (1, 1, 2, 2),
    (3, 3, 2, 1),
    (64, 32, 1, 1),
    (239, 1, 1, 1),
    (113, 203, 4, 2),
    (300, 300, 4, 1),
    (108, 256, 1, 1),
];

/// For kernels that pack heads: groups that leave rows of a tile of 64 idle, with fewer queries than a tile
/// has and more.
const GROUPS: [(usize, usize, usize, usize); 4] =
    [(1, 130, 10, 2), (4, 77, 3, 1), (16, 150, 7, 1), (20, 40, 12, 1)];

/// For kernels whose CTAs share a row's keys: few queries, many keys.
const DECODES: [(usize, usize, usize, usize); 2] = [(1, 700, 4, 1), (5, 1030, 2, 2)];

/// For backwards whose tiles have all keys of a sequence; no query sees none.
const WHOLE: [(usize, usize, usize, usize); 7] = [
    (1, 1, 2, 2),
    (3, 3, 2, 1),
    (64, 64, 2, 2),
    (77, 128, 4, 2),
    (1, 128, 2, 2),
    (128, 128, 4, 1),
    (77, 77, 1, 1),
];

/// Lengths of [`WHOLE`].
pub(super) fn whole_lengths() -> Vec<(usize, usize)> {
    WHOLE.iter().map(|&(seqlen_q, seqlen_k, ..)| (seqlen_q, seqlen_k)).collect()
}

/// Lengths of the sequences of one batch, queries and keys: longer than a tile and shorter, none on either
/// side, one query, more keys than queries.
pub const LENGTHS: [(usize, usize); 7] =
    [(300, 300), (77, 77), (0, 0), (129, 129), (1, 300), (40, 0), (200, 513)];

/// The layout of one side of a batch.
#[derive(Clone, Copy)]
enum Rows {
    /// In a slot of equal size for each sequence, of which a part is used.
    Padded,
    /// End to end.
    Packed,
    /// End to end, in slots with [`ROOM`] more rows than are used.
    PackedUsed,
    /// In pages of this many keys.
    Paged(usize),
    /// The same, with [`RUN`] keys at a time in consecutive pages.
    Runs(usize),
}

/// Keys in consecutive pages of a cache: some tiles are contiguous, some in two pieces, some in more.
const RUN: usize = 320;

/// Unused rows of a slot.
const ROOM: usize = 3;

/// A batch of sequences with lengths of their own.
struct Batch {
    lengths: Vec<(usize, usize)>,
    heads: (usize, usize),
    q: Rows,
    k: Rows,
    /// Rows of a page where the kernel reads pages.
    page: usize,
    /// Rows by which bounds exceed the longest sequence, and tensors the end of the last one.
    slack: usize,
}

/// The cases of a kernel: every shape, one of them with two sequences, one with gaps between rows, one with
/// head dims that the kernel pads; and batches, for a kernel that reads lengths on the device. One has slopes
/// and sinks at the ends of f32, for a kernel that takes them.
pub(super) fn awkward(group: &'static str, name: &str, spec: &KernelSpec) -> Vec<Case> {
    let mut all = if spec.reads.varied { of_batches(group, spec) } else { of_shapes(group, spec) };
    if spec.score.alibi || spec.score.sinks {
        // 113 x 203, or a decode: every query that sees a key is at one.
        all.push(Case { values: Values::Edges, ..all[4].clone() });
    }
    let kernel = Some(NamedSpec { name: name.to_owned(), spec: spec.clone() });
    all.into_iter().map(|own| Case { kernel: kernel.clone(), pass: spec.kernel.pass(), ..own }).collect()
}

fn of_shapes(group: &'static str, spec: &KernelSpec) -> Vec<Case> {
    let few_queries: &[_] = if spec.split { &DECODES } else { &[] };
    let groups: &[_] = if spec.traits().packs_gqa { &GROUPS } else { &[] };
    let of_shape =
        |(turn, &(seqlen_q, seqlen_k, heads_q, heads_kv)): (usize, &(usize, usize, usize, usize))| {
            let sequences = if turn == 1 { 2 } else { 1 };
            let mut problem = problem(spec, (heads_q, heads_kv), turn);
            problem.lengths = Lengths::uniform(sequences, seqlen_q, seqlen_k);
            let arrangement = if turn == 2 { Arrangement::BhsdGap(8) } else { Arrangement::Bshd };
            Case { arrangement, ..case(group, problem) }
        };
    let is_whole = spec.backward().is_some_and(|own| own.whole_keys);
    let shapes = if is_whole { WHOLE } else { SHAPES };
    shapes.iter().chain(few_queries).chain(groups).enumerate().map(of_shape).collect()
}

fn of_batches(group: &'static str, spec: &KernelSpec) -> Vec<Case> {
    let plain = |lengths, heads, rows, page, slack| Batch { lengths, heads, q: rows, k: rows, page, slack };
    // Fewer rows than sequences.
    let short = (0..40).map(|i| (i % 7 / 6, i * 7 % 23)).collect();
    let decode = vec![(1, 300), (1, 1), (1, 513), (1, 0), (1, 64)];
    let uneven = vec![(70, 133), (300, 40), (0, 9), (128, 128)];
    let groups = if spec.traits().packs_gqa {
        let tokens = vec![(4, 200), (1, 3), (16, 129), (0, 7), (13, 13)];
        vec![
            plain(tokens.clone(), (10, 2), Rows::Packed, 16, 3),
            plain(tokens.clone(), (7, 1), Rows::Padded, 1, 0),
            plain(tokens, (3, 1), Rows::PackedUsed, 24, 2),
        ]
    } else {
        Vec::new()
    };
    let batches = [
        plain(LENGTHS.to_vec(), (4, 2), Rows::Packed, 16, 5),
        plain(vec![(300, 300)], (2, 2), Rows::Packed, 64, 0),
        plain(vec![(0, 0); 3], (2, 1), Rows::Packed, 16, 0),
        plain(short, (2, 1), Rows::Packed, 1, 3),
        plain(decode, (8, 1), Rows::Padded, 128, 0),
        plain(uneven.clone(), (2, 1), Rows::Padded, 7, 2),
        plain(uneven, (2, 2), Rows::PackedUsed, 48, 9),
    ];
    let of_batch = |(turn, batch): (usize, &Batch)| {
        let mut problem = problem(spec, batch.heads, turn);
        if turn == 5 {
            problem.score.alibi = problem.score.alibi.map(|_| Alibi::PerSequenceHead);
        }
        let arrangement = if turn == 5 { Arrangement::BhsdGap(8) } else { Arrangement::Bshd };
        let own = case_of(group, "", problem, batch.sequences(spec, turn as u64));
        Case { arrangement, ..own }
    };
    // Only pages have an order.
    let runs = Batch { k: Rows::Runs(1), ..plain(LENGTHS.to_vec(), (2, 1), Rows::Packed, 1, 5) };
    let runs = spec.reads.paged.then_some(runs);
    batches.iter().chain(&groups).chain(&runs).enumerate().map(of_batch).collect()
}

impl Batch {
    fn sequences(&self, spec: &KernelSpec, seed: u64) -> Sequences {
        let (of_q, of_k): (Vec<usize>, Vec<usize>) = self.lengths.iter().copied().unzip();
        let page = if loads_pages(spec, self.page) { self.page } else { 8 * self.page };
        let keys = match (spec.reads.paged, self.k) {
            (true, Rows::Runs(_)) => Rows::Runs(page),
            (true, _) => Rows::Paged(page),
            (false, _) => self.k,
        };
        Sequences { q: self.side(&of_q, self.q, seed), k: self.side(&of_k, keys, seed) }
    }

    fn side(&self, lens: &[usize], rows: Rows, seed: u64) -> Ragged {
        let max = lens.iter().copied().max().unwrap_or(0) + self.slack;
        let slots = || lens.iter().map(|len| len + ROOM).collect::<Vec<usize>>();
        match rows {
            Rows::Padded => Ragged::padded(lens, max),
            Rows::Packed => Ragged::packed(lens, self.slack).bounded(max),
            Rows::PackedUsed => Ragged::packed_in(lens, &slots(), self.slack).bounded(max + ROOM),
            Rows::Paged(page) => Ragged::paged(lens, page, 2, &mut Random::new(seed + 1)).bounded(max),
            Rows::Runs(page) => {
                let random = &mut Random::new(seed + 1);
                Ragged::paged_in_runs(lens, page, RUN / page, 2, random).bounded(max)
            }
        }
    }
}

/// A problem for the kernel, with head dims that it pads in turn 6; the caller sets the lengths.
fn problem(spec: &KernelSpec, (heads_q, heads_kv): (usize, usize), turn: usize) -> Problem {
    // Two heads of wide rows take as long as four of narrow ones; groups that leave rows idle stay so.
    let few = spec.head_dim > 128 && heads_q.is_power_of_two();
    let heads_q = if few { heads_q.min(2) } else { heads_q };
    let widest = problem_of(spec, BASE.lengths, (heads_q, heads_kv));
    let narrow = if turn == 6 { narrower(spec) } else { 0 };
    widest
        .with_head_dims(widest.head_dim - narrow, widest.head_dim_v - narrow)
        .with_descales(descales(spec, turn))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use fa_core::Reads;

    use super::super::case::Extent;
    use super::super::of_spec;
    use super::*;

    #[test]
    fn a_gpu_runs_what_the_emulation_runs_and_more() {
        for file in fa_kernels::specs::shipped().unwrap() {
            for (varied, paged, split) in [(false, false, false), (true, false, false), (true, true, true)] {
                let spec = &mut file.shipped.spec.clone();
                (spec.reads, spec.split) = (Reads { varied, paged }, split);
                if spec.check().is_err() {
                    continue;
                }
                let emulated = of_spec("spec", "it", spec, Extent::Emulated);
                let full = of_spec("spec", "it", spec, Extent::Full);
                let names: HashSet<String> = full.iter().map(Case::name).collect();
                assert_eq!(names.len(), full.len(), "{}", file.path);
                assert!(emulated.len() >= 7 && full.len() > 2 * emulated.len().min(9), "{}", file.path);
                for case in &emulated {
                    case.problem.check().unwrap_or_else(|e| panic!("{}: {e}", case.name()));
                    assert!(spec.serves(&case.problem).is_ok(), "{}", case.name());
                    assert!(case.problem.flops_forward() < 1e9, "{}", case.name());
                    assert!(names.contains(&case.name()), "{}", case.name());
                }
            }
        }
    }
}
