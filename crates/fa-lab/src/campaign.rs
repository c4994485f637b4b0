//! The runs that a machine with a GPU has to make when kernels have changed: a list of commands of this
//! program, in order, each with a time limit, resumed where it was stopped.
//!
//! Every step is a process of its own, whose output goes to a file; what became of it is a line in a list. A
//! step that has ended, successfully or not, is not run again by the same build of the program.

mod steps;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::error::{Context, Result};
use crate::log::{self, Log};
use crate::progress::{Progress, Step as Shown};
use crate::summary;
use crate::worker::Program;

pub use steps::{Wanted, steps_for};

/// One command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Its name, unique in a list.
    pub name: String,
    /// The arguments of this program.
    pub arguments: Vec<String>,
    /// Seconds that it took before, on an H100: it is started only if that much time is left.
    pub expected: u64,
    /// Seconds after which it is stopped.
    pub limit: u64,
    /// The record that it writes, where a summary of it is kept.
    pub summarised: Option<Summarised>,
}

/// A record that only a summary is kept of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summarised {
    /// The full record, among the files of the run's progress.
    pub record: PathBuf,
    /// The folder of the results, where its summary is.
    pub results: PathBuf,
}

/// How to run a list.
#[derive(Clone, Debug)]
pub struct Options {
    /// The folder of the list of finished steps and of each step's output.
    pub folder: PathBuf,
    /// The build of the program: steps finished by another build are run again.
    pub build: String,
    /// Seconds for all steps together; the rest is left for the next run.
    pub budget: Option<u64>,
    /// Whether steps that failed or were too slow are run again.
    pub again: bool,
}

/// How a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// With a good verdict.
    Good,
    /// With a bad verdict or an error.
    Bad,
    /// Stopped at its time limit.
    Slow,
}

/// The result of a step: a line of the list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Done {
    /// The step's name.
    pub name: String,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// The build of the program.
    pub build: String,
    /// How it ended.
    pub end: End,
    /// How long it took.
    pub seconds: f64,
    /// The last line that it printed, of its errors where it failed.
    pub said: String,
}

/// A step and its result; `None` where it has not been run, or was cut short by the budget.
pub type Row = (Step, Option<Done>);

/// File name of the list of finished steps.
const LIST: &str = "done.jsonl";

/// Time between the request to end and killing a step that ignores it.
const GRACE: Duration = Duration::from_secs(10);

/// Runs the unfinished `steps` in order; returns the results of all.
///
/// # Errors
/// A folder that cannot be written, and a program that does not start.
pub fn run(
    steps: &[Step],
    program: &Program,
    options: &Options,
    progress: &mut Progress<'_>,
) -> Result<Vec<Row>> {
    let folder = &options.folder;
    std::fs::create_dir_all(folder).context(folder.display().to_string())?;
    let mut rows = known(steps, options)?;
    let is_left = |row: &Row| match &row.1 {
        None => true,
        Some(done) => options.again && done.end != End::Good,
    };
    progress(Shown::Total(rows.iter().filter(|row| is_left(row)).count()));
    let began = Instant::now();
    for row in rows.iter_mut().filter(|row| is_left(row)) {
        let left = options.budget.map(|budget| Duration::from_secs(budget).saturating_sub(began.elapsed()));
        if left.is_some_and(|left| left < Duration::from_secs(row.0.expected)) {
            break;
        }
        progress(Shown::Begin(row.0.name.clone()));
        row.1 = run_one(&row.0, program, options, left)?;
        match &row.1 {
            Some(done) => Log::open(&folder.join(LIST))?.add(std::slice::from_ref(done))?,
            // The budget ended with it.
            None => break,
        }
        progress(Shown::Done);
    }
    Ok(rows)
}

/// The results so far.
///
/// # Errors
/// A list that cannot be read.
pub fn known(steps: &[Step], options: &Options) -> Result<Vec<Row>> {
    let done: Vec<Done> = log::read(&options.folder.join(LIST))?.results;
    let of = |step: &Step| {
        let same = |done: &&Done| {
            done.name == step.name && done.arguments == step.arguments && done.build == options.build
        };
        done.iter().rev().find(same).cloned()
    };
    Ok(steps.iter().map(|step| (step.clone(), of(step))).collect())
}

/// Runs a step; `None` where the budget ended it, not its own limit.
fn run_one(
    step: &Step,
    program: &Program,
    options: &Options,
    left: Option<Duration>,
) -> Result<Option<Done>> {
    let limit = Duration::from_secs(step.limit);
    let time = left.map_or(limit, |left| left.min(limit));
    let files = ["out", "err"].map(|stream| options.folder.join(format!("{}.{stream}", step.name)));
    if let Some(folder) = step.summarised.as_ref().and_then(|own| own.record.parent()) {
        std::fs::create_dir_all(folder).context(folder.display().to_string())?;
    }
    let create = |path: &Path| File::create(path).context(path.display().to_string());
    let mut command = program.command();
    command.args(&step.arguments).stdin(Stdio::null());
    command.stdout(create(&files[0])?).stderr(create(&files[1])?);
    let began = Instant::now();
    let mut child = command.spawn().context(program.executable.display().to_string())?;
    let ended = wait(&mut child, began + time)?;
    let end = match ended {
        Some(status) if status.success() => {
            if let Some(Summarised { record, results }) = &step.summarised {
                summary::keep(record, results)?;
            }
            End::Good
        }
        Some(_) => End::Bad,
        None if time < limit => return Ok(None),
        None => End::Slow,
    };
    let last = |path: &PathBuf| {
        let text = std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let text = text.unwrap_or_default();
        text.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default().to_owned()
    };
    let [out, errors] = files.each_ref().map(last);
    let said = if end == End::Good || errors.is_empty() { out } else { errors };
    let Step { name, arguments, .. } = step.clone();
    let (build, seconds) = (options.build.clone(), began.elapsed().as_secs_f64());
    Ok(Some(Done { name, arguments, build, end, seconds, said }))
}

/// Waits for the child up to `deadline`, then ends it: `None`.
fn wait(child: &mut Child, deadline: Instant) -> Result<Option<ExitStatus>> {
    if let Some(status) = ends_before(child, deadline)? {
        return Ok(Some(status));
    }
    // It removes unfinished files, if it still responds.
    #[cfg(unix)]
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    }
    if ends_before(child, Instant::now() + GRACE)?.is_none() {
        child.kill()?;
        child.wait()?;
    }
    Ok(None)
}

fn ends_before(child: &mut Child, deadline: Instant) -> Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    /// A program that appends its first argument to a list and acts on the others.
    struct Stub {
        folder: tempfile::TempDir,
    }

    impl Stub {
        fn new() -> Stub {
            let folder = tempfile::tempdir().expect("a folder");
            let script = "echo \"$1\" >> \"$(dirname \"$0\")/order\"; shift; eval \"$*\"\n";
            std::fs::write(folder.path().join("stub.sh"), script).expect("written");
            Stub { folder }
        }

        fn program(&self) -> Program {
            let script = self.folder.path().join("stub.sh").display().to_string();
            Program { executable: PathBuf::from("sh"), arguments: vec![script] }
        }

        fn options(&self) -> Options {
            let (folder, build) = (self.folder.path().join("state"), "one".to_owned());
            Options { folder, build, budget: None, again: false }
        }

        fn run(&self, steps: &[Step], options: &Options) -> Vec<Option<End>> {
            let rows = run(steps, &self.program(), options, &mut |_| {}).expect("it runs");
            rows.into_iter().map(|(_, done)| done.map(|done| done.end)).collect()
        }

        fn order(&self) -> String {
            let text = std::fs::read_to_string(self.folder.path().join("order")).unwrap_or_default();
            text.split_whitespace().collect()
        }
    }

    fn step(name: &str, does: &str) -> Step {
        let arguments = vec![name.to_owned(), does.to_owned()];
        Step { name: name.to_owned(), arguments, expected: 0, limit: 60, summarised: None }
    }

    use End::{Bad, Good, Slow};

    #[test]
    fn steps_run_in_order_and_each_once_for_a_build() {
        let (stub, steps) = (Stub::new(), [step("a", "true"), step("b", "exit 1"), step("c", "true")]);
        let options = stub.options();
        assert_eq!(stub.run(&steps, &options), [Some(Good), Some(Bad), Some(Good)]);
        assert_eq!(stub.run(&steps, &options), [Some(Good), Some(Bad), Some(Good)]);
        assert_eq!(stub.order(), "abc");
        // What failed runs again where that is asked for, a changed command and another build in any case.
        stub.run(&steps, &Options { again: true, ..options.clone() });
        assert_eq!(stub.order(), "abcb");
        stub.run(&[step("a", "true"), step("c", "exit 0")], &options);
        assert_eq!(stub.order(), "abcbc");
        stub.run(&steps, &Options { build: "two".to_owned(), ..options });
        assert_eq!(stub.order(), "abcbcabc");
    }

    #[test]
    fn what_is_kept_of_a_record_is_its_summary() {
        let stub = Stub::new();
        let [record, results] = ["rates.json", "results"].map(|name| stub.folder.path().join(name));
        let summary = results.join("rates.json");
        let text = r#"{"reps": 24, "version": "0.1.0", "rows": [{"spec": "a", "ms_median": 1.25}]}"#;
        std::fs::write(&record, text).expect("written");
        let summarised = Some(Summarised { record, results });
        let steps = [Step { summarised: summarised.clone(), ..step("a", "true") }];
        assert_eq!(stub.run(&steps, &stub.options()), [Some(Good)]);
        let kept = std::fs::read_to_string(&summary).expect("a summary");
        assert_eq!(kept, "{\n\"reps\":24,\n\"rows\":[{\"ms_median\":1.25,\"spec\":\"a\"}]\n}\n");
        // What failed leaves the summary as it is.
        std::fs::remove_file(&summary).expect("removed");
        assert_eq!(stub.run(&[Step { summarised, ..step("b", "exit 1") }], &stub.options()), [Some(Bad)]);
        assert!(!summary.exists());
    }

    #[test]
    fn a_step_that_takes_too_long_is_ended_and_the_others_go_on() {
        let (stub, began) = (Stub::new(), Instant::now());
        let slow = Step { limit: 1, ..step("s", "exec sleep 60") };
        assert_eq!(stub.run(&[slow, step("t", "true")], &stub.options()), [Some(Slow), Some(Good)]);
        assert!(began.elapsed() < Duration::from_secs(30) && stub.order() == "st");
    }

    #[test]
    fn the_budget_leaves_the_rest_for_the_next_time() {
        let stub = Stub::new();
        let steps = [step("a", "true"), Step { expected: 50, ..step("b", "true") }, step("c", "true")];
        let options = Options { budget: Some(20), ..stub.options() };
        // No step is skipped: the most important ones come first.
        assert_eq!(stub.run(&steps, &options), [Some(Good), None, None]);
        assert_eq!(stub.run(&steps, &stub.options()), [Some(Good); 3]);
        assert_eq!(stub.order(), "abc");
        // One that is cut short by the budget is not done.
        let stub = Stub::new();
        let steps = [step("s", "exec sleep 60"), step("t", "true")];
        assert_eq!(stub.run(&steps, &Options { budget: Some(1), ..stub.options() }), [None, None]);
        assert_eq!(stub.order(), "s");
    }

    #[test]
    fn the_last_line_says_what_came_of_a_step() {
        let stub = Stub::new();
        let steps = [
            step("good", "echo 7 of 7; echo; echo warned >&2"),
            step("bad", "echo some; echo no GPU >&2; exit 2"),
        ];
        let rows = run(&steps, &stub.program(), &stub.options(), &mut |_| {}).expect("it runs");
        let said: Vec<String> = rows.into_iter().filter_map(|(_, done)| Some(done?.said)).collect();
        assert_eq!(said, ["7 of 7", "no GPU"]);
    }

    #[test]
    fn a_line_that_was_cut_off_is_of_a_step_that_runs_again() {
        let stub = Stub::new();
        let options = stub.options();
        std::fs::create_dir_all(&options.folder).expect("made");
        std::fs::write(options.folder.join(LIST), "{\"name\": \"a\", \"argum\n").expect("written");
        assert_eq!(stub.run(&[step("a", "true")], &options), [Some(Good)]);
        assert_eq!(stub.order(), "a");
    }
}
