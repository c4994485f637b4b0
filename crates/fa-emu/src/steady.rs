//! A few steady steps of a kernel's main loop, from the events of an emulated CTA on a small problem.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use fa_core::{Arch, KernelSpec, Lengths, Problem};
use fa_cpu::OwnedExtras;

use crate::case::Case;
use crate::emulator::Emulator;
use crate::error::Error;
use crate::extras::{Batch, Lie, with_mods};
use crate::options::{Options, Pace};
use crate::outcome::Span;
use crate::placement::Placement;
use crate::proof::Trial;
use fa_kernels::Headers;

/// Number of steps.
pub const STEPS: usize = 2;
/// Tiles of the loop that are emulated: enough that those in the middle are steady.
const TILES: usize = 14;
/// Rows of operations in flight at once, per lane.
const DEPTH: usize = 3;

/// Steady steps, as an emulated CTA went through them.
#[derive(Clone, Debug, PartialEq)]
pub struct Steady {
    /// The problem that was emulated.
    pub problem: Problem,
    /// TMA first, then tensor cores, then the first warp of each warpgroup.
    pub lanes: Vec<Lane>,
    /// Length in emulated steps.
    pub length: u64,
    /// Faults of the run; empty for a kernel without a fault that the emulation detects.
    pub faults: Vec<String>,
}

/// The events of one unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lane {
    /// A warp, TMA, a warpgroup's tensor core.
    pub name: String,
    /// In order, without overlap: operations in flight at the same time are in several lanes of the same
    /// name.
    pub events: Vec<Event>,
}

/// An event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The wait of a warp, or the operation in flight.
    pub what: String,
    /// Number of operations, where several were issued together at the same location.
    pub count: usize,
    /// First step, counted from the beginning.
    pub begin: u64,
    /// Step after the last.
    pub end: u64,
    /// Where it was issued or waited for, as `sm90/fwd_consumer.cuh:126 (sm90::consume)`, and from where.
    pub place: String,
    /// Whether a warp waited.
    pub waits: bool,
}

/// Emulates a kernel on a small form of `problem` and takes steady steps out of it; `None` where its loop is
/// too short to have any.
///
/// # Errors
/// [`Error`] where this machine cannot emulate, or the kernel does not compute such problems.
pub fn emulate(
    emulator: &Emulator,
    spec: &KernelSpec,
    arch: Arch,
    problem: &Problem,
) -> Result<Option<Steady>, Error> {
    let case = small(spec, problem);
    let unit = emulator.unit(spec, arch, &Headers::embedded())?;
    let trial = Trial::with(&case.problem, spec.kernel.pass(), case.placement, &case.extras);
    let options = Options { pace: Pace::Paced, trace_cta: Some(0), sms: 1, ..Options::seed(2) };
    let proof = trial.run(&unit, &options)?;
    let found = lanes(&proof.outcome.spans);
    Ok(found.map(|(lanes, length)| Steady { problem: case.problem, lanes, length, faults: proof.faults() }))
}

/// One head (or group) of one sequence, with enough tiles along the kernel's loop.
fn small(spec: &KernelSpec, problem: &Problem) -> Case {
    let traits = spec.traits();
    let (tile_m, tile_n) = (traits.tile.0 as usize, traits.tile.1 as usize);
    let (max_q, max_k) = (problem.lengths.max_q(), problem.lengths.max_k());
    let (q, k) = if spec.kernel.is_backward() {
        let n = TILES * tile_m.max(tile_n);
        (max_q.min(n), max_k.min(n))
    } else {
        (max_q.min(tile_m), max_k.min(TILES * tile_n))
    };
    let heads_q = if traits.packs_gqa { problem.group_size() } else { 1 };
    let small = problem.with_lengths(Lengths::uniform(1, q, k)).with_heads(heads_q, 1);
    if !spec.reads.varied {
        return Case {
            extras: with_mods(OwnedExtras::NONE, &small),
            problem: small,
            placement: Placement::PACKED,
        };
    }
    let keys = if spec.reads.paged { Lie::Paged(problem.lengths.page().unwrap_or(16)) } else { Lie::Packed };
    let batch = Batch { sequences: vec![(q, k)], q: Lie::Packed, k: keys, slack: 0 };
    let small = small.with_lengths(batch.lengths());
    Case { extras: batch.extras(&small), problem: small, placement: Placement::PACKED }
}

/// The lanes of [`STEPS`] steady steps, and their length.
fn lanes(spans: &[Span]) -> Option<(Vec<Lane>, u64)> {
    let mut tracks: BTreeMap<(u8, u32, &str), Vec<&Span>> = BTreeMap::new();
    for span in spans.iter().filter(|span| span.end > span.begin) {
        let (group, number) = order(&span.track);
        // The warps of a group do the same.
        if group < 2 || number % 4 == 0 {
            tracks.entry((group, number, &span.track)).or_default().push(span);
        }
    }
    tracks.values_mut().for_each(|own| own.sort_by_key(|span| span.begin));
    let (begin, end) = window(&tracks)?;
    let mut lanes = Vec::new();
    for ((group, _, name), own) in &tracks {
        let inside = own.iter().filter(|span| span.end > begin && span.begin < end);
        let events = merged(inside.copied(), *group == 2);
        let mut rows: Vec<Vec<Event>> = Vec::new();
        for event in events {
            let event =
                Event { begin: event.begin.max(begin) - begin, end: event.end.min(end) - begin, ..event };
            let free = |row: &Vec<Event>| row.last().is_none_or(|last| last.end <= event.begin);
            match rows.iter().position(free) {
                Some(row) => rows[row].push(event),
                None if rows.len() < DEPTH => rows.push(vec![event]),
                None => {}
            }
        }
        lanes.extend(rows.into_iter().map(|events| Lane { name: (*name).to_owned(), events }));
    }
    Some((lanes, end - begin))
}

/// Start and end of the steady steps. A mark comes once a step: a tensor core's first product or, without
/// one, a warp's most frequent wait. Of all ranges of [`STEPS`] steps, the one of median length is taken.
fn window(tracks: &BTreeMap<(u8, u32, &str), Vec<&Span>>) -> Option<(u64, u64)> {
    let by_core = tracks.iter().find(|((group, ..), _)| *group == 1);
    let (_, marked) = by_core.or_else(|| tracks.iter().max_by_key(|(_, own)| own.len()))?;
    let mut places: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for span in marked {
        let starts = places.entry(format!("{} {}", span.what, place(span))).or_default();
        // Lanes of a warp that start together are one mark.
        if starts.last().is_none_or(|last| span.begin > last + 1) {
            starts.push(span.begin);
        }
    }
    // Of several products of a step, the one that came first.
    let often = |marks: &Vec<u64>| (marks.len(), Reverse(marks.first().copied()));
    let marks = places.into_values().max_by_key(often).filter(|marks| marks.len() > STEPS + 1)?;
    let mut stretches: Vec<(u64, u64)> = marks.windows(STEPS + 1).map(|own| (own[0], own[STEPS])).collect();
    // Without the first and last steps.
    let edge = stretches.len() / 4;
    let steady = &mut stretches[edge..];
    let count = steady.len() - edge;
    let steady = &mut steady[..count];
    steady.sort_by_key(|(begin, end)| end - begin);
    steady.get(steady.len() / 2).copied()
}

/// Merges spans that were issued together at one location, and consecutive waits there.
fn merged<'a>(spans: impl Iterator<Item = &'a Span>, waits: bool) -> Vec<Event> {
    let mut events: Vec<Event> = Vec::new();
    for span in spans {
        let place = place(span);
        let same = |own: &&mut Event| {
            own.what == span.what
                && own.place == place
                && if waits { span.begin <= own.end + 2 } else { span.begin <= own.begin + 1 }
        };
        match events.iter_mut().rev().take(2).find(same) {
            Some(own) => (own.end, own.count) = (own.end.max(span.end), own.count + 1),
            None => events.push(Event {
                what: span.what.clone(),
                count: 1,
                begin: span.begin,
                end: span.end,
                place,
                waits,
            }),
        }
    }
    events
}

/// The innermost line and its callers, which distinguish products of one function.
fn place(span: &Span) -> String {
    let lines: Vec<String> = span.stack.iter().map(|frame| format!("{frame} ({})", frame.function)).collect();
    lines.join(", from ")
}

/// TMA first, then tensor cores, then warps, each by number.
pub(crate) fn order(track: &str) -> (u8, u32) {
    let number = track.rsplit(' ').next().and_then(|word| word.parse().ok()).unwrap_or(0);
    let group = if track.starts_with("TMA") { 0 } else { u8::from(track.starts_with("warp")) + 1 };
    (group, number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::Frame;

    fn span(track: &str, what: &str, [begin, end]: [u64; 2], line: u32) -> Span {
        let stack = vec![Frame { function: "f".into(), file: "a.cuh".into(), line }];
        Span { track: track.into(), what: what.into(), begin, end, stack }
    }

    #[test]
    fn steps_in_the_middle_are_cut_out_and_what_overlaps_lies_in_lanes() {
        let mut spans = Vec::new();
        for step in 0..12u64 {
            // The first is slow.
            let at = 100 * step + if step > 0 { 500 } else { 0 };
            spans.push(span("tensor core of warpgroup 1", "wgmma group", [at, at + 40], 1));
            spans.push(span("tensor core of warpgroup 1", "wgmma group", [at + 30, at + 80], 2));
            spans.push(span("TMA", "TMA box", [at, at + 20], 3));
            spans.push(span("TMA", "TMA box", [at, at + 25], 3));
            spans.push(span("warp 4", "mbarrier", [at + 50, at + 60], 4));
            spans.push(span("warp 4", "mbarrier", [at + 61, at + 70], 4));
            spans.push(span("warp 5", "mbarrier", [at + 50, at + 60], 4));
        }
        let (lanes, length) = lanes(&spans).unwrap();
        assert_eq!(length, 200);
        let names: Vec<&str> = lanes.iter().map(|lane| &*lane.name).collect();
        let core = "tensor core of warpgroup 1";
        assert_eq!(names, ["TMA", core, core, "warp 4"]);
        let copies: Vec<_> = lanes[0].events.iter().map(|e| (e.begin, e.end, e.count, e.waits)).collect();
        assert_eq!(copies, [(0, 25, 2, false), (100, 125, 2, false)]);
        let waits: Vec<_> = lanes[3].events.iter().map(|e| (e.begin, e.end, e.waits)).collect();
        assert_eq!(waits, [(50, 70, true), (150, 170, true)]);
        assert!(lanes.iter().all(|lane| lane.events.iter().all(|event| event.place.starts_with("a.cuh:"))));
    }

    #[test]
    fn a_loop_without_steady_steps_has_none() {
        assert_eq!(lanes(&[]), None);
        assert_eq!(lanes(&[span("warp 0", "bar.sync", [0, 5], 1)]), None);
    }
}
