//! When each step of a program begins and ends on its stream.

use fa_attn::device::Gpu;
use fa_kernels::cudarc::driver::sys::CUevent_flags;
use fa_kernels::cudarc::driver::{CudaEvent, CudaStream};

use super::memory::driver;
use crate::error::Error;
use crate::program::{Lane, Program};

/// The time of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepTime {
    /// What it does.
    pub name: &'static str,
    /// Its queue.
    pub lane: Lane,
    /// Seconds from the beginning of the first step.
    pub begin: f64,
    /// Seconds that it took, those included in which an exchange waits for another rank.
    pub seconds: f64,
}

/// Events around each step.
pub(super) struct Marks(Vec<[CudaEvent; 2]>);

impl Marks {
    pub(super) fn new(gpu: &Gpu, steps: usize) -> Result<Marks, Error> {
        let event = || gpu.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        let pair = || -> Result<_, _> { Ok([event()?, event()?]) };
        let all = (0..steps).map(|_| pair()).collect::<Result<Vec<_>, _>>();
        all.map(Marks).map_err(driver("making an event"))
    }

    /// Notes the beginning of a step, or its end.
    pub(super) fn record(&self, number: usize, is_end: bool, stream: &CudaStream) -> Result<(), Error> {
        let event = &self.0[number][usize::from(is_end)];
        event.record(stream).map_err(driver("recording an event"))
    }

    /// The times of steps that are done.
    pub(super) fn times(&self, program: &Program) -> Result<Vec<StepTime>, Error> {
        let Some([first, _]) = self.0.first() else { return Ok(Vec::new()) };
        let seconds = |from: &CudaEvent, to: &CudaEvent| {
            from.elapsed_ms(to).map(|ms| f64::from(ms) * 1e-3).map_err(driver("reading an event"))
        };
        let of = |(step, [begin, end]): (&crate::program::Step, &[CudaEvent; 2])| {
            let (from, to) = (seconds(first, begin)?, seconds(begin, end)?);
            Ok(StepTime { name: step.op.name(), lane: step.lane, begin: from, seconds: to })
        };
        program.steps.iter().zip(&self.0).map(of).collect()
    }
}
