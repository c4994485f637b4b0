//! Tests of the tables.

use fa_core::{Alibi, Arch, Dtype, Lengths, Mask, ScoreMod, Side};
use fa_planner::account::account;
use fa_planner::plan::{PlanOptions, plan};

use super::*;

const PROBLEM: Problem = Problem::square(2, 4096, 16, 128, Mask::CAUSAL, Dtype::Bf16);

const KIND: (Family, Pass) = (Family::Sm90, Pass::Forward);

fn entry(problem: &Problem, rank: usize) -> TunedEntry {
    let spec =
        plan(problem, Arch::Sm90, &PlanOptions::default()).expect("there are plans")[rank].spec.clone();
    TunedEntry { key: TuneKey::of(problem), spec, splits: None, tflops: 1.0, code: None }
}

fn found(table: &Tuned, problem: &Problem) -> Option<KernelSpec> {
    table.find("GPU", problem, Family::Sm90, Pass::Forward).map(|entry| entry.spec)
}

#[test]
fn the_nearest_measured_problem_decides() {
    let longer = PROBLEM.with_lengths(Lengths::uniform(1, 8192, 8192));
    let mut table = Tuned::default();
    table.set("GPU", entry(&PROBLEM, 0));
    // The two differ however the planner ranks either problem.
    let far = entry(&PROBLEM, 1).spec;
    table.set("GPU", TunedEntry { spec: far.clone(), ..entry(&longer, 0) });
    let spec = |rank| Some(entry(&PROBLEM, rank).spec);
    assert_eq!(found(&table, &PROBLEM), spec(0));
    assert_eq!(
        found(&table, &PROBLEM.with_lengths(Lengths::uniform(PROBLEM.lengths.sequences(), 3000, 2500))),
        spec(0)
    );
    assert_eq!(
        found(&table, &longer.with_lengths(Lengths::uniform(longer.lengths.sequences(), 16000, 8000))),
        Some(far)
    );
    let half = found(&table, &PROBLEM.with_types(Types::same(Dtype::F16))).expect("types stand in");
    assert_eq!((half.types.q, Some(half.kernel)), (Dtype::F16, spec(0).map(|spec| spec.kernel)));
    for other in [
        PROBLEM.with_lengths(Lengths::uniform(PROBLEM.lengths.sequences(), 1, PROBLEM.lengths.max_k())),
        PROBLEM.with_head_dim(120),
        PROBLEM.with_mask(Mask::FULL),
        PROBLEM.with_score(ScoreMod::softcap(3.0)),
        PROBLEM.with_heads_kv(8),
    ] {
        assert_eq!(found(&table, &other), None, "{other:?}");
    }
    assert_eq!(table.find("another GPU", &PROBLEM, Family::Sm90, Pass::Forward), None);
    assert_eq!(table.find("GPU", &PROBLEM, Family::Sm80, Pass::Forward), None);
}

#[test]
fn windows_of_other_widths_have_their_own_winners() {
    let window = |left: u32| PROBLEM.with_mask(Mask::causal_window(left));
    let (narrow, wide) = (window(127), window(1023));
    let mut table = Tuned::default();
    table.set("GPU", entry(&narrow, 0));
    // The two differ however the planner ranks either problem.
    table.set("GPU", TunedEntry { spec: entry(&narrow, 1).spec, ..entry(&wide, 0) });
    assert_eq!(table.gpus[0].entries.len(), 2);
    let spec = |rank| Some(entry(&narrow, rank).spec);
    for (left, rank) in [(0, 0), (100, 0), (127, 0), (200, 0), (500, 1), (800, 1), (4000, 1), (9000, 1)] {
        assert_eq!(found(&table, &window(left)), spec(rank), "a window of {left}");
    }
    let has = |left: u32| table.has("GPU", &window(left), (Family::Sm90, Pass::Forward), |_| true);
    assert!(has(100) && has(600) && !has(200) && !has(3000));
    // A window that no sequence fills, and one without a limit, see all keys.
    let open = PROBLEM.with_mask(Mask::band(Some(100_000), None));
    assert_eq!(TuneKey::of(&open).window, 4096);
    assert_eq!((TuneKey::of(&window(0)).window, TuneKey::of(&PROBLEM).window), (64, 0));
}

#[test]
fn windows_of_tables_from_before_their_widths_were_counted_are_found() {
    let window = |left: u32| PROBLEM.with_mask(Mask::causal_window(left));
    let mut table = Tuned::default();
    table.set("GPU", entry(&window(127), 0));
    let text = table.to_json().replacen(",\"window\":128", "", 1);
    let mut before = Tuned::from_json(&text).expect("a table");
    assert_eq!(before.gpus[0].entries[0].key.window, 0);
    for left in [1, 127, 1023, 100_000] {
        assert_eq!(found(&before, &window(left)), Some(entry(&window(127), 0).spec), "{left}");
        assert!(!before.has("GPU", &window(left), (Family::Sm90, Pass::Forward), |_| true), "{left}");
    }
    // What was measured for the width goes before it.
    before.set("GPU", entry(&window(127), 1));
    assert_eq!(found(&before, &window(127)), Some(entry(&window(127), 1).spec));
    // Without a window nothing is written of it.
    let mut without = Tuned::default();
    without.set("GPU", entry(&PROBLEM, 0));
    assert!(!without.to_json().contains("window"));
}

#[test]
fn the_users_table_goes_before_those_that_ship() {
    let table = |rank: usize| {
        let mut table = Tuned::default();
        table.set("GPU", entry(&PROBLEM, rank));
        table
    };
    let found = |tables: &Tables| tables.find("GPU", &PROBLEM, KIND, |_| true).map(|entry| entry.spec);
    let (own, shipped) = (table(3), table(0));
    let (first, second) = (entry(&PROBLEM, 3).spec, entry(&PROBLEM, 0).spec);
    assert_eq!(found(&Tables { own, shipped: shipped.clone() }), Some(first));
    assert_eq!(found(&Tables { own: Tuned::default(), shipped }), Some(second));
    assert_eq!(found(&Tables::default()), None);
}

#[test]
fn an_entry_may_name_its_splits() {
    let decode = PROBLEM.with_lengths(Lengths::uniform(1, 1, 8192)).with_heads_kv(2);
    let planned = entry(&decode, 0);
    assert!(planned.spec.split, "{}", planned.spec);
    let named = TunedEntry { splits: Some(4), ..planned.clone() };
    let text = |entry: &TunedEntry| {
        let mut table = Tuned::default();
        table.set("GPU", entry.clone());
        table.to_json()
    };
    assert!(!text(&planned).contains("splits"));
    let table = Tuned::from_json(&text(&named)).expect("a table");
    assert_eq!(table.find("GPU", &decode, Family::Sm90, Pass::Forward), Some(named.clone()));
    let refused = |entry: &TunedEntry, part: &str| {
        let error = Tuned::from_json(&text(entry)).expect_err(part);
        assert!(error.contains(part), "{error}");
    };
    refused(&TunedEntry { splits: Some(0), ..named.clone() }, "splits = 0: must be at least 1");
    refused(
        &TunedEntry { spec: KernelSpec { split: false, ..named.spec.clone() }, ..named },
        "divides no keys",
    );
}

#[test]
fn an_entry_takes_the_place_of_its_key() {
    let mut table = Tuned::default();
    table.set("GPU", entry(&PROBLEM, 0));
    table.set("GPU", entry(&PROBLEM, 3));
    assert_eq!(table.gpus[0].entries, [entry(&PROBLEM, 3)]);
}

/// What was measured with one compiler stays beside what was with another; other sources, and `fa tune`,
/// replace it.
#[test]
fn compilers_have_entries_of_their_own() {
    let code = |compiler: &str, key: &str| Some(Code { compiler: compiler.to_owned(), key: key.to_owned() });
    let of = |rank, code| TunedEntry { code, ..entry(&PROBLEM, rank) };
    let mut table = Tuned::default();
    for (rank, code, count) in
        [(0, code("nvrtc 12.8", "a"), 1), (1, code("nvrtc 13.0", "b"), 2), (2, code("nvrtc 13.0", "c"), 2)]
    {
        table.set("GPU", of(rank, code.clone()));
        assert_eq!(table.gpus[0].entries.len(), count);
        let is_current = |entry: &TunedEntry| entry.code == code;
        let found = table.find_current("GPU", &PROBLEM, KIND, is_current);
        assert_eq!(found.map(|entry| entry.spec), Some(entry(&PROBLEM, rank).spec));
        assert!(table.has("GPU", &PROBLEM, KIND, is_current));
    }
    assert!(!table.has("GPU", &PROBLEM, KIND, |entry| entry.code == code("nvrtc 13.0", "b")));
    assert_eq!(Tuned::from_json(&table.to_json()).as_ref(), Ok(&table));
    table.set("GPU", of(3, None));
    assert_eq!(table.gpus[0].entries, [entry(&PROBLEM, 3)]);
}

#[test]
fn what_reads_or_scores_otherwise_has_its_own_entry() {
    // A cache used in part, dense rows and slopes are of one key.
    let used = Lengths::of(2, Side::padded(4096), Side::padded(4096).with_used());
    let used = PROBLEM.with_lengths(used);
    let slopes = ScoreMod::NONE.with_alibi(Some(Alibi::PerHead));
    let slopes = PROBLEM.with_score(slopes);
    let mut table = Tuned::default();
    let has = |table: &Tuned, problem| table.has("GPU", problem, (Family::Sm90, Pass::Forward), |_| true);
    for (count, problem) in [&PROBLEM, &used, &slopes].into_iter().enumerate() {
        assert_eq!(TuneKey::of(problem), TuneKey::of(&PROBLEM));
        assert!(!has(&table, problem), "no other's entry computes {problem:?}");
        table.set("GPU", entry(problem, 0));
        assert_eq!(table.gpus[0].entries.len(), count + 1);
    }
    for problem in [&PROBLEM, &used, &slopes] {
        assert!(has(&table, problem));
        assert_eq!(found(&table, problem), Some(entry(problem, 0).spec));
    }
    assert!(table.forget("GPU", &entry(&used, 0).spec) && !has(&table, &used) && has(&table, &slopes));
    assert!(
        !table.forget("GPU", &entry(&used, 0).spec) && !table.forget("another GPU", &entry(&PROBLEM, 0).spec)
    );
}

#[test]
fn changes_at_once_are_all_kept() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("new/tuned.json");
    let problem = |at: usize| PROBLEM.with_lengths(Lengths::uniform(1, 64 << at, 64 << at));
    let spec = entry(&PROBLEM, 0).spec;
    std::thread::scope(|scope| {
        for at in 0..8 {
            let (path, spec) = (&path, &spec);
            scope.spawn(move || {
                let entry = TunedEntry {
                    key: TuneKey::of(&problem(at)),
                    spec: spec.clone(),
                    splits: None,
                    tflops: 1.0,
                    code: None,
                };
                let (_, written) = Tuned::change(path, |table| table.set("GPU", entry)).expect("read");
                written.expect("written");
            });
        }
    });
    let table = Tuned::read(&path).expect("whole");
    assert_eq!(table.gpus[0].entries.len(), 8);
    let beside = fs::read_dir(folder.path().join("new")).expect("a folder").count();
    assert_eq!(beside, 1, "the table alone");
}

#[test]
fn tables_survive_the_disk_and_damage_is_named() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("deep/tuned.json");
    assert_eq!(Tuned::read(&path).expect("none is empty"), Tuned::default());
    let mut table = Tuned::default();
    table.set("GPU", entry(&PROBLEM, 0));
    table.write(&path).expect("written");
    assert_eq!(Tuned::read(&path).expect("read back"), table);
    let text = table.to_json().replace("\"tile_n\":", "\"tile_n\":1");
    fs::write(&path, text).expect("written");
    let error = Tuned::read(&path).expect_err("no such tile").to_string();
    assert!(error.contains("tile_n") && error.contains("tuned.json"), "{error}");
    let text = table.to_json().replace("\"seqlen_q\":4096", "\"seqlen_q\":0");
    fs::write(&path, text).expect("written");
    let error = Tuned::read(&path).expect_err("no such length").to_string();
    assert!(error.contains("seqlen_q = 0"), "{error}");
    // Tables were RON once.
    for text in ["(gpus: [])", "// Measured\n(\n    gpus: [],\n)\n"] {
        fs::write(&path, text).expect("written");
        let error = Tuned::read(&path).expect_err("of another format").to_string();
        assert!(error.contains("it is RON") && error.contains("remove it"), "{error}");
    }
}

#[test]
fn what_ships_fits_its_gpu() {
    for (name, text) in SHIPPED {
        let table = Tuned::from_json(text).unwrap_or_else(|e| panic!("{name}: {e}"));
        for entry in table.gpus.iter().flat_map(|gpu| &gpu.entries) {
            account(&entry.spec, Arch::Sm90).unwrap_or_else(|e| panic!("{name}: {}: {e}", entry.spec));
        }
    }
}
