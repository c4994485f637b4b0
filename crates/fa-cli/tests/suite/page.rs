//! Pages in a browser: nothing fails, nothing is cut off, and the numbers are those of `--json`.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{Dir, fa, repository, text};

/// A Chromium: `FA_CHROMIUM`, or one on the path.
fn chromium() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("FA_CHROMIUM") {
        return Some(PathBuf::from(named));
    }
    let folders: Vec<PathBuf> = std::env::split_paths(&std::env::var_os("PATH")?).collect();
    let names = ["chromium", "chromium-browser", "google-chrome", "chrome-headless-shell"];
    names.iter().find_map(|name| folders.iter().map(|folder| folder.join(name)).find(|path| path.is_file()))
}

/// Looks at a page in frames of some widths, light, dark and printed, and says what is wrong with it.
const INSPECT: &str = r"
const found = [], numbers = [];
const say = (frame, what) => found.push(`${frame.id} ${frame.width}${frame.dark ? ' dark' : ''}: ${what}`);
function look(frame, view) {
  const doc = view.document, root = doc.documentElement;
  if (root.scrollWidth > frame.width) say(frame, `the page is ${root.scrollWidth} wide`);
  const loads = view.performance.getEntriesByType('resource');
  if (loads.length) say(frame, `loads ${loads[0].name}`);
  for (const element of doc.querySelectorAll('main *')) {
    const style = view.getComputedStyle(element), own = element.getBoundingClientRect();
    if (!own.width || style.display === 'none') continue;
    const text = element.textContent.slice(0, 40);
    const name = `${element.tagName} ${element.getAttribute('class') || ''} '${text}'`;
    // What scrolls may be wider; texts that have no room in a bar are in its tip.
    const scrolls = element.closest('.scroll'), bar = element.closest('.bar, .sp, .cell input');
    if (!scrolls && !bar && own.right > frame.width + 1) say(frame, `ends at ${own.right}: ${name}`);
    if (own.left < -1) say(frame, `begins at ${own.left}: ${name}`);
    if (!bar && style.overflowX === 'hidden' && element.scrollWidth > element.clientWidth + 1)
      say(frame, `cut: ${name}`);
    if (element.matches('.cell') && element.scrollWidth > element.clientWidth + 1)
      say(frame, `too narrow: ${name}`);
    if (element.matches('svg text')) {
      const drawing = element.ownerSVGElement.getBoundingClientRect();
      if (own.left < drawing.left - 1 || own.right > drawing.right + 1 || own.top < drawing.top - 1)
        say(frame, `leaves its drawing: ${name}`);
    }
    if (element.matches('b') && element.closest('.sp, .bar') && element.offsetWidth &&
        element.scrollWidth > element.parentElement.clientWidth + 1) say(frame, `cut in its bar: ${name}`);
  }
  // An account is shown by its cell, and only then.
  const inputs = frame.dark ? [...doc.querySelectorAll('.cell input')] : [];
  for (const input of inputs.filter((_, index) => index % 9 === 0)) {
    const account = doc.getElementById('a' + input.id);
    input.checked = true;
    const shown = [...account.parentElement.children].filter((one) => one.offsetHeight > 0);
    if (shown.length !== 1 || shown[0] !== account) say(frame, `${input.id} shows ${shown.length} accounts`);
  }
  for (const table of frame.dark ? doc.querySelectorAll('table.sorts') : []) sort(frame, table);
  const light = view.getComputedStyle(doc.body).backgroundColor.match(/\d+/g)[0] > 128;
  if (light === frame.dark) say(frame, 'has the other mode');
  for (const tip of doc.querySelectorAll('[data-tip], .pt'))
    if (tip.tabIndex < 0) say(frame, 'a tip without focus');
  if (!numbers.length) doc.querySelectorAll('data').forEach((one) => numbers.push(Number(one.value)));
}
// Each heading is a button that sorts by its column, both ways, and loses no row.
function sort(frame, table) {
  const order = () => [...table.tBodies[0].rows].slice(1), before = order();
  if (before.length < 2) return;
  if (table.closest('details')) table.closest('details').open = true;
  for (const [column, cell] of [...table.rows[0].cells].entries()) {
    const button = cell.querySelector('button');
    if (!button) { if (cell.textContent) say(frame, `no button: ${cell.textContent}`); continue; }
    for (const way of ['ascending', 'descending']) {
      button.focus();
      if (cell.ownerDocument.activeElement !== button) say(frame, `no focus: ${cell.textContent}`);
      button.click();
      const sorted = order();
      if (cell.getAttribute('aria-sort') !== way) say(frame, `${cell.textContent} is not ${way}`);
      if (new Set(sorted).size !== before.length) say(frame, `rows are lost by ${cell.textContent}`);
      const exact = sorted.map((row) => row.cells[column].querySelector('data')?.value).map(Number);
      if (!exact.every((one, i) => !i || !(way === 'ascending' ? exact[i - 1] > one : exact[i - 1] < one)))
        say(frame, `${cell.textContent} ${way}: ${exact}`);
    }
    if (table.querySelectorAll('[aria-sort]').length !== 1) say(frame, 'sorted by several columns');
  }
}
window.onerror = (message) => { found.push(`error: ${message}`); };
window.onload = () => {
  for (const frame of frames_of_page) look(frame, document.getElementById(frame.id).contentWindow);
  document.body.textContent = 'RESULT' + JSON.stringify({ found, numbers }) + 'END';
};
";

/// What begins the style of the printed page.
const PRINT: &str = "@media print";

/// What a browser finds wrong with a page, and the numbers on it.
fn inspect(browser: &Path, page: &str, folder: &Path) -> (Vec<String>, Vec<f64>) {
    assert!(page.contains(PRINT), "no style for print");
    let printed = page.replace(PRINT, "@media all");
    let quoted = [page, &printed].map(|page| page.replace('&', "&amp;").replace('"', "&quot;"));
    let mut frames = String::new();
    let mut listed = Vec::new();
    for (id, width, dark) in
        [("a", 390, false), ("b", 768, false), ("c", 1600, false), ("d", 1100, true), ("print", 720, false)]
    {
        let quoted = &quoted[usize::from(id == "print")];
        let scheme = if dark { "dark" } else { "light" };
        frames += &format!(
            "<iframe id=\"{id}\" style=\"border:0;width:{width}px;height:9000px;color-scheme:{scheme}\" \
             srcdoc=\"{quoted}\"></iframe>\n"
        );
        listed.push(format!("{{id: '{id}', width: {width}, dark: {dark}}}"));
    }
    let script = format!("<script>const frames_of_page = [{}];{INSPECT}</script>", listed.join(", "));
    let path = folder.join("inspect.html");
    std::fs::write(&path, format!("<!doctype html><meta charset=\"utf-8\">{script}<body>{frames}</body>"))
        .expect("a writable folder");
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
    let found = result["found"].as_array().expect("a list").iter().map(|one| one.to_string()).collect();
    let numbers =
        result["numbers"].as_array().expect("a list").iter().filter_map(|one| one.as_f64()).collect();
    (found, numbers)
}

#[test]
fn pages_are_whole_in_a_browser_and_have_the_numbers_of_json() {
    let Some(browser) = chromium() else {
        eprintln!("skipped: no Chromium on the path (FA_CHROMIUM names one)");
        return;
    };
    let folder = Dir::new();
    for (index, (flags, pass)) in [
        ("--headdim 128 --causal --seqlen 8192", "forward"),
        ("--headdim 192-128 --causal --mode bwd", "backward"),
        ("--batch 64 --seqlen 1x4096 --heads 32:8", "forward"),
        ("--batch 32 --heads 32:8 --seqlen 8192 --packed 65536 --causal --sinks", "forward"),
        ("--batch 64 --heads 32:8 --seqlen 1x8192 --packed 64 --page 16", "forward"),
        ("--arch sm80 --headdim 64 --causal --softcap 30", "forward"),
        ("--arch sm80 --headdim 64 --mode bwd", "backward"),
        ("--arch sm100", "forward"),
        ("--batch 1 --seqlen 1x1 --heads 1 --headdim 8", "forward"),
    ]
    .into_iter()
    .enumerate()
    {
        let path = folder.path(format!("{index}.html"));
        let records = repository("docs/results");
        let line = format!("plan {flags} --json -n 1 --report {} --records {}", text(&path), text(&records));
        let json = fa(&line).json();
        let page = std::fs::read_to_string(&path).unwrap();
        let (found, numbers) = inspect(&browser, &page, folder.root());
        assert!(found.is_empty(), "{flags}: {found:#?}");
        let best = &json[pass]["plans"][0];
        let cost = &best["cost"];
        let rate = if flags.contains(" 1x") { "bytes_per_s" } else { "tflops" };
        for number in [&cost["seconds"], &cost[rate], &cost["tiles"], &best["smem"]["total"]] {
            let number = number.as_f64().unwrap();
            let near = numbers.iter().any(|shown| (shown - number).abs() <= 1e-9 * number.abs());
            assert!(near, "{flags}: {number} is not in {numbers:?}");
        }
        // By sequence length too: this problem at its own length, packed and in pages as it is.
        let length = json["problem"]["seqlen_k"].as_u64().expect("a length");
        let row = page.split("<tr>").find(|row| row.starts_with(&format!("<td class=\"n\">{length}</td>")));
        let row = row.unwrap_or_else(|| panic!("{flags}: no row of {length}"));
        let seconds = cost["seconds"].as_f64().unwrap();
        let exact =
            row.split("<data value=\"").skip(1).filter_map(|rest| rest.split('"').next()?.parse().ok());
        let near = |shown: f64| (shown - seconds).abs() <= 1e-9 * seconds;
        assert!(exact.into_iter().any(near), "{flags}: {row} has not {seconds}");
        // Nothing is rounded to zero; paper is light.
        assert!(!page.contains(">0 GB/s") && !page.contains(">0 TFLOP/s"), "{flags}");
        assert!(!page.contains("@media (prefers-color-scheme: dark)"), "{flags}");
        if flags.contains(" 1x4096") {
            assert!(page.contains("Device memory delivers a step's data"), "{flags}");
        }
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
    let decode = page("--batch 64 --seqlen 1x4096 --heads 32:8");
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
    assert!(many.contains("more, of longer sequences."));
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

/// Where there is a C++ compiler.
#[test]
fn a_page_shows_the_loop_by_the_emulation() {
    let folder = Dir::new();
    let path = folder.path("page.html");
    let refused = fa("plan --emulate");
    assert!(refused.code == 2 && refused.stderr.contains("--report"), "{refused:?}");
    let planned = fa(&format!("plan --arch sm100 --emulate --report {}", text(&path)));
    if planned.stderr.contains("compiler") {
        eprintln!("skipped: {}", planned.stderr);
        return;
    }
    assert!(planned.code == 2 && planned.stderr.contains("fa emulate SPEC --report"), "{planned:?}");
    fa(&format!("plan --headdim 64 --seqlen 1024 --emulate --report {}", text(&path))).good();
    let page = std::fs::read_to_string(&path).unwrap();
    for part in ["A steady step, emulated", "products, warpgroup 1", "TMA box", "sm90/fwd_consumer.cuh:"] {
        assert!(page.contains(part), "'{part}' is not on the page");
    }
    if let Some(browser) = chromium() {
        let (found, _) = inspect(&browser, &page, folder.root());
        assert!(found.is_empty(), "{found:#?}");
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
