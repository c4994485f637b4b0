//! Times a closure: median and range of samples that are long beside the clock's resolution.

use std::hint::black_box;
use std::time::{Duration, Instant};

const SAMPLES: usize = 21;
const SAMPLE: Duration = Duration::from_millis(20);

/// Prints how long a call of `run` takes.
pub(crate) fn time<R>(name: &str, mut run: impl FnMut() -> R) {
    let mut calls = 1;
    // Doubled until a sample is long enough, which warms caches as well.
    while sample(calls, &mut run) < SAMPLE {
        calls *= 2;
    }
    let mut times: Vec<Duration> = (0..SAMPLES).map(|_| sample(calls, &mut run) / calls).collect();
    times.sort();
    let (fastest, median, slowest) = (times[0], times[SAMPLES / 2], times[SAMPLES - 1]);
    println!("{name:<32} {median:>9.2?} ({fastest:.2?} to {slowest:.2?})");
}

fn sample<R>(calls: u32, run: &mut impl FnMut() -> R) -> Duration {
    let start = Instant::now();
    for _ in 0..calls {
        black_box(run());
    }
    start.elapsed()
}
