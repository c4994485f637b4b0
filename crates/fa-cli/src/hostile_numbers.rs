//! Files whose numbers have been changed, through every reader of the program and what it does with them:
//! each is refused or used, none panics.

use std::panic::{AssertUnwindSafe, catch_unwind};

use fa_attn::tune::Tuned;
use fa_core::{Arch, Dtype, Family, KernelSpec, Mask, Pass, Problem, ShippedSpec};
use fa_lab::random::Random;
use fa_planner::cost::{CostConstants, predict};
use fa_planner::plan::{PlanOptions, plan_spec};

use crate::commands::{bench, ladder};
use crate::page::Records;

/// What a number becomes.
const HOSTILE: [&str; 14] = [
    "0",
    "1",
    "-1",
    "2",
    "3",
    "17",
    "255",
    "65536",
    "2147483648",
    "4294967295",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "0.5",
];

/// Where the numbers of a text stand. Those of strings count: a field may name a mask or a kernel.
fn numbers(text: &str) -> Vec<(usize, usize)> {
    let bytes = text.as_bytes();
    let (mut found, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let first = at;
        while at < bytes.len() && (bytes[at].is_ascii_digit() || at > first && bytes[at] == b'.') {
            at += 1;
        }
        let is_alone = first == 0 || !bytes[first - 1].is_ascii_alphanumeric();
        if at > first && is_alone {
            found.push((first, at));
        }
        at = at.max(first + 1);
    }
    found
}

/// `text` with one to three of its numbers changed, or two of them exchanged.
fn changed(text: &str, random: &mut Random) -> String {
    let places = numbers(text);
    let mut changes: Vec<((usize, usize), String)> = Vec::new();
    if random.below(6) == 0 {
        let (one, other) = (random.of(&places), random.of(&places));
        changes.push((one, text[other.0..other.1].to_owned()));
        changes.push((other, text[one.0..one.1].to_owned()));
    } else {
        for _ in 0..1 + random.below(3) {
            changes.push((random.of(&places), random.of(&HOSTILE).to_owned()));
        }
    }
    changes.sort_by_key(|change| std::cmp::Reverse(change.0));
    changes.dedup_by_key(|change| change.0);
    let mut changed = text.to_owned();
    for ((first, end), number) in changes {
        changed.replace_range(first..end, &number);
    }
    changed
}

/// Tries `count` changes of a text; how many were used.
fn survive(name: &str, text: &str, count: usize, use_it: impl Fn(&str) -> bool) -> usize {
    let mut random = Random::new(9);
    let mut used = 0;
    for turn in 0..count {
        let text = changed(text, &mut random);
        let outcome = catch_unwind(AssertUnwindSafe(|| use_it(&text)));
        used += usize::from(outcome.unwrap_or_else(|_| panic!("{name}, change {turn}:\n{text}")));
    }
    used
}

/// Plans and prices a kernel on ordinary problems.
fn price(spec: &KernelSpec) {
    for (heads_kv, seqlen) in [(8, 4096), (1, 1)] {
        for arch in [Arch::Sm80, Arch::Sm90, Arch::Sm100] {
            let problem = Problem::square(2, seqlen, 8, 64, Mask::CAUSAL, Dtype::Bf16);
            let problem = problem.with_heads_kv(heads_kv);
            let _ = plan_spec(&problem, spec, arch, &PlanOptions::default());
            let cost = predict(&problem, spec, arch, &CostConstants::of(arch));
            assert!(cost.seconds > 0.0, "{spec}");
            let _ = format!("{spec} {}", spec.to_ron());
        }
    }
}

#[test]
fn specs() {
    let (mut used, mut tried) = (0, 0);
    for file in fa_kernels::specs::shipped().expect("they are valid").iter().step_by(5) {
        let shipped = &file.shipped;
        used += survive(file.path, &shipped.to_ron(), 40, |text| {
            let Ok(shipped) = ShippedSpec::from_ron(text) else { return false };
            price(&shipped.spec);
            true
        });
        let json = serde_json::to_string(&shipped.spec).expect("plain data");
        used += survive(file.path, &json, 40, |text| {
            let Ok(spec) = serde_json::from_str::<KernelSpec>(text) else { return false };
            price(&spec);
            true
        });
        tried += 80;
    }
    assert!(tried > 700 && used > tried / 50 && used < tried, "{used} of {tried} were used");
}

#[test]
fn tables_of_tuned_kernels() {
    let whole = Tuned::shipped();
    let mut table = whole.clone();
    table.gpus.truncate(1);
    table.gpus[0].entries.truncate(3);
    let gpu = table.gpus[0].gpu.clone();
    let used = survive("a tuned table", &table.to_json(), 300, |text| {
        let Ok(table) = Tuned::from_json(text) else { return false };
        for (seqlen, mask) in [(1, Mask::FULL), (4096, Mask::CAUSAL), (333, Mask::causal_window(100))] {
            let problem = Problem::square(1, seqlen, 16, 128, mask, Dtype::Bf16);
            for family in [Family::Sm80, Family::Sm90] {
                let _ = table.find(&gpu, &problem, family, Pass::Forward);
            }
        }
        table.gpus.iter().flat_map(|gpu| &gpu.entries).for_each(|entry| price(&entry.spec));
        true
    });
    assert!(used > 0, "none was used");
}

/// A record of the repository with a few of its kernels and rows.
fn record(path: &str) -> String {
    let path = format!("{}/../../docs/results/{path}", env!("CARGO_MANIFEST_DIR"));
    let mut record: serde_json::Value = fa_lab::summary::read(path.as_ref(), "fa").expect(&path);
    for (list, most) in [("kernels", 3), ("rows", 6), ("problems", 1)] {
        if let Some(values) = record.get_mut(list).and_then(serde_json::Value::as_array_mut) {
            values.truncate(most);
        }
    }
    if let Some(values) = record.pointer_mut("/problems/0/kernels").and_then(serde_json::Value::as_array_mut)
    {
        values.truncate(2);
    }
    serde_json::to_string(&record).expect("JSON")
}

#[test]
fn records_of_rates() {
    let mut used = 0;
    for name in ["marks-sm80-h100.json", "marks-sm80-bwd-h100.json", "marks-sm90-bwd-h100.json"] {
        used += survive(name, &record(name), 150, |text| {
            let mut records = Records::default();
            let is_read = records.add_text(text, name).is_ok();
            is_read
                | serde_json::from_str::<bench::draw::Record>(text).is_ok_and(|record| record.draw().is_ok())
        });
    }
    assert!(used > 100, "{used} were used");
}

#[test]
fn records_of_ladders() {
    let used = survive("a ladder", &record("ladder/sm80-h100.json"), 60, |text| {
        serde_json::from_str::<ladder::draw::Record>(text).is_ok_and(|record| record.draw().is_ok())
    });
    assert!(used > 20, "{used} were used");
}

#[test]
fn records_of_tuning() {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    let text = record("tune/random-8-nvidia-h100-80gb-hbm3.json");
    let used = survive("a record of tuning", &text, 120, |text| {
        std::fs::write(file.path(), text).expect("written");
        fa_lab::tune::judge::judge(&[file.path().into()]).is_ok()
    });
    assert!(used > 0, "none was used");
}

#[test]
fn problems() {
    let problem = Problem::square(2, 1024, 8, 64, Mask::window(40, 7), Dtype::Bf16).with_heads_kv(2);
    let text = ron::to_string(&problem).expect("plain data");
    let used = survive("a problem", &text, 300, |text| {
        let Ok(problem) = ron::from_str::<Problem>(text) else { return false };
        if problem.check().is_err() {
            return false;
        }
        for arch in [Arch::Sm80, Arch::Sm90] {
            for pass in [Pass::Forward, Pass::BACKWARD] {
                let _ = fa_planner::plan::plan(&problem, arch, &PlanOptions::default().with_pass(pass));
            }
        }
        true
    });
    assert!(used > 50, "{used} were used");
}
