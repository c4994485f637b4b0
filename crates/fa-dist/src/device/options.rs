//! How a rank on a GPU joins the others.

use std::time::Duration;

/// What ranks on GPUs send by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Copies where all ranks are on one host and reach one another's GPUs, else NCCL: two H200s take
    /// 1 to 39 % less time for a pass by copies (NB-222), which need no SM and begin under kernels that have
    /// all of them.
    #[default]
    Auto,
    /// NCCL, in one host and between hosts, with a GPU for each rank. Its kernels need SMs.
    Nccl,
    /// Copies between GPUs of one host that are peers, or ranks of one GPU, by copy engines; without a
    /// library. A CUDA graph that is captured refuses them.
    Copies,
}

impl Transport {
    /// Every choice.
    pub const ALL: [Transport; 3] = [Transport::Auto, Transport::Nccl, Transport::Copies];

    /// The name used on the command line and in errors.
    pub const fn name(self) -> &'static str {
        match self {
            Transport::Auto => "auto",
            Transport::Nccl => "nccl",
            Transport::Copies => "copies",
        }
    }
}

/// How a rank on a GPU joins the others.
#[derive(Clone, Copy, Debug)]
pub struct RankOptions {
    /// The longest wait for others: to join, and for an enqueued pass in [`Rank::wait`](super::Rank::wait).
    pub deadline: Duration,
    /// The most SMs that NCCL's transfers take; `None` for its own choice. Kernels of attention leave none
    /// free: few are enough where transfers are hidden.
    pub transfer_ctas: Option<u32>,
    /// What ranks send by: the same of all.
    pub transport: Transport,
}

impl Default for RankOptions {
    fn default() -> RankOptions {
        RankOptions { deadline: Duration::from_secs(60), transfer_ctas: Some(16), transport: Transport::Auto }
    }
}
