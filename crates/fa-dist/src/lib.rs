//! Attention over several GPUs: sequences whose rows are spread over ranks.
//!
//! - [`ShardPlan`]: which rank holds which rows, and the [`program`] of each rank, as data: nothing here
//!   knows CUDA. [`Scheme`] has the ways to work together, [`cost`] predicts their times.
//! - [`HostAttention`]: passes on the CPU, over a [`HostTransport`] such as threads ([`MemoryTransport`]).
//! - [`DeviceAttention`]: the same programs on a GPU, over NCCL or copies ([`Transport`]); [`Rank`] joins the
//!   ranks, [`Bootstrap`] says where they meet.
//!
//! What this crate does not know: how attention is computed (fa-attn, fa-cpu).

mod block;
mod bootstrap;
pub mod cost;
mod device;
mod error;
mod host;
mod memory;
mod moved;
mod nccl;
mod passes;
mod plan;
mod planning;
pub mod program;
pub mod pulls;
mod run;
mod schemes;
mod shard;
mod transport;
mod visible;

pub use bootstrap::{Bootstrap, Place};
pub use device::{DeviceAttention, Rank, RankOptions, StepTime, Transport, one_gpu};
pub use error::Error;
pub use host::{HostAttention, Wire};
pub use memory::{Fault, FaultKind, MemoryOptions, MemoryTransport};
pub use nccl::{NCCL_VARIABLE, Nccl};
pub use plan::{MAX_WORLD, Scheme, ShardPlan};
pub use run::Order;
pub use shard::{Layout, Placed, Shards};
pub use transport::HostTransport;
