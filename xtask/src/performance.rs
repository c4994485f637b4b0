//! The tables of docs/performance.md against the records in docs/results: every number that a record holds is
//! that number, rounded as the table rounds it, and every record that is named has its date beside it. So are
//! the figures that README repeats.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

const PAGE: &str = "docs/performance.md";

/// The page and the records, by file name.
struct Records {
    page: String,
    files: BTreeMap<String, Value>,
}

/// A table's rows below its head, cells trimmed.
type Table = Vec<Vec<String>>;

impl Records {
    fn read() -> Records {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let page = std::fs::read_to_string(root.join(PAGE)).expect("the page");
        let folder = std::fs::read_dir(root.join("docs/results")).expect("the records' folder");
        let mut files = BTreeMap::new();
        for entry in folder {
            let path = entry.expect("an entry").path();
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            if name.starts_with("marks-") && name.ends_with(".json") {
                let text = std::fs::read_to_string(&path).expect("a record");
                files.insert(name, serde_json::from_str(&text).expect("JSON"));
            }
        }
        Records { page, files }
    }

    /// The record `marks-NAME-h100.json`.
    fn of(&self, name: &str) -> &Value {
        let file = format!("marks-{name}-h100.json");
        self.files.get(&file).unwrap_or_else(|| panic!("no record {file}"))
    }

    fn rows(&self, name: &str) -> &[Value] {
        self.of(name)["rows"].as_array().expect("rows")
    }

    /// The first table below a heading, which is a whole line.
    fn table(&self, heading: &str) -> Table {
        let below =
            self.page.split_once(&format!("\n{heading}\n")).unwrap_or_else(|| panic!("no {heading}")).1;
        let lines = below.lines().skip_while(|line| !line.starts_with('|'));
        let cells =
            |line: &str| line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect();
        let rows: Table = lines.take_while(|line| line.starts_with('|')).skip(2).map(cells).collect();
        assert!(rows.len() > 1, "{heading} has no table");
        rows
    }
}

/// The rate that a row of a record is shown by.
fn rate(row: &Value) -> f64 {
    row["rate"].as_f64().or_else(|| row["tflops"].as_f64()).expect("a rate")
}

/// Asserts that a number of the page is `value`, with as many digits as the page gives.
#[track_caller]
fn same(what: &str, shown: &str, value: f64) {
    let digits = shown.split_once('.').map_or(0, |(_, fraction)| fraction.len());
    assert_eq!(shown, format!("{value:.digits$}"), "{what}: the record has {value}");
}

/// The numbers of a cell, in order.
fn numbers(cell: &str) -> Vec<&str> {
    let is_number = |word: &&str| word.starts_with(|c: char| c.is_ascii_digit());
    cell.split(|c: char| !(c.is_ascii_alphanumeric() || c == '.')).filter(is_number).collect()
}

/// Asserts that a cell is `ours / theirs = ratio` of a record; `ours / -` where a peer computes no such row.
#[track_caller]
fn beside(what: &str, cell: &str, record: &Value, peer: Option<(f64, f64)>) {
    let Some((rate_of_peer, ratio_to_it)) = peer else {
        let alone = cell.strip_suffix(" / -").unwrap_or_else(|| panic!("{what}: no peer, but {cell}"));
        return same(what, alone, rate(record));
    };
    let [ours, theirs, ratio] = numbers(cell)[..] else { panic!("{what}: {cell}") };
    same(what, ours, rate(record));
    same(what, theirs, rate_of_peer);
    same(what, ratio, ratio_to_it);
}

/// The rate of a peer in a record, and ours over it.
fn of_peer(record: &Value, peer: &str) -> Option<(f64, f64)> {
    let theirs = record["peers"][peer].as_f64()?;
    Some((theirs, rate(record) / theirs))
}

fn best_peer(row: &Value) -> (&str, f64) {
    let peers = row["peers"].as_object().expect("peers").iter();
    let rates = peers.map(|(name, rate)| (name.as_str(), rate.as_f64().expect("a rate")));
    rates.max_by(|a, b| a.1.total_cmp(&b.1)).expect("a peer")
}

#[test]
fn layers_of_models_are_their_records() {
    let records = Records::read();
    for (heading, list) in [
        ("## Layers of released models", "models"),
        ("### Held out", "held-out"),
        ("### On one of several GPUs", "sharded"),
        ("### Packed batches of models", "packed-models"),
    ] {
        let named = |pass: &str, name: &str| {
            let rows = records.rows(&format!("{list}-{pass}"));
            rows.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("no row {name}")).clone()
        };
        let table = records.table(heading);
        assert_eq!(table.len(), records.rows(&format!("{list}-fwd")).len(), "{heading}");
        for row in &table {
            let [name, _, forward, backward] = row.as_slice() else { panic!("{row:?}") };
            let record = named("fwd", name);
            let ratio = |record: &Value| record["ratio"].as_f64().expect("a ratio");
            if record["peers"].as_object().is_none_or(|peers| peers.is_empty()) {
                beside(name, forward, &record, None);
            } else {
                let (peer, peer_rate) = best_peer(&record);
                assert!(forward.contains(&format!(" {peer} = ")), "{name}: the best peer is {peer}");
                beside(name, forward, &record, Some((peer_rate, ratio(&record))));
            }
            let record = named("bwd", name);
            let (peer, peer_rate) = best_peer(&record);
            assert_eq!(
                backward.contains(&format!(" {peer} = ")),
                peer != "fa4",
                "{name}: the best is {peer}"
            );
            beside(name, backward, &record, Some((peer_rate, ratio(&record))));
        }
    }
}

/// Number, geometric mean, least, and number below 1 of the ratios of rows, each with its digits.
fn spread<'a>(rows: impl Iterator<Item = &'a Value>) -> [(f64, usize); 4] {
    let ratios: Vec<f64> = rows.filter_map(|row| row["ratio"].as_f64()).collect();
    let count = ratios.len() as f64;
    let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / count).exp();
    let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let below = ratios.iter().filter(|ratio| **ratio < 1.0).count() as f64;
    [(count, 0), (mean, 2), (least, 2), (below, 0)]
}

/// Forwards of head dim 192-128 have a record of their own.
#[test]
fn groups_are_their_records() {
    let records = Records::read();
    let table = records.table("### Groups, head dims and masks");
    let is_shown = |cells: &[String], values: [(f64, usize); 4]| {
        for (cell, (value, digits)) in cells.iter().zip(values) {
            assert_eq!(*cell, format!("{value:.digits$}"), "{cells:?}");
        }
    };
    let [masks @ .., own] = table.as_slice() else { panic!("{table:?}") };
    assert_eq!(masks.len(), 3);
    for row in masks {
        let forward = records.rows(&format!("groups-{}-fwd", row[0])).iter();
        is_shown(&row[1..5], spread(forward.filter(|row| row["head_dim"] != 192)));
        is_shown(&row[5..9], spread(records.rows(&format!("groups-{}-bwd", row[0])).iter()));
    }
    is_shown(&own[1..5], spread(records.rows("groups-192-128-fwd").iter()));
}

#[test]
fn square_shapes_are_their_records() {
    let records = Records::read();
    let find = |name: &str, row: &[String], seqlen: u32| {
        let head_dims = row[0].split_once(", ").unwrap_or((&row[0], &row[0]));
        let [head_dim, head_dim_v] = [head_dims.0, head_dims.1].map(|dim| dim.parse::<u32>().expect("a dim"));
        let of = |record: &&Value| {
            record["dtype"] == "bf16"
                && record["head_dim"] == head_dim
                && record["head_dim_v"] == head_dim_v
                && record["mask"] == *row[1]
                && record["seqlen_q"] == seqlen
        };
        let found = records.rows(name).iter().find(of);
        found.unwrap_or_else(|| panic!("{name} lacks {row:?} at {seqlen}")).clone()
    };
    for (heading, name) in [("## SM90 forward", "sm90"), ("## SM90 backward", "sm90-bwd")] {
        let table = records.table(heading);
        assert_eq!(table.len(), 8, "{heading}");
        for row in &table {
            for (cell, seqlen) in row[2..].iter().zip([512, 1024, 2048, 4096, 8192, 16384]) {
                let what = format!("{name} {} {} {seqlen}", row[0], row[1]);
                let record = find(name, row, seqlen);
                let shown = numbers(cell);
                same(&what, shown[0], rate(&record));
                if name == "sm90" {
                    same(&what, shown[1], best_peer(&record).1);
                } else {
                    same(&what, shown[1], record["peers"]["cudnn"].as_f64().expect("a rate"));
                    same(&what, shown[2], record["peers"]["fa4"].as_f64().expect("a rate"));
                }
            }
        }
    }
}

/// A row of a table of decoding: what it is, the tile, ms, TB/s, those of cuDNN and of FlashAttention-3, and
/// ours over the best.
fn decoding(row: &[String], record: &Value) {
    same(&row[0], &row[2], record["ms_median"].as_f64().expect("a time"));
    same(&row[0], &row[3], rate(record));
    for (shown, peer) in row[4..6].iter().zip(["cudnn", "fa3"]) {
        match record["peers"][peer].as_f64() {
            Some(of_peer) => same(&row[0], shown, of_peer),
            None => assert_eq!(shown, "-", "{} beside {peer}", row[0]),
        }
    }
    same(&row[0], &row[6], rate(record) / best_peer(record).1);
}

#[test]
fn decode_packed_and_paged_batches_are_their_records() {
    let records = Records::read();
    let decode = records.table("### Decode");
    let shape = |row: &Value| ["batch", "heads_q", "heads_kv", "seqlen_k"].map(|field| row[field].as_u64());
    let mut shapes: Vec<_> = records.rows("decode").iter().map(shape).collect();
    shapes.dedup();
    assert_eq!(decode.len(), shapes.len());
    for (row, own) in decode.iter().zip(shapes) {
        let kernel = format!("-{}-rs-ovl-q2-s2-", row[1]);
        let is_it = |record: &&Value| {
            shape(record) == own && record["spec"].as_str().is_some_and(|spec| spec.contains(&kernel))
        };
        let record = records.rows("decode").iter().find(is_it).unwrap_or_else(|| panic!("no row {}", row[0]));
        decoding(row, record);
    }
    let models = records.table("### Decoding models");
    assert_eq!(models.len(), records.rows("decode-models").len());
    for (row, record) in models.iter().zip(records.rows("decode-models")) {
        assert_eq!(record["name"], *row[0]);
        decoding(row, record);
    }
    let mixed = records.table("### Mixed steps");
    assert_eq!(mixed.len(), records.rows("mixed").len());
    for (row, record) in mixed.iter().zip(records.rows("mixed")) {
        assert_eq!(record["name"], *row[0]);
        beside(&row[0], &row[2], record, Some(of_peer(record, "fa3").expect("a rate")));
    }
    let chunks = records.table("### Chunks of prompts");
    assert_eq!(chunks.len(), records.rows("chunks").len());
    for (row, record) in chunks.iter().zip(records.rows("chunks")) {
        assert_eq!(record["name"], *row[0]);
        same(&row[0], &row[2], 1000.0 * record["ms_median"].as_f64().expect("a time"));
        beside(&row[0], &row[3], record, of_peer(record, "fa3"));
    }
    let packed = records.table("### Packed batches");
    for (column, name, peer) in [(1, "packed", "fa3"), (2, "packed-bwd", "fa4")] {
        let rows = records.rows(name);
        let of = |row: &Value| of_peer(row, peer).expect("a rate");
        assert_eq!((packed.len(), rows.len()), (3, 4), "{name}");
        for (row, record) in packed.iter().zip(rows) {
            let cell = row[column].split(" (dense").next().unwrap_or_default();
            beside(&row[0], cell, record, Some(of(record)));
        }
        let dense = numbers(&packed[1][column]);
        same("dense", dense[3], rate(&rows[3]));
        same("dense", dense[4], of(&rows[3]).0);
    }
    let plans = records.table("### Sinks and the plan kernel");
    let names = ["1 decode", "32 decodes", "256 decodes", "1024 decodes", "8300 decodes"];
    for (shown, name) in plans[0][1..].iter().zip(names) {
        let record = records.rows("plan").iter().find(|row| row["name"] == name).expect("a row");
        same(name, shown, rate(record));
    }
    let paged = records.table("### Keys in pages");
    let forms =
        ["in one piece", "pages of 128", "pages of 64", "pages of 16", "pages of 16 in order", "pages of 1"];
    for (at, form) in forms.into_iter().chain(["pages of 1 in order"]).enumerate() {
        let record = |queries: u32| {
            let is_it = |row: &&Value| row["name"] == form && row["seqlen_q"] == queries;
            records.rows("paged").iter().find(is_it).unwrap_or_else(|| panic!("no row {form}"))
        };
        same(form, &paged[0][at + 1], rate(record(1)));
        same(form, &paged[1][at + 1], rate(record(512)));
        same(form, &paged[2][at + 1], record(512)["ms_min"].as_f64().expect("a time"));
    }
}

#[test]
fn figures_in_the_text_are_their_records() {
    let records = Records::read();
    let shows = |text: &str| assert!(records.page.contains(text), "the page does not say '{text}'");
    let mean = |name: &str, group: &str, against: &str| {
        let all = records.of(name)["summary"].as_array().expect("a summary");
        let of =
            |s: &&Value| s["group"].as_str().is_some_and(|g| g.contains(group)) && s["against"] == against;
        let found = all.iter().find(of).unwrap_or_else(|| panic!("{name}: no {group} against {against}"));
        found["geometric_mean"].as_f64().expect("a mean")
    };
    for (list, group, beside_cudnn) in
        [("models", "models", "models-bwd"), ("held-out", "held out", "held-out-bwd-cudnn")]
    {
        let of = |against| mean(&format!("{list}-fwd"), group, against);
        shows(&format!(
            "Forward: {:.2} times the best peer in geometric mean (cuDNN {:.2}, FlashAttention-3 {:.2}, \
             FlashAttention-4 {:.2})",
            of("best peer"),
            of("cudnn"),
            of("fa3"),
            of("fa4")
        ));
        shows(&format!("Backward: {:.2} times FlashAttention-4", mean(&format!("{list}-bwd"), group, "fa4")));
        shows(&format!("{:.2} times cuDNN over", mean(beside_cudnn, group, "cudnn")));
    }
    for (list, peer) in
        [("sharded", "better of FlashAttention-3 and cuDNN"), ("packed-models", "better peer")]
    {
        let group = if list == "sharded" { "GPUs" } else { "packed models" };
        let forward = mean(&format!("{list}-fwd"), group, "best peer");
        shows(&format!("Forward: {forward:.2} times the {peer} in geometric mean"));
        shows(&format!("Backward: {:.2} times FlashAttention-4", mean(&format!("{list}-bwd"), group, "fa4")));
    }
    let deterministic = mean("models-bwd-deterministic", "models", "fa4");
    shows(&format!("{deterministic:.2} times FlashAttention-4's deterministic kernels"));
    let forward = |against| mean("sm90", "bf16", against);
    shows(&format!(
        "{:.2} times the best peer in geometric mean (cuDNN {:.2}, FlashAttention-4 {:.2}, FlashAttention-3 \
         {:.2})",
        forward("best peer"),
        forward("cudnn"),
        forward("fa4"),
        forward("fa3")
    ));
    let backward = |against| mean("sm90-bwd", "bf16", against);
    shows(&format!("{:.2} times cuDNN in geometric mean", backward("cudnn")));
    shows(&format!("{:.2} times FlashAttention-4 in geometric mean", backward("fa4")));
    shows(&format!("The forward is {:.2} times FlashAttention-2", mean("sm80", "16k tokens", "fa2")));
    shows(&format!("The backward is {:.2} times FlashAttention-2's", mean("sm80-bwd", "16k tokens", "fa2")));
    shows(&format!("takes {:.2} ms", rate(&records.rows("step")[0])));
    let sinks = |name: &str| {
        let row = records.rows("sinks").iter().find(|row| row["name"] == name);
        1000.0 * row.expect("a row")["ms_median"].as_f64().expect("a time")
    };
    let (with, without) = (sinks("sinks, window 128"), sinks("no sinks, window 128"));
    let more = 100.0 * (with / without - 1.0);
    shows(&format!("sinks take {with:.1} us against {without:.1} without, {more:.1} % more"));
}

/// Every record of rates that the page names exists, and the page has its date; commands that write one name
/// one that is there.
#[test]
fn records_are_named_with_their_dates() {
    let records = Records::read();
    let flat = records.page.replace('\n', " ");
    let named: Vec<&str> = flat
        .match_indices("docs/results/marks-")
        .filter_map(|(at, _)| flat[at + "docs/results/".len()..].split_inclusive(".json").next())
        .filter(|name| !name.contains(' '))
        .collect();
    assert!(named.len() > 15, "{named:?}");
    for (name, record) in &records.files {
        assert!(named.contains(&name.as_str()), "the page does not name {name}");
        let date = &record["date"].as_str().expect("a date")[..10];
        let at = flat.find(name.as_str()).expect("named");
        let from =
            flat[..at].rfind(" # ").map_or(0, |start| start).max(flat[..at].rfind(" ## ").unwrap_or(0));
        let until = flat[at..].find(" ## ").map_or(flat.len(), |end| at + end);
        assert!(flat[from..until].contains(date), "{name} is of {date}: its section does not say so");
    }
    for name in named {
        assert!(records.files.contains_key(name), "there is no record {name}");
    }
}

/// README's table of rates, which repeats the records.
#[test]
fn the_readme_sums_up_the_records() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let readme = std::fs::read_to_string(root.join("README.md")).expect("the README").replace('\n', " ");
    let shows = |text: &str| assert!(readme.contains(text), "README does not say '{text}'");
    let records = Records::read();
    let of = |name: &str, group: &str, against: &str| {
        let all = records.of(name)["summary"].as_array().expect("a summary");
        let is_it =
            |s: &&Value| s["group"].as_str().is_some_and(|g| g.contains(group)) && s["against"] == against;
        let found = all.iter().find(is_it).unwrap_or_else(|| panic!("{name}: no {group} against {against}"));
        ["geometric_mean", "lowest"].map(|field| found[field].as_f64().expect("a ratio"))
    };
    let [mean, lowest] = of("models-fwd", "models", "best peer");
    shows(&format!("| layers of 24 released models | {mean:.2} (lowest {lowest:.2}) |"));
    let [mean, lowest] = of("models-bwd", "models", "fa4");
    let [ordered, ordered_lowest] = of("models-bwd-deterministic", "models", "fa4");
    shows(&format!(
        "| {mean:.2} (lowest {lowest:.2}); deterministic {ordered:.2} (lowest {ordered_lowest:.2}) |"
    ));
    let [mean, lowest] = of("held-out-fwd", "held out", "best peer");
    let [backward, backward_lowest] = of("held-out-bwd", "held out", "fa4");
    shows(&format!("tuned | {mean:.2} (lowest {lowest:.3}) | {backward:.2} (lowest {backward_lowest:.2}) |"));
    let [mean, lowest] = of("sm90", "bf16", "best peer");
    let [backward, backward_lowest] = of("sm90-bwd", "bf16", "fa4");
    shows(&format!(
        "| 48 square shapes | {mean:.2} (lowest {lowest:.2}) | {backward:.2} (lowest {backward_lowest:.2}) |"
    ));
    let [mean, lowest] = of("decode-models", "decoding", "best peer");
    shows(&format!(
        "| decoding, 12 layers of models | {mean:.2} (lowest {lowest:.2}) of cuDNN and FlashAttention-3 |"
    ));
    for (list, group, what) in [
        ("sharded", "GPUs", "20 layers on one of several GPUs"),
        ("packed-models", "packed", "14 packed batches of models"),
    ] {
        let [mean, lowest] = of(&format!("{list}-fwd"), group, "best peer");
        let [backward, backward_lowest] = of(&format!("{list}-bwd"), group, "fa4");
        shows(&format!(
            "| {what} | {mean:.2} (lowest {lowest:.2}) | {backward:.2} (lowest {backward_lowest:.2}) |"
        ));
    }
    let [mean, lowest] = of("drawn-fwd", "drawn", "best peer");
    let [backward, backward_lowest] = of("drawn-bwd", "drawn", "best peer");
    shows(&format!(
        "drawn at random | {mean:.2} (lowest {lowest:.2}; 0.88 in an earlier draw) | {backward:.2} (lowest \
         {backward_lowest:.2}), the better"
    ));
    let ratios = |name: &str, peer: &str| {
        let rows = records.rows(name).iter().filter(|row| row["group"] == "packed, bf16");
        let ratios: Vec<f64> =
            rows.map(|row| rate(row) / row["peers"][peer].as_f64().expect("a rate")).collect();
        [ratios.iter().copied().fold(f64::INFINITY, f64::min), ratios.iter().copied().fold(0.0, f64::max)]
    };
    let [low, high] = ratios("packed", "fa3");
    let [backward_low, backward_high] = ratios("packed-bwd", "fa4");
    shows(&format!(
        "| packed batches | {low:.2} to {high:.2} (over FlashAttention-3) | {backward_low:.2} to \
         {backward_high:.2} |"
    ));
}
