//! Summaries of records: what tables, plots, pages and tests read of a run, in a few kilobytes.
//!
//! A summary is JSON with the fields of its record, without those that nothing reads. A list of objects is a
//! table: `columns` has the paths of the fields (`/name` beside the one before), `rows` their values (null
//! where a row has no such field) and `same` the fields that all rows share. [`read`] gives a full record and
//! its summary in the same form.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fa_core::Dtype;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::error::{Error, Result, message, read_record};
use crate::record;
use crate::shape::pair;

/// Significant digits of measured numbers.
const DIGITS: usize = 6;

/// Fields whose numbers define a problem or a kernel, and are not rounded.
const EXACT: [&str; 2] = ["problem", "spec"];

/// Fields that no summary has, wherever they are in a record.
const LEFT_OUT: [&str; 7] =
    ["version", "memory_bytes", "sources", "judged", "peer_errors", "errors", "names"];

/// A row of a record of `fa bench`, as far as tables and pages show it.
#[derive(Clone, Debug, Deserialize)]
pub struct RateRow {
    /// `fwd` or `bwd`.
    pub kind: String,
    /// The part of its list.
    pub group: String,
    /// Set for rows that a shape alone does not describe.
    pub name: Option<String>,
    /// Sequences.
    pub batch: usize,
    /// Query heads.
    pub heads_q: usize,
    /// Heads of K and V.
    pub heads_kv: usize,
    /// Queries of a sequence.
    pub seqlen_q: usize,
    /// Keys of a sequence.
    pub seqlen_k: usize,
    /// Head dim of Q and K.
    pub head_dim: usize,
    /// Head dim of V.
    pub head_dim_v: usize,
    /// The mask, as in `causal+window(128)`.
    pub mask: String,
    /// Element type.
    pub dtype: Dtype,
    /// The kernel's name.
    pub spec: String,
    /// Milliseconds.
    pub ms_median: f64,
    /// 10^12 operations a second, where the row counts them.
    pub tflops: Option<f64>,
    /// What counts for the list, in `unit`.
    pub rate: f64,
    /// `TFLOP/s`, `TB/s`, or a time such as `ms per step`.
    pub unit: String,
    /// `rate` of other libraries, by name.
    #[serde(default)]
    pub peers: BTreeMap<String, f64>,
    /// Why it was not measured.
    pub error: Option<String>,
}

impl RateRow {
    /// Its problem in words, as `2 x 8192, 32:8, hd 128, causal`.
    pub fn shape(&self) -> String {
        let RateRow { batch, mask, dtype, .. } = self;
        let dtype = if *dtype == Dtype::Bf16 { String::new() } else { format!(", {dtype}") };
        format!(
            "{batch} x {}, {}, hd {}, {mask}{dtype}",
            pair(self.seqlen_q, self.seqlen_k, 'x'),
            pair(self.heads_q, self.heads_kv, ':'),
            pair(self.head_dim, self.head_dim_v, '-')
        )
    }

    /// Its name, or else its shape.
    pub fn label(&self) -> String {
        self.name.clone().unwrap_or_else(|| self.shape())
    }

    /// How many times as fast as a rate of another: of times (`ms per step`) the lesser is the better.
    pub fn over(&self, rate: f64) -> f64 {
        if self.unit.contains(" per ") { rate / self.rate } else { self.rate / rate }
    }

    /// The best other library and our rate over its.
    pub fn best_peer(&self) -> Option<(&str, f64)> {
        let over = self.peers.iter().map(|(name, &rate)| (name.as_str(), self.over(rate)));
        over.min_by(|a, b| a.1.total_cmp(&b.1))
    }
}

/// What a record is of, which says where its summary is kept and what it lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Of `fa bench`.
    Rates,
    /// Of `fa tune`.
    Tuning,
    /// Of `fa ladder`.
    Ladder,
    /// Of `fa ladder --profile`.
    Profile,
    /// Of `fa validate --all-configs`.
    Configs,
}

impl Kind {
    /// The kind of a record; `None` for anything else.
    pub fn of(record: &Value) -> Option<Kind> {
        let has = |field: &str| record.get(field).is_some();
        if has("problems") {
            return Some(Kind::Tuning);
        }
        let first = record.get("rows")?.get(0);
        if record["kind"] == "configs" {
            Some(Kind::Configs)
        } else if first.is_some_and(|row| row.get("planned_registers").is_some()) {
            Some(Kind::Profile)
        } else if first.is_some_and(|row| row.get("ladder").is_some()) {
            Some(Kind::Ladder)
        } else {
            (first.is_some_and(|row| row.get("spec").is_some())).then_some(Kind::Rates)
        }
    }

    /// The folder of its summaries below that of all results.
    pub const fn folder(self) -> &'static str {
        match self {
            Kind::Rates => "",
            Kind::Tuning => "tune",
            Kind::Ladder => "ladder",
            Kind::Profile => "profile",
            Kind::Configs => "configs",
        }
    }

    /// Fields that nothing reads of a summary, wherever they are.
    const fn left_out(self) -> &'static [&'static str] {
        match self {
            // Ratios by group follow from the rows.
            Kind::Rates => &["summary", "ratio"],
            // They follow from the times and the planner, which may have changed since.
            Kind::Tuning => &[
                "key",
                "name",
                "error",
                "rank",
                "predicted_ms",
                "winner",
                "tflops",
                "first_choice",
                "first_choice_over_best",
                "first_choice_rate",
                "rank_correlation",
                "mean_rank_correlation",
                "overall_rank_correlation",
                "distribution",
                "halves",
            ],
            Kind::Ladder => &["kernels", "change"],
            Kind::Profile => &["kernels"],
            Kind::Configs => &[
                "summaries",
                "cases",
                "problem",
                "fits",
                "registers_planned",
                "register_limit",
                "fault",
                "smem",
                "right",
                "tflops_predicted",
            ],
        }
    }
}

/// Reads a record of `command`, or the summary of one.
///
/// # Errors
/// A file that cannot be read, and [`Error::Request`] for one that is no such record.
pub fn read<T: DeserializeOwned>(path: &Path, command: &str) -> Result<T> {
    let not_one = |why| Error::Request(format!("{} is not a record of `{command}`: {why}", path.display()));
    let record = serde_json::from_str(&read_record(path)?).map_err(not_one)?;
    serde_json::from_value(expanded(record)).map_err(not_one)
}

/// Writes the summary of a full record to the folder of its kind below `results`, under the same file name.
///
/// # Errors
/// A file that cannot be read, is not such a record, or cannot be written.
pub fn keep(record: &Path, results: &Path) -> Result<PathBuf> {
    let value: Value = read(record, "fa bench")?;
    let text =
        of(&value).map_err(|why| Error::Request(format!("{}: {}", record.display(), message(&why))))?;
    let folder = Kind::of(&value).map_or("", Kind::folder);
    let name = record.file_name().unwrap_or(record.as_os_str()).to_string_lossy();
    record::write(results, folder, &name, &text)
}

/// The summary of a record, as text.
///
/// # Errors
/// [`Error::Request`] for what is no record that has a summary.
pub fn of(record: &Value) -> Result<String> {
    let kind = Kind::of(record).ok_or_else(|| {
        let commands = "`fa bench`, `fa tune`, `fa ladder` or `fa validate --all-configs`";
        Error::Request(format!("only records of {commands}, as --json writes them, have summaries"))
    })?;
    let mut record = record.clone();
    reduce(&mut record, kind);
    round(&mut record);
    let mut text = String::new();
    write(&packed(record), 0, &mut text);
    Ok(text + "\n")
}

/// Takes out the fields that the summary lacks, and those without a value.
fn reduce(value: &mut Value, kind: Kind) {
    let is_left_out = |name: &str| LEFT_OUT.contains(&name) || kind.left_out().contains(&name);
    match value {
        Value::Object(fields) => {
            let keeps = |name: &str, own: &Value| {
                // Of configurations it is a name, else the problem itself.
                !own.is_null() && (!is_left_out(name) || (name == "problem" && own.is_object()))
            };
            fields.retain(|name, own| keeps(name, own));
            fields.values_mut().for_each(|own| reduce(own, kind));
        }
        Value::Array(values) => values.iter_mut().for_each(|own| reduce(own, kind)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn round(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields
                .iter_mut()
                .filter(|(name, _)| !EXACT.contains(&name.as_str()))
                .for_each(|(_, own)| round(own));
        }
        Value::Array(values) => values.iter_mut().for_each(round),
        Value::Number(number) if number.is_f64() => {
            let exact = number.as_f64().unwrap_or_default();
            // Digits are decimal ones: by text, since a product with a power of ten would not be.
            let rounded: Option<f64> = format!("{exact:.*e}", DIGITS - 1).parse().ok();
            *value = json!(rounded.unwrap_or(exact));
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Lists of objects as tables.
fn packed(value: Value) -> Value {
    match value {
        Value::Object(fields) => fields.into_iter().map(|(name, own)| (name, packed(own))).collect(),
        Value::Array(values) if values.len() > 1 && values.iter().all(Value::is_object) => table(values),
        Value::Array(values) => values.into_iter().map(packed).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => value,
    }
}

/// What is between the names of a path.
const BETWEEN: char = '/';

fn table(objects: Vec<Value>) -> Value {
    let mut columns: Vec<String> = Vec::new();
    let mut rows: Vec<Vec<Value>> = Vec::new();
    for object in objects {
        let mut row = vec![Value::Null; columns.len()];
        for (path, leaf) in leaves(object, "") {
            let at = columns.iter().position(|own| *own == path).unwrap_or_else(|| {
                columns.push(path);
                row.push(Value::Null);
                columns.len() - 1
            });
            row[at] = packed(leaf);
        }
        rows.push(row);
    }
    rows.iter_mut().for_each(|row| row.resize(columns.len(), Value::Null));
    let mut same = json!({});
    let is_same = |at: usize| !rows[0][at].is_null() && rows.iter().all(|row| row[at] == rows[0][at]);
    let (shared, own): (Vec<usize>, Vec<usize>) = (0..columns.len()).partition(|&at| is_same(at));
    for at in shared {
        set(&mut same, &columns[at], rows[0][at].clone());
    }
    let pick = |row: &[Value]| own.iter().map(|&at| row[at].clone()).collect::<Vec<Value>>();
    let mut last = "";
    let names = own.iter().map(|&at| shortened(&columns[at], &mut last)).collect::<Vec<_>>();
    json!({ "same": same, "columns": names, "rows": rows.iter().map(|row| pick(row)).collect::<Vec<_>>() })
}

/// A path as it is written after that of the column `last`.
fn shortened<'a>(path: &'a str, last: &mut &'a str) -> &'a str {
    let (folder, before) = (path.rfind(BETWEEN), last.rfind(BETWEEN));
    let beside = folder.is_some_and(|at| before == Some(at) && path[..at] == last[..at]);
    *last = path;
    folder.filter(|_| beside).map_or(path, |at| &path[at..])
}

/// The whole path of a column, after that of the column `last`.
fn whole(written: &str, last: &str) -> String {
    let folder = if written.starts_with(BETWEEN) { last.rfind(BETWEEN).unwrap_or(0) } else { 0 };
    format!("{}{written}", &last[..folder])
}

/// The values of an object that are no objects, and empty ones, by path.
fn leaves(value: Value, path: &str) -> Vec<(String, Value)> {
    match value {
        Value::Object(fields) if !fields.is_empty() && !fields.keys().any(|name| name.contains(BETWEEN)) => {
            let below =
                |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}{BETWEEN}{name}") };
            fields.into_iter().flat_map(|(name, own)| leaves(own, &below(&name))).collect()
        }
        leaf @ (Value::Null
        | Value::Bool(_)
        | Value::Number(_)
        | Value::String(_)
        | Value::Array(_)
        | Value::Object(_)) => vec![(path.to_owned(), leaf)],
    }
}

/// Sets the field at `path`, with the objects on the way.
fn set(object: &mut Value, path: &str, value: Value) {
    let mut at = object;
    for name in path.split(BETWEEN) {
        if !at.is_object() {
            *at = json!({});
        }
        at = &mut at[name];
    }
    *at = value;
}

/// Tables as lists of objects.
fn expanded(value: Value) -> Value {
    match value {
        Value::Object(fields) if is_table(&fields) => {
            let same = fields.get("same").cloned().unwrap_or_else(|| json!({}));
            let list = |name: &str| fields[name].as_array().cloned().unwrap_or_default();
            let mut columns: Vec<String> = Vec::new();
            for name in list("columns") {
                let last = columns.last().map_or("", String::as_str);
                columns.push(whole(name.as_str().unwrap_or_default(), last));
            }
            let object = |row: Value| {
                let mut object = same.clone();
                let cells = row.as_array().cloned().unwrap_or_default();
                for (path, cell) in columns.iter().zip(cells).filter(|(_, cell)| !cell.is_null()) {
                    set(&mut object, path, cell);
                }
                expanded(object)
            };
            list("rows").into_iter().map(object).collect()
        }
        Value::Object(fields) => fields.into_iter().map(|(name, own)| (name, expanded(own))).collect(),
        Value::Array(values) => values.into_iter().map(expanded).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => value,
    }
}

fn is_table(fields: &Map<String, Value>) -> bool {
    fields.len() <= 3 && ["columns", "rows"].iter().all(|name| fields.get(*name).is_some_and(Value::is_array))
}

/// A line for each field of the whole and for each row of a table.
fn write(value: &Value, depth: usize, text: &mut String) {
    let lines = |open: char, items: Vec<(String, &Value)>, close: char, text: &mut String| {
        text.push(open);
        for (index, (before, own)) in items.into_iter().enumerate() {
            text.push_str(if index == 0 { "\n" } else { ",\n" });
            text.push_str(&before);
            write(own, depth + 1, text);
        }
        text.push('\n');
        text.push(close);
    };
    match value {
        Value::Object(fields) if is_table(fields) => {
            text.push_str(&format!(
                "{{\"same\":{},\"columns\":{},\"rows\":",
                fields["same"], fields["columns"]
            ));
            let rows = fields["rows"].as_array().into_iter().flatten();
            lines('[', rows.map(|row| (String::new(), row)).collect(), ']', text);
            text.push('}');
        }
        Value::Object(fields) if depth == 0 => {
            let fields = fields.iter().map(|(name, own)| (format!("{}:", json!(name)), own));
            lines('{', fields.collect(), '}', text);
        }
        Value::Array(values) if values.iter().any(Value::is_object) => {
            text.push('[');
            for (index, own) in values.iter().enumerate() {
                text.push_str(if index == 0 { "" } else { "," });
                write(own, depth + 1, text);
            }
            text.push(']');
        }
        other @ (Value::Null
        | Value::Bool(_)
        | Value::Number(_)
        | Value::String(_)
        | Value::Array(_)
        | Value::Object(_)) => {
            text.push_str(&other.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(record: &Value) -> Value {
        let text = of(record).expect("a record");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("summary.json");
        std::fs::write(&path, &text).expect("written");
        read(&path, "fa bench").expect("a summary")
    }

    #[test]
    fn a_summary_is_read_as_its_record_without_what_nothing_reads() {
        let row = |name: &str, ms: f64, peers: Value| {
            json!({
                "name": name, "spec": "kernel", "ms_median": ms, "peers": peers, "ratio": null,
                "judged": { "rows": 3 }
            })
        };
        let record = json!({
            "command": "fa bench", "version": "0.1.0", "reps": 24,
            "kernels": [{ "name": "kernel", "spec": { "head_dim": 64 }, "sources": "0123" }],
            "rows": [
                row("a", 0.123456789, json!({})),
                row("b", 1234567.0, json!({ "fa3": 2.0 })),
                row("c", 1.0, json!({ "fa3": 2.0, "fa4": 700.126 })),
            ],
        });
        let row = |name: &str, ms: f64, peers: Value| {
            let mut row = json!({ "name": name, "spec": "kernel", "ms_median": ms });
            row["peers"] = peers;
            row
        };
        let expected = json!({
            "command": "fa bench", "reps": 24,
            "kernels": [{ "name": "kernel", "spec": { "head_dim": 64 } }],
            "rows": [
                row("a", 0.123457, json!({})),
                row("b", 1234570.0, json!({ "fa3": 2.0 })),
                row("c", 1.0, json!({ "fa3": 2.0, "fa4": 700.126 })),
            ],
        });
        assert_eq!(summary(&record), expected);
        assert_eq!(summary(&expected), expected, "a summary of a summary is the same");
    }

    #[test]
    fn tuned_kernels_keep_their_spec_and_their_times() {
        let kernel = |tile_n: u32, ms: Option<f64>| {
            let spec = json!({ "kernel": { "Sm80Fwd": { "tile_m": 64, "tile_n": tile_n } } });
            json!({ "name": "x", "spec": spec, "ms": ms })
        };
        let problem = |number: usize, scale: f64| {
            json!({
                "number": number,
                "problem": { "batch": 2, "softmax_scale": scale, "mask": { "left": null, "right": null } },
                "winner": "x",
                "kernels": [kernel(64, Some(1.0)), kernel(128, None)],
            })
        };
        let read = summary(&json!({ "arch": "sm90", "problems": [problem(0, 0.1234567), problem(1, 0.5)] }));
        let own = &read["problems"][0];
        assert_eq!(own["problem"], json!({ "batch": 2, "softmax_scale": 0.1234567, "mask": {} }));
        assert_eq!(own["kernels"][1], json!({ "spec": kernel(128, None)["spec"] }));
        assert_eq!((&read["problems"][1]["kernels"][0]["ms"], own.get("winner")), (&json!(1.0), None));
    }

    #[test]
    fn kinds_are_told_apart() {
        for (record, kind) in [
            (json!({ "problems": [] }), Some(Kind::Tuning)),
            (json!({ "kind": "configs", "rows": [{ "kernel": "x" }] }), Some(Kind::Configs)),
            (json!({ "rows": [{ "ladder": "tiles", "spec": "x" }] }), Some(Kind::Ladder)),
            (json!({ "rows": [{ "ladder": "tiles", "planned_registers": 168 }] }), Some(Kind::Profile)),
            (json!({ "rows": [{ "spec": "x" }] }), Some(Kind::Rates)),
            (json!({ "kind": "validate", "groups": [] }), None),
            (json!([1]), None),
        ] {
            assert_eq!(Kind::of(&record), kind, "{record}");
            assert_eq!(of(&record).is_ok(), kind.is_some(), "{record}");
        }
    }
}
