//! A worker's messages: which case is on the GPU, and its result.

use serde::{Deserialize, Serialize};

use crate::worker::{EXIT_LOST, say};

/// A message of a worker to its supervisor, a line of JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Event {
    /// The number of cases ahead.
    Cases(usize),
    /// This case starts on the GPU.
    Begin(String),
    /// This case is finished.
    Done(CaseResult),
}

/// The result of a case.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CaseResult {
    /// The case.
    pub name: String,
    /// The kernel.
    pub kernel: String,
    /// Its status.
    pub status: Status,
    /// The largest error as a share of its tolerance.
    pub ratio: f64,
    /// The figures, or what is wrong.
    pub detail: String,
    /// Median milliseconds of a launch, where it was timed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ms: Option<f64>,
    /// Kernels that the planner ranks above the one that ran, and that do not compile cleanly.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub passed_over: Vec<PassedOver>,
}

/// A kernel of the planner that does not compile cleanly.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PassedOver {
    /// The kernel.
    pub kernel: String,
    /// The fault that the compiler reports.
    pub fault: String,
}

impl PassedOver {
    /// The kernel of [`fa_kernels::Error::Refused`]; `None` for other errors.
    pub(super) fn of(error: &fa_kernels::Error) -> Option<PassedOver> {
        let fa_kernels::Error::Refused { name, fault, .. } = error else { return None };
        Some(PassedOver { kernel: name.clone(), fault: fault.to_string() })
    }
}

/// The status of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Right.
    Passed,
    /// Wrong.
    Failed,
    /// Could not be tried here.
    Skipped,
}

pub(super) fn tell(event: &Event) {
    // A worker without a supervisor ends.
    if say(event).is_err() {
        std::process::exit(EXIT_LOST);
    }
}
