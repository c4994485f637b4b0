//! Copies between GPUs of one host, and between ranks of one GPU: each rank pulls what is for it out of the
//! others' memory, by copy engines, which need no SM. Words of shared memory say what is there and what is
//! taken ([`crate::pulls`]); streams wait for them, the host for nothing.
#![allow(unsafe_code)]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fa_attn::device::Gpu;
use fa_core::Pass;
use fa_kernels::cudarc::driver::sys::{CUevent_flags, CUstreamCaptureStatus};
use fa_kernels::cudarc::driver::{CudaContext, CudaEvent, CudaStream, result, sys};

use super::meet::{Told, agree, number};
use super::memory::{BLOCK, Memory, Peer, copy_rows, driver};
use super::page::{Page, create};
use crate::bootstrap::{Place, Store};
use crate::error::{Error, Lost};
use crate::plan::ShardPlan;
use crate::pulls::{Act, Pull, READY, TAKEN, acts};

/// What the exchanges of a program copy.
#[derive(Default)]
pub(super) struct Links {
    /// Where each rank's memory of the program is.
    bases: Vec<u64>,
    /// What is done at each step.
    acts: Vec<Vec<Act>>,
}

/// Tells which rank is lost, if any.
type Watch = Box<dyn Fn() -> Option<Lost> + Send>;

/// How long the end of what is released, and of the other ranks, is waited for before memory goes.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often lost ranks are looked for, and waits are ended once more.
const AGAIN: Duration = Duration::from_millis(2);

/// What a rank has with others, which a thread of its own looks after, too.
struct Shared {
    page: Page,
    /// The end of the last exchange.
    last: CudaEvent,
    is_over: AtomicBool,
}

impl Shared {
    fn is_pending(&self) -> bool {
        matches!(self.last.try_is_complete(), Ok(false))
    }

    /// Ends all waits, since `rank` is lost.
    fn give_up(&self, rank: usize) {
        self.page.give_up(rank);
        self.page.release();
    }

    /// Ends the waits of exchanges with a rank that is lost, again and again: streams that go on write words
    /// that others wait for.
    fn look_after(&self, lost: impl Fn() -> Option<Lost>) {
        while !self.is_over.load(Ordering::SeqCst) {
            if let Some(lost) = lost().filter(|_| self.is_pending()) {
                self.page.give_up(lost.rank);
            }
            if self.page.given_up().is_some() {
                self.page.release();
            }
            std::thread::sleep(AGAIN);
        }
    }
}

/// A rank that copies.
pub(super) struct Copies {
    gpu: Arc<Gpu>,
    rank: usize,
    deadline: Duration,
    /// Nothing of a rank that is alone.
    shared: Option<(Arc<Shared>, JoinHandle<()>)>,
    lost: Watch,
    /// Which ranks are threads of this process.
    near: Vec<bool>,
    /// This rank's memory that others know.
    own: Vec<Arc<Memory>>,
    /// Theirs.
    peers: Vec<Peer>,
}

/// A file that is removed.
struct Removed(Option<PathBuf>);

impl Drop for Removed {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // That it is gone is what is wanted.
            std::fs::remove_file(path).ok();
        }
    }
}

impl Copies {
    /// A rank without others.
    pub(super) fn alone(gpu: &Arc<Gpu>) -> Copies {
        let (own, peers) = (Vec::new(), Vec::new());
        let (deadline, near) = (Duration::MAX, vec![true]);
        Copies {
            gpu: gpu.clone(),
            rank: 0,
            deadline,
            shared: None,
            lost: Box::new(|| None),
            near,
            own,
            peers,
        }
    }

    /// Joins the others, of which each has told where it is.
    pub(super) fn join(
        gpu: &Arc<Gpu>,
        store: &mut Store,
        place: Place,
        all: &[Told],
        deadline: Duration,
    ) -> Result<Copies, Error> {
        let Place { rank, world, .. } = place;
        let path = (rank == 0).then(|| create(world)).transpose();
        let removed = Removed(path.as_ref().ok().cloned().flatten());
        let text = match &path {
            Ok(path) => path.as_ref().map_or_else(String::new, |path| path.display().to_string()),
            Err(error) => format!("error: {error}"),
        };
        let texts = store.gather("sharing memory", &text)?;
        path?;
        heard(&texts)?;
        let page = Page::open(Path::new(&texts[0]), world, gpu);
        let page = agree(store, "shared memory", page)?;
        drop(removed);
        let last = gpu.context().new_event(Some(CUevent_flags::CU_EVENT_DISABLE_TIMING));
        let last = last.map_err(driver("making an event"))?;
        let shared = Arc::new(Shared { page, last, is_over: AtomicBool::new(false) });
        let (looking, lost, context) = (shared.clone(), store.watch(), gpu.context().clone());
        let thread = std::thread::spawn(move || {
            // Without it no event can be asked, and waits end when the rank does.
            context.bind_to_thread().ok();
            looking.look_after(lost);
        });
        let near =
            all.iter().map(|told| (&told.host, &told.process) == (&all[rank].host, &all[rank].process));
        let mut own = Copies::alone(gpu);
        (own.rank, own.deadline, own.near) = (rank, deadline, near.collect());
        (own.shared, own.lost) = (Some((shared, thread)), Box::new(store.watch()));
        // Whether memory can be shared shows before any plan needs it.
        let block = Memory::new(gpu, BLOCK, 0).map(|block| vec![Arc::new(block)]);
        own.share(store, block)?;
        own.close();
        agree(store, "memory given back", Ok(()))?;
        own.forget();
        Ok(own)
    }

    /// Makes this rank's memory known to all others, and theirs to this one, or an error: where each rank's
    /// is. All ranks call it, with as many.
    fn share(
        &mut self,
        store: &mut Store,
        memory: Result<Vec<Arc<Memory>>, Error>,
    ) -> Result<Vec<Vec<u64>>, Error> {
        let is_far = self.near.contains(&false);
        let export = |all: &Vec<Arc<Memory>>| -> Result<Vec<String>, Error> {
            all.iter().map(|memory| memory.export(is_far)).collect()
        };
        let own = memory.and_then(|all| Ok((export(&all)?, all)));
        let text = match &own {
            Ok((texts, _)) => texts.join("\n"),
            Err(error) => format!("error: {error}"),
        };
        let texts = store.gather("sharing memory", &text)?;
        let opened = own.and_then(|(_, all)| {
            heard(&texts)?;
            self.own.extend(all.iter().cloned());
            (0..all.len()).map(|number| self.open(&all[number], number, &texts)).collect()
        });
        agree(store, "memory of all ranks", opened)
    }

    /// Opens the memory of a number of all ranks.
    fn open(&mut self, own: &Memory, number: usize, texts: &[String]) -> Result<Vec<u64>, Error> {
        let mut bases = Vec::with_capacity(texts.len());
        for (rank, text) in texts.iter().enumerate() {
            if rank == self.rank {
                bases.push(own.address);
                continue;
            }
            let text = text.lines().nth(number).unwrap_or_default();
            let peer = Peer::open(&self.gpu, text, self.near[rank])?.ok_or_else(|| {
                let (theirs, ours) = (format!("{text:?}"), "memory to copy out of".to_owned());
                Error::Mismatch { rank, theirs, ours }
            })?;
            bases.push(peer.address());
            self.peers.push(peer);
        }
        Ok(bases)
    }

    /// Connects the memory of programs, one of each pass, with that of the other ranks.
    pub(super) fn link(
        &mut self,
        store: &mut Store,
        plan: &ShardPlan,
        passes: &[Pass],
        memory: Vec<Arc<Memory>>,
    ) -> Result<Vec<Links>, Error> {
        let of = |pass: &Pass| -> Result<Vec<Vec<Act>>, Error> {
            let programs = (0..plan.world()).map(|rank| plan.program(rank, *pass));
            acts(&programs.collect::<Result<Vec<_>, Error>>()?, self.rank)
        };
        let (found, memory) = match passes.iter().map(of).collect::<Result<Vec<_>, Error>>() {
            Ok(found) => (found, Ok(memory)),
            Err(error) => (Vec::new(), Err(error)),
        };
        let bases = self.share(store, memory)?;
        Ok(bases.into_iter().zip(found).map(|(bases, acts)| Links { bases, acts }).collect())
    }

    /// Gives the others' memory back, which no program copies out of any more.
    pub(super) fn close(&mut self) {
        self.settle();
        self.peers.clear();
    }

    /// Gives back this rank's memory, of which all others have said that they do not know it any more.
    pub(super) fn forget(&mut self) {
        self.own.clear();
    }

    /// Enqueues the exchange of a program's step.
    ///
    /// # Safety
    /// The links are of a program whose memory all ranks still have, and which has the step.
    pub(super) unsafe fn exchange(
        &mut self,
        links: &Links,
        step: usize,
        stream: &CudaStream,
    ) -> Result<(), Error> {
        if links.acts[step].is_empty() {
            return Ok(());
        }
        let Some((shared, _)) = &self.shared else {
            // SAFETY: as the caller vouches.
            return links.acts[step].iter().try_for_each(|act| unsafe { self.enqueue(links, *act, stream) });
        };
        self.is_good("exchanging", &self.lost)?;
        if stream.capture_status().map_err(driver("asking a stream"))?
            != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
        {
            return Err(Error::Transport {
                transport: "copies",
                what: "be captured in a CUDA graph".to_owned(),
                instead: "call the pass for each step, or use NCCL".to_owned(),
            });
        }
        // The turns of a word are those of exchanges one after the other, also of a caller's several streams.
        stream.wait(&shared.last).map_err(driver("waiting for an event"))?;
        // SAFETY: as the caller vouches.
        links.acts[step].iter().try_for_each(|act| unsafe { self.enqueue(links, *act, stream) })?;
        shared.last.record(stream).map_err(driver("recording an event"))
    }

    /// # Safety
    /// As [`Copies::exchange`].
    unsafe fn enqueue(&self, links: &Links, act: Act, stream: &CudaStream) -> Result<(), Error> {
        let word =
            |from: usize, to: usize| self.shared.as_ref().map_or(0, |(shared, _)| shared.page.turn(from, to));
        let queue = stream.cu_stream();
        // SAFETY: words lie in the page, which lives until all that is enqueued has ended.
        let (say, wait) = unsafe {
            const UNTIL_ONE_OF_THE_BITS: u32 =
                sys::CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_AND as u32;
            (
                |word: u64, bit: u32| sys::cuStreamWriteValue32_v2(queue, word, bit, 0).result(),
                |word: u64, bit: u32| {
                    sys::cuStreamWaitValue32_v2(queue, word, bit, UNTIL_ONE_OF_THE_BITS).result()
                },
            )
        };
        let done = match act {
            Act::Ready(to) => say(word(self.rank, to), READY),
            Act::AwaitReady(from) => wait(word(from, self.rank), READY),
            Act::Taken(from) => say(word(from, self.rank), TAKEN),
            Act::AwaitTaken(to) => wait(word(self.rank, to), TAKEN),
            Act::Copy(peer, Pull { from, to, width, rows, pitches }) => {
                let [from, to] =
                    [(peer, from), (self.rank, to)].map(|(rank, at)| links.bases[rank] + at as u64);
                // SAFETY: both lie in the memory of the ranks' programs, for which the caller vouches.
                unsafe {
                    match pitches == [width; 2] {
                        true => result::memcpy_dtod_async(to, from, width * rows, queue),
                        false => copy_rows(stream, (from, pitches[0]), (to, pitches[1]), (width, rows)),
                    }
                }
            }
        };
        done.map_err(driver("enqueuing a copy between ranks"))
    }

    /// Whether no rank has given up, so that what has ended did so by itself.
    pub(super) fn is_good(&self, doing: &str, lost: &dyn Fn() -> Option<Lost>) -> Result<(), Error> {
        let Some(rank) = self.shared.as_ref().and_then(|(shared, _)| shared.page.given_up()) else {
            return Ok(());
        };
        // Who has given up has said why, which is on its way.
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(1) {
            if let Some(lost) = lost() {
                return Err(lost.while_doing(doing));
            }
            std::thread::sleep(AGAIN);
        }
        Err(Lost::silently(rank).while_doing(doing))
    }

    /// Gives up, with the reason, if a rank is lost or has given up, or the deadline is over.
    pub(super) fn still(
        &self,
        doing: &'static str,
        begun: Instant,
        lost: &dyn Fn() -> Option<Lost>,
    ) -> Result<(), Error> {
        if let Some(lost) = lost() {
            self.abort();
            return Err(lost.while_doing(doing));
        }
        self.is_good(doing, lost)?;
        if begun.elapsed() > self.deadline {
            self.abort();
            return Err(Error::Deadline { after: self.deadline, doing: doing.to_owned() });
        }
        Ok(())
    }

    /// Gives up: what is enqueued ends, and so do the other ranks' waits.
    pub(super) fn abort(&self) {
        if let Some((shared, _)) = &self.shared {
            shared.give_up((self.lost)().map_or(self.rank, |lost| lost.rank));
        }
    }

    /// Waits for the end of exchanges, which are given up where a rank is lost or the deadline is over.
    fn settle(&self) {
        let Some((shared, _)) = &self.shared else { return };
        let (begun, mut released) = (Instant::now(), None);
        while shared.is_pending() {
            if released.is_none() && self.still("ending", begun, &self.lost).is_err() {
                released = Some(Instant::now());
            }
            if released.is_some_and(|released| released.elapsed() > PATIENCE) {
                return;
            }
            std::thread::yield_now();
        }
    }

    /// Waits for the other processes, which may still have this rank's memory.
    fn part(&self) {
        let Some((shared, _)) = &self.shared else { return };
        shared.page.end(self.rank);
        let (begun, patience) = (Instant::now(), PATIENCE.min(self.deadline));
        let has_it = |rank: usize| !self.near[rank] && !shared.page.has_ended(rank);
        while (0..self.near.len()).any(has_it) && begun.elapsed() < patience {
            if (self.lost)().is_some() || shared.page.given_up().is_some() {
                return;
            }
            std::thread::sleep(AGAIN);
        }
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        self.close();
        self.part();
        self.forget();
        if let Some((shared, thread)) = self.shared.take() {
            shared.is_over.store(true, Ordering::SeqCst);
            // A thread that has panicked has ended, too.
            thread.join().ok();
        }
    }
}

/// The GPUs out of whose memory `gpu` can copy, as far as this process sees them.
pub(super) fn reach(gpu: &Gpu) -> Result<Vec<String>, Error> {
    let asked = driver("asking about a GPU");
    let own = gpu.context().cu_device();
    let mut all = Vec::new();
    for ordinal in 0..CudaContext::device_count().map_err(&asked)? {
        let device = result::device::get(ordinal).map_err(&asked)?;
        let uuid = result::device::get_uuid(device).map_err(&asked)?;
        let mut can = 0;
        // SAFETY: the argument points at a local.
        unsafe { sys::cuDeviceCanAccessPeer(&mut can, own, device) }.result().map_err(&asked)?;
        all.extend((device == own || can != 0).then(|| number(&uuid.bytes)));
    }
    Ok(all)
}

/// The first error that a rank has told.
fn heard(texts: &[String]) -> Result<(), Error> {
    let found = texts.iter().enumerate().find(|(_, text)| text.starts_with("error: "));
    found.map_or(Ok(()), |(rank, text)| {
        let (theirs, ours) = (text.clone(), "copies".to_owned());
        Err(Error::Mismatch { rank, theirs, ours })
    })
}
