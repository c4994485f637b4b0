//! `cargo xtask search` from outside: exit codes, messages and formats.

use std::process::{Command, Output};

use fa_planner::guide::search::SearchResult;

fn search(args: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.arg("search").args(args.split_whitespace()).output().expect("xtask starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

fn json(args: &str) -> serde_json::Value {
    let output = search(&format!("{args} --format json"));
    assert_eq!(output.status.code(), Some(0), "{args}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn json_has_the_documented_fields() {
    let result = json("--headdim 192-128");
    let keys = |value: &serde_json::Value| -> Vec<String> {
        let mut keys: Vec<String> = value.as_object().expect("an object").keys().cloned().collect();
        keys.sort();
        keys
    };
    assert_eq!(keys(&result), ["arch", "bwd", "fwd", "head_dim", "head_dim_v"]);
    assert_eq!(
        (&result["arch"], &result["head_dim"], &result["head_dim_v"]),
        (&"sm90".into(), &192.into(), &128.into())
    );
    assert_eq!(result["fwd"].as_array().map(Vec::len), Some(28));
    assert_eq!(result["bwd"].as_array().map(Vec::len), Some(18));
    let common = ["tile_m", "tile_n", "num_wg", "total_regs", "reg_limit", "smem_bytes", "smem_traffic"]
        .map(String::from);
    let mut fwd = ["pv_is_rs", "overlap_wg", "regs_s", "regs_o", "regs_p"].map(String::from).to_vec();
    let mut bwd = [
        "q_stage",
        "do_stage",
        "pds_stage",
        "sdp_swap_ab",
        "dkv_swap_ab",
        "dq_swap_ab",
        "atom_layout_m_sdp",
        "atom_layout_n_dkv",
        "atom_layout_m_dq",
        "mma_dkv_is_rs",
        "regs_sdp",
        "regs_dk",
        "regs_dv",
        "regs_dq",
    ]
    .map(String::from)
    .to_vec();
    for (direction, fields) in [("fwd", &mut fwd), ("bwd", &mut bwd)] {
        fields.extend(common.clone());
        fields.sort();
        assert_eq!(&keys(&result[direction][0]), fields, "{direction}");
    }
}

#[test]
fn lists_are_cut_and_explained_on_request_only() {
    let cut = json("--headdim 128 -n 3 --explain");
    assert_eq!(
        (cut["fwd"].as_array().map(Vec::len), cut["bwd"].as_array().map(Vec::len)),
        (Some(3), Some(3))
    );
    let nearest = &cut["explain"]["bwd"]["registers"]["nearest"]["reason"]["RegOverflow"];
    assert_eq!((&nearest["need"], &nearest["have"]), (&224.into(), &216.into()));
    assert_eq!(cut["explain"]["bwd"]["feasible"], 142);

    let rows = |args: &str| text(&search(args).stdout).lines().filter(|line| line.starts_with(" 2 ")).count();
    assert_eq!(rows("--headdim 128 --mode fwd"), 10);
    assert_eq!(rows("--headdim 128 --mode fwd -n 4"), 4);
}

#[test]
fn ron_reads_back() {
    let output = search("--headdim 72 --mode bwd --format ron --explain");
    let result: SearchResult = ron::from_str(&text(&output.stdout)).expect("RON");
    assert_eq!((result.head_dim, result.fwd.len(), result.bwd.len()), (72, 0, 14));
    assert!(result.explain.is_some());
}

#[test]
fn nothing_found_is_an_answer_with_the_nearest_misses() {
    let output = search("--headdim 256 --mode bwd");
    assert_eq!(output.status.code(), Some(0));
    let message = text(&output.stdout);
    assert!(message.contains("no configuration fits"), "{message}");
    assert!(message.contains("needs 224 registers per thread, has 216"), "{message}");

    let output = search("--headdim 256 --mode bwd --format json");
    assert!(text(&output.stderr).contains("no configuration fits"));
    let result: SearchResult = serde_json::from_slice(&output.stdout).expect("JSON");
    assert!(result.bwd.is_empty() && result.explain.is_none());
}

#[test]
fn other_architectures_have_both_passes() {
    let output = search("--headdim 64 --arch sm80 -n 1");
    let table = text(&output.stdout);
    assert!(
        table.contains("sm80 forward, head dim 64") && table.contains("sm80 backward, head dim 64"),
        "{table}"
    );
    let output = search("--headdim 64 --arch sm100 --mode bwd -n 2 --format json");
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let counts = ["fwd", "bwd"].map(|pass| found[pass].as_array().expect("a list").len());
    assert_eq!(counts, [0, 2], "{found}");
}

#[test]
fn bad_input_is_named_and_exits_with_2() {
    for (args, part) in [
        ("", "--headdim"),
        ("--headdim 0", "head_dim is 0"),
        ("--headdim abc", "'abc' is no head dim"),
        ("--headdim 192-", "'192-' is no head dim"),
        ("--headdim 577", "1 to 576"),
        ("--headdim 99999999999999999999", "no head dim"),
        ("--headdim 64 --mode sideways", "fwd, bwd or both"),
        ("--headdim 64 --arch sm75", "sm80"),
        ("--headdim 64 --tile-n 0", "1 to 1024"),
        ("--headdim 64 --tile-m 64,4294967295", "1 to 1024"),
        ("--headdim 64 --tile-n 64,x", "x"),
        ("--headdim 64 --mode fwd --tile-m 64", "64 rows per MMA warpgroup"),
        ("--headdim 64 -n 0", "0"),
        ("--headdim 100 --arch sm80 --mode fwd", "multiples of 8"),
    ] {
        let output = search(args);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args}: {message}");
        assert!(message.contains(part), "{args}: {message}");
        assert!(output.stdout.is_empty(), "{args}");
    }
}
