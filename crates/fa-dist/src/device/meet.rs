//! What ranks tell each other when they meet, and by what they send.

use std::hash::{BuildHasher, Hasher};
use std::sync::OnceLock;

use super::rank::Transport;
use crate::bootstrap::Store;
use crate::error::Error;
use crate::nccl::UniqueId;

/// What a rank is to the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Told {
    /// What it is to send by.
    pub(super) transport: Transport,
    /// Its host: the name, and when it was started.
    pub(super) host: String,
    /// Its GPU.
    pub(super) gpu: String,
    /// Its process.
    pub(super) process: String,
    /// NCCL's id, which is rank 0's, or why the rank has no NCCL.
    pub(super) nccl: Result<String, String>,
}

/// What ranks send by, as they agree on.
pub(super) enum Chosen {
    Nccl(UniqueId),
    Copies,
}

/// This host, by its name and by when it was started; of a system that does not say so no two processes are
/// on one.
pub(super) fn host() -> String {
    let read = |path: &str| Some(std::fs::read_to_string(path).ok()?.trim().to_owned());
    let named = read("/proc/sys/kernel/random/boot_id").zip(read("/proc/sys/kernel/hostname"));
    named.map_or_else(process, |(boot, name)| format!("{boot} {name}"))
}

/// This process, by a number that no other has.
pub(super) fn process() -> String {
    static OWN: OnceLock<u64> = OnceLock::new();
    let random = || std::hash::RandomState::new().build_hasher().finish();
    format!("{:016x}", OWN.get_or_init(random))
}

/// A GPU's number as text.
pub(super) fn number(uuid: &[std::ffi::c_char; 16]) -> String {
    uuid.iter().map(|byte| format!("{:02x}", *byte as u8)).collect()
}

/// Compares a text with those of the other ranks, of which one may have an error instead: then each has one.
pub(super) fn agree<T>(store: &mut Store, text: &str, done: Result<T, Error>) -> Result<T, Error> {
    let own = match &done {
        Ok(_) => text.to_owned(),
        Err(error) => format!("error: {error}"),
    };
    let all = store.gather("comparing plans", &own)?;
    let done = done?;
    match all.into_iter().enumerate().find(|(_, other)| *other != own) {
        Some((rank, theirs)) => Err(Error::Mismatch { rank, theirs, ours: own }),
        None => Ok(done),
    }
}

impl Told {
    pub(super) fn text(&self) -> String {
        let nccl = match &self.nccl {
            Ok(id) => format!("id {id}"),
            Err(error) => format!("error {error}"),
        };
        [self.transport.name(), &self.host, &self.gpu, &self.process, &nccl].join("\n")
    }

    pub(super) fn of(text: &str) -> Option<Told> {
        let mut fields = text.splitn(5, '\n');
        let transport = fields.next()?;
        let transport = Transport::ALL.into_iter().find(|own| own.name() == transport)?;
        let mut own = || fields.next().map(str::to_owned);
        let (host, gpu, process) = (own()?, own()?, own()?);
        let (kind, text) = fields.next()?.split_once(' ')?;
        let nccl = if kind == "id" { Ok(text.to_owned()) } else { Err(text.to_owned()) };
        Some(Told { transport, host, gpu, process, nccl })
    }
}

/// What all ranks send by, from what each has told: all of them find the same, or each an error.
pub(super) fn choose(rank: usize, all: &[Told]) -> Result<Chosen, Error> {
    let own = &all[rank];
    let differs = |told: &&Told| told.transport != own.transport;
    if let Some((rank, other)) = all.iter().enumerate().find(|(_, told)| differs(told)) {
        let [theirs, ours] = [other, own].map(|told| format!("transport {}", told.transport.name()));
        return Err(Error::Mismatch { rank, theirs, ours });
    }
    let is_apart = |told: &Told| told.host != all[0].host;
    let apart = all.iter().position(is_apart);
    let of_gpu =
        |told: &Told| all.iter().position(|other| (&other.host, &other.gpu) == (&told.host, &told.gpu));
    let shared =
        all.iter().enumerate().find_map(|(at, told)| Some((of_gpu(told)?, at)).filter(|(a, b)| a != b));
    let without = all.iter().enumerate().find_map(|(at, told)| Some((at, told.nccl.as_ref().err()?)));
    let by_copies = match own.transport {
        Transport::Nccl => false,
        Transport::Copies => true,
        Transport::Auto => apart.is_none() && (shared.is_some() || without.is_some()),
    };
    if by_copies {
        let Some(other) = apart else { return Ok(Chosen::Copies) };
        return Err(Error::Transport {
            transport: "copies",
            what: format!("join ranks 0 and {other}, which are on different hosts"),
            instead: "use NCCL".to_owned(),
        });
    }
    if let Err(tried) = &own.nccl {
        return Err(Error::NoNccl { tried: tried.clone() });
    }
    if let Some((rank, error)) = without {
        let (theirs, ours) = (format!("error: {error}"), "NCCL".to_owned());
        return Err(Error::Mismatch { rank, theirs, ours });
    }
    if let Some((one, other)) = shared {
        return Err(Error::Transport {
            transport: "NCCL",
            what: format!("join ranks {one} and {other}, which have one GPU"),
            instead: "use copies, which ranks of one host can, or a GPU for each rank".to_owned(),
        });
    }
    let id = all[0].nccl.as_ref().ok().and_then(|id| UniqueId::from_hex(id));
    id.map(Chosen::Nccl).ok_or_else(|| Error::Mismatch {
        rank: 0,
        theirs: "no NCCL id".to_owned(),
        ours: "NCCL".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(rank: usize, transport: Transport) -> Told {
        let nccl = Ok(if rank == 0 { "ab".repeat(128) } else { String::new() });
        let (host, gpu, process) = ("boot name".to_owned(), format!("gpu {rank}"), format!("{rank:x}"));
        Told { transport, host, gpu, process, nccl }
    }

    /// What each of the ranks finds.
    fn found(all: &[Told]) -> Vec<String> {
        let of = |rank: usize| match choose(rank, all) {
            Ok(Chosen::Nccl(id)) => format!("nccl {}", &id.to_hex()[..4]),
            Ok(Chosen::Copies) => "copies".to_owned(),
            Err(error) => error.to_string(),
        };
        (0..all.len()).map(of).collect()
    }

    #[test]
    fn what_ranks_tell_survives_its_text() {
        for nccl in [Ok(String::new()), Ok("00".repeat(128)), Err("a line\nand another".to_owned())] {
            let own = Told { nccl, ..told(3, Transport::Copies) };
            assert_eq!(Told::of(&own.text()), Some(own));
        }
        assert_eq!(Told::of("hello"), None);
        assert_eq!(process(), process());
        assert_eq!(host(), host());
    }

    #[test]
    fn ranks_that_choose_for_themselves_take_nccl_where_all_can() {
        let all = [0, 1, 2].map(|rank| told(rank, Transport::Auto));
        assert_eq!(found(&all), ["nccl abab"; 3]);
        let mut one_gpu = all.clone();
        one_gpu[2].gpu = "gpu 1".to_owned();
        assert_eq!(found(&one_gpu), ["copies"; 3]);
        let mut none = all.clone();
        none[1].nccl = Err("nowhere".to_owned());
        assert_eq!(found(&none), ["copies"; 3]);
        // Between hosts there is nothing else, and GPUs of two hosts are never one.
        let mut hosts = all.clone();
        (hosts[2].host, hosts[2].gpu) = ("boot other".to_owned(), "gpu 1".to_owned());
        assert_eq!(found(&hosts), ["nccl abab"; 3]);
        hosts[1].nccl = Err("nowhere".to_owned());
        let errors = found(&hosts);
        assert!(errors[0].starts_with("rank 1 has error: nowhere"), "{errors:?}");
        assert!(errors[1].starts_with("no usable NCCL (nowhere)"), "{errors:?}");
    }

    #[test]
    fn what_is_asked_for_is_taken_or_refused_by_all() {
        for transport in [Transport::Nccl, Transport::Copies] {
            let all = [0, 1].map(|rank| told(rank, transport));
            let named = if transport == Transport::Nccl { "nccl abab" } else { "copies" };
            assert_eq!(found(&all), [named; 2]);
            let mut odd = all.clone();
            odd[1].transport = Transport::Auto;
            let errors = found(&odd);
            assert!(errors[0].starts_with("rank 1 has transport auto, this rank transport"), "{errors:?}");
            assert!(errors[1].contains("this rank transport auto"), "{errors:?}");
        }
        let mut far = [0, 1].map(|rank| told(rank, Transport::Copies));
        far[1].host = "boot other".to_owned();
        assert_eq!(
            found(&far),
            ["copies cannot join ranks 0 and 1, which are on different hosts: use NCCL"; 2]
        );
        let mut one_gpu = [0, 1].map(|rank| told(rank, Transport::Nccl));
        one_gpu[1].gpu = "gpu 0".to_owned();
        let errors = found(&one_gpu);
        assert!(
            errors
                .iter()
                .all(|error| error.starts_with("NCCL cannot join ranks 0 and 1, which have one GPU"))
        );
        let mut none = [0, 1].map(|rank| told(rank, Transport::Nccl));
        none[0].nccl = Err("nowhere".to_owned());
        let errors = found(&none);
        assert!(errors[0].starts_with("no usable NCCL") && errors[1].starts_with("rank 0 has error"));
    }
}
