//! What ranks send by, behind one interface: NCCL, or copies out of one another's memory.

use std::sync::Arc;
use std::time::Instant;

use fa_attn::device::Gpu;

use super::copies::Copies;
use super::meet::{Chosen, Told, choose, host, number, process};
use super::memory::driver;
use super::rank::{RankOptions, Transport};
use crate::bootstrap::{Place, Store};
use crate::error::{Error, Lost};
use crate::nccl::{Communicator, Nccl};

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
        let loaded = match transport {
            Transport::Auto | Transport::Nccl => Nccl::load(),
            Transport::Copies => Err(Error::NoNccl { tried: "which was not asked for".to_owned() }),
        };
        let id = |nccl: &Arc<Nccl>| {
            if place.rank == 0 { Ok(nccl.unique_id()?.to_hex()) } else { Ok(String::new()) }
        };
        let nccl = loaded.as_ref().map_err(tried).and_then(|nccl| id(nccl).map_err(|error| tried(&error)));
        let uuid = gpu.context().uuid().map_err(driver("asking the GPU's number"))?;
        let own = Told { transport, host: host(), gpu: number(&uuid.bytes), process: process(), nccl };
        let texts = store.gather("exchanging what ranks send by", &own.text())?;
        let mut all = Vec::with_capacity(texts.len());
        for (rank, text) in texts.iter().enumerate() {
            let other = || {
                let (theirs, ours) = (format!("{text:?}"), "another version of this program".to_owned());
                Error::Mismatch { rank, theirs, ours }
            };
            all.push(Told::of(text).ok_or_else(other)?);
        }
        match (choose(place.rank, &all)?, loaded) {
            (Chosen::Nccl(id), Ok(nccl)) => {
                let (lost, at) = (store.watch(), (place.rank, place.world));
                let joined = Communicator::join(&nccl, id, at, transfer_ctas, deadline, &lost)?;
                Ok(Transfers::Nccl(joined))
            }
            (Chosen::Nccl(_), Err(error)) => Err(error),
            (Chosen::Copies, _) => {
                Ok(Transfers::Copies(Box::new(Copies::join(gpu, store, place, &all, deadline)?)))
            }
        }
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

/// What an error says of NCCL.
fn tried(error: &Error) -> String {
    if let Error::NoNccl { tried } = error { tried.clone() } else { error.to_string() }
}
