//! Help, manual pages, completions and `fa doctor`.

use crate::common::{Dir, fa, fa_args, fa_with, listing, refused, text};

const COMMANDS: [&str; 19] = [
    "run",
    "plan",
    "check",
    "check-mod",
    "bench",
    "build",
    "validate",
    "emulate",
    "tune",
    "ladder",
    "prove",
    "records",
    "dist",
    "dist plan",
    "dist check",
    "dist bench",
    "doctor",
    "completions",
    "man",
];

#[test]
fn every_command_has_help_with_examples_and_a_manual_page() {
    let all = fa("--help").good();
    for name in COMMANDS {
        let (first, page) = (name.split(' ').next().unwrap(), name.replace([' ', '-'], "\\-"));
        assert!(all.contains(&format!("  {first}")), "{name} is not in\n{all}");
        let help = fa(&format!("{name} --help")).good();
        assert!(help.contains("Examples:") && help.contains(&format!("fa {name}")), "{help}");
        let (title, page) = (format!("fa\\-{page}"), fa(&format!("man {name}")).good());
        assert!(page.contains(".TH") && page.contains(&title), "{page}");
        let version = fa("--version").good();
        let title = page.lines().find(|line| line.starts_with(".TH")).unwrap();
        assert!(title.contains(version.trim()), "{title}");
    }
    assert!(fa("man").good().contains(".SH DESCRIPTION"));
    assert!(fa("--version").good().starts_with("fa "));
    let unknown = fa("man nosuch");
    assert!(unknown.code == 2 && unknown.stderr.contains("use one of run, plan"), "{unknown:?}");
    assert!(!unknown.stderr.contains("worker"), "{unknown:?}");
}

#[test]
fn the_manual_is_written_as_pages_of_a_folder() {
    let folder = Dir::new();
    let pages = folder.path("man/man1");
    let said = fa_args(&["man", "--out", text(&pages)]).good();
    let written = listing(&pages);
    let mut expected: Vec<String> =
        COMMANDS.iter().map(|name| format!("fa-{}.1", name.replace(' ', "-"))).collect();
    expected.push("fa.1".to_owned());
    for name in &expected {
        assert!(written.contains(name), "{name} is not in {written:?}");
        assert!(said.contains(name.as_str()), "{name} is not in {said}");
    }
    assert!(!written.iter().any(|name| name.contains("worker")), "{written:?}");
    let one = std::fs::read_to_string(pages.join("fa-plan.1")).unwrap();
    assert_eq!(one, fa("man plan").good());
    // A file in the folder's place, and a page beside the folder.
    let file = folder.path("file");
    std::fs::write(&file, "x").unwrap();
    refused(&fa_args(&["man", "--out", text(&file)]), &["cannot write"], "a file in the folder's place");
    assert_eq!(fa_args(&["man", "plan", "--out", text(&pages)]).code, 2);
}

#[test]
fn environment_variables_are_in_the_help() {
    let help = fa("--help").good();
    let own = ["FA_CACHE_DIR", "FA_TUNED", "FA_NVRTC", "FA_NVCC", "FA_PYTHON", "FA_EMULATOR_CACHE"];
    for name in own.into_iter().chain(["CXX", "RAYON_NUM_THREADS", "NO_COLOR"]) {
        assert!(help.contains(name), "{name} is not in\n{help}");
    }
}

/// What every command has comes behind what is its own.
#[test]
fn verbose_stands_behind_a_commands_own_options() {
    for command in ["run", "plan", "bench", "check", "emulate"] {
        let help = fa_args(&[command, "--help"]).good();
        let verbose = help.find("--verbose").unwrap();
        let last = help.lines().rfind(|line| line.trim_start().starts_with("--")).unwrap();
        assert!(help.find(last).unwrap() < verbose, "{command}: {last} comes behind --verbose");
    }
}

#[test]
fn every_shell_has_completions() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = fa_args(&["completions", shell]).good();
        assert!(script.contains("softcap") && script.len() > 1000, "{shell}");
    }
}

#[test]
fn the_doctor_finds_a_cpu_that_computes_rightly() {
    let report = fa("doctor --json").json();
    let checks = report["checks"].as_array().unwrap();
    let status = |name: &str| {
        let check = checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no {name}"));
        check["status"].as_str().unwrap().to_owned()
    };
    for name in ["cpu", "threads", "attention"] {
        assert_eq!(status(name), "ok", "{name}");
    }
    for name in ["simd", "gpu", "driver", "nvrtc", "cache"] {
        // What is there depends on the machine; what is missing comes with advice.
        let check = checks.iter().find(|check| check["name"] == name).unwrap();
        assert!(
            status(name) == "ok" || check["advice"].as_str().is_some_and(|text| !text.is_empty()),
            "{check}"
        );
    }
    let text = fa("doctor").good();
    assert!(text.contains("attention") && text.contains("right on a small problem"), "{text}");
}

#[test]
fn the_doctor_says_when_a_variable_names_no_library() {
    let wrong = fa_with(&["doctor"], &[("FA_NVRTC", "/no/such/library")]);
    assert_eq!(wrong.code, 1, "{wrong:?}");
    for part in ["/no/such/library", "FA_NVRTC names neither", "unset FA_NVRTC"] {
        assert!(wrong.stdout.contains(part), "{part} is not in {}", wrong.stdout);
    }
    // Empty is as good as unset.
    let nvrtc = |text: &str| text.lines().find(|line| line.contains(" nvrtc ")).map(str::to_owned);
    let empty = fa_with(&["doctor"], &[("FA_NVRTC", "")]).stdout;
    assert_eq!(nvrtc(&empty), nvrtc(&fa("doctor").stdout), "{empty}");
}
