//! A rank on a GPU, and how it joins the others.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fa_attn::device::Gpu;
use fa_kernels::cudarc::driver::CudaStream;
use fa_kernels::cudarc::driver::sys::CUevent_flags;

use super::memory::driver;
use crate::bootstrap::{Bootstrap, Place, Store};
use crate::error::Error;
use crate::nccl::{Communicator, Nccl, UniqueId};

/// How a rank on a GPU joins the others.
#[derive(Clone, Copy, Debug)]
pub struct RankOptions {
    /// The longest wait for others: to join, and for an enqueued pass in [`Rank::wait`].
    pub deadline: Duration,
    /// The most SMs that NCCL's transfers take; `None` for its own choice. Kernels of attention leave none
    /// free: few are enough where transfers are hidden.
    pub transfer_ctas: Option<u32>,
}

impl Default for RankOptions {
    fn default() -> RankOptions {
        RankOptions { deadline: Duration::from_secs(60), transfer_ctas: Some(16) }
    }
}

/// A stream's priority: less is earlier.
const HIGHEST: i32 = -5;

/// One GPU of several: a process or a thread each.
pub struct Rank {
    pub(super) gpu: Arc<Gpu>,
    pub(super) place: Place,
    pub(super) store: Store,
    pub(super) communicator: Option<Communicator>,
    pub(super) transfer: Arc<CudaStream>,
}

impl Rank {
    /// Joins the other ranks, on a GPU of this process. NCCL's first transfers connect the ranks, so that
    /// later ones do not.
    ///
    /// # Errors
    /// [`Error::NoNccl`], [`Error::Deadline`] where a rank does not come, [`Error::Mismatch`] where ranks
    /// disagree on their number, [`Error::Nccl`] and those of the bootstrap.
    pub fn join(
        gpu: &Arc<Gpu>,
        bootstrap: &Bootstrap,
        place: Place,
        options: &RankOptions,
    ) -> Result<Rank, Error> {
        let RankOptions { deadline, transfer_ctas } = *options;
        gpu.context().bind_to_thread().map_err(driver("entering the context"))?;
        let mut store = Store::join(bootstrap, place, deadline)?;
        // Transfers get SMs before kernels that would hold all of them; the driver takes its own highest.
        let transfer = gpu.context().new_stream_with_priority(HIGHEST).map_err(driver("making a stream"))?;
        let mut communicator = None;
        if place.world > 1 {
            let loaded = Nccl::load();
            // A rank without the library says so to all, which would else wait for it.
            let own = match &loaded {
                Ok(nccl) if place.rank == 0 => nccl.unique_id()?.to_hex(),
                Ok(_) => String::new(),
                Err(error) => format!("error: {error}"),
            };
            let all = store.gather("exchanging NCCL's id", &own)?;
            let nccl = loaded?;
            for (rank, text) in all.iter().enumerate() {
                if text.starts_with("error: ") {
                    let (theirs, ours) = (text.clone(), "NCCL".to_owned());
                    return Err(Error::Mismatch { rank, theirs, ours });
                }
            }
            let id = UniqueId::from_hex(&all[0]).ok_or_else(|| Error::Mismatch {
                rank: 0,
                theirs: "no NCCL id".to_owned(),
                ours: "NCCL".to_owned(),
            })?;
            let lost = store.watch();
            let at = (place.rank, place.world);
            communicator = Some(Communicator::join(&nccl, id, at, transfer_ctas, deadline, &lost)?);
        }
        Ok(Rank { gpu: gpu.clone(), place, store, communicator, transfer })
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// The place among all ranks.
    pub fn place(&self) -> Place {
        self.place
    }

    /// The text of every rank, in their order, which waits for all: a barrier, and a way to tell times.
    ///
    /// # Errors
    /// [`Error::PeerLost`] and [`Error::Deadline`].
    pub fn gather(&mut self, text: &str) -> Result<Vec<String>, Error> {
        self.store.gather("exchanging a text", text)
    }

    /// Adds up a few host values over all ranks, in their order: losses, and gradients of small models. It
    /// goes by the bootstrap's connections, as text.
    ///
    /// # Errors
    /// As [`Rank::gather`], and [`Error::Mismatch`] where a rank has another number of values.
    pub fn sum(&mut self, values: &mut [f32]) -> Result<(), Error> {
        let own: String = values.iter().map(|value| format!("{:08x}", value.to_bits())).collect();
        let all = self.store.gather("adding up values", &own)?;
        values.fill(0.0);
        for (rank, text) in all.iter().enumerate() {
            if text.len() != own.len() {
                let [theirs, ours] = [text, &own].map(|text| format!("{} values", text.len() / 8));
                return Err(Error::Mismatch { rank, theirs, ours });
            }
            let word =
                |at: usize| text.get(8 * at..8 * at + 8).and_then(|word| u32::from_str_radix(word, 16).ok());
            for (at, value) in values.iter_mut().enumerate() {
                *value += word(at).map_or(f32::NAN, f32::from_bits);
            }
        }
        Ok(())
    }

    /// Waits for what is enqueued on `stream`: until a rank is lost, NCCL fails, or the deadline is over,
    /// which ends the communicator.
    ///
    /// # Errors
    /// [`Error::PeerLost`], [`Error::Nccl`], [`Error::Deadline`], and asynchronous errors of the GPU.
    pub fn wait(&mut self, stream: &CudaStream) -> Result<(), Error> {
        const DOING: &str = "waiting for a pass";
        let event = stream.record_event(Some(CUevent_flags::CU_EVENT_DISABLE_TIMING));
        let event = event.map_err(driver("recording an event"))?;
        let (begun, lost) = (Instant::now(), self.store.watch());
        while !event.is_complete() {
            if let Some(communicator) = &mut self.communicator {
                communicator.is_settled(DOING)?;
                communicator.still(DOING, begun, &lost)?;
            }
            std::thread::yield_now();
        }
        stream.synchronize().map_err(driver("waiting for the GPU"))
    }

    /// Compares a text with those of the other ranks, of which one may have an error instead: then each has
    /// one.
    pub(super) fn agree<T>(&mut self, text: &str, done: Result<T, Error>) -> Result<T, Error> {
        let own = match &done {
            Ok(_) => text.to_owned(),
            Err(error) => format!("error: {error}"),
        };
        let all = self.store.gather("comparing plans", &own)?;
        let done = done?;
        match all.into_iter().enumerate().find(|(_, other)| *other != own) {
            Some((rank, theirs)) => Err(Error::Mismatch { rank, theirs, ours: own }),
            None => Ok(done),
        }
    }

    /// What a call has done: of an error the other ranks, which may wait for this one, learn at once.
    pub(super) fn told<T>(&mut self, done: Result<T, Error>) -> Result<T, Error> {
        if let Err(error) = &done {
            self.store.fail(&error.to_string());
            if let Some(communicator) = &mut self.communicator {
                communicator.abort();
            }
        }
        done
    }

    /// Whether all ranks are there, as far as this one knows.
    pub(super) fn check(&self, doing: &str) -> Result<(), Error> {
        match (self.store.watch())() {
            Some(lost) => Err(lost.while_doing(doing)),
            None => Ok(()),
        }
    }
}
