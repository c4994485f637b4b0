//! Commands for a GPU where there is none: what they say, and what they do without.

use crate::common::{Dir, fa, fa_args, repository, text};

#[test]
fn without_a_gpu_the_way_out_is_named() {
    let done = fa("validate --quick --filter none-has-this-name");
    // With a GPU, no case has that name; without, there is no driver or no device.
    assert!(done.code == 1 || done.code == 2, "{}{}", done.stdout, done.stderr);
    let named = ["no CUDA driver", "making a context", "no case has"];
    assert!(named.iter().any(|part| done.stderr.contains(part)), "{}", done.stderr);
    assert_eq!(fa("validate --soak 5 --full").code, 2);
    assert_eq!(fa("validate --repeat 1").code, 2);
}

#[test]
fn todays_first_choices_are_judged_by_records_without_a_gpu() {
    let tune = repository("docs/results/tune");
    let record = |seed: &str| tune.join(format!("random-{seed}-nvidia-h100-80gb-hbm3.json"));
    let (second, third) = (record("2"), record("3"));
    let out = Dir::new();
    let page = out.path("judged.md");
    let done = fa_args(&["tune", "--judge", text(&second), text(&third), "--report", text(&page)]).good();
    for part in ["never measured", "bwd sm90", "random-3-nvidia", "all", "of 48 ("] {
        assert!(done.contains(part), "{part}: {done}");
    }
    let widest = done.lines().map(|line| line.chars().count()).max();
    assert!(widest.is_some_and(|columns| columns <= 200), "{widest:?} columns: {done}");
    assert!(std::fs::read_to_string(&page).expect("a page").starts_with("| kernels |"));
    let judged = fa_args(&["tune", "--judge", text(&second), "--json"]).json();
    assert_eq!(judged["problems"].as_array().map(Vec::len), Some(24));
    assert_eq!(judged["groups"][4]["name"], "all", "one record has no group of its own: {judged}");
    let none = fa_args(&["tune", "--judge", text(&repository("README.md"))]);
    assert!(none.code == 2 && none.stderr.contains("is not a record of `fa tune`"), "{}", none.stderr);
}

#[test]
fn a_record_has_a_summary_that_is_drawn_as_it_is() {
    let (folder, results) = (Dir::new(), Dir::new());
    let [record, plot] = ["rates.json", "rates.svg"].map(|name| folder.path(name));
    let line = "bench --headdim 16 --seqlen 32,64 --heads 2 --backend reference --seconds 0.001 --json";
    fa(&format!("{line} {}", text(&record))).good();
    let summarise = |path: &std::path::Path| {
        fa_args(&["records", "--results", text(results.root()), "--summarise", text(path)])
    };
    summarise(&record).good();
    let summary = results.path("rates.json");
    let [full, kept] = [&record, &summary].map(|path| {
        fa(&format!("bench --draw {} --plot {}", text(path), text(&plot))).good();
        std::fs::read_to_string(&plot).expect("a plot")
    });
    assert_eq!(full.matches("<circle").count(), kept.matches("<circle").count());
    assert!(std::fs::read_to_string(&summary).expect("a summary").contains("\"columns\":["));
    let none = summarise(&repository("examples/README.md"));
    assert!(none.code == 2 && none.stderr.contains("is not a record of"), "{none:?}");
    let none = summarise(&repository("docs/results/peers-tests-h100.json"));
    assert!(none.code == 2 && none.stderr.contains("as --json writes them, have summaries"), "{none:?}");
    let outside = fa_args(&["records", "--tables", "--results", text(results.root())]);
    assert!(outside.code != 0 && outside.stderr.contains("--results names"), "{outside:?}");
}

#[test]
fn what_a_gpu_has_to_run_is_listed_and_kept() {
    let (results, state) = (repository("docs/results"), Dir::new());
    let records = |more: &[&str]| {
        let base = ["records", "--results", text(&results), "--state", text(state.root())];
        fa_args(&[&base, more].concat())
    };
    let all = records(&["--list", "--all"]).good();
    let order = ["prove-grid", "marks-models-fwd", "marks-packed-bwd-drawn", "prove-soak", "prove-sanitized"];
    let places: Vec<_> = order.iter().map(|part| all.find(part).expect(part)).collect();
    assert!(places.is_sorted(), "{all}");
    assert!(all.contains("--change persistent=true") && all.contains("--peers"), "{all}");
    assert!(!records(&["--list", "--no-peers"]).good().contains("--peers"));
    let none = records(&["--only", "nothing"]);
    assert!(none.code == 2 && none.stderr.contains("marks-decode"), "{none:?}");
    let driver = fa("doctor --json").json()["checks"]
        .as_array()
        .unwrap()
        .iter()
        .any(|check| check["name"] == "driver" && check["status"] == "ok");
    if !driver {
        let prove = ["prove", "--results", text(&results), "--tier", "grid"];
        for done in [records(&[]), fa_args(&prove)] {
            assert!(done.code == 1 && done.stderr.contains("no CUDA driver"), "{done:?}");
        }
        // No step counts as run.
        assert!(!state.path("done.jsonl").exists(), "{}", records(&["--list"]).stdout);
    }
}
