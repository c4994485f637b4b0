//! `fa plan`: tables, JSON, RON, why, and the report.

use fa_core::Arch;
use fa_planner::guide::report::Query;
use fa_planner::guide::search::SearchResult;
use fa_planner::{HeadDims, Mode};

use crate::common::{Dir, fa, fa_args, refuses, text};

#[test]
fn json_lists_everything_and_n_limits_it() {
    let all = fa("plan --headdim 128 --seqlen 8192 --causal --mode both --json").json();
    let plans = all["forward"]["plans"].as_array().unwrap();
    assert_eq!(plans.len() as u64, all["forward"]["fit"].as_u64().unwrap());
    let rejected: u64 =
        all["forward"]["rejected"].as_array().unwrap().iter().map(|r| r["count"].as_u64().unwrap()).sum();
    assert_eq!(plans.len() as u64 + rejected, all["forward"]["tried"].as_u64().unwrap());
    let seconds: Vec<f64> = plans.iter().map(|plan| plan["cost"]["seconds"].as_f64().unwrap()).collect();
    assert!(seconds.is_sorted() && seconds[0] > 0.0);
    // The SM90 block size guide lists 142 backward configurations for head dim 128; each is a plan, and so
    // are variants.
    let backward = all["backward"]["plans"].as_array().unwrap();
    assert_eq!(all["backward"]["guide"]["feasible"], 142);
    assert!(backward.len() >= 142 && backward.len() as u64 == all["backward"]["fit"].as_u64().unwrap());
    let seconds: Vec<f64> = backward.iter().map(|plan| plan["cost"]["seconds"].as_f64().unwrap()).collect();
    assert!(seconds.is_sorted() && seconds[0] > 0.0);
    assert_eq!(all["problem"]["mask"]["right"], 0);

    let few = fa("plan --headdim 128 --seqlen 8192 --causal --mode both -n 3 --json").json();
    assert_eq!(few["forward"]["plans"].as_array().unwrap()[..], plans[..3]);
    assert_eq!(few["backward"]["plans"].as_array().unwrap()[..], backward[..3]);
    assert_eq!(few["forward"]["fit"], all["forward"]["fit"]);
}

#[test]
fn of_nothing_there_are_plans_and_no_nan() {
    let folder = Dir::new();
    let page = folder.file("page.html");
    for line in [
        "plan --batch 0",
        "plan --seqlen 0 --mode both",
        "plan --seqlen 0x64 --mode bwd",
        "plan --seqlen 64x0",
    ] {
        let text = fa(line).good();
        assert!(text.contains("0 FLOP per byte") && !text.contains("NaN"), "{line}: {text}");
        fa(&format!("{line} --report {page}")).good();
        let page = std::fs::read_to_string(&page).unwrap();
        assert!(!page.contains("NaN") && !page.contains("inf "), "{line}");
    }
}

#[test]
fn ron_is_read_back() {
    let text = fa("plan --headdim 64 -n 2 --format ron").good();
    let value: ron::Value = ron::from_str(&text).unwrap();
    assert!(matches!(value, ron::Value::Map(_)), "{value:?}");
    assert!(text.contains("Sm90Fwd"));
}

/// A plan in a file is read for its problem, another plan of which is the same.
#[test]
fn a_plan_is_read_for_its_problem() {
    let folder = Dir::new();
    let path = folder.path("plan.ron");
    let plan = "plan --headdim 96 --heads 12:3 --seqlen 1x700 --causal -n 2 --format ron";
    let text = fa(plan).good();
    std::fs::write(&path, &text).unwrap();
    let path = path.display();
    assert_eq!(fa(&format!("plan --problem {path} -n 2 --format ron")).good(), text);
    // So is one that lists all that fits: more than a megabyte.
    let whole = "plan --bias --bias-grad --mode both --format ron";
    std::fs::write(folder.path("plan.ron"), fa(whole).good()).unwrap();
    assert!(fa(&format!("plan --problem {path} -n 1")).good().contains("a program's score"));
    // Neither a problem nor a plan: the error is about a problem.
    std::fs::write(folder.path("plan.ron"), "(arch: sm90)").unwrap();
    refuses(&format!("plan --problem {path}"), "holds no problem: 1:2-1:6: Unexpected field named `arch`");
}

#[test]
fn the_first_choice_is_printed_as_a_kernels_file() {
    let folder = Dir::new();
    let path = folder.path("kernel.ron");
    for (flags, name) in [
        ("--headdim 128 --causal", "sm90_fwd"),
        ("--headdim 64 --mode bwd", "sm90_bwd"),
        ("--headdim 128 --causal --arch sm100", "sm100_fwd"),
    ] {
        std::fs::write(&path, fa(&format!("plan {flags} --format spec")).good()).unwrap();
        let best = fa(&format!("plan {flags} -n 1 --json")).json();
        let pass = if name == "sm90_bwd" { "backward" } else { "forward" };
        let flags = flags.replace(" --mode bwd", "");
        let judged = fa(&format!("plan {flags} --spec {} --json", text(&path))).json();
        assert_eq!(judged[pass]["plans"][0]["spec"], best[pass]["plans"][0]["spec"], "{name}");
    }
    for (line, part) in [
        ("plan --mode both --format spec", "use --mode fwd or bwd"),
        ("plan --format spec -n 1", "leave out -n"),
        ("plan --guide --headdim 64 --format spec", "leave out --guide"),
    ] {
        refuses(line, part);
    }
}

#[test]
fn tables_show_the_problem_and_the_limits() {
    for (line, parts) in [
        (
            "plan",
            vec![
                "4096x4096",
                "sm90 (H100 SXM5)",
                "registers",
                "best      sm90_fwd",
                "rejected",
                " 1 block of ",
                "memory    269 MB of tensors, no workspace",
            ],
        ),
        (
            "plan --arch sm80 --heads 32:8 --seqlen 1x65536",
            vec!["queries x keys 1x65536", "32:8", "sm80_fwd"],
        ),
        ("plan --arch sm86 --headdim 192-128 --softcap 30", vec!["192-128", "soft cap 30", "99 KiB"]),
        (
            "plan --headdim 64 --mask-mod k%3!=1 --bias --dropout 0.1 -n 1",
            vec!["a program's mask and score, dropout 0.1"],
        ),
        ("plan --arch sm100", vec!["B200", "TMEM columns", "sm100_fwd"]),
        ("plan --arch sm_90a --seqlen-q 7 --seqlen-k 9 --window inf,3", vec!["7x9", "window(inf,3)"]),
        ("plan --mode bwd --headdim 192-128", vec!["18 of", "dK/dV from", "S and dP, then dQ"]),
        ("plan --mode bwd --headdim 256 --causal --deterministic", vec!["dQ by atomics", "deterministic"]),
    ] {
        let text = fa(line).good();
        for part in parts {
            assert!(text.contains(part), "{line}: '{part}' is not in\n{text}");
        }
    }
}

#[test]
fn a_step_of_a_server_is_planned_as_chunks_and_decoding() {
    let step = "plan --batch 32 --seqlen 512x32768 --heads 8:1 --causal --page 16,9200 -n 1 --packed";
    let shown = fa(&format!("{step} 543")).stdout;
    let note = "a server's step on 4600 keys per sequence: 1 of 512 queries, then 31 of 1\n";
    assert!(shown.contains(note), "{shown}");
    // Neither phase is planned on the 32k keys that the server has room for.
    let json = fa(&format!("{step} 543 --json")).json();
    let cost = &json["forward"]["plans"][0]["cost"];
    assert!(
        cost["seconds"].as_f64().is_some_and(|s| s < 100e-6) && cost["splits"].as_u64() > Some(1),
        "{cost}"
    );
    // All decode, or all are chunks.
    for total in [32, 16384] {
        assert!(!fa(&format!("{step} {total}")).stdout.contains("server's step"), "{total}");
    }
}

#[test]
fn why_names_the_limit_with_need_and_have() {
    let text = fa("plan --headdim 256 --why tile_n=192").good();
    assert!(text.contains("rejected") && text.contains("needs") && !text.contains("fits "), "{text}");
    let answer = fa("plan --headdim 128 --why tile_n=128,num_wg=2 --json").json();
    let feasible = answer["forward"]["feasible"].as_array().unwrap();
    assert!(!feasible.is_empty());
    for ranked in feasible {
        assert_eq!(ranked["plan"]["spec"]["kernel"]["Sm90Fwd"]["tile_n"], 128);
        assert!(ranked["slowdown"].as_f64().unwrap() >= 1.0);
    }
    let text = fa("plan --mode bwd --headdim 128 --why tile_m=80,tile_n=112").good();
    assert!(text.contains("0 fit") && text.contains("must be a multiple of"), "{text}");
    let answer = fa("plan --mode bwd --headdim 128 --why tile_n=128,pds_stages=2 --json").json();
    let feasible = answer["backward"]["feasible"].as_array().unwrap();
    assert!(!feasible.is_empty());
    for ranked in feasible {
        let kernel = &ranked["plan"]["spec"]["kernel"]["Sm90Bwd"];
        assert_eq!((kernel["tile_n"].as_u64(), kernel["pds_stages"].as_u64()), (Some(128), Some(2)));
    }
}

#[test]
fn a_backward_from_a_file_is_judged_as_one() {
    let folder = Dir::new();
    let path = folder.path("kernel.ron");
    let spec = |tile_m: u32| {
        format!(
            "(dtype: bf16, head_dim: 128, head_dim_v: 128, mask: full, kernel: Sm90Bwd((tile_m: {tile_m}, \
             tile_n: 128, num_wg: 2, q_stages: 2, do_stages: 2, pds_stages: 1, sdp_swap_ab: true, \
             dkv_swap_ab: false, dq_swap_ab: true, atom_layout_m_sdp: 1, atom_layout_n_dkv: 2, \
             atom_layout_m_dq: 1, mma_dkv_is_rs: true, dq_via_smem: true, dq_slices: 1, tile_order: Natural, \
             deterministic: false)))"
        )
    };
    std::fs::write(&path, spec(64)).unwrap();
    let good = fa(&format!("plan --spec {} --mode bwd --json", text(&path))).json();
    assert_eq!((good["backward"]["tried"].as_u64(), good["backward"]["fit"].as_u64()), (Some(1), Some(1)));
    assert_eq!(good["forward"], serde_json::Value::Null);
    let other = fa(&format!("plan --spec {} --mode fwd", text(&path)));
    assert!(other.code == 2 && other.stderr.contains("is a backward kernel"), "{other:?}");
    // More registers than there are, and a problem with another mask: verdicts, not bad input.
    std::fs::write(&path, spec(112)).unwrap();
    for (flags, part) in [("", "registers: needs"), ("--causal", "mask")] {
        let outcome = fa(&format!("plan --spec {} {flags}", text(&path)));
        assert_eq!(outcome.code, 1, "{flags}: {outcome:?}");
        assert!(outcome.stdout.contains(part), "{flags}: {}", outcome.stdout);
    }
}

#[test]
fn a_kernel_from_a_file_is_judged_alone() {
    let folder = Dir::new();
    let path = folder.path("kernel.ron");
    let spec = |tile_n: u32| {
        format!(
            "(dtype: bf16, head_dim: 128, head_dim_v: 128, mask: full, kernel: Sm80Fwd((tile_m: 128, tile_n: \
             {tile_n}, num_warps: 8, stages: 2, q_in_regs: false, blocks_per_sm: 1, swizzle: true, ldmatrix: \
             true, exp2: true, fast_math: true, loop_split: true, reverse_blocks: false)))"
        )
    };
    std::fs::write(&path, spec(64)).unwrap();
    let good = fa(&format!("plan --arch sm80 --spec {} --json", text(&path))).json();
    assert_eq!((good["forward"]["tried"].as_u64(), good["forward"]["fit"].as_u64()), (Some(1), Some(1)));
    // Too much shared memory for sm86, the wrong problem, and the wrong mask: verdicts, not bad input.
    std::fs::write(&path, spec(128)).unwrap();
    for (flags, part) in [
        ("--arch sm86", "shared memory: needs"),
        ("--arch sm80 --headdim 160", "head_dim"),
        ("--arch sm80 --causal", "mask"),
        ("--arch sm80 --dtype f16", "dtype"),
    ] {
        let outcome = fa(&format!("plan --spec {} {flags}", text(&path)));
        assert_eq!(outcome.code, 1, "{flags}: {outcome:?}");
        assert!(outcome.stdout.contains(part), "{flags}: {}", outcome.stdout);
    }
}

#[test]
fn reports_are_one_self_contained_page() {
    let folder = Dir::new();
    for (index, (flags, parts)) in [
        (
            "--headdim 128 --causal --seqlen 8192",
            vec!["Register budget", "S: KiB of SMEM over", "8-way", "first choice here", "tile_m 192 (3 wg)"],
        ),
        ("--headdim 192-128 --mode both", vec!["Backward tiles", "tile_m 80 queries per step"]),
        ("--arch sm80 --headdim 64", vec!["tile_m 256, 8 warps", "A100"]),
        ("--arch sm86 --headdim 256 --seqlen 1x4096", vec!["keys per sequence", "R: registers over"]),
        ("--arch sm100", vec!["Tensor memory of the best shape", "512"]),
        ("--mode bwd --headdim 64", vec!["Backward tiles", "The best backward kernels"]),
        ("--headdim 72 --heads 32:4 --softcap 20 --window 128,0", vec!["causal+window(128)", "soft cap 20"]),
    ]
    .into_iter()
    .enumerate()
    {
        let path = folder.path(format!("{index}.html"));
        let shown = fa(&format!("plan {flags} --report {}", text(&path))).good();
        assert!(shown.contains("report "), "{flags}");
        let page = std::fs::read_to_string(&path).unwrap();
        for part in parts {
            assert!(page.contains(part), "{flags}: '{part}' is not in the page");
        }
        let without_namespace = page.replace("http://www.w3.org/2000/svg", "");
        let outside = ["http:", "https:", "src=", "@import", "url(", "<link", "NaN", "inf "];
        for outside in
            outside.into_iter().chain(["fetch", "XMLHttp", "import(", "import ", "eval", "innerHTML"])
        {
            assert!(!without_namespace.contains(outside), "{flags}: '{outside}' is in the page");
        }
        assert_eq!(page.matches("<script").count(), 1, "{flags}: the one that sorts tables");
        let body = &page[page.find("<body>").unwrap()..page.find("</html>").unwrap()];
        let body = body.replace("<br>", "<br/>");
        let body = roxmltree::Document::parse(&body).unwrap_or_else(|error| panic!("{flags}: {error}"));
        let count = |tag: &str| body.descendants().filter(|node| node.tag_name().name() == tag).count();
        assert!(count("svg") > 0 && count("title") > 0 && count("section") > 0, "{flags}");
        // The forward's rates by length are a chart with axes; a point at every length.
        let rates = body.descendants().any(|node| node.text().is_some_and(|text| text.trim() == "TFLOP/s"));
        assert!(
            flags.contains("--mode bwd") || rates && count("circle") >= 8,
            "{flags}: {}",
            count("circle")
        );
    }
}

#[test]
fn plans_without_a_kernel_say_so_first() {
    const NOTE: &str = "assembled and emulated, never run on a GPU";
    for line in ["plan --arch sm100", "plan --arch sm103 --mode both", "plan --arch sm100 --family sm100"] {
        let text = fa(line).good();
        let note = text.lines().nth(2).unwrap();
        assert!(note.contains(NOTE) && note.contains("--family sm80"), "{line}: {note}");
        let json = fa(&format!("{line} -n 1 --json")).json();
        assert!(json["never_run"].as_str().unwrap().contains(NOTE), "{line}");
    }
    for line in [
        "plan",
        "plan --arch sm100 --family sm80",
        "plan --arch sm100 --mode bwd",
        "plan --arch sm100 --page 16",
        "plan --arch sm100 --kv-dtype e4m3",
        "plan --arch sm100 --mask-mod k%3!=1",
    ] {
        assert!(!fa(line).good().contains(NOTE), "{line}");
        assert!(fa(&format!("{line} -n 1 --json")).json().get("never_run").is_none(), "{line}");
    }
    let folder = Dir::new();
    let page = |arch: &str| {
        let path = folder.path(format!("{arch}.html"));
        fa_args(&["plan", "--arch", arch, "--report", path.to_str().unwrap()]).good();
        std::fs::read_to_string(path).unwrap()
    };
    let sm100 = page("sm100");
    assert!(sm100.find(NOTE).unwrap() < sm100.find("<section>").unwrap());
    assert!(!page("sm90").contains(NOTE));
}

#[test]
fn the_guide_lists_tiles_without_a_problem() {
    let found = fa("plan --guide --headdim 192-128 --json").json();
    let count = |found: &serde_json::Value, pass: &str| found[pass].as_array().unwrap().len();
    assert_eq!((count(&found, "fwd"), count(&found, "bwd")), (28, 18));
    assert!(found.get("explain").is_none());
    let cut = fa("plan --guide --mode bwd -n 3 --explain --json").json();
    assert_eq!((count(&cut, "fwd"), count(&cut, "bwd")), (0, 3));
    assert_eq!(cut["explain"]["bwd"]["feasible"], 142);
    let listed =
        fa("plan --guide --headdim 192 --mode bwd --tile-m 64,80 --tile-n 64,96 --format ron").good();
    let query = Query {
        head_dims: HeadDims::square(192),
        mode: Mode::Bwd,
        arch: Arch::Sm90,
        tile_m: Some(vec![64, 80]),
        tile_n: Some(vec![64, 96]),
        limit: None,
        explain: false,
    };
    let report = query.clone().run().unwrap();
    let in_json: SearchResult = serde_json::from_value(serde_json::to_value(&report).unwrap()).unwrap();
    assert_eq!(ron::from_str::<SearchResult>(&listed).unwrap(), in_json);
    for arch in [Arch::Sm90, Arch::Sm80, Arch::Sm100] {
        let query = Query {
            arch,
            explain: true,
            head_dims: HeadDims::square(128),
            tile_m: None,
            tile_n: Some(vec![64, 96]),
            ..query.clone()
        };
        let table = fa(&format!("plan --guide --arch {arch} --mode bwd --tile-n 64,96 --explain")).good();
        assert_eq!(table, query.run().unwrap().text(), "{arch}");
    }
    // Finding nothing is an answer.
    assert!(fa("plan --guide --headdim 256 --mode bwd").good().contains("no configuration fits"));
}

#[test]
fn flags_of_the_guide_of_a_file_and_of_a_problem_do_not_mix() {
    for (line, part) in [
        ("plan --guide --causal", "--causal"),
        ("plan --guide --seqlen 512", "--seqlen"),
        ("plan --guide --packed 512", "--packed"),
        ("plan --guide --page 16", "--page"),
        ("plan --guide --used-q", "--used-q"),
        ("plan --guide --used-k", "--used-k"),
        ("plan --guide --alibi", "--alibi"),
        ("plan --guide --sinks", "--sinks"),
        ("plan --guide --records docs/results", "--records"),
        ("plan --guide --why tile_n=64", "--why"),
        ("plan --problem FILE --mask-mod k<=q", "--mask-mod"),
        ("plan --problem FILE --bias", "--bias"),
        ("plan --problem FILE --dropout 0.5", "--dropout"),
        ("plan --problem FILE --query-offset 3", "--query-offset"),
        ("plan --problem FILE --headdim 64", "--headdim"),
        ("plan --explain", "--guide"),
        ("plan --tile-n 64", "--guide"),
        ("plan --guide --headdim 577", "1 to 576"),
        ("plan --guide --headdim 99999999999", "1 to 576"),
        ("plan --guide --tile-n 0", "1 to 1024"),
        ("plan --guide -n 0", "at least 1"),
        ("plan --guide --headdim 100 --arch sm80", "multiples of 8"),
        ("plan --guide --mode fwd --tile-m 64,128", "tile_m [64, 128] is the backward's"),
    ] {
        refuses(line, part);
    }
}

#[test]
fn decode_shows_its_bandwidth_and_why_keys_are_split() {
    let text = fa("plan --batch 64 --seqlen 1x4096 --heads 32:8 -n 3").good();
    for part in ["GB/s", "bandwidth ", "of the memory's 3350", "splits    none: 512 tiles on 132 SMs"] {
        assert!(text.contains(part), "'{part}' is not in\n{text}");
    }
    let json = fa("plan --batch 64 --seqlen 1x4096 --heads 32:8 -n 1 --json").json();
    let cost = &json["forward"]["plans"][0]["cost"];
    assert_eq!(cost["splits"], 1);
    assert!(cost["bytes_per_s"].as_f64().is_some_and(|rate| rate > 2.5e12), "{cost}");
    let prefill = fa("plan --seqlen 4096 --causal").good();
    assert!(!prefill.contains("GB/s") && !prefill.contains("splits"), "{prefill}");
}

#[test]
fn packed_and_paged_problems_have_flags() {
    // Nothing fits where the kernels lack the code, and the problem is printed all the same.
    let problem = |flags: &str| {
        let out = fa(&format!("plan --json -n 1 {flags}")).stdout;
        serde_json::from_str::<serde_json::Value>(&out).expect("JSON")["problem"].clone()
    };
    let packed = problem("--batch 8 --seqlen 2048 --packed 4096,8192 --used-k --alibi --sinks");
    for (field, value) in [("total_q", 4096), ("total_k", 8192), ("seqlen_q", 2048), ("batch", 8)] {
        assert_eq!(packed[field], value, "{packed}");
    }
    assert!(packed["used_k"] == true && packed["alibi"] == "per_head" && packed["sinks"] == true, "{packed}");
    let paged = problem("--batch 8 --seqlen 1x1000 --packed 8 --page 16 --alibi=per_sequence_head");
    for (field, value) in [("total_q", 8), ("page", 16), ("pages", 8 * 63), ("seqlen_k", 1000)] {
        assert_eq!(paged[field], value, "{paged}");
    }
    assert_eq!(paged["alibi"], "per_sequence_head");
    for (flags, part) in [
        ("--page 16 --packed 4,64", "--page and 64 packed keys"),
        ("--page 0", "page of 0 keys"),
        ("--page 16 --used-k", "leave out --used-k"),
        ("--alibi=both", "per_head or per_sequence_head"),
        ("--page 16 --mode bwd", "keys in pages of 16 rows have no backward"),
    ] {
        refuses(&format!("plan {flags}"), part);
    }
}

/// Pages of one key and panels of unequal width: the library takes the SM80 class, and so does a plan.
#[test]
fn what_no_launch_holds_is_said_with_limit_and_value() {
    let line = "plan --headdim 192-96 --heads 5:1 --seqlen 300 --batch 3 --page 1";
    let shown = fa(line).good();
    assert!(shown.contains("best      sm80_fwd-") && shown.contains("rejected  244 by pages"), "{shown}");
    let own = fa(&format!("{line} --family sm90"));
    assert!(own.code == 1 && own.stdout.contains("use pages of a multiple of 2"), "{own:?}");
    for (flags, parts) in [
        ("--seqlen 4294967296", ["seqlen_q = 4294967296 is above 1073741824", "split the problem"]),
        ("--softcap 5000", ["softcap = 5000.0", "soft caps up to 1024"]),
        ("--softcap 1e-300", ["softcap = 1e-300", "scale / softcap a normal f32"]),
    ] {
        let refused = fa(&format!("plan {flags}"));
        assert_eq!(refused.code, 2, "{flags}: {refused:?}");
        assert!(parts.iter().all(|part| refused.stderr.contains(part)), "{flags}: {}", refused.stderr);
    }
}

/// Rates far below those of a large problem have digits, too.
#[test]
fn small_rates_are_not_rounded_to_zero() {
    for flags in [
        "--seqlen 1x1",
        "--seqlen 2x3 --mode bwd",
        "--seqlen 1x1 --arch sm100",
        "--seqlen 1x1 --why tile_n=64",
    ] {
        let text = fa(&format!("plan --batch 1 --heads 1 --headdim 8 {flags}")).good();
        let numbers = ["0 TFLOP/s", "0 GB/s", " 0 %", " 0.0 ", "0 FLOP per byte"];
        let zero = text.lines().find(|line| {
            numbers.iter().any(|number| {
                let at = line.find(number);
                at.is_some_and(|at| !line[..at].ends_with(|c: char| c.is_ascii_digit()))
            })
        });
        assert!(zero.is_none(), "{flags}: {zero:?}");
    }
}
