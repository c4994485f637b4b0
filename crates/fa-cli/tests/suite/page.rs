//! Pages in a browser: nothing fails, nothing is cut off, and the numbers are those of `--json`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use crate::common::{Dir, fa, refuses, repository, text};

/// A Chromium: `FA_CHROMIUM`, or one on the path.
fn chromium() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("FA_CHROMIUM") {
        return Some(PathBuf::from(named));
    }
    let folders: Vec<PathBuf> = std::env::split_paths(&std::env::var_os("PATH")?).collect();
    let names = ["chromium", "chromium-browser", "google-chrome", "chrome-headless-shell"];
    names.iter().find_map(|name| folders.iter().map(|folder| folder.join(name)).find(|path| path.is_file()))
}

/// Looks at pages, each in a frame, at several widths, light, dark and printed, and says what is wrong.
const INSPECT: &str = include_str!("page.js");

/// What a browser, started once, finds wrong with each of some pages, and the numbers on it.
fn inspect(browser: &Path, pages: &[String], folder: &Path) -> Vec<(Vec<String>, Vec<f64>)> {
    let mut frames = String::new();
    for page in pages {
        assert!(page.contains("@media print") && page.contains("@media screen"), "no style for print");
        let quoted = page.replace('&', "&amp;").replace('"', "&quot;");
        frames += &format!("<iframe style=\"border:0;height:9000px\" srcdoc=\"{quoted}\"></iframe>\n");
    }
    let path = folder.join("inspect.html");
    let document =
        format!("<!doctype html><meta charset=\"utf-8\"><script>{INSPECT}</script><body>{frames}</body>");
    std::fs::write(&path, document).expect("a writable folder");
    let done = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--window-size=1700,1000"])
        .args(["--disable-dev-shm-usage", "--no-first-run"])
        .arg(format!("--user-data-dir={}", folder.join("profile").display()))
        .arg(format!("file://{}", path.display()))
        .output()
        .expect("the browser starts");
    let shown = String::from_utf8_lossy(&done.stdout).into_owned();
    let result = shown.rsplit_once("RESULT").and_then(|(_, rest)| Some(rest.split_once("END")?.0));
    let result = result.unwrap_or_else(|| panic!("{shown}\n{}", String::from_utf8_lossy(&done.stderr)));
    let result = result.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">");
    let result: serde_json::Value = serde_json::from_str(&result).expect("JSON");
    assert_eq!(result["errors"], serde_json::json!([]), "a script fails");
    let texts = |value: &serde_json::Value| -> Vec<String> {
        value.as_array().expect("a list").iter().map(ToString::to_string).collect()
    };
    let numbers = |value: &serde_json::Value| -> Vec<f64> {
        value.as_array().expect("a list").iter().filter_map(serde_json::Value::as_f64).collect()
    };
    let results = result["results"].as_array().expect("a list");
    assert_eq!(results.len(), pages.len());
    results.iter().map(|one| (texts(&one["found"]), numbers(&one["numbers"]))).collect()
}

/// Every kernel, and problems of every form.
const PAGES: [(&str, &str); 14] = [
    ("--headdim 128 --causal --seqlen 8192", "forward"),
    ("--headdim 192-128 --causal --mode bwd", "backward"),
    ("--headdim 64 --mode bwd --deterministic", "backward"),
    ("--batch 64 --seqlen 1x4096 --heads 32:8", "forward"),
    ("--batch 1 --seqlen 1x65536 --heads 8:1", "forward"),
    ("--batch 32 --heads 32:8 --seqlen 8192 --packed 65536 --causal --sinks --alibi", "forward"),
    ("--batch 64 --heads 32:8 --seqlen 1x8192 --packed 64 --page 16", "forward"),
    ("--arch sm80 --headdim 64 --causal --softcap 30", "forward"),
    ("--arch sm80 --headdim 64 --mode bwd", "backward"),
    ("--arch sm100", "forward"),
    ("--batch 1 --seqlen 1x1 --heads 1 --headdim 8", "forward"),
    ("--causal --spec SPECS/sm90/hd128-causal-bf16.ron", "forward"),
    ("--causal --spec SPECS/sm90/hd128-causal-bf16-bwd.ron", "backward"),
    ("--causal --arch sm100 --spec SPECS/sm100/hd128-causal-bf16.ron", "forward"),
];

#[test]
fn pages_are_whole_in_a_browser_and_have_the_numbers_of_json() {
    let Some(browser) = chromium() else {
        eprintln!("skipped: no Chromium on the path (FA_CHROMIUM names one)");
        return;
    };
    let folder = Dir::new();
    let path = folder.path("page.html");
    let (records, specs) = (repository("docs/results"), repository("crates/fa-kernels/specs"));
    let written = |flags: &str| {
        let flags = flags.replace("SPECS", text(&specs));
        let done = fa(&format!("plan {flags} --report {} --records {}", text(&path), text(&records)));
        (done, std::fs::read_to_string(&path).unwrap())
    };
    let (plans, mut pages): (Vec<serde_json::Value>, Vec<String>) = PAGES
        .iter()
        .map(|(flags, _)| {
            let (done, page) = written(&format!("{flags} --json -n 1"));
            (done.json(), page)
        })
        .unzip();
    // What nothing fits, what is asked about, and both passes with the loops of the emulation.
    pages.push(written("--headdim 64 --spec SPECS/sm90/hd128-causal-bf16.ron").1);
    pages.push(written("--headdim 256 --why tile_n=192").1);
    pages.extend(emulated().ok().cloned());
    let results = inspect(&browser, &pages, folder.root());
    for (index, (found, _)) in results.iter().enumerate() {
        let flags = PAGES.get(index).map_or("other", |(flags, _)| flags);
        assert!(found.is_empty(), "{index}, {flags}: {found:#?}");
    }
    for (((flags, pass), json), (page, (_, numbers))) in
        PAGES.iter().zip(&plans).zip(pages.iter().zip(&results))
    {
        let best = &json[pass]["plans"][0];
        let cost = &best["cost"];
        let rate = if flags.contains(" 1x") { "bytes_per_s" } else { "tflops" };
        for number in [&cost["seconds"], &cost[rate], &cost["tiles"], &best["smem"]["total"]] {
            let number = number.as_f64().unwrap();
            let near = numbers.iter().any(|shown| (shown - number).abs() <= 1e-9 * number.abs());
            assert!(near, "{flags}: {number} is not in {numbers:?}");
        }
        // By sequence length too: this problem at its own length, packed and in pages as it is. A kernel that
        // was asked for is beside the best there.
        let length = json["problem"]["seqlen_k"].as_u64().expect("a length");
        let row = page.split("<tr>").find(|row| row.starts_with(&format!("<td class=\"n\">{length}</td>")));
        let row = row.unwrap_or_else(|| panic!("{flags}: no row of {length}"));
        let seconds = cost["seconds"].as_f64().unwrap();
        let exact =
            row.split("<data value=\"").skip(1).filter_map(|rest| rest.split('"').next()?.parse().ok());
        let near = |shown: f64| (shown - seconds).abs() <= 1e-9 * seconds;
        assert!(flags.contains("--spec") || exact.into_iter().any(near), "{flags}: {row} has not {seconds}");
        // Nothing is rounded to zero; paper is light.
        assert!(!page.contains(">0 GB/s") && !page.contains(">0 TFLOP/s"), "{flags}");
        assert!(!page.contains("@media (prefers-color-scheme: dark)"), "{flags}");
        if flags.contains(" 1x4096") {
            assert!(page.contains("Device memory delivers a step's data"), "{flags}");
        }
        assert_eq!(flags.contains("1x1 "), page.contains("none of its steps is steady"), "{flags}");
    }
}

#[test]
fn pages_compare_with_records_and_say_where_there_is_none() {
    let folder = Dir::new();
    let path = folder.path("page.html");
    let records = repository("docs/results");
    let page = |flags: &str| {
        fa(&format!("plan {flags} --report {} --records {}", text(&path), text(&records))).good();
        std::fs::read_to_string(&path).unwrap()
    };
    let decode = page("--batch 8 --seqlen 1x8192 --heads 32:8");
    for part in ["class=\"here\"", "Error of time", "marks-decode-h100.json", "GB/s", "rows of a tile in use"]
    {
        assert!(decode.contains(part), "'{part}' is not in the page");
    }
    assert!(!decode.contains("class=\"warning\""));
    // Rows of kernels that read lengths or pages, by what the record says of them.
    let paged = page("--batch 64 --seqlen 1x4096 --heads 32:8 --page 16");
    assert!(paged.contains("64 of at most 1x4096, heads 32:8 (pages of 16"), "no row of the record");
    let dense = page("--batch 64 --seqlen 1x4096 --heads 32:8 --causal");
    assert!(!dense.contains("of at most"));
    let many = page("--headdim 128 --causal --mode bwd");
    assert!(many.contains("more, farther away."));
    // Of kernels as deterministic as those that are planned.
    let same_bits = page("--headdim 128 --causal --mode bwd --deterministic");
    let table =
        same_bits.split("<h2>Predicted and measured").nth(1).and_then(|rest| rest.split("</table>").next());
    let kernels = table.expect("a table").matches("<td class=\"w\"><code>").count();
    assert!(kernels > 0 && table.expect("a table").matches("-det</code>").count() == kernels);
    let other = page("--arch sm86 --headdim 64");
    assert!(other.contains("no record has sm80_fwd-bf16-hd64") && other.contains("on sm86"));
    // Without records nothing is said of them.
    let empty = folder.path("empty");
    std::fs::create_dir(&empty).unwrap();
    let none = fa(&format!("plan --records {} --report {}", text(&empty), text(&path))).good();
    assert!(none.contains("report "));
    let missing = fa(&format!("plan --records /nowhere --report {}", text(&path)));
    assert!(missing.code == 2 && missing.stderr.contains("--records /nowhere"), "{missing:?}");
    std::fs::write(empty.join("marks-x.json"), "{}").unwrap();
    let broken = fa(&format!("plan --records {} --report {}", text(&empty), text(&path)));
    assert!(broken.code == 2 && broken.stderr.contains("marks-x.json"), "{broken:?}");
}

/// A page of both passes with their loops by the emulation, or why there is none.
fn emulated() -> Result<&'static String, &'static str> {
    static PAGE: LazyLock<Result<String, String>> = LazyLock::new(|| {
        let folder = Dir::new();
        let path = folder.path("page.html");
        let flags = "--headdim 64 --seqlen 1024 --mode both --emulate";
        let planned = fa(&format!("plan {flags} --report {}", text(&path)));
        if planned.stderr.contains("compiler") {
            return Err(planned.stderr);
        }
        planned.good();
        Ok(std::fs::read_to_string(&path).unwrap())
    });
    PAGE.as_ref().map_err(|why| &**why)
}

/// Where there is a C++ compiler.
#[test]
fn a_page_shows_the_loop_by_the_emulation() {
    let folder = Dir::new();
    let path = folder.path("page.html");
    refuses("plan --emulate", "--report");
    let page = match emulated() {
        Ok(page) => page,
        Err(why) => {
            eprintln!("skipped: {why}");
            return;
        }
    };
    for part in [
        "A steady step, emulated",
        "products, warpgroup 1",
        "TMA box",
        "sm90/fwd_consumer.cuh:",
        "warp 0, producer",
    ] {
        assert!(page.contains(part), "'{part}' is not on the page");
    }
    fa(&format!("plan --arch sm100 --emulate --report {}", text(&path))).good();
    let page = std::fs::read_to_string(&path).unwrap();
    for part in ["class=\"sp product\"", "tcgen05.mma", "warp 8, correction", "warp 12, products"] {
        assert!(page.contains(part), "'{part}' is not on the page of SM100");
    }
    // Too short to have steady steps.
    fa(&format!("plan --headdim 64 --seqlen 64 --emulate --report {}", text(&path))).good();
    assert!(std::fs::read_to_string(&path).unwrap().contains("too short to have steady steps"));
}

#[test]
fn why_and_spec_have_pages() {
    let folder = Dir::new();
    let path = folder.path("page.html");
    let spec = repository("crates/fa-kernels/specs/sm90/hd128-causal-bf16.ron");
    let shown = fa(&format!("plan --headdim 256 --why tile_n=192 --report {}", text(&path))).good();
    let page = std::fs::read_to_string(&path).unwrap();
    assert!(shown.contains("report ") && shown.contains("rejected"), "{shown}");
    assert!(page.contains("<h2>Why</h2>") && page.contains("tile_n=192"));
    fa(&format!("plan --causal --spec {} --report {}", text(&spec), text(&path))).good();
    let page = std::fs::read_to_string(&path).unwrap();
    assert!(page.contains("#1 of 1") && page.contains("A steady step"), "{}", page.len());
}
