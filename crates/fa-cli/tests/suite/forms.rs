//! The forms of what `--json` prints without a GPU: the paths of all keys, held to a record. What programs
//! read changes on purpose or not at all; `FA_GUARD=write` writes the record anew.

use std::collections::BTreeSet;
use std::fmt::Write;

use serde_json::Value;

use crate::common::{Dir, fa_args, repository, text};

/// The paths of all keys and the kinds of their values.
fn paths(value: &Value, at: &str, into: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(key, value)| paths(value, &format!("{at}.{key}"), into));
        }
        Value::Array(values) => {
            values.iter().for_each(|value| paths(value, &format!("{at}[]"), into));
        }
        Value::Null => {
            into.insert(format!("{at} null"));
        }
        Value::Bool(_) => {
            into.insert(format!("{at} bool"));
        }
        Value::Number(_) => {
            into.insert(format!("{at} number"));
        }
        Value::String(_) => {
            into.insert(format!("{at} text"));
        }
    }
}

#[test]
fn forms_of_json_are_those_of_the_record() {
    let dir = Dir::new();
    let input = repository("examples/minilm-layer0.safetensors");
    let spec = repository("crates/fa-kernels/specs/sm90/hd128-causal-bf16.ron");
    let output = dir.path("out.safetensors");
    let (input, spec, output) = (text(&input), text(&spec), text(&output));
    let run = format!("run {input} --backend cpu -o {output} --json");
    let check = format!("check {output} {output} --inputs {input} --json");
    let lines = [
        "plan --headdim 128 --seqlen 1024 --causal -n 2 --json",
        "plan --headdim 128 --seqlen 1024 --mode both -n 2 --json",
        "plan --headdim 192-128 --mode bwd --deterministic -n 2 --json",
        "plan --batch 64 --heads 32:8 --seqlen 1x8192 --packed 64 --page 16 --sinks -n 2 --json",
        "plan --batch 2 --heads 32:8 --seqlen 1x8192 -n 2 --json",
        "plan --headdim 64 --arch sm80 --softcap 30 -n 2 --json",
        &format!("plan --headdim 128 --causal --spec {spec} --json"),
        "plan --headdim 128 --why tile_n=192 --json",
        "plan --guide --headdim 128 -n 2 --json",
        "plan --guide --headdim 192-128 --mode bwd -n 2 --json",
        &run,
        &check,
        "bench --backend reference --headdim 16 --seqlen 16 --heads 1 --seconds 0.001 --mode both --json -",
        "bench --append --backend cpu --seconds 0.001 --json -",
    ];
    let mut forms = String::new();
    for line in lines {
        let words: Vec<&str> = line.split_whitespace().collect();
        let mut found = BTreeSet::new();
        paths(&fa_args(&words).json(), "", &mut found);
        let is_plain = |word: &&&str| !word.contains('/') && !word.contains('\\');
        let name: Vec<&str> = words.iter().filter(is_plain).copied().collect();
        writeln!(forms, "{}", name.join(" ")).expect("written");
        found.iter().for_each(|path| writeln!(forms, "  {path}").expect("written"));
    }
    let record = repository("crates/fa-cli/tests/data/json-forms.txt");
    if std::env::var("FA_GUARD").is_ok_and(|mode| mode == "write") {
        std::fs::write(&record, &forms).expect("written");
    }
    let known = std::fs::read_to_string(&record).unwrap_or_default();
    let missing = known.lines().find(|line| !forms.lines().any(|own| own == *line));
    assert_eq!(forms, known, "first line of the record that is not printed: {missing:?}");
}
