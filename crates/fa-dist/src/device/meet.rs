//! What ranks tell each other when they meet, and whether they copy.

use std::hash::{BuildHasher, Hasher};
use std::sync::OnceLock;

use super::options::Transport;
use crate::bootstrap::Store;
use crate::error::Error;

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
    /// The GPUs out of whose memory its own can copy.
    pub(super) reach: Vec<String>,
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
        [self.transport.name(), &self.host, &self.gpu, &self.process, &self.reach.join(" ")].join("\n")
    }

    pub(super) fn of(text: &str) -> Option<Told> {
        let mut fields = text.split('\n');
        let transport = fields.next()?;
        let transport = Transport::ALL.into_iter().find(|own| own.name() == transport)?;
        let mut own = || fields.next().map(str::to_owned);
        let (host, gpu, process, reach) = (own()?, own()?, own()?, own()?);
        let reach = reach.split(' ').map(str::to_owned).collect();
        fields.next().is_none().then_some(Told { transport, host, gpu, process, reach })
    }
}

fn refused(transport: &'static str, what: String, instead: &str) -> Error {
    Error::Transport { transport, what, instead: instead.to_owned() }
}

/// Whether ranks copy, from what each has told: all of them find the same, or each an error.
pub(super) fn copies(rank: usize, all: &[Told]) -> Result<bool, Error> {
    let own = &all[rank];
    let differs = |told: &&Told| told.transport != own.transport;
    if let Some((rank, other)) = all.iter().enumerate().find(|(_, told)| differs(told)) {
        let [theirs, ours] = [other, own].map(|told| format!("transport {}", told.transport.name()));
        return Err(Error::Mismatch { rank, theirs, ours });
    }
    let apart = all.iter().position(|told| told.host != all[0].host);
    let apart = apart.map(|other| format!("join ranks 0 and {other}, which are on different hosts"));
    let pairs = (0..all.len()).flat_map(|from| (0..all.len()).map(move |to| (from, to)));
    let is_out_of_reach = |(from, to): &(usize, usize)| {
        all[*from].gpu != all[*to].gpu && !all[*from].reach.contains(&all[*to].gpu)
    };
    let beyond = pairs.into_iter().find(is_out_of_reach).map(|(from, to)| {
        format!("reach the GPU of rank {to} from rank {from}: no peers, or CUDA_VISIBLE_DEVICES hides one")
    });
    match (own.transport, apart.or(beyond)) {
        (Transport::Nccl, _) | (Transport::Auto, Some(_)) => Ok(false),
        (Transport::Auto | Transport::Copies, None) => Ok(true),
        (Transport::Copies, Some(what)) => Err(refused("copies", what, "use NCCL")),
    }
}

/// Whether each rank has a GPU of its own, as NCCL needs.
pub(super) fn has_gpus(all: &[Told]) -> Result<(), Error> {
    for (other, told) in all.iter().enumerate() {
        let is_same = |one: &Told| (&one.host, &one.gpu) == (&told.host, &told.gpu);
        if let Some(one) = all[..other].iter().position(is_same) {
            let what = format!("join ranks {one} and {other}, which have one GPU");
            return Err(refused("NCCL", what, "use copies, which ranks of one host can, or a GPU for each"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(rank: usize, transport: Transport) -> Told {
        let (host, gpu, process) = ("boot name".to_owned(), format!("gpu{rank}"), format!("{rank:x}"));
        Told { transport, host, gpu, process, reach: (0..3).map(|rank| format!("gpu{rank}")).collect() }
    }

    /// What each of the ranks finds.
    fn found(all: &[Told]) -> Vec<String> {
        let of = |rank: usize| match copies(rank, all) {
            Ok(true) => "copies".to_owned(),
            Ok(false) => has_gpus(all).map_or_else(|error| error.to_string(), |()| "nccl".to_owned()),
            Err(error) => error.to_string(),
        };
        (0..all.len()).map(of).collect()
    }

    #[test]
    fn what_ranks_tell_survives_its_text() {
        for reach in [Vec::from(["a".to_owned()]), Vec::from(["a".to_owned(), "b".to_owned()])] {
            let own = Told { reach, ..told(3, Transport::Copies) };
            assert_eq!(Told::of(&own.text()), Some(own));
        }
        assert_eq!(Told::of("hello"), None);
        assert_eq!(process(), process());
        assert_eq!(host(), host());
    }

    #[test]
    fn ranks_that_choose_for_themselves_copy_where_all_can() {
        let all = [0, 1, 2].map(|rank| told(rank, Transport::Auto));
        assert_eq!(found(&all), ["copies"; 3]);
        let mut one_gpu = all.clone();
        one_gpu[2].gpu = "gpu1".to_owned();
        assert_eq!(found(&one_gpu), ["copies"; 3]);
        // Of a rank that sees its own GPU alone none knows whether others are peers.
        let mut hidden = all.clone();
        hidden[1].reach = Vec::from(["gpu1".to_owned()]);
        assert_eq!(found(&hidden), ["nccl"; 3]);
        // GPUs of two hosts are never one.
        let mut hosts = all.clone();
        (hosts[2].host, hosts[2].gpu) = ("boot other".to_owned(), "gpu1".to_owned());
        assert_eq!(found(&hosts), ["nccl"; 3]);
    }

    #[test]
    fn what_is_asked_for_is_taken_or_refused_by_all() {
        for transport in [Transport::Nccl, Transport::Copies] {
            let all = [0, 1].map(|rank| told(rank, transport));
            assert_eq!(found(&all), [transport.name(); 2]);
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
        let mut hidden = [0, 1].map(|rank| told(rank, Transport::Copies));
        hidden[1].reach.clear();
        let errors = found(&hidden);
        assert!(
            errors.iter().all(|error| error.starts_with("copies cannot reach the GPU of rank 0 from rank 1"))
        );
        let mut one_gpu = [0, 1].map(|rank| told(rank, Transport::Nccl));
        one_gpu[1].gpu = "gpu0".to_owned();
        let errors = found(&one_gpu);
        assert!(
            errors
                .iter()
                .all(|error| error.starts_with("NCCL cannot join ranks 0 and 1, which have one GPU"))
        );
    }
}
