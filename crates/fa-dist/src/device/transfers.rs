//! What ranks send by, behind one interface: NCCL, or copies out of one another's memory.

use std::sync::Arc;
use std::time::Instant;

use fa_attn::device::Gpu;

use super::copies::{Copies, reach};
use super::meet::{Told, copies, has_gpus, host, number, process};
use super::memory::driver;
use super::options::{RankOptions, Transport};
use crate::bootstrap::{Place, Store};
use crate::error::{Error, Lost};
use crate::nccl::{Communicator, Nccl, UniqueId};

/// What a rank sends by: one of the two, or, where ranks choose for themselves, one for each plan.
pub(super) struct Transfers {
    options: RankOptions,
    copies: Option<Box<Copies>>,
    nccl: Option<Communicator>,
    /// Whether NCCL is left to be joined, for plans that are faster by it.
    is_open: bool,
    by_nccl: bool,
}

/// What the steps of a plan send by.
pub(super) enum Active<'a> {
    Nccl(&'a mut Communicator),
    Copies(&'a mut Copies),
}

impl Transfers {
    /// Agrees with the other ranks on what all send by, and makes it.
    pub(super) fn join(
        gpu: &Arc<Gpu>,
        store: &mut Store,
        place: Place,
        options: &RankOptions,
    ) -> Result<Transfers, Error> {
        let RankOptions { deadline, transport, .. } = *options;
        let own = |copies, nccl: Option<Communicator>, is_open| {
            let by_nccl = nccl.is_some();
            Transfers { options: *options, copies, nccl, is_open, by_nccl }
        };
        if place.world == 1 {
            return Ok(own(Some(Box::new(Copies::alone(gpu))), None, false));
        }
        let uuid = gpu.context().uuid().map_err(driver("asking the GPU's number"))?;
        let (uuid, reach) = (number(&uuid.bytes), reach(gpu).unwrap_or_default());
        let told = Told { transport, host: host(), gpu: uuid, process: process(), reach };
        let texts = store.gather("exchanging what ranks send by", &told.text())?;
        let mut all = Vec::with_capacity(texts.len());
        for (rank, text) in texts.iter().enumerate() {
            let other = || {
                let (theirs, ours) = (format!("{text:?}"), "another version of this program".to_owned());
                Error::Mismatch { rank, theirs, ours }
            };
            all.push(Told::of(text).ok_or_else(other)?);
        }
        if copies(place.rank, &all)? {
            // What keeps a rank from it, as a system without shared memory, all ranks learn.
            match Copies::join(gpu, store, place, &all, deadline) {
                Ok(copies) => {
                    let is_open = transport == Transport::Auto && has_gpus(&all).is_ok();
                    return Ok(own(Some(Box::new(copies)), None, is_open));
                }
                Err(error) if transport == Transport::Copies => return Err(error),
                Err(error) => tracing::warn!("ranks of one host do not copy, but take NCCL: {error}"),
            }
        }
        has_gpus(&all)?;
        Ok(own(None, Some(join_nccl(store, place, options)?), false))
    }

    /// Takes what a plan's exchanges are faster by, once all ranks have agreed on it: NCCL for the short
    /// messages of a decode, which nothing hides, where every rank has it.
    pub(super) fn choose(&mut self, store: &mut Store, place: Place, is_decode: bool) -> Result<(), Error> {
        if is_decode && std::mem::take(&mut self.is_open) {
            let joined = join_nccl(store, place, &self.options);
            let own = joined.as_ref().err().map_or(String::new(), ToString::to_string);
            let all = store.gather("joining NCCL", &own)?;
            match all.iter().find(|error| !error.is_empty()) {
                Some(error) => tracing::info!("decodes go by copies: {error}"),
                None => self.nccl = Some(joined?),
            }
        }
        self.by_nccl = self.nccl.is_some() && (is_decode || self.copies.is_none());
        Ok(())
    }

    /// What the present plan sends by; `None` of what has failed to be made.
    pub(super) fn active(&mut self) -> Option<Active<'_>> {
        match (self.by_nccl, &mut self.nccl, &mut self.copies) {
            (true, Some(communicator), _) => Some(Active::Nccl(communicator)),
            (_, _, Some(copies)) => Some(Active::Copies(copies)),
            (_, _, None) => None,
        }
    }

    /// What ranks copy by, whatever the present plan does.
    pub(super) fn copies(&mut self) -> Option<&mut Copies> {
        self.copies.as_deref_mut()
    }

    /// What the present plan sends by.
    pub(super) fn transport(&self) -> Transport {
        if self.by_nccl { Transport::Nccl } else { Transport::Copies }
    }

    /// While something that is enqueued is waited for: gives up, with the reason, if a rank is lost, the
    /// transport fails or the deadline is over.
    pub(super) fn still(
        &mut self,
        doing: &'static str,
        begun: Instant,
        lost: &dyn Fn() -> Option<Lost>,
    ) -> Result<(), Error> {
        let nccl = self.nccl.as_mut().map_or(Ok(()), |communicator| {
            communicator.is_settled(doing)?;
            communicator.still(doing, begun, lost)
        });
        let all =
            nccl.and_then(|()| self.copies.as_ref().map_or(Ok(()), |own| own.still(doing, begun, lost)));
        if all.is_err() {
            self.abort();
        }
        all
    }

    /// Whether what was enqueued has come to its end by itself. What NCCL aborts has not ended.
    pub(super) fn is_good(&self, doing: &'static str, lost: &dyn Fn() -> Option<Lost>) -> Result<(), Error> {
        self.copies.as_ref().map_or(Ok(()), |copies| copies.is_good(doing, lost))
    }

    /// Gives up: what is enqueued ends.
    pub(super) fn abort(&mut self) {
        if let Some(communicator) = &mut self.nccl {
            communicator.abort();
        }
        if let Some(copies) = &self.copies {
            copies.abort();
        }
    }
}

/// Joins all ranks by NCCL.
fn join_nccl(store: &mut Store, place: Place, options: &RankOptions) -> Result<Communicator, Error> {
    let RankOptions { deadline, transfer_ctas, .. } = *options;
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
    Communicator::join(&nccl, id, (place.rank, place.world), transfer_ctas, deadline, &lost)
}
