//! Backwards under a program's mask: tiles of keys come in the order of the lengths of their lists, and the
//! first of them to arrive stores its sums of dQ, without zeros to add to. Queries and keys that see nothing
//! have zeros all the same.

use fa_core::program::Program;
use fa_core::{Arch, KernelSpec, Lengths, Mask, Problem, Reads, ScoreMod};
use fa_emu::{Batch, Lie, Options, Placement, Trial, Unit};
use fa_kernels::Headers;

use crate::emulator;

const TILE_M: usize = 64;
const TILE_N: usize = 128;

/// Bytes of dQ's sums of a tile of queries at head dim 64.
const TILE: usize = TILE_M * 64 * 4;

/// A mask that leaves nothing to every third tile of queries and to the second tile of keys, and whose lists
/// are of unlike lengths, the longest the last one.
const MASK: &str = "mask = q // 64 % 3 != 1 and k // 128 != 1 and (k // 128 == 3 or k + 128 <= q);";

fn sees(q: usize, k: usize) -> bool {
    q / 64 % 3 != 1 && k / 128 != 1 && (k / 128 == 3 || k + 128 <= q)
}

fn spec(fields: &str, reads: Reads) -> KernelSpec {
    let text = format!(
        "(dtype: bf16, head_dim: 64, head_dim_v: 64, mask: full, softcap: false, kernel: Sm90Bwd((tile_m: \
         64, tile_n: 128, num_wg: 2, q_stages: 2, do_stages: 2, pds_stages: 2, sdp_swap_ab: true, \
         dkv_swap_ab: false, dq_swap_ab: false, atom_layout_m_sdp: 1, atom_layout_n_dkv: 2, \
         atom_layout_m_dq: 1, mma_dkv_is_rs: true, dq_via_smem: true, dq_slices: 1, {fields})))"
    );
    let mut spec = KernelSpec::from_ron(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
    spec.score.program = Some(program(MASK));
    spec.reads = reads;
    spec
}

fn program(text: &str) -> fa_core::program::Interned {
    Program::parse(text).unwrap_or_else(|error| panic!("{text}: {error}")).intern().unwrap()
}

fn unit(spec: &KernelSpec) -> Unit {
    emulator().unit(spec, Arch::Sm90, &Headers::embedded()).unwrap_or_else(|e| panic!("{spec}: {e}"))
}

fn problem(heads: [usize; 2], spec: &KernelSpec) -> Problem {
    Problem::square(1, 1, heads[0], 64, Mask::FULL, spec.types.q)
        .with_heads_kv(heads[1])
        .with_score(ScoreMod::NONE.with_program(spec.score.program))
}

/// Tiles of keys that each tile of queries visits.
fn visits(queries: usize, keys: usize) -> Vec<Vec<usize>> {
    let tile = |m: usize, n: usize| {
        let (rows, columns) =
            (m * TILE_M..((m + 1) * TILE_M).min(queries), n * TILE_N..((n + 1) * TILE_N).min(keys));
        rows.clone().any(|q| columns.clone().any(|k| sees(q, k)))
    };
    let tiles = |m: usize| (0..keys.div_ceil(TILE_N)).filter(|&n| tile(m, n)).collect();
    (0..queries.div_ceil(TILE_M)).map(tiles).collect()
}

/// Tiles of keys in the order of their lists.
const DRAWN: &str = "tile_order: LongestFirst, deterministic: false";

#[test]
#[ignore = "emulation"]
fn whoever_comes_first_under_a_programs_mask_stores_its_sums_of_dq() {
    let visited = visits(450, 500);
    assert!(visited.iter().any(Vec::is_empty), "{visited:?}");
    let all: usize = visited.iter().map(Vec::len).sum();
    let rows = visited.iter().filter(|tiles| !tiles.is_empty()).count();
    for (fields, stores) in [
        (DRAWN, true),
        ("tile_order: LongestFirst, deterministic: false, persistent: true", true),
        ("tile_order: Natural, deterministic: false", true),
        ("tile_order: LongestFirst, deterministic: true", false),
    ] {
        let spec = spec(fields, Reads::UNIFORM);
        let unit = unit(&spec);
        let problem = problem([2, 2], &spec).with_lengths(Lengths::uniform(2, 450, 500));
        let trial = Trial::new(&problem, spec.kernel.pass(), Placement::PACKED);
        for seed in 0..3 {
            let proof = trial.run(&unit, &Options { sms: 3, resident: 3, ..Options::seed(seed) }).unwrap();
            assert!(proof.passed(), "{spec}:\n{}", proof.faults().join("\n"));
            let added = if stores { all - rows } else { all };
            assert_eq!(proof.outcome.counters().red_bytes, (4 * added * TILE) as u64, "{spec}");
        }
    }
}

/// The first CTA has the longest list, and each other one a shorter one than the CTA before it.
#[test]
#[ignore = "emulation"]
fn tiles_of_keys_come_in_the_order_of_their_lists() {
    let mut lists = [0; 4];
    visits(450, 500).iter().flatten().for_each(|&n| lists[n] += 1);
    assert!(!lists.is_sorted_by(|a, b| a >= b), "{lists:?}");
    lists.sort_unstable_by(|a, b| b.cmp(a));
    let spec = spec(DRAWN, Reads::UNIFORM);
    let unit = unit(&spec);
    let problem = problem([1, 1], &spec).with_lengths(Lengths::uniform(1, 450, 500));
    let trial = Trial::new(&problem, spec.kernel.pass(), Placement::PACKED);
    let boxes = |cta: u32| {
        let proof = trial.run(&unit, &Options { trace_cta: Some(cta), ..Options::seed(2) }).unwrap();
        assert!(proof.passed(), "{spec}:\n{}", proof.faults().join("\n"));
        proof.outcome.spans.iter().filter(|span| span.track == "TMA").count()
    };
    let boxes: Vec<usize> = (0..4).map(boxes).collect();
    // A longer list has more loads, and a tile that is visited by none has none.
    assert!(lists.is_sorted_by(|a, b| a > b) && lists[3] == 0, "{lists:?}");
    assert!(boxes.is_sorted_by(|a, b| a > b) && boxes[3] == 0, "{boxes:?} for {lists:?}");
}

#[test]
#[ignore = "emulation"]
fn packed_sequences_have_one_order_of_all_their_lists() {
    let sequences = vec![(300, 300), (0, 40), (130, 0), (450, 390), (129, 300)];
    let batch = Batch { sequences, q: Lie::Packed, k: Lie::Packed, slack: 5 };
    for fields in [DRAWN, "tile_order: LongestFirst, deterministic: false, persistent: true"] {
        let spec = spec(fields, Reads { varied: true, paged: false });
        let unit = unit(&spec);
        let problem = problem([4, 2], &spec).with_lengths(batch.lengths());
        let extras = batch.extras(&problem);
        let trial = Trial::with(&problem, spec.kernel.pass(), Placement::PACKED, &extras);
        for seed in 0..3 {
            let proof = trial.run(&unit, &Options { sms: 3, resident: 3, ..Options::seed(seed) }).unwrap();
            assert!(proof.passed(), "{spec}:\n{}", proof.faults().join("\n"));
        }
    }
}
