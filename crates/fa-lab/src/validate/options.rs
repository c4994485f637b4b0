//! What to validate.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use fa_core::{DescaleForm, Dtype, Family, KernelSpec, Pass};
use serde::{Deserialize, Serialize};

use crate::grid::{Case, Extent};
use crate::shape::HeadDim;

/// What to validate, and how.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Options {
    /// The family of kernels; `None` for the fastest that the GPU runs.
    pub family: Option<Family>,
    /// The pass; gradients are taken after the forward.
    pub pass: Pass,
    /// The cases.
    pub cases: Cases,
    /// Only cases of these groups; all, if empty.
    #[serde(default)]
    pub groups: Vec<String>,
    /// Only cases of problems of this kind.
    #[serde(default)]
    pub kind: Kind,
    /// Only cases whose names contain this.
    pub filter: Option<String>,
    /// Seconds after which a case on the GPU counts as hung.
    pub watchdog: u32,
}

/// A kind of problems: what is `None` or `false` may be anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kind {
    /// The type of Q.
    pub dtype: Option<Dtype>,
    /// The type of K and V.
    pub kv_dtype: Option<Dtype>,
    /// The form of K's descales, or of V's.
    pub kv_descale: Option<DescaleForm>,
    /// Whether keys begin with their values.
    pub latent: bool,
}

impl Kind {
    /// Whether a case is of this kind.
    pub(super) fn has(&self, case: &Case) -> bool {
        let Kind { dtype, kv_dtype, kv_descale, latent } = *self;
        let (problem, append) = (&case.problem, &case.append);
        let (q, kv, descales) = match append {
            Some(append) => (append.dtype, append.cache_dtype(), append.descales()),
            None => (problem.types.q, problem.types.kv, problem.descales),
        };
        dtype.is_none_or(|dtype| dtype == q)
            && kv_dtype.is_none_or(|dtype| dtype == kv)
            && kv_descale.is_none_or(|form| kv.is_code() && [descales.k, descales.v].contains(&form))
            && (!latent || problem.latent)
    }

    /// As an error says it, between spaces.
    pub(super) fn text(&self) -> String {
        let Kind { dtype, kv_dtype, kv_descale, latent } = self;
        let parts = [
            dtype.map(|dtype| format!(" of {dtype}")),
            kv_dtype.map(|dtype| format!(" with K and V in {dtype}")),
            kv_descale.map(|form| format!(" with descales {form}")),
            latent.then(|| " of latents".to_owned()),
        ];
        parts.into_iter().flatten().collect()
    }
}

/// Which cases are run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Cases {
    /// The grid: by the library's own choice of kernel, by shipped kernels, and by kernels with one switch
    /// changed.
    Grid {
        /// How much of it.
        extent: Extent,
        /// Runs of each repeated case, which must give the same bits.
        repeat: usize,
    },
    /// Cases of one kernel.
    Spec {
        /// The kernel.
        spec: Box<KernelSpec>,
        /// Runs of the repeated case.
        repeat: usize,
    },
    /// Cases of units of the ledger.
    Units {
        /// The units, by their keys.
        keys: Vec<String>,
        /// How many cases of each.
        extent: Extent,
        /// Whether the grid's other cases run as well: the library's own choices, and kernels with one switch
        /// changed.
        library: bool,
    },
    /// Random problems.
    Soak {
        /// For this many seconds.
        seconds: u32,
        /// Their seed.
        seed: u64,
    },
    /// The small cases that run under compute-sanitizer.
    Sanitize,
    /// Every configuration that the planner lists for these head dims.
    Configs {
        /// The head dims.
        head_dims: Vec<HeadDim>,
    },
}

impl Options {
    /// How long random problems run, if they do.
    pub fn soak_time(&self) -> Option<Duration> {
        match self.cases {
            Cases::Soak { seconds, .. } => Some(Duration::from_secs(u64::from(seconds))),
            Cases::Grid { .. }
            | Cases::Spec { .. }
            | Cases::Units { .. }
            | Cases::Sanitize
            | Cases::Configs { .. } => None,
        }
    }
}

/// When to stop, and what is there from an earlier run.
#[derive(Debug, Default)]
pub struct Resume {
    /// Cases that have not ended then are left for another run.
    pub until: Option<Instant>,
    /// A file with the cases that have ended, to which those of this run are added.
    pub state: Option<PathBuf>,
    /// What the cases are of: a state file's cases of anything else run again.
    pub of: String,
}

/// A worker's job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    /// The cases.
    pub options: Options,
    /// Names of finished cases.
    pub finished: Vec<String>,
}
