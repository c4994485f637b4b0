//! Work for all threads. Each has a list of items of its own, the same from call to call, so that what it
//! reads may still be in its cache; then it takes from the lists of the others.

use std::cell::Cell;
use std::iter;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::gate;
use crate::threads;

/// Runs `work` on the items `0..count` on at most `threads` threads: this one, which starts at once, and
/// others of the current rayon pool as they wake. Items are started about in order. Each worker allocates its
/// scratch memory once.
pub(crate) fn run<S>(
    count: usize,
    threads: Option<usize>,
    scratch: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) + Sync,
) {
    let lists = Lists::new(count, workers(threads));
    let worker = || {
        let mut items = lists.items();
        // A thread that wakes when all is done allocates nothing.
        let Some(first) = items.next() else { return };
        let mut scratch = scratch();
        for item in iter::once(first).chain(items) {
            work(&mut scratch, item);
        }
    };
    match lists.lists.len() {
        0 => {}
        1 => worker(),
        workers => gate::open(workers, &worker),
    }
}

/// The items of a call, dealt out to its threads one by one.
struct Lists {
    count: usize,
    lists: Vec<List>,
}

/// Every n-th item of n lists. Lists lie in cache lines of their own (which come in pairs).
#[derive(Default)]
#[repr(align(128))]
struct List {
    /// Items that have been started.
    started: AtomicUsize,
    /// Whether it is a thread's own.
    owned: AtomicBool,
}

thread_local! {
    /// The list that this thread had in its last call.
    static OWN: Cell<usize> = const { Cell::new(0) };
}

impl Lists {
    fn new(count: usize, workers: usize) -> Lists {
        Lists { count, lists: iter::repeat_with(List::default).take(workers.min(count)).collect() }
    }

    /// The items for this thread: those of its own list, then what is left of the others.
    fn items(&self) -> impl Iterator<Item = usize> {
        let lists = self.lists.len();
        let from = |first: usize| (first..first + lists).map(move |list| list % lists);
        let last = OWN.get();
        let free = |list: &usize| !self.lists[*list].owned.swap(true, Ordering::Relaxed);
        let own = from(last).find(free).unwrap_or(last % lists);
        // A call with fewer threads does not mix up the lists of the next.
        if own != last % lists {
            OWN.set(own);
        }
        from(own).flat_map(move |list| {
            let next = move || list + self.lists[list].started.fetch_add(1, Ordering::Relaxed) * lists;
            iter::repeat_with(next).take_while(|&item| item < self.count)
        })
    }
}

/// Threads that a call may use: more threads than cores would only take turns, each with scratch memory of
/// its own.
pub(super) fn workers(limit: Option<usize>) -> usize {
    let pool = threads::current().min(cores());
    limit.map_or(pool, |limit| limit.clamp(1, pool))
}

#[cfg(not(test))]
fn cores() -> usize {
    threads::cores()
}

#[cfg(test)]
fn cores() -> usize {
    tests::PRETENDED.get().unwrap_or_else(threads::cores)
}

#[cfg(test)]
pub(super) mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        /// Cores that this thread assumes.
        pub(super) static PRETENDED: Cell<Option<usize>> = const { Cell::new(None) };
    }

    /// Runs `work` on this thread as if the machine had this many cores.
    pub(in crate::tiled) fn with_cores(cores: usize, work: impl FnOnce()) {
        let before = PRETENDED.replace(Some(cores));
        work();
        PRETENDED.set(before);
    }

    #[test]
    fn threads_beyond_the_cores_get_no_work() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(6).build().unwrap();
        pool.install(|| {
            with_cores(4, || {
                assert_eq!(
                    [workers(None), workers(Some(3)), workers(Some(5)), workers(Some(0))],
                    [4, 3, 4, 1]
                );
                let made = AtomicUsize::new(0);
                run(100, None, || made.fetch_add(1, Ordering::Relaxed), |_, _| {});
                assert!(made.into_inner() <= 4);
            });
            with_cores(64, || assert_eq!(workers(None), 6));
        });
    }

    #[test]
    fn every_item_runs_once() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(5).build().unwrap();
        let check = |count: usize, threads| {
            let ran: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
            run(count, Some(threads), || (), |(), item| _ = ran[item].fetch_add(1, Ordering::Relaxed));
            assert!(ran.into_iter().all(|ran| ran.into_inner() == 1), "{count} items, {threads} threads");
        };
        let all = || (0..40).for_each(|count| (1..=5).for_each(|threads| check(count, threads)));
        pool.install(|| with_cores(5, all));
    }

    #[test]
    fn a_thread_has_the_same_list_in_every_call() {
        let lists = Lists::new(7, 3);
        let own = |lists: &Lists| lists.items().next();
        OWN.set(0);
        assert_eq!([own(&lists), own(&lists)], [Some(0), Some(1)]);
        let again = Lists::new(7, 3);
        assert_eq!(again.items().collect::<Vec<_>>(), [1, 4, 2, 5, 0, 3, 6]);
        assert_eq!(again.items().count(), 0);
        // With a single list, too, it does not forget its own.
        OWN.set(2);
        assert_eq!((own(&Lists::new(9, 1)), own(&Lists::new(9, 3))), (Some(0), Some(2)));
    }
}
