//! Ranks that are threads of one process, over channels: for the CPU, and for tests of everything above a
//! transport. Faults can be injected.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::error::{Error, Lost, PANIC, until};
use crate::transport::HostTransport;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The rank ends.
    Die,
    /// The rank waits for so long before it goes on.
    Stall(Duration),
    /// The first message to every rank is lost.
    Drop,
    /// The first two messages to every rank change places.
    Swap,
    /// The first message to every rank lacks its last byte.
    Truncate,
}

/// Something that goes wrong in one exchange of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The rank.
    pub rank: usize,
    /// The exchange, counted from 0 since the transport was made.
    pub exchange: usize,
    /// What goes wrong.
    pub kind: FaultKind,
}

/// What ranks in memory do besides passing messages on.
#[derive(Clone, Debug)]
pub struct MemoryOptions {
    /// The longest wait for a message.
    pub deadline: Duration,
    /// Seed of random delays of up to a millisecond before each exchange; `None` for none.
    pub delays: Option<u64>,
    /// What goes wrong.
    pub faults: Vec<Fault>,
}

impl Default for MemoryOptions {
    fn default() -> MemoryOptions {
        MemoryOptions { deadline: Duration::from_secs(60), delays: None, faults: Vec::new() }
    }
}

enum Envelope {
    Bytes {
        number: u64,
        bytes: Vec<u8>,
    },
    Text(String),
    /// The sender has learnt that a rank is lost.
    Lost(Lost),
}

/// One rank of several threads.
pub struct MemoryTransport {
    rank: usize,
    /// To each rank and from it; none for itself.
    to: Vec<Option<Sender<Envelope>>>,
    from: Vec<Option<Receiver<Envelope>>>,
    sent: Vec<u64>,
    received: Vec<u64>,
    exchanges: usize,
    random: Option<Random>,
    deadline: Duration,
    faults: Vec<Fault>,
}

/// A small generator of random numbers (splitmix64), for delays and orders of steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Random(pub u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

impl MemoryTransport {
    /// `world` connected ranks, one for each thread.
    pub fn connect(world: usize, options: &MemoryOptions) -> Vec<MemoryTransport> {
        let mut ranks: Vec<MemoryTransport> = (0..world)
            .map(|rank| MemoryTransport {
                rank,
                to: (0..world).map(|_| None).collect(),
                from: (0..world).map(|_| None).collect(),
                sent: vec![0; world],
                received: vec![0; world],
                exchanges: 0,
                random: options.delays.map(|seed| Random(seed.wrapping_add(rank as u64))),
                deadline: options.deadline,
                faults: options.faults.iter().filter(|fault| fault.rank == rank).copied().collect(),
            })
            .collect();
        for a in 0..world {
            for b in (0..world).filter(|b| *b != a) {
                let (sender, receiver) = channel();
                ranks[a].to[b] = Some(sender);
                ranks[b].from[a] = Some(receiver);
            }
        }
        ranks
    }

    /// Runs `work` for each rank in a thread of its own, and gives what each returned, in their order.
    ///
    /// # Panics
    /// If one of them panics.
    pub fn run<R: Send>(
        world: usize,
        options: &MemoryOptions,
        work: impl Fn(MemoryTransport) -> R + Sync,
    ) -> Vec<R> {
        let ranks = MemoryTransport::connect(world, options);
        std::thread::scope(|scope| {
            let started: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(|| work(rank))).collect();
            started.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect()
        })
    }

    fn post(&mut self, peer: usize, envelope: Envelope) -> Result<(), Error> {
        let to = self.to.get(peer).and_then(Option::as_ref);
        let sent = to.is_some_and(|to| to.send(envelope).is_ok());
        if sent { Ok(()) } else { Err(self.ended(peer, "sending")) }
    }

    /// A rank has ended: because another one did, if any has said so.
    fn ended(&self, peer: usize, doing: &str) -> Error {
        let told = |from: &Receiver<Envelope>| {
            std::iter::from_fn(|| from.try_recv().ok()).find_map(|envelope| match envelope {
                Envelope::Lost(lost) => Some(lost),
                Envelope::Bytes { .. } | Envelope::Text(_) => None,
            })
        };
        let first = self.from.iter().flatten().find_map(told);
        self.lost(first.unwrap_or(Lost::silently(peer)), doing)
    }

    /// Tells the others, so that each names the rank that was lost first.
    fn lost(&self, lost: Lost, doing: &str) -> Error {
        for to in self.to.iter().flatten() {
            // Whoever has ended needs no word.
            to.send(Envelope::Lost(lost.clone())).ok();
        }
        lost.while_doing(doing)
    }

    fn take(&mut self, peer: usize, end: Instant) -> Result<Envelope, Error> {
        let doing = format!("receiving from rank {peer}");
        let Some(from) = self.from.get(peer).and_then(Option::as_ref) else {
            return Err(self.lost(Lost::silently(peer), &doing));
        };
        match from.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(Envelope::Lost(lost)) => Err(self.lost(lost, &doing)),
            Ok(envelope) => Ok(envelope),
            Err(RecvTimeoutError::Timeout) => Err(Error::Deadline { after: self.deadline, doing }),
            Err(RecvTimeoutError::Disconnected) => Err(self.ended(peer, &doing)),
        }
    }

    /// The fault of this exchange.
    fn fault(&mut self) -> Option<FaultKind> {
        let now = self.exchanges;
        self.exchanges += 1;
        self.faults.iter().find(|fault| fault.exchange == now).map(|fault| fault.kind)
    }
}

impl HostTransport for MemoryTransport {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.to.len()
    }

    fn exchange(
        &mut self,
        sends: Vec<(usize, Vec<u8>)>,
        recvs: &[(usize, usize)],
    ) -> Result<Vec<Vec<u8>>, Error> {
        let fault = self.fault();
        match fault {
            Some(FaultKind::Die) => {
                return Err(self.lost(Lost::silently(self.rank), "ending as the test asks"));
            }
            Some(FaultKind::Stall(time)) => std::thread::sleep(time),
            Some(FaultKind::Drop | FaultKind::Swap | FaultKind::Truncate) | None => {}
        }
        if let Some(random) = &mut self.random {
            std::thread::sleep(Duration::from_micros(random.next() % 1000));
        }
        let mut boxes: Vec<Vec<(u64, Vec<u8>)>> = vec![Vec::new(); self.to.len()];
        for (peer, bytes) in sends {
            boxes[peer].push((self.sent[peer], bytes));
            self.sent[peer] += 1;
        }
        for (peer, mut messages) in boxes.into_iter().enumerate() {
            match fault {
                Some(FaultKind::Drop) if !messages.is_empty() => drop(messages.remove(0)),
                Some(FaultKind::Swap) if messages.len() > 1 => messages.swap(0, 1),
                Some(FaultKind::Truncate) => {
                    if let Some((_, bytes)) = messages.first_mut() {
                        bytes.pop();
                    }
                }
                Some(FaultKind::Die | FaultKind::Stall(_) | FaultKind::Drop | FaultKind::Swap) | None => {}
            }
            for (number, bytes) in messages {
                self.post(peer, Envelope::Bytes { number, bytes })?;
            }
        }
        let end = until(self.deadline);
        let mut arrived = Vec::with_capacity(recvs.len());
        for &(peer, len) in recvs {
            let expected = self.received[peer];
            self.received[peer] += 1;
            let ours = format!("message {expected} of {len} bytes");
            match self.take(peer, end)? {
                Envelope::Bytes { number, bytes } if number == expected && bytes.len() == len => {
                    arrived.push(bytes);
                }
                Envelope::Bytes { number, bytes } => {
                    let theirs = format!("message {number} of {} bytes", bytes.len());
                    return Err(Error::Mismatch { rank: peer, theirs, ours });
                }
                Envelope::Text(theirs) => return Err(Error::Mismatch { rank: peer, theirs, ours }),
                Envelope::Lost(lost) => return Err(self.lost(lost, "receiving")),
            }
        }
        Ok(arrived)
    }

    fn agree(&mut self, text: &str) -> Result<(), Error> {
        let others: Vec<usize> = (0..self.to.len()).filter(|peer| *peer != self.rank).collect();
        for &peer in &others {
            // One that has found another plan may have ended; that it is lost shows below.
            if let Some(to) = &self.to[peer] {
                to.send(Envelope::Text(text.to_owned())).ok();
            }
        }
        let end = until(self.deadline);
        for &peer in &others {
            match self.take(peer, end)? {
                Envelope::Text(theirs) if theirs == text => {}
                Envelope::Text(theirs) => {
                    return Err(Error::Mismatch { rank: peer, theirs, ours: text.to_owned() });
                }
                Envelope::Bytes { bytes, .. } => {
                    let theirs = format!("a message of {} bytes", bytes.len());
                    return Err(Error::Mismatch { rank: peer, theirs, ours: text.to_owned() });
                }
                Envelope::Lost(lost) => return Err(self.lost(lost, "comparing plans")),
            }
        }
        Ok(())
    }

    fn fail(&mut self, why: &str) {
        self.lost(Lost::of(self.rank, why), "failing");
    }
}

impl Drop for MemoryTransport {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.fail(PANIC);
        }
    }
}
