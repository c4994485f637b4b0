//! The GPUs of the process: each opened once, the thread's context left as it was, tuning on all of them.
#![allow(unsafe_code)]

use std::sync::{Mutex, OnceLock};

use fa_attn::device::Gpu;
use fa_attn::{Error, Tuning, TuningOutcome};
use fa_kernels::cudarc::driver::result;
use fa_kernels::cudarc::driver::sys::CUcontext;
use pyo3::prelude::*;

use crate::error::{InputError, raised};
use crate::gpu::{Device, lock};

const MOST: usize = 64;
static DEVICES: [OnceLock<Device>; MOST] = [const { OnceLock::new() }; MOST];

/// The tuning of all GPUs: of those that are open, and of those that will be opened; what `FA_TUNE` says
/// until the caller does.
static TUNING: Mutex<Option<Tuning>> = Mutex::new(None);

/// The thread's current context, restored when this is dropped: other libraries rely on their device being
/// current.
pub(crate) struct Current(Option<CUcontext>);

impl Current {
    /// Remembers the context; does nothing where there is no driver.
    pub(crate) fn keep() -> Current {
        let there = fa_kernels::driver::probe().is_ok();
        Current(if there { result::ctx::get_current().ok().flatten() } else { None })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if let Some(context) = self.0
            && result::ctx::get_current() != Ok(Some(context))
        {
            // SAFETY: it was current when the call began, and its owner keeps it. An error would come again
            // at the owner's next call, which reports it.
            let _ = unsafe { result::ctx::set_current(context) };
        }
    }
}

/// GPU `ordinal`, opened at the first call: its primary context is retained, which every library shares.
///
/// # Errors
/// Without a driver, a GPU, or one that kernels run on.
pub(crate) fn device(ordinal: i32) -> PyResult<&'static Device> {
    let index = usize::try_from(ordinal).ok().filter(|index| *index < MOST);
    let Some(index) = index else {
        return Err(InputError::new_err(format!("there is no GPU {ordinal}")));
    };
    if let Some(device) = DEVICES[index].get() {
        return Ok(device);
    }
    let gpu = Gpu::nth(index).map_err(raised)?;
    let tuning = lock(&TUNING);
    let tuning = tuning.map_or_else(Tuning::from_environment, Ok).map_err(raised)?;
    if tuning != Tuning::Off {
        gpu.set_tuning(tuning).map_err(raised)?;
    }
    Ok(DEVICES[index].get_or_init(|| Device::new(gpu)))
}

/// Switches tuning on or off for all GPUs.
///
/// # Errors Options out of range, a machine without a GPU, a table of winners that cannot be read.
pub(crate) fn set_tuning(py: Python<'_>, tuning: Tuning) -> PyResult<()> {
    tuning.check().map_err(raised)?;
    if tuning != Tuning::Off && fa_kernels::driver::probe().is_err() {
        return Err(raised(Error::NothingToTune { backend: "CPU" }));
    }
    let _current = Current::keep();
    // Switching off waits for the candidate that is being measured.
    py.detach(|| {
        let mut now = lock(&TUNING);
        for device in DEVICES.iter().filter_map(OnceLock::get) {
            device.set_tuning(tuning)?;
        }
        *now = Some(tuning);
        Ok(())
    })
    .map_err(raised)
}

/// Waits for the measurements on all GPUs; returns their outcomes.
pub(crate) fn finish_tuning(py: Python<'_>) -> Vec<TuningOutcome> {
    py.detach(|| DEVICES.iter().filter_map(OnceLock::get).flat_map(Device::finish_tuning).collect())
}
