//! A rank on a GPU, and how it joins the others.

use std::sync::Arc;
use std::time::Instant;

use fa_attn::device::Gpu;
use fa_core::Pass;
use fa_kernels::cudarc::driver::CudaStream;
use fa_kernels::cudarc::driver::sys::CUevent_flags;

use super::meet::agree;
use super::memory::driver;
use super::options::{RankOptions, Transport};
use super::prepared::Prepared;
use super::transfers::Transfers;
use crate::bootstrap::{Bootstrap, Place, Store};
use crate::error::Error;
use crate::plan::ShardPlan;

/// A stream's priority: less is earlier.
const HIGHEST: i32 = -5;

/// One GPU of several, or a part of its work: a process or a thread each. Where ranks copy, the end of one
/// waits for those of other processes, which may still have its memory, for 10 s at most; and ranks that are
/// threads of one GPU need streams of their own, not its default stream.
pub struct Rank {
    pub(super) gpu: Arc<Gpu>,
    pub(super) place: Place,
    pub(super) store: Store,
    pub(super) transfers: Transfers,
    pub(super) transfer: Arc<CudaStream>,
}

impl Rank {
    /// Joins the other ranks, on a GPU of this process, and agrees with them on what all send by. NCCL's
    /// first transfers connect the ranks, so that later ones do not.
    ///
    /// # Errors
    /// [`Error::Transport`] for what ranks cannot send by, [`Error::NoNccl`], [`Error::Deadline`] where a
    /// rank does not come, [`Error::Mismatch`] where ranks disagree on their number or transport,
    /// [`Error::Nccl`] and those of the bootstrap.
    pub fn join(
        gpu: &Arc<Gpu>,
        bootstrap: &Bootstrap,
        place: Place,
        options: &RankOptions,
    ) -> Result<Rank, Error> {
        gpu.context().bind_to_thread().map_err(driver("entering the context"))?;
        let mut store = Store::join(bootstrap, place, options.deadline)?;
        // Transfers get SMs before kernels that would hold all of them; the driver takes its own highest.
        let transfer = gpu.context().new_stream_with_priority(HIGHEST).map_err(driver("making a stream"))?;
        let transfers = Transfers::join(gpu, &mut store, place, options)?;
        Ok(Rank { gpu: gpu.clone(), place, store, transfers, transfer })
    }

    /// What the ranks send by; a rank that is alone copies.
    pub fn transport(&self) -> Transport {
        self.transfers.transport()
    }

    /// Gives the others' memory back, before all ranks agree on another plan.
    pub(super) fn close(&mut self) {
        if let Transfers::Copies(copies) = &mut self.transfers {
            copies.close();
        }
    }

    /// Gives back memory that others had, once all ranks have agreed.
    pub(super) fn forget(&mut self) {
        if let Transfers::Copies(copies) = &mut self.transfers {
            copies.forget();
        }
    }

    /// Connects the memory of programs with that of the other ranks.
    pub(super) fn link(
        &mut self,
        plan: &ShardPlan,
        passes: &[Pass],
        prepared: &mut [Prepared],
    ) -> Result<(), Error> {
        let Transfers::Copies(copies) = &mut self.transfers else { return Ok(()) };
        let memory = prepared.iter().map(|own| own.memory.clone()).collect();
        let links = copies.link(&mut self.store, plan, passes, memory)?;
        prepared.iter_mut().zip(links).for_each(|(own, links)| own.links = links);
        Ok(())
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

    /// Waits for what is enqueued on `stream`: until a rank is lost, the transport fails, or the deadline is
    /// over, which ends the ranks' connections. Results are what they should be once this says so: where a
    /// rank is lost a stream may end, too.
    ///
    /// # Errors
    /// [`Error::PeerLost`], [`Error::Nccl`], [`Error::Deadline`], and asynchronous errors of the GPU.
    pub fn wait(&mut self, stream: &CudaStream) -> Result<(), Error> {
        const DOING: &str = "waiting for a pass";
        let event = stream.record_event(Some(CUevent_flags::CU_EVENT_DISABLE_TIMING));
        let event = event.map_err(driver("recording an event"))?;
        let (begun, lost) = (Instant::now(), self.store.watch());
        while !event.try_is_complete().map_err(driver("waiting for the GPU"))? {
            self.transfers.still(DOING, begun, &lost)?;
            std::thread::yield_now();
        }
        stream.synchronize().map_err(driver("waiting for the GPU"))?;
        self.transfers.is_good(DOING, &lost)
    }

    /// Compares a text with those of the other ranks, of which one may have an error instead: then each has
    /// one.
    pub(super) fn agree<T>(&mut self, text: &str, done: Result<T, Error>) -> Result<T, Error> {
        agree(&mut self.store, text, done)
    }

    /// What a call has done: of an error the other ranks, which may wait for this one, learn at once.
    pub(super) fn told<T>(&mut self, done: Result<T, Error>) -> Result<T, Error> {
        if let Err(error) = &done {
            self.store.fail(&error.to_string());
            self.transfers.abort();
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A rank may be made by one thread and used by another.
    #[test]
    fn ranks_are_sent_to_threads() {
        const fn is_sent<T: Send>() {}
        const { is_sent::<Rank>() };
    }
}
