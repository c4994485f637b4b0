//! Times of launches by CUDA events.

use fa_kernels::Error;
use fa_kernels::cudarc::driver::sys::CUevent_flags;
use fa_kernels::cudarc::driver::{CudaStream, DriverError};

/// How to measure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// Milliseconds of warm-up launches.
    pub warm_up_ms: f64,
    /// Samples, each between two events.
    pub samples: usize,
    /// Milliseconds that a sample lasts at least: short kernels are launched several times within one.
    pub sample_ms: f64,
}

impl Default for Timing {
    fn default() -> Self {
        Timing { warm_up_ms: 20.0, samples: 30, sample_ms: 0.2 }
    }
}

fn doing(doing: &'static str) -> impl Fn(DriverError) -> Error {
    move |source| Error::Driver { doing, source }
}

/// Milliseconds of `count` calls of `work`, each between two events on `stream`, after `lead` warm-up calls.
/// All are enqueued before the first time is read, so that the host stays ahead of the GPU.
///
/// # Errors
/// [`Error::Driver`], and what `work` reports.
pub fn time_each(
    stream: &CudaStream,
    lead: usize,
    count: usize,
    mut work: impl FnMut() -> Result<(), Error>,
) -> Result<Vec<f64>, Error> {
    let event = || {
        let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
        stream.context().new_event(flags).map_err(doing("making an event"))
    };
    let events = (0..count).map(|_| Ok([event()?, event()?])).collect::<Result<Vec<_>, Error>>()?;
    (0..lead).try_for_each(|_| work())?;
    for [start, end] in &events {
        start.record(stream).map_err(doing("recording an event"))?;
        work()?;
        end.record(stream).map_err(doing("recording an event"))?;
    }
    let elapsed = |[start, end]: &[_; 2]| {
        let start: &fa_kernels::cudarc::driver::CudaEvent = start;
        start.elapsed_ms(end).map(f64::from).map_err(doing("timing a kernel"))
    };
    events.iter().map(elapsed).collect()
}

/// Milliseconds of one of the launches that `run` makes (its argument says how many), one figure per sample,
/// ascending.
///
/// # Errors
/// [`Error::Driver`], and what `run` reports.
pub(super) fn time_launches(
    stream: &CudaStream,
    timing: Timing,
    mut run: impl FnMut(usize) -> Result<(), Error>,
) -> Result<Vec<f64>, Error> {
    let mut measure = |samples: usize, launches: usize| -> Result<Vec<f64>, Error> {
        let times = time_each(stream, 0, samples, || run(launches))?;
        Ok(times.into_iter().map(|ms| ms / launches as f64).collect())
    };
    let first = measure(1, 1)?[0];
    let warm_up = ((timing.warm_up_ms / first.max(1e-3)).ceil() as usize).clamp(2, 2000);
    let one = measure(1, warm_up)?[0];
    let launches = ((timing.sample_ms / one.max(1e-4)).ceil() as usize).clamp(1, 200);
    let mut times = measure(timing.samples.max(1), launches)?;
    times.sort_by(f64::total_cmp);
    Ok(times)
}

/// The median of values in ascending order; 0 of none.
pub fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(&[1.0, 2.0, 9.0]), 2.0);
        assert_eq!(median(&[1.0, 3.0]), 2.0);
    }
}
