//! Memory of the tiled implementation grows with N: at N = 16,384 it stays far below one N x N buffer.
//!
//! A separate test binary, because it counts every allocation of the process.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use fa_core::{Dtype, Mask, Problem, TensorLayout};
use fa_cpu::tiled::{backward, forward};
use fa_cpu::{Element, TensorMut, TensorRef};
use half::bf16;

struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const DIM: usize = 64;

/// Most bytes held at once beyond what was held before, for forward and backward at length `n` on two
/// threads.
fn peak<T: Element>(n: usize, dtype: Dtype) -> usize {
    let problem = Problem::square(1, n, 1, DIM, Mask::CAUSAL, dtype);
    let shape = [1, n, 1, DIM];
    let inputs: Vec<T> = (0..n * DIM).map(|i| T::from_f32((i % 13) as f32 / 13.0 - 0.4)).collect();
    let view = TensorRef::packed("input", &inputs, shape, TensorLayout::Bshd).unwrap();
    let [mut out, mut dq, mut dk, mut dv] = [0; 4].map(|_| vec![T::from_f32(f32::NAN); n * DIM]);
    let mut lse = vec![f32::NAN; n];
    fn writable<T>(data: &mut [T], shape: [usize; 4]) -> TensorMut<'_, T> {
        TensorMut::packed("output", data, shape, TensorLayout::Bshd).unwrap()
    }
    let before = NOW.load(Ordering::Relaxed);
    // Threads keep scratch for their next call until they end, so they are joined before anything is measured
    // again.
    let mut workers = Vec::new();
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(2)
        .spawn_handler(|worker| {
            workers.push(std::thread::Builder::new().spawn(|| worker.run())?);
            Ok(())
        })
        .build()
        .unwrap();
    PEAK.store(before, Ordering::Relaxed);
    pool.install(|| {
        forward(&problem, &view, &view, &view, &mut writable(&mut out, shape), Some(&mut lse)).unwrap();
        let out = TensorRef::packed("out", &out, shape, TensorLayout::Bshd).unwrap();
        let [dq, dk, dv] = [&mut dq, &mut dk, &mut dv].map(|data| writable(data, shape));
        let (dq, dk, dv) = (&mut { dq }, &mut { dk }, &mut { dv });
        backward(&problem, &view, &view, &view, &out, &lse, &view, dq, dk, dv).unwrap();
    });
    let peak = PEAK.load(Ordering::Relaxed) - before;
    drop(pool);
    workers.into_iter().for_each(|worker| worker.join().unwrap());
    assert!(lse.iter().all(|value| value.is_finite()), "the call has done its work");
    peak
}

#[test]
fn memory_grows_with_n_and_not_with_its_square() {
    let n = 16_384;
    let square = n * n * size_of::<f32>();
    for (dtype, peak) in [
        (Dtype::F32, peak::<f32> as fn(usize, Dtype) -> usize),
        (Dtype::Bf16, peak::<bf16> as fn(usize, Dtype) -> usize),
    ] {
        let (short, long) = (peak(n / 4, dtype), peak(n, dtype));
        println!("{dtype}: {:.1} MiB at N = {}, {:.1} MiB at N = {n}", mib(short), n / 4, mib(long));
        assert!(long < square / 8, "{dtype}: {} MiB, an N x N buffer has {}", mib(long), mib(square));
        assert!(long < 5 * short, "{dtype}: {} MiB for {} at a quarter of N", mib(long), mib(short));
    }
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / (1 << 20) as f64
}
