//! What a plan refuses, and what fails between ranks.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use fa_core::ProblemError;
use fa_cpu::CpuError;

/// An error of this crate. Each says what was asked and what would work.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The problem contradicts itself.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// A scheme cannot compute the problem.
    #[error("{scheme} over {world} ranks does not compute {what}: {instead}")]
    Refused {
        /// The scheme.
        scheme: &'static str,
        /// Ranks.
        world: usize,
        /// What it does not compute.
        what: String,
        /// What would work.
        instead: String,
    },
    /// A rank or a number of ranks that cannot be.
    #[error("{name} = {value}: use {need}")]
    Ranks {
        /// `rank` or `world`.
        name: &'static str,
        /// Its value.
        value: usize,
        /// What would work.
        need: String,
    },
    /// A tensor of a call does not fit the plan.
    #[error("{tensor} is {got}, the plan needs {need}")]
    Tensor {
        /// The tensor.
        tensor: &'static str,
        /// What was given.
        got: String,
        /// What the rank's shard has.
        need: String,
    },
    /// A rank has ended or does not answer any more.
    #[error("rank {rank} is lost while {doing}{}: start all ranks again", said(.why.as_deref()))]
    PeerLost {
        /// The rank.
        rank: usize,
        /// What this rank was doing.
        doing: String,
        /// What the rank itself has said of it, if it could.
        why: Option<String>,
    },
    /// Another rank does something else.
    #[error("rank {rank} has {theirs}, this rank {ours}: all ranks need the same call in the same order")]
    Mismatch {
        /// The other rank.
        rank: usize,
        /// What it has.
        theirs: String,
        /// What this rank has.
        ours: String,
    },
    /// What ranks send by cannot be used.
    #[error("{transport} cannot {what}: {instead}")]
    Transport {
        /// What ranks were to send by.
        transport: &'static str,
        /// What it cannot do.
        what: String,
        /// What would work.
        instead: String,
    },
    /// NCCL returned an error.
    #[error("NCCL error {code} ({text}) while {doing}")]
    Nccl {
        /// `ncclResult_t`.
        code: i32,
        /// NCCL's own words.
        text: String,
        /// What this rank was doing.
        doing: &'static str,
    },
    /// Something did not happen in time.
    #[error("{doing} took more than {after:?}: is every rank running, and with the same plan?")]
    Deadline {
        /// The time allowed.
        after: Duration,
        /// What was waited for.
        doing: String,
    },
    /// NCCL's library is not there, or not usable.
    #[error(
        "no usable NCCL ({tried}): `pip install nvidia-nccl-cu13` (or -cu12), or set FA_NCCL to the file \
         libnccl.so.2"
    )]
    NoNccl {
        /// Where it was looked for, or what is wrong with it.
        tried: String,
    },
    /// A bootstrap's address, file or variable is not usable.
    #[error("{what}: {reason}")]
    Bootstrap {
        /// The address, file or variable.
        what: String,
        /// Why.
        reason: String,
    },
    /// A file of the bootstrap cannot be read or written.
    #[error("{path}: {source}", path = .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The CPU's code refuses a part of the work.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// A GPU's code refuses a part of the work.
    #[error(transparent)]
    Attention(#[from] fa_attn::Error),
    /// A launch or the driver fails.
    #[error(transparent)]
    Kernels(#[from] fa_kernels::Error),
}

fn said(why: Option<&str>) -> String {
    why.map_or_else(String::new, |why| format!(", which says: {why}"))
}

/// A rank that is lost, and what it has said of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lost {
    pub(crate) rank: usize,
    pub(crate) why: Option<String>,
}

/// Characters of a reason that are passed on.
const MOST_WORDS: usize = 1000;

impl Lost {
    /// Of a rank that says why.
    pub(crate) fn of(rank: usize, why: &str) -> Lost {
        Lost { rank, why: Some(why.chars().take(MOST_WORDS).collect()) }
    }

    /// Of a rank that has ended without a word.
    pub(crate) fn silently(rank: usize) -> Lost {
        Lost { rank, why: None }
    }

    /// The error of a rank that learns of it.
    pub(crate) fn while_doing(self, doing: &str) -> Error {
        Error::PeerLost { rank: self.rank, doing: doing.to_owned(), why: self.why }
    }
}

/// What a rank says whose thread panics.
pub(crate) const PANIC: &str = "its thread panicked";

/// When a deadline that begins now is over; those beyond the clock are a year away.
pub(crate) fn until(deadline: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 86_400);
    Instant::now() + deadline.min(YEAR)
}
