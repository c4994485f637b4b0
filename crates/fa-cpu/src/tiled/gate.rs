//! Work that threads of the rayon pool join while it lasts. The end of a scope waits for every thread that
//! was asked, also for those that are still being woken, which takes longer than a short problem. Here it
//! waits for those that have come; the others find the gate closed.
#![allow(unsafe_code)]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// How long a finished thread spins for the others before it sleeps: waking takes tens of microseconds,
/// longer than the last item of a short problem. Those that come to a gate stay awake for the next call.
const PATIENCE: Duration = Duration::from_micros(50);

/// The most threads that may have been asked and not have come. If so many are busy elsewhere, it is no use
/// to ask more, call after call.
const MOST_ASKED: usize = 1 << 10;
static ASKED: AtomicUsize = AtomicUsize::new(0);

/// Of [`Gate::inside`].
const CLOSED: usize = 1;
const ONE: usize = 2;

/// `work` of the thread that has opened it.
#[derive(Clone, Copy)]
struct Shared(*const (dyn Fn() + Sync));

// SAFETY: the work is `Sync`; when it may be called is `Gate::enter`'s affair.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

struct Gate {
    work: Shared,
    /// `ONE` for each guest inside, and `CLOSED`.
    inside: AtomicUsize,
    /// Threads that work, the owner among them.
    at_work: AtomicUsize,
    /// Threads that may work.
    threads: usize,
    owner: Thread,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Runs `work` on this thread, and meanwhile on as many threads of the current rayon pool as make `threads`
/// with this one, if they come in time. All have left when it returns.
///
/// # Panics
/// If `work` does, on any thread.
pub(super) fn open(threads: usize, work: &(dyn Fn() + Sync)) {
    let work: *const (dyn Fn() + Sync + '_) = work;
    // SAFETY: only the lifetime changes. `Gate::enter` says why the pointer is not used after it.
    let work = Shared(unsafe {
        std::mem::transmute::<*const (dyn Fn() + Sync + '_), *const (dyn Fn() + Sync + 'static)>(work)
    });
    let gate = Arc::new(Gate {
        work,
        inside: AtomicUsize::new(0),
        at_work: AtomicUsize::new(1),
        threads,
        owner: thread::current(),
        panic: Mutex::new(None),
    });
    let closing = Closing(&gate);
    gate.ask(0);
    // SAFETY: the caller's reference is alive.
    unsafe { (*work.0)() };
    drop(closing);
    let panic = gate.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(panic) = panic {
        resume_unwind(panic);
    }
}

/// Closes the gate, whether or not the owner's work panics, and waits until all have left.
struct Closing<'a>(&'a Gate);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let Gate { inside, at_work, .. } = self.0;
        at_work.fetch_sub(1, Ordering::Relaxed);
        inside.fetch_or(CLOSED, Ordering::Relaxed);
        let all_left = || inside.load(Ordering::Acquire) == CLOSED;
        spin_until(all_left);
        while !all_left() {
            thread::park();
        }
    }
}

impl Gate {
    /// Asks those whom guest number `number` has to ask (the owner is 0): each two, so that no thread wakes
    /// all others one after another.
    fn ask(self: &Arc<Self>, number: usize) {
        for guest in 2 * number + 1..(2 * number + 3).min(self.threads) {
            if ASKED.fetch_add(1, Ordering::Relaxed) >= MOST_ASKED {
                ASKED.fetch_sub(1, Ordering::Relaxed);
                return;
            }
            let gate = Arc::clone(self);
            rayon::spawn(move || {
                ASKED.fetch_sub(1, Ordering::Relaxed);
                gate.enter(guest);
            });
        }
    }

    /// Works, if the gate is open.
    fn enter(self: &Arc<Self>, guest: usize) {
        let open = |inside| (inside & CLOSED == 0).then_some(inside + ONE);
        if self.inside.fetch_update(Ordering::Acquire, Ordering::Relaxed, open).is_err() {
            return;
        }
        self.at_work.fetch_add(1, Ordering::Relaxed);
        self.ask(guest);
        // SAFETY: while a guest is inside, `Closing` does not end, and with it not the call of `open`, which
        // borrows the work.
        let done = catch_unwind(AssertUnwindSafe(|| unsafe { (*self.work.0)() }));
        if let Err(panic) = done {
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
        }
        self.at_work.fetch_sub(1, Ordering::Relaxed);
        if self.inside.fetch_sub(ONE, Ordering::Release) == ONE | CLOSED {
            self.owner.unpark();
        }
        spin_until(|| self.at_work.load(Ordering::Relaxed) == 0);
    }
}

/// Spins until `done`, with [`PATIENCE`].
fn spin_until(done: impl Fn() -> bool) {
    let begin = Instant::now();
    while !done() && begin.elapsed() < PATIENCE {
        std::hint::spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::AtomicBool;

    use super::*;

    fn pool(threads: usize) -> rayon::ThreadPool {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap()
    }

    #[test]
    fn all_who_come_have_left_at_the_end() {
        pool(6).install(|| {
            for _ in 0..200 {
                let (here, came) = (AtomicUsize::new(0), AtomicUsize::new(0));
                let work = || {
                    here.fetch_add(1, Ordering::Relaxed);
                    came.fetch_add(1, Ordering::Relaxed);
                    thread::yield_now();
                    here.fetch_sub(1, Ordering::Relaxed);
                };
                open(5, &work);
                assert_eq!(here.into_inner(), 0);
                assert!((1..=5).contains(&came.into_inner()));
            }
        });
    }

    #[test]
    fn threads_that_are_busy_are_not_waited_for() {
        pool(2).install(|| {
            let (busy, release) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
            let both = (Arc::clone(&busy), Arc::clone(&release));
            rayon::spawn(move || _ = (both.0.wait(), both.1.wait()));
            busy.wait();
            let came = Arc::new(AtomicUsize::new(0));
            open(2, &|| _ = came.fetch_add(1, Ordering::Relaxed));
            release.wait();
            assert_eq!(came.load(Ordering::Relaxed), 1);
        });
    }

    #[test]
    fn a_guests_panic_is_the_owners() {
        pool(2).install(|| {
            let (owner, came) = (thread::current().id(), AtomicBool::new(false));
            let work = || {
                if thread::current().id() != owner {
                    came.store(true, Ordering::Relaxed);
                    panic!("a guest's");
                }
                while !came.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            };
            let panic = catch_unwind(AssertUnwindSafe(|| open(2, &work))).unwrap_err();
            assert_eq!(panic.downcast_ref(), Some(&"a guest's"));
        });
    }
}
