//! How ranks find each other: over TCP, as torchrun's environment names it, or through a folder.
//!
//! What ranks tell each other here is short: NCCL's id, their plans, and that one of them has ended.

use std::env;
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::error::{Error, Lost, PANIC, until};

/// Where ranks meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bootstrap {
    /// Rank 0 listens at this address (`host:port`), the others connect. A rank that ends is noticed at once.
    Tcp(String),
    /// An empty folder that all ranks see. A rank that ends is noticed by the deadline alone.
    File(PathBuf),
}

/// The place of a rank among all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The rank.
    pub rank: usize,
    /// Ranks.
    pub world: usize,
    /// The rank's number on its host, which is its GPU's.
    pub local: usize,
}

impl Bootstrap {
    /// What torchrun and its like set: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT`.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] for a variable that is missing or no number.
    pub fn from_env() -> Result<(Bootstrap, Place), Error> {
        let text = |name: &str| {
            let reason =
                "is not set: start ranks by torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT";
            env::var(name).map_err(|_| Error::Bootstrap { what: name.to_owned(), reason: reason.to_owned() })
        };
        let number = |name: &str| -> Result<usize, Error> {
            let text = text(name)?;
            let reason = format!("{text:?} is no number");
            text.parse().map_err(|_| Error::Bootstrap { what: name.to_owned(), reason })
        };
        let (rank, world) = (number("RANK")?, number("WORLD_SIZE")?);
        let local = if env::var_os("LOCAL_RANK").is_some() { number("LOCAL_RANK")? } else { rank };
        let address = format!("{}:{}", text("MASTER_ADDR")?, number("MASTER_PORT")?);
        Ok((Bootstrap::Tcp(address), Place { rank, world, local }))
    }
}

/// How often a file or a port is tried again.
const AGAIN: Duration = Duration::from_millis(5);

/// Short texts between all ranks, and word of those that have ended.
pub(crate) struct Store {
    place: Place,
    deadline: Duration,
    lost: Arc<OnceLock<Lost>>,
    kind: Kind,
}

enum Kind {
    Alone,
    /// Rank 0: a connection to each of the others, and one that tells of their ends.
    Server {
        ranks: Vec<TcpStream>,
        hearts: Vec<TcpStream>,
    },
    Client {
        server: TcpStream,
        heart: TcpStream,
    },
    Folder {
        folder: PathBuf,
        round: usize,
    },
}

/// The byte by which a rank says that it ends well, and that before a text on a rank that is lost.
const BYE: u8 = b'.';
const LOST: u8 = b'!';

impl Store {
    pub(crate) fn join(bootstrap: &Bootstrap, place: Place, deadline: Duration) -> Result<Store, Error> {
        let Place { rank, world, .. } = place;
        if world == 0 || rank >= world {
            let need = format!("a rank below {world}");
            return Err(Error::Ranks { name: "rank", value: rank, need });
        }
        let lost = Arc::new(OnceLock::new());
        let kind = match bootstrap {
            _ if world == 1 => Kind::Alone,
            Bootstrap::Tcp(address) if rank == 0 => server(address, world, deadline, &lost)?,
            Bootstrap::Tcp(address) => client(address, place, deadline, &lost)?,
            Bootstrap::File(folder) => {
                fs::create_dir_all(folder).map_err(|source| Error::Io { path: folder.clone(), source })?;
                Kind::Folder { folder: folder.clone(), round: 0 }
            }
        };
        Ok(Store { place, deadline, lost, kind })
    }

    /// The rank that is lost, if any.
    #[cfg(test)]
    pub(crate) fn lost(&self) -> Option<Lost> {
        self.lost.get().cloned()
    }

    /// Tells which rank is lost, if any; outlives the borrow.
    pub(crate) fn watch(&self) -> impl Fn() -> Option<Lost> + use<> {
        let lost = self.lost.clone();
        move || lost.get().cloned()
    }

    /// Tells the others that this rank is lost, and why, or the one that was lost before, and ends its
    /// connections: they wait for it no longer.
    pub(crate) fn fail(&mut self, why: &str) {
        let first = self.lost.get_or_init(|| Lost::of(self.place.rank, why)).clone();
        let tell = |heart: &mut TcpStream| {
            // Whoever has ended already needs no word.
            write_lost(heart, &first).ok();
            heart.shutdown(Shutdown::Write).ok();
        };
        match &mut self.kind {
            Kind::Server { ranks, hearts } => {
                hearts.iter_mut().for_each(tell);
                ranks.iter().for_each(|rank| drop(rank.shutdown(Shutdown::Both)));
            }
            Kind::Client { server, heart } => {
                tell(heart);
                server.shutdown(Shutdown::Both).ok();
            }
            Kind::Alone | Kind::Folder { .. } => {}
        }
    }

    /// The text of every rank, in their order. All ranks call it.
    pub(crate) fn gather(&mut self, doing: &str, text: &str) -> Result<Vec<String>, Error> {
        let (Place { rank, world, .. }, deadline) = (self.place, self.deadline);
        let lost = self.lost.clone();
        let failed = |peer: usize, error: &std::io::Error| {
            let late = [std::io::ErrorKind::WouldBlock, std::io::ErrorKind::TimedOut].contains(&error.kind());
            match lost.get() {
                None if late => {
                    Error::Deadline { after: deadline, doing: format!("{doing}, waiting for rank {peer}") }
                }
                _ => lost.get_or_init(|| Lost::silently(peer)).clone().while_doing(doing),
            }
        };
        match &mut self.kind {
            Kind::Alone => Ok(vec![text.to_owned()]),
            Kind::Server { ranks, .. } => {
                let mut all = vec![text.to_owned()];
                for (index, stream) in ranks.iter_mut().enumerate() {
                    all.push(read_text(stream).map_err(|error| failed(index + 1, &error))?);
                }
                for (index, stream) in ranks.iter_mut().enumerate() {
                    for text in &all {
                        write_text(stream, text).map_err(|error| failed(index + 1, &error))?;
                    }
                }
                Ok(all)
            }
            Kind::Client { server, .. } => {
                write_text(server, text).map_err(|error| failed(0, &error))?;
                (0..world).map(|_| read_text(server).map_err(|error| failed(0, &error))).collect()
            }
            Kind::Folder { folder, round } => {
                let path = |rank: usize| folder.join(format!("round{round}-rank{rank}"));
                let written = path(rank);
                fa_attn::atomic_file::write(&written, text.as_bytes()).map_err(fa_attn::Error::Write)?;
                let end = until(deadline);
                let all = (0..world).map(|peer| await_file(&path(peer), peer, end, deadline, doing));
                let all = all.collect::<Result<Vec<_>, Error>>()?;
                *round += 1;
                Ok(all)
            }
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let hearts = match &mut self.kind {
            Kind::Server { hearts, .. } => hearts.iter_mut().collect(),
            Kind::Client { heart, .. } => vec![heart],
            Kind::Alone | Kind::Folder { .. } => Vec::new(),
        };
        if std::thread::panicking() {
            note(&self.lost, Lost::of(self.place.rank, PANIC));
        }
        // A rank that ends because another one did says which, if nobody has told yet.
        for heart in hearts {
            // Whoever has ended already needs no word.
            match self.lost.get() {
                None => heart.write_all(&[BYE]).ok(),
                Some(lost) => write_lost(heart, lost).ok(),
            };
            heart.shutdown(Shutdown::Write).ok();
        }
    }
}

fn await_file(path: &Path, peer: usize, end: Instant, after: Duration, doing: &str) -> Result<String, Error> {
    loop {
        match fs::read_to_string(path) {
            Ok(text) => return Ok(text),
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::Io { path: path.to_owned(), source });
            }
            Err(_) if Instant::now() > end => {
                return Err(Error::Deadline { after, doing: format!("{doing}, waiting for rank {peer}") });
            }
            Err(_) => std::thread::sleep(AGAIN),
        }
    }
}

/// The longest text: more is none of ours.
const MOST_TEXT: u32 = 1 << 24;

/// A text behind its length.
fn framed(text: &str) -> std::io::Result<Vec<u8>> {
    let len = u32::try_from(text.len()).map_err(std::io::Error::other)?;
    Ok([&len.to_le_bytes(), text.as_bytes()].concat())
}

fn write_text(stream: &mut TcpStream, text: &str) -> std::io::Result<()> {
    stream.write_all(&framed(text)?)
}

/// Says on a heart which rank is lost: the rank, and its reason if it has one.
fn write_lost(heart: &mut TcpStream, lost: &Lost) -> std::io::Result<()> {
    let text = match &lost.why {
        Some(why) => format!("{} {why}", lost.rank),
        None => lost.rank.to_string(),
    };
    // In one piece: two threads may tell of a lost rank.
    heart.write_all(&[&[LOST][..], &framed(&text)?].concat())
}

/// Waits for what a heart says last: nothing of a rank that ends well, else which rank is lost, of one that
/// ends without a word `peer` itself.
fn last_word(heart: &mut TcpStream, peer: usize) -> Option<Lost> {
    heart.set_read_timeout(None).ok();
    let mut byte = [0];
    match heart.read(&mut byte) {
        Ok(1) if byte[0] == BYE => return None,
        Ok(1) if byte[0] == LOST => {}
        _ => return Some(Lost::silently(peer)),
    }
    let Ok(text) = read_text(heart) else { return Some(Lost::silently(peer)) };
    let (rank, why) = text.split_once(' ').map_or((text.as_str(), None), |(rank, why)| (rank, Some(why)));
    let Ok(rank) = rank.parse() else { return Some(Lost::silently(peer)) };
    Some(why.map_or_else(|| Lost::silently(rank), |why| Lost::of(rank, why)))
}

fn read_text(stream: &mut TcpStream) -> std::io::Result<String> {
    let mut len = [0; 4];
    stream.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len);
    if len > MOST_TEXT {
        return Err(std::io::Error::other("another program talks here"));
    }
    let mut text = vec![0; len as usize];
    stream.read_exact(&mut text)?;
    String::from_utf8(text).map_err(std::io::Error::other)
}

fn address_error(address: &str, reason: impl ToString) -> Error {
    Error::Bootstrap { what: address.to_owned(), reason: reason.to_string() }
}

fn server(
    address: &str,
    world: usize,
    deadline: Duration,
    lost: &Arc<OnceLock<Lost>>,
) -> Result<Kind, Error> {
    let listener = TcpListener::bind(address).map_err(|error| address_error(address, error))?;
    listener.set_nonblocking(true).map_err(|error| address_error(address, error))?;
    let mut found: Vec<[Option<TcpStream>; 2]> = (1..world).map(|_| [None, None]).collect();
    let end = until(deadline);
    while found.iter().flatten().any(Option::is_none) {
        let (mut stream, _) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                if Instant::now() > end {
                    let missing = found.iter().position(|pair| pair.iter().any(Option::is_none));
                    let missing = missing.map_or(0, |index| index + 1);
                    let doing = format!("joining, waiting for rank {missing}");
                    return Err(Error::Deadline { after: deadline, doing });
                }
                std::thread::sleep(AGAIN);
                continue;
            }
            Err(error) => return Err(address_error(address, error)),
        };
        let prepared = stream.set_nonblocking(false).and_then(|()| stream.set_read_timeout(Some(deadline)));
        prepared.and_then(|()| stream.set_nodelay(true)).map_err(|error| address_error(address, error))?;
        // Strangers that connect are left alone.
        let Ok(hello) = read_text(&mut stream) else { continue };
        let words: Vec<usize> = hello.split(' ').filter_map(|word| word.parse().ok()).collect();
        let &[rank, theirs, which] = words.as_slice() else { continue };
        if theirs != world {
            let [theirs, ours] = [theirs, world].map(|world| format!("{world} ranks"));
            return Err(Error::Mismatch { rank, theirs, ours });
        }
        let slot = rank.checked_sub(1).and_then(|index| found.get_mut(index)?.get_mut(which));
        match slot {
            Some(slot @ None) => *slot = Some(stream),
            _ => return Err(address_error(address, format!("rank {rank} is there twice"))),
        }
    }
    let (mut ranks, mut hearts) = (Vec::new(), Vec::new());
    for [rank, heart] in found {
        ranks.extend(rank);
        hearts.extend(heart);
    }
    let clone = |stream: &TcpStream| stream.try_clone().map_err(|error| address_error(address, error));
    for index in 0..hearts.len() {
        let mut heart = clone(&hearts[index])?;
        let others = hearts.iter().map(clone).collect::<Result<Vec<_>, Error>>()?;
        let lost = lost.clone();
        std::thread::spawn(move || {
            if let Some(found) = last_word(&mut heart, index + 1) {
                // Told before it is noted: who notes it may end at once.
                for mut other in others {
                    // Ranks that have ended need no word.
                    write_lost(&mut other, &found).ok();
                }
                note(&lost, found);
            }
        });
    }
    Ok(Kind::Server { ranks, hearts })
}

/// The first that is lost stays.
fn note(lost: &OnceLock<Lost>, rank: Lost) {
    lost.set(rank).ok();
}

fn client(
    address: &str,
    place: Place,
    deadline: Duration,
    lost: &Arc<OnceLock<Lost>>,
) -> Result<Kind, Error> {
    let end = until(deadline);
    let connect = |which: usize| loop {
        match TcpStream::connect(address) {
            Ok(mut stream) => {
                let hello = format!("{} {} {which}", place.rank, place.world);
                let ready = stream.set_read_timeout(Some(deadline)).and_then(|()| stream.set_nodelay(true));
                let sent = ready.and_then(|()| write_text(&mut stream, &hello));
                return sent.map(|()| stream).map_err(|error| address_error(address, error));
            }
            Err(_) if Instant::now() > end => {
                let doing = format!("joining, connecting to rank 0 at {address}");
                return Err(Error::Deadline { after: deadline, doing });
            }
            Err(_) => std::thread::sleep(AGAIN),
        }
    };
    let (server, heart) = (connect(0)?, connect(1)?);
    let mut listening = heart.try_clone().map_err(|error| address_error(address, error))?;
    let lost = lost.clone();
    std::thread::spawn(move || {
        if let Some(found) = last_word(&mut listening, 0) {
            note(&lost, found);
        }
    });
    Ok(Kind::Client { server, heart })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(5);

    fn free_address() -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().to_string()
    }

    fn place(rank: usize, world: usize) -> Place {
        Place { rank, world, local: rank }
    }

    #[test]
    fn texts_reach_all_ranks_over_tcp_and_through_a_folder() {
        let folder = std::env::temp_dir().join(format!("fa-dist-{}", std::process::id()));
        for bootstrap in [Bootstrap::Tcp(free_address()), Bootstrap::File(folder.clone())] {
            std::thread::scope(|scope| {
                for rank in 0..3 {
                    let bootstrap = &bootstrap;
                    scope.spawn(move || {
                        let mut store = Store::join(bootstrap, place(rank, 3), SOON).unwrap();
                        for round in 0..3 {
                            let found = store.gather("testing", &format!("{rank}.{round}")).unwrap();
                            assert_eq!(
                                found,
                                (0..3).map(|peer| format!("{peer}.{round}")).collect::<Vec<_>>()
                            );
                        }
                        assert_eq!(store.lost(), None);
                    });
                }
            });
        }
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_rank_that_ends_is_known_to_all() {
        let bootstrap = Bootstrap::Tcp(free_address());
        std::thread::scope(|scope| {
            for rank in 0..3 {
                let bootstrap = &bootstrap;
                scope.spawn(move || {
                    let mut store = Store::join(bootstrap, place(rank, 3), SOON).unwrap();
                    store.gather("testing", "").unwrap();
                    if rank == 1 {
                        // As a process that is killed: connections end without a word.
                        let Kind::Client { server, heart } = &store.kind else { panic!() };
                        heart.shutdown(Shutdown::Both).unwrap();
                        server.shutdown(Shutdown::Both).unwrap();
                        return;
                    }
                    let begun = Instant::now();
                    while store.lost().is_none() && begun.elapsed() < SOON {
                        std::thread::sleep(AGAIN);
                    }
                    assert_eq!(store.lost(), Some(Lost::silently(1)), "rank {rank}");
                    let error = store.gather("testing", "").unwrap_err();
                    assert!(
                        matches!(error, Error::PeerLost { rank: 1, .. } | Error::PeerLost { rank: 0, .. }),
                        "{error}"
                    );
                });
            }
        });
    }

    /// A rank that fails and lives on is known to all, whichever it is.
    #[test]
    fn a_rank_that_fails_alone_is_known_to_all() {
        for failing in 0..3 {
            let bootstrap = Bootstrap::Tcp(free_address());
            std::thread::scope(|scope| {
                for rank in 0..3 {
                    let bootstrap = &bootstrap;
                    scope.spawn(move || {
                        let mut store = Store::join(bootstrap, place(rank, 3), SOON).unwrap();
                        store.gather("testing", "").unwrap();
                        let begun = Instant::now();
                        if rank == failing {
                            store.fail("a test of words. Of some");
                            std::thread::sleep(Duration::from_millis(300));
                        }
                        while store.lost().is_none() && begun.elapsed() < SOON {
                            std::thread::sleep(AGAIN);
                        }
                        let lost = Lost::of(failing, "a test of words. Of some");
                        assert_eq!(store.lost(), Some(lost), "rank {rank}");
                        let error = store.gather("testing", "").unwrap_err();
                        let said =
                            format!("rank {failing} is lost while testing, which says: a test of words");
                        assert!(error.to_string().starts_with(&said), "{error}");
                        assert!(begun.elapsed() < SOON, "rank {rank} waited");
                    });
                }
            });
        }
    }

    #[test]
    fn absent_ranks_are_waited_for_until_the_deadline() {
        let soon = Duration::from_millis(100);
        let alone = |rank| Store::join(&Bootstrap::Tcp(free_address()), place(rank, 2), soon).err().unwrap();
        assert!(matches!(alone(0), Error::Deadline { .. }));
        assert!(alone(1).to_string().contains("connecting to rank 0"));
        let error = Store::join(&Bootstrap::Tcp("nowhere".to_owned()), place(0, 2), soon).err().unwrap();
        assert!(matches!(error, Error::Bootstrap { .. }), "{error}");
        assert!(matches!(
            Store::join(&Bootstrap::Tcp(String::new()), place(2, 2), soon),
            Err(Error::Ranks { .. })
        ));
    }
}
