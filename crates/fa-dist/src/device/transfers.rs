//! What ranks send by, behind one interface: NCCL, or copies out of one another's memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fa_attn::device::Gpu;

use super::copies::{Copies, reach};
use super::meet::{Told, copies, has_gpus, host, number, process};
use super::memory::driver;
use super::options::{RankOptions, Transport};
use crate::bootstrap::{Place, Store};
use crate::error::{Error, Lost};
use crate::nccl::{Communicator, Nccl, UniqueId};

/// What a rank sends by.
pub(super) enum Transfers {
    Nccl(Communicator),
    Copies(Box<Copies>),
}

impl Transfers {
    /// Agrees with the other ranks on what all send by, and makes it.
    pub(super) fn join(
        gpu: &Arc<Gpu>,
        store: &mut Store,
        place: Place,
        options: &RankOptions,
    ) -> Result<Transfers, Error> {
        let RankOptions { deadline, transfer_ctas, transport } = *options;
        if place.world == 1 {
            return Ok(Transfers::Copies(Box::new(Copies::alone(gpu))));
        }
        let uuid = gpu.context().uuid().map_err(driver("asking the GPU's number"))?;
        let (own, reach) = (number(&uuid.bytes), reach(gpu).unwrap_or_default());
        let own = Told { transport, host: host(), gpu: own, process: process(), reach };
        let texts = store.gather("exchanging what ranks send by", &own.text())?;
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
                Ok(copies) => return Ok(Transfers::Copies(Box::new(copies))),
                Err(error) if transport == Transport::Copies => return Err(error),
                Err(error) => tracing::warn!("ranks of one host do not copy, but take NCCL: {error}"),
            }
        }
        has_gpus(&all)?;
        by_nccl(store, place, transfer_ctas, deadline).map(Transfers::Nccl)
    }

    /// What it is.
    pub(super) fn transport(&self) -> Transport {
        match self {
            Transfers::Nccl(_) => Transport::Nccl,
            Transfers::Copies(_) => Transport::Copies,
        }
    }

    /// While something that is enqueued is waited for: gives up, with the reason, if a rank is lost, the
    /// transport fails or the deadline is over.
    pub(super) fn still(
        &mut self,
        doing: &'static str,
        begun: Instant,
        lost: &dyn Fn() -> Option<Lost>,
    ) -> Result<(), Error> {
        match self {
            Transfers::Nccl(communicator) => {
                communicator.is_settled(doing)?;
                communicator.still(doing, begun, lost)
            }
            Transfers::Copies(copies) => copies.still(doing, begun, lost),
        }
    }

    /// Whether what was enqueued has come to its end by itself.
    pub(super) fn is_good(&self, doing: &'static str, lost: &dyn Fn() -> Option<Lost>) -> Result<(), Error> {
        match self {
            // What is aborted has not ended.
            Transfers::Nccl(_) => Ok(()),
            Transfers::Copies(copies) => copies.is_good(doing, lost),
        }
    }

    /// Gives up: what is enqueued ends.
    pub(super) fn abort(&mut self) {
        match self {
            Transfers::Nccl(communicator) => communicator.abort(),
            Transfers::Copies(copies) => copies.abort(),
        }
    }
}

fn by_nccl(
    store: &mut Store,
    place: Place,
    transfer_ctas: Option<u32>,
    deadline: Duration,
) -> Result<Communicator, Error> {
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
