//! Faults put into what kernels do with sequences of different lengths, pages and shared keys: each is found,
//! and without it nothing is.

use fa_core::{Alibi, Arch, Dtype, Kernel, Mask, Problem, Reads, ScoreMod};
use fa_emu::{Batch, Lie, Options, Placement, Trial, source};
use fa_kernels::Headers;

use crate::emulator;
use crate::faults::{inject, spec};

/// How the keys lie, and whether several CTAs share those of a row.
type Form = (Lie, bool);

const PACKED: Form = (Lie::Packed, false);
const PADDED: Form = (Lie::Padded, false);
const PAGED: Form = (Lie::Paged(16), false);
const SPLIT: Form = (Lie::Packed, true);

/// A name, a form, `[header, after, old, new]`, and what is found: one of these.
type Fault = (&'static str, Form, [&'static str; 4], &'static [&'static str]);

const FAULTS: &[Fault] = &[
    (
        "keys behind a sequence's end are loaded",
        PACKED,
        ["sm90/fwd_producer.cuh", "auto load_varied", "seqlen.k());", "seqlen.k() + 5);"],
        &["foreign row"],
    ),
    (
        "used lengths are not asked for",
        PADDED,
        ["attn/seqlen.cuh", "", "if (used != nullptr) rows = min(rows, used[batch]);", ""],
        &["foreign row"],
    ),
    (
        "keys behind the last page are looked up",
        PAGED,
        [
            "attn/paged_keys.cuh",
            "int entry_of(",
            "min(n_block * TileN + row(), keys - 1)",
            "n_block * TileN + row()",
        ],
        &["page faults"],
    ),
    (
        "a row of the next sequence is stored",
        PACKED,
        ["attn/epilogue.cuh", "", "row < end", "row <= end"],
        &["data race", "foreign row", "wrong values"],
    ),
    (
        "sums of warps are read before all are there",
        PACKED,
        ["attn/plan_cta.cuh", "int cta_scan(", "cta_sync();", ""],
        &["data race"],
    ),
    (
        "sums of warps are written again before all have read them",
        PACKED,
        ["attn/plan_cta.cuh", "int place_bins(", "cta_sync();", ""],
        &["data race"],
    ),
    (
        "the parts of two tiles have the same slots",
        SPLIT,
        ["attn/plan_few.cuh", "", "slot = before & 0xffffff", "slot = 0"],
        &["data race", "wrong values"],
    ),
    (
        "partial sums are combined before all are there",
        SPLIT,
        ["attn/split.cuh", "(&smem.sums[warp][column]) = acc[part];", "cta_sync();", ""],
        &["data race"],
    ),
    (
        "the sink is left out of the combined sum",
        SPLIT,
        [
            "attn/split.cuh",
            "void combine_rows(",
            "if constexpr (Sinks) sum += exp2_approx((sink - base) * kLog2e);",
            "",
        ],
        &["wrong values"],
    ),
];

/// What is found in a forward of these sequences under three seeds, with the fault if there is one.
fn find((keys, split): Form, fault: Option<[&str; 4]>) -> Result<Vec<String>, String> {
    let emulator = emulator();
    let mut spec = spec("sm90_fwd", &[("tile_n", "64")]);
    if let Kernel::Sm90Fwd(knobs) = &mut spec.kernel {
        // Pages that no box of TMA divides.
        knobs.gather = matches!(keys, Lie::Paged(page) if !page.is_multiple_of(8));
    }
    spec.reads = Reads { varied: true, paged: matches!(keys, Lie::Paged(_)) };
    spec.split = split;
    (spec.score.alibi, spec.score.sinks) = (split, true);
    let mut source = source(&spec, Arch::Sm90, &Headers::embedded()).map_err(|error| error.to_string())?;
    if let Some(change) = fault {
        inject(&mut source, change)?;
    }
    let unit = emulator.unit_of(&spec, Arch::Sm90, &source).map_err(|error| error.to_string())?;
    let mut sequences = vec![(300, 300), (77, 140), (0, 9), (1, 600), (40, 0), (129, 129)];
    // Twice as many have more tiles than one warp plans.
    if (keys, split) == PACKED {
        sequences.extend_from_within(..);
    }
    let q = if keys == Lie::Padded { Lie::Padded } else { Lie::Packed };
    let batch = Batch { sequences, q, k: keys, slack: 5 };
    let score = ScoreMod::NONE.with_alibi(split.then_some(Alibi::PerSequenceHead)).with_sinks(true);
    let lengths = batch.lengths();
    let one = Problem::square(1, 1, 2, 64, Mask::CAUSAL, Dtype::Bf16);
    let problem = one.with_lengths(lengths).with_heads_kv(1).with_score(score);
    let trial = Trial::with(&problem, spec.kernel.pass(), Placement::PACKED, &batch.extras(&problem));
    let run = |seed| {
        // So many SMs that CTAs of the combine kernel share a row.
        let sms = if split { 528 } else { Options::sms_of(&spec) };
        let options = Options { sms, step_limit: 20_000_000, ..Options::seed(seed) };
        trial.run(&unit, &options).map(|proof| proof.faults().join("\n")).map_err(|error| error.to_string())
    };
    (0..3).map(run).collect()
}

#[test]
#[ignore = "emulation"]
fn faults_of_varied_forwards_are_found() {
    let mut missed = Vec::new();
    for &(name, form, change, found) in FAULTS {
        match find(form, Some(change)) {
            Err(error) => missed.push(format!("{name}: {error}")),
            Ok(texts) => {
                eprintln!("---- {name}\n{}", texts[2].lines().take(5).collect::<Vec<_>>().join("\n"));
                let of = texts.iter().filter(|text| !found.iter().any(|kind| text.contains(kind)));
                missed.extend(of.map(|text| format!("{name}: found {text:?}, not {found:?}")));
            }
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n\n"));
}

#[test]
#[ignore = "emulation"]
fn varied_forwards_without_a_fault_are_clean() {
    for form in [PACKED, PADDED, PAGED, SPLIT, (Lie::Paged(7), true), (Lie::PackedUsed, false)] {
        for (seed, text) in find(form, None).unwrap().iter().enumerate() {
            assert!(text.is_empty(), "{form:?}, seed {seed}:\n{text}");
        }
    }
}
