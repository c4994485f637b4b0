//! The cases of one kernel.

use fa_core::{Alibi, KernelSpec, Lengths, Mask, MaskKind, Reads, ScoreMod};
use fa_cpu::grid::SHAPES;

use super::awkward::{awkward, whole_lengths};
use super::case::{Arrangement, BASE, Case, Extent, NamedSpec, Values, case, case_of};
use super::paged::{PAGES, loads_pages, pages_of};
use super::problem::{descales, narrower};
use super::varied::packed_of;
use crate::sequences::{Ragged, Sequences};

/// Keys of the longest of many sequences.
const MOST_KEYS: usize = 330;

const ALIBIS: [Alibi; 2] = [Alibi::PerHead, Alibi::PerSequenceHead];

/// The cases of a kernel of a given spec: every edge case that its fields allow. Extents select from one
/// list, of which [`Extent::Full`] is all.
pub fn of_spec(group: &'static str, name: &str, spec: &KernelSpec, extent: Extent) -> Vec<Case> {
    let is_whole = spec.backward().is_some_and(|own| own.whole_keys);
    match extent {
        Extent::Emulated => awkward(group, name, spec),
        Extent::Quick | Extent::Full if is_whole => {
            let mut all = at_lengths(group, name, spec, &whole_lengths());
            all.extend(awkward(group, name, spec));
            all
        }
        Extent::Quick => at_lengths(group, name, spec, &[(113, 203), (1000, 1000), (300, 70)]),
        Extent::Full => {
            let mut all = at_lengths(group, name, spec, &SHAPES);
            all.extend(awkward(group, name, spec));
            all
        }
    }
}

/// Problems of these lengths, under every mask of the kernel's kind; heads, layouts and kinds of sequences
/// alternate.
fn at_lengths(group: &'static str, name: &str, spec: &KernelSpec, lengths: &[(usize, usize)]) -> Vec<Case> {
    let masks: &[Mask] = match spec.mask {
        MaskKind::Full => &[Mask::FULL],
        MaskKind::Causal => &[Mask::CAUSAL],
        MaskKind::Window => &[Mask::window(70, 9), Mask::causal_window(130)],
    };
    // Kernels that divide keys plan few tiles by a warp, more by several, and many by the plan kernel.
    let plans_many = if spec.reads.varied && spec.split { MANY.len() } else { 0 };
    let mut cases = Vec::new();
    for &mask in masks {
        let more = [(1, MOST_KEYS); MANY.len()].into_iter().take(plans_many);
        for (turn, (seqlen_q, seqlen_k)) in lengths.iter().copied().chain(more).enumerate() {
            // Some problems narrower than the tile.
            let narrow = if turn % 3 == 2 { narrower(spec) } else { 0 };
            let (heads_q, heads_kv) = [(4, 4), (6, 3), (8, 1)][turn % 3];
            let traits = spec.traits();
            let scale = traits.is_latent.then(|| 1.0 / f64::from(spec.head_dim).sqrt());
            let problem = BASE
                .with_latent(traits.is_latent)
                .with_softmax_scale(scale)
                .with_lengths(Lengths::uniform(BASE.lengths.sequences(), seqlen_q, seqlen_k))
                .with_heads(heads_q * traits.head_parts as usize, heads_kv)
                .with_head_dims(spec.head_dim as usize - narrow, spec.head_dim_v as usize - narrow)
                .with_mask(mask)
                .with_types(spec.types)
                .with_descales(descales(spec, turn))
                .with_score(
                    ScoreMod::NONE
                        .with_softcap(spec.score.softcap.then_some(7.0))
                        .with_alibi(spec.score.alibi.then_some(ALIBIS[turn % 2]))
                        .with_sinks(spec.score.sinks)
                        .with_program(spec.score.program),
                );
            let arrangement = [Arrangement::Bshd, Arrangement::Bhsd, Arrangement::Gap(8)][turn % 3];
            let kernel = Some(NamedSpec { name: name.to_owned(), spec: spec.clone() });
            // Gradients of long problems take the oracle seconds a head.
            if !spec.kernel.is_backward() || seqlen_q * seqlen_k <= 1 << 20 {
                let case = match spec.reads {
                    Reads { varied: false, .. } => case(group, problem),
                    _ if turn >= lengths.len() => {
                        case_of(group, "", problem, many(spec, MANY[turn - lengths.len()]))
                    }
                    _ => case_of(group, "", problem, varied(spec, turn, (seqlen_q, seqlen_k))),
                };
                cases.push(Case { arrangement, kernel, pass: spec.kernel.pass(), ..case });
            }
        }
    }
    let steep = cases.iter().max_by_key(|case| case.problem.lengths.max_k().min(1024)).cloned();
    cases.extend(
        steep
            .into_iter()
            .flat_map(|case| [Values::Rising, Values::Falling].map(|values| Case { values, ..case.clone() })),
    );
    cases
}

/// Sequences around `q` queries and `k` keys for a kernel that reads their lengths: in turns packed, with
/// slots and used in part, keys in pages of another size each time, of those that the kernel loads.
fn varied(spec: &KernelSpec, turn: usize, (q, k): (usize, usize)) -> Sequences {
    let (reads, decodes) = (spec.reads, spec.split);
    let (of_q, of_k) = ([q, 0, q / 2 + 1, 1], [k, k / 3, k - k / 4, k.min(65)]);
    let slots = |lens: &[usize]| lens.iter().map(|len| len + len % 23).collect::<Vec<usize>>();
    let room = |lens: &[usize]| lens.iter().copied().max().unwrap_or(0) + 7;
    let packed = packed_of(&of_q, &of_k, turn);
    let queries = match (turn % 3, decodes) {
        (0, _) => packed.q,
        (1, true) => Ragged::uniform(4, q.min(16)),
        (1, false) => Ragged::padded(&of_q, room(&of_q)),
        _ => Ragged::packed_in(&of_q, &slots(&of_q), 3),
    };
    let keys = match (turn % 3, reads.paged) {
        (_, true) => {
            let pages = PAGES.into_iter().filter(|&page| loads_pages(spec, page));
            // The step changes each round, so that problems that only differ in queries have different pages.
            let page = pages.cycle().nth(turn + turn / 6).expect("pages of a multiple of 8");
            pages_of(&of_k, page, turn as u64)
        }
        (0, false) => packed.k,
        (1, false) => Ragged::padded(&of_k, room(&of_k)),
        (_, false) => Ragged::packed_in(&of_k, &slots(&of_k), 3),
    };
    Sequences { q: queries, k: keys }
}

/// Sequences of the batches of many: more than one warp plans, and more than the CTAs of a kernel plan for
/// themselves.
const MANY: [usize; 2] = [40, 270];

/// A step of forty sequences among so many, of which the others have no query.
fn many(spec: &KernelSpec, all: usize) -> Sequences {
    let of = |own: fn(usize) -> usize, other: usize| -> Vec<usize> {
        (0..all).map(|i| if i < 40 { own(i) } else { other }).collect()
    };
    let lens = of(|i| MOST_KEYS - 8 * i, 1);
    let keys = match spec.reads.paged {
        true => {
            let page =
                PAGES.into_iter().find(|&page| loads_pages(spec, page)).expect("pages of a multiple of 8");
            pages_of(&lens, page, 1)
        }
        false => Ragged::padded(&lens, MOST_KEYS + 7),
    };
    Sequences { q: Ragged::packed(&of(|_| 1, 0), 0), k: keys }
}
