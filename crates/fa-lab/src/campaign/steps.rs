//! The steps: unvalidated kernels first, then rates next to peers, then what takes longest.

use std::path::Path;

use fa_core::{Family, Pass, counted};

use super::{Step, Summarised};
use crate::error::Result;
use crate::record::{State, standings};

/// Which steps to list.
#[derive(Clone, Debug)]
pub struct Wanted<'a> {
    /// The folder of the records.
    pub results: &'a Path,
    /// The folder of full records, of which summaries are kept.
    pub state: &'a Path,
    /// The GPU, as names of records of rates have it: `h100`.
    pub gpu: &'a str,
    /// Whether to validate kernels whose records match the current sources.
    pub all: bool,
    /// Whether other libraries are measured in the same runs.
    pub peers: bool,
}

const KERNELS: [(Family, Pass); 4] = [
    (Family::Sm90, Pass::Forward),
    (Family::Sm80, Pass::Forward),
    (Family::Sm80, Pass::BACKWARD),
    (Family::Sm90, Pass::BACKWARD),
];

/// Seconds of each kernel's grid on an H100, by its records.
const GRID: [u64; 4] = [270, 230, 240, 420];

/// Seconds of random problems for each kernel.
const SOAK: u64 = 300;

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
    let changed = changed(wanted)?;
    let of =
        |(family, pass): &(Family, Pass)| format!("--family {} --mode {}", family.name(), pass.short_name());
    let name = |what: &str, (family, pass): &(Family, Pass)| {
        format!("{what}-{}-{}", family.name(), pass.short_name())
    };
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
    for (kernel, seconds) in KERNELS.iter().zip(GRID).filter(|(kernel, _)| changed.contains(kernel)) {
        let flags = format!("validate --record {}", of(kernel));
        add(name("validate", kernel), &flags, &results, (seconds, 3 * seconds), None);
    }
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
    for kernel in &KERNELS {
        let flags = format!("validate --soak {SOAK} --watchdog 240 --seed 21 --record {}", of(kernel));
        add(name("soak", kernel), &flags, &results, (SOAK + 20, 2 * SOAK), None);
    }
    for kernel in &KERNELS {
        let flags = format!("validate --sanitize --record {}", of(kernel));
        add(name("sanitize", kernel), &flags, &results, (120, 900), None);
    }
    Ok(steps)
}

/// The kernels with a shipped spec that no record has with the current sources.
fn changed(wanted: &Wanted<'_>) -> Result<Vec<(Family, Pass)>> {
    if wanted.all {
        return Ok(KERNELS.to_vec());
    }
    let mut changed = Vec::new();
    for standing in standings(wanted.results)? {
        if matches!(standing.state, State::Validated { .. }) {
            continue;
        }
        let name = &standing.kernel.name;
        let own = KERNELS
            .iter()
            .find(|(family, pass)| name.starts_with(&format!("{}_{}", family.name(), pass.short_name())));
        changed.extend(own.copied().filter(|own| !changed.contains(own)));
    }
    tracing::info!("{} to validate", counted(changed.len(), "kernel"));
    Ok(changed)
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
    fn what_is_not_validated_comes_first_and_nothing_that_is() {
        let none = tempfile::tempdir().expect("a folder");
        let all = names(none.path(), false, true);
        assert_eq!(
            all[..4],
            ["validate-sm90-fwd", "validate-sm80-fwd", "validate-sm80-bwd", "validate-sm90-bwd"]
        );
        let here = names(&records(), false, true);
        let standings = standings(&records()).expect("records");
        for (family, pass) in KERNELS {
            let kernel = format!("{}_{}", family.name(), pass.short_name());
            let of_kernel = |own: &&crate::record::Standing| own.kernel.name.starts_with(&kernel);
            let is_old =
                standings.iter().filter(of_kernel).any(|own| !matches!(own.state, State::Validated { .. }));
            assert_eq!(here.contains(&format!("validate-{}", kernel.replace('_', "-"))), is_old, "{kernel}");
        }
        assert_eq!(names(&records(), true, true), all);
        assert!(!names(&records(), true, false).contains(&"marks-models-bwd-deterministic".to_owned()));
    }

    #[test]
    fn steps_are_named_once_and_measure_every_list_but_the_largest() {
        let records = records();
        let wanted = Wanted { results: &records, state: &records, gpu: "h100", all: true, peers: true };
        let steps = steps_for(&wanted).expect("steps");
        let names: BTreeSet<&str> = steps.iter().map(|step| step.name.as_str()).collect();
        assert_eq!(names.len(), steps.len());
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
