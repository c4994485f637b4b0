//! The steps: what is to be proven first, then rates next to peers, then what takes longest.

use std::path::Path;

use super::{Step, Summarised};
use crate::error::Result;

/// Which steps to list.
#[derive(Clone, Debug)]
pub struct Wanted<'a> {
    /// The folder of the records.
    pub results: &'a Path,
    /// The folder of full records, of which summaries are kept.
    pub state: &'a Path,
    /// The GPU, as names of records of rates have it: `h100`.
    pub gpu: &'a str,
    /// Whether kernels are judged again that the grid has judged as they are.
    pub all: bool,
    /// Whether other libraries are measured in the same runs.
    pub peers: bool,
}

/// Seconds of the whole grid, of all kernels, and of random problems for each of the four, on an H100.
const GRID: u64 = 1200;
const SOAK: u64 = 300;

/// Seconds of a ladder's steps, and the most that they take with kernels to compile.
const LADDER: (u64, u64) = (90, 600);

/// The same of a ladder's profile, which only compiles.
const PROFILE: (u64, u64) = (20, 300);

/// Rates: name, arguments after `bench --backend cuda`, whether peers can be timed, seconds.
const RATES: [(&str, &str, bool, u64); 25] = [
    ("marks-models-fwd", "--marks models --mode fwd", true, 60),
    ("marks-models-bwd", "--marks models --mode bwd", true, 90),
    ("marks-held-out-fwd", "--marks held-out --mode fwd", true, 60),
    ("marks-held-out-bwd", "--marks held-out --mode bwd", true, 90),
    ("marks-sharded-fwd", "--marks sharded --mode fwd", true, 60),
    ("marks-sharded-bwd", "--marks sharded --mode bwd", true, 90),
    ("marks-groups-fwd", "--marks groups --mode fwd", true, 300),
    ("marks-groups-bwd", "--marks groups --mode bwd", true, 400),
    ("marks-packed", "--marks packed", true, 40),
    ("marks-packed-bwd", "--marks packed-bwd --mode bwd", false, 20),
    (
        "marks-packed-bwd-drawn",
        "--marks packed-bwd --mode bwd --change persistent=true --change persistent=false",
        false,
        30,
    ),
    ("marks-packed-models-fwd", "--marks packed-models --mode fwd", true, 60),
    ("marks-packed-models-bwd", "--marks packed-models --mode bwd", true, 70),
    ("marks-models-bwd-deterministic", "--marks models --mode bwd --deterministic --peer fa4", true, 90),
    ("marks-sm80-bwd", "--marks sm80-bwd --mode bwd", true, 60),
    ("marks-sm80", "--marks sm80", true, 60),
    ("marks-decode", "--marks decode", true, 60),
    ("marks-decode-models", "--marks decode-models", true, 80),
    ("marks-chunks", "--marks chunks", true, 40),
    ("marks-mixed", "--marks mixed", true, 40),
    ("marks-step", "--marks step", true, 40),
    ("marks-paged", "--marks paged", false, 20),
    ("marks-plan", "--marks plan", false, 10),
    ("marks-sinks", "--marks sinks", true, 40),
    ("marks-sm90-bwd", "--marks sm90-bwd --mode bwd", true, 120),
];

/// The steps, in order.
///
/// # Errors
/// Records that cannot be read.
pub fn steps_for(wanted: &Wanted<'_>) -> Result<Vec<Step>> {
    let folder = wanted.results.display().to_string();
    let mut steps = Vec::new();
    let mut add = |name: String,
                   flags: &str,
                   paths: &[(&str, String)],
                   (expected, limit): (u64, u64),
                   summarised: Option<Summarised>| {
        let mut arguments: Vec<String> = flags.split_whitespace().map(str::to_owned).collect();
        for (flag, path) in paths {
            arguments.extend([(*flag).to_owned(), path.clone()]);
        }
        steps.push(Step { name, arguments, expected, limit, summarised });
    };
    let results = [("--results", folder.clone())];
    let again = if wanted.all { " --again" } else { "" };
    add("prove-grid".to_owned(), &format!("prove --tier grid{again}"), &results, (GRID, 3 * GRID), None);
    for (name, flags, has_peers, seconds) in RATES {
        // It compares with one peer, and is useless without it.
        if name == "marks-models-bwd-deterministic" && !wanted.peers {
            continue;
        }
        let (base, peer) = flags.split_once(" --peer ").unwrap_or((flags, ""));
        let mut flags = format!("bench --backend cuda {base}");
        if has_peers && wanted.peers {
            flags += " --peers";
            if !peer.is_empty() {
                flags += &format!(" --peer {peer}");
            }
        }
        let record = wanted.state.join(format!("{name}-{}.json", wanted.gpu));
        let path = [("--json", record.display().to_string())];
        let summarised = Some(Summarised { record, results: wanted.results.to_owned() });
        // Kernels that have not been compiled are compiled before the first rate.
        add(name.to_owned(), &flags, &path, (seconds, 5 * seconds + 120), summarised);
    }
    for family in ["sm80", "sm90"] {
        let record = wanted.state.join(format!("{family}-{}.json", wanted.gpu));
        let path = [("--json", record.display().to_string())];
        let peers = if family == "sm80" && wanted.peers { " --peers" } else { "" };
        let summarised = Some(Summarised { record, results: wanted.results.to_owned() });
        let flags = format!("ladder --family {family}{peers}");
        add(format!("ladder-{family}"), &flags, &path, LADDER, summarised);
        let record = wanted.state.join("profile").join(format!("{family}-{}.json", wanted.gpu));
        let path = [("--json", record.display().to_string())];
        let summarised = Some(Summarised { record, results: wanted.results.to_owned() });
        let flags = format!("ladder --profile --family {family}");
        add(format!("profile-{family}"), &flags, &path, PROFILE, summarised);
    }
    let soak = format!("prove --tier soak --seconds {SOAK} --watchdog 240 --seed 21");
    add("prove-soak".to_owned(), &soak, &results, (4 * SOAK + 80, 8 * SOAK), None);
    add("prove-sanitized".to_owned(), "prove --tier sanitized", &results, (480, 3600), None);
    Ok(steps)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::marks::Marks;

    fn names(results: &Path, all: bool, peers: bool) -> Vec<String> {
        let wanted = Wanted { results, state: results, gpu: "h100", all, peers };
        steps_for(&wanted).expect("steps").into_iter().map(|step| step.name).collect()
    }

    fn records() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results")
    }

    #[test]
    fn what_is_to_be_proven_comes_first() {
        let all = names(&records(), true, true);
        assert_eq!(
            (all[0].as_str(), &all[all.len() - 2..]),
            ("prove-grid", &["prove-soak".to_owned(), "prove-sanitized".to_owned()][..])
        );
        assert_eq!(names(&records(), false, true), all);
        assert!(!names(&records(), true, false).contains(&"marks-models-bwd-deterministic".to_owned()));
    }

    #[test]
    fn steps_are_named_once_and_measure_every_list_but_the_largest() {
        let records = records();
        let wanted = Wanted { results: &records, state: &records, gpu: "h100", all: true, peers: true };
        let steps = steps_for(&wanted).expect("steps");
        let names: BTreeSet<&str> = steps.iter().map(|step| step.name.as_str()).collect();
        assert_eq!(names.len(), steps.len());
        assert!(
            ["ladder-sm80", "ladder-sm90", "profile-sm80", "profile-sm90"]
                .iter()
                .all(|name| names.contains(name))
        );
        assert!(steps.iter().all(|step| step.limit > step.expected));
        let measured: BTreeSet<&str> = steps
            .iter()
            .filter_map(|step| {
                let at = step.arguments.iter().position(|own| own == "--marks")?;
                Some(step.arguments[at + 1].as_str())
            })
            .collect();
        for marks in Marks::ALL {
            assert!(measured.contains(marks.name()) || marks == Marks::Sm90, "{}", marks.name());
        }
        let deterministic =
            steps.iter().find(|step| step.name == "marks-models-bwd-deterministic").expect("one");
        assert!(deterministic.arguments.join(" ").contains("--peers --peer fa4"), "{deterministic:?}");
    }
}
