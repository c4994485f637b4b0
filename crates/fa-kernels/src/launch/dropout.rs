//! The dropout kernel: the bits of the probabilities that are kept ([`fa_core::dropout`]), as the attention
//! kernels read them. One kernel for all problems, one launch.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtrMut};
use fa_core::Kept;

use crate::Error;
use crate::jit::declare::{ConstPtr, MutU32Ptr};
use crate::jit::dropout_params::DropoutParams;
use crate::jit::entries::DROPOUT_THREADS;
use crate::launch::checks::check_address;
use crate::launch::single::Single;

/// CTAs of an SM, whose warps take block after block.
const CTAS_PER_SM: u64 = 16;

/// The launch of the dropout kernel, as data: nothing here calls CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropoutLaunch {
    /// CTAs; 0 where there is nothing to do.
    pub grid: u32,
    /// Threads of a CTA.
    pub threads: u32,
    heads: i32,
    queries: i32,
    words: i32,
}

/// What decides which probabilities are kept: by value, or the address of seed, offset and threshold in
/// device memory, 64 bits each, which a captured graph reads at each replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RawKept {
    /// By value.
    Value(Kept),
    /// In device memory.
    At(u64),
}

impl DropoutLaunch {
    /// The launch for bits `[heads, queries, words]` of 32 keys each, of the query heads of all sequences, on
    /// a GPU with `sms` SMs.
    ///
    /// # Errors
    /// [`Error::DropoutCount`] for counts beyond the kernel's integers.
    pub fn new(heads: usize, queries: usize, words: usize, sms: u32) -> Result<DropoutLaunch, Error> {
        let narrow = |count: usize| {
            i32::try_from(count).map_err(|_| Error::DropoutCount { count, most: i32::MAX as usize })
        };
        let blocks = (heads as u64).saturating_mul(queries.div_ceil(16) as u64).saturating_mul(words as u64);
        let warps = u64::from(DROPOUT_THREADS / 32);
        let grid = blocks.div_ceil(warps).min(CTAS_PER_SM * u64::from(sms.max(1)));
        Ok(DropoutLaunch {
            grid: grid as u32,
            threads: DROPOUT_THREADS,
            heads: narrow(heads)?,
            queries: narrow(queries)?,
            words: narrow(words)?,
        })
    }

    /// Words that are written.
    pub fn len(&self) -> usize {
        self.heads as usize * self.queries as usize * self.words as usize
    }

    /// Whether nothing is written.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The kernel's parameters.
    pub fn params(&self, bits: u64, kept: RawKept) -> DropoutParams {
        let halves = |value: u64| [value as u32, (value >> 32) as u32];
        let (state, kept) = match kept {
            RawKept::Value(kept) => (0, kept),
            RawKept::At(address) => (address, Kept { seed: 0, offset: 0, threshold: 0 }),
        };
        DropoutParams {
            bits: MutU32Ptr(bits),
            state: ConstPtr(state),
            seed: halves(kept.seed),
            offset: halves(kept.offset),
            threshold: kept.threshold.into(),
            heads: self.heads,
            queries: self.queries,
            words: self.words,
        }
    }
}

/// The dropout kernel ready to run. Shared by threads.
#[derive(Clone, Debug)]
pub struct BoundDropout {
    kernel: Arc<Single>,
    launch: DropoutLaunch,
}

impl BoundDropout {
    pub(crate) fn new(kernel: Arc<Single>, launch: DropoutLaunch) -> BoundDropout {
        BoundDropout { kernel, launch }
    }

    /// What a call launches.
    pub fn launch(&self) -> &DropoutLaunch {
        &self.launch
    }

    /// Writes the bits on `stream`: one launch that allocates nothing and waits for nothing.
    ///
    /// # Errors
    /// [`Error::TooShort`], [`Error::Context`] and [`Error::Driver`].
    pub fn run(&self, stream: &CudaStream, kept: Kept, bits: &mut CudaSlice<u32>) -> Result<(), Error> {
        if bits.len() < self.launch.len() {
            let (have, need) = (bits.len() as u64, self.launch.len() as u64);
            return Err(Error::TooShort { tensor: "bits", have, need });
        }
        self.kernel.check_context("bits", bits.stream())?;
        let (address, guard) = bits.device_ptr_mut(stream);
        // SAFETY: the length was checked, and the bits stay borrowed until the launch is enqueued; cudarc
        // orders the stream before any later use or release.
        let launched = unsafe { self.run_raw(stream, address, RawKept::Value(kept)) };
        drop(guard);
        launched
    }

    /// [`BoundDropout::run`] on addresses alone.
    ///
    /// # Safety
    /// The launch's words lie at `bits`, and 24 bytes at an address of the state, in device memory that the
    /// stream's context can access, and stay there, untouched by others, until the stream has run the kernel.
    ///
    /// # Errors
    /// [`Error::Address`], [`Error::Context`] and [`Error::Driver`].
    pub unsafe fn run_raw(&self, stream: &CudaStream, bits: u64, kept: RawKept) -> Result<(), Error> {
        let DropoutLaunch { grid, threads, .. } = self.launch;
        if grid == 0 {
            return Ok(());
        }
        check_address("bits", bits, 4)?;
        if let RawKept::At(address) = kept {
            check_address("the generator's state", address, 8)?;
        }
        // SAFETY: the entry takes these parameters; the caller vouches for the addresses.
        unsafe { self.kernel.launch(stream, (grid, threads, 0), self.launch.params(bits, kept)) }
    }
}
