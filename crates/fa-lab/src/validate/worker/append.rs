//! Cases of the append kernel, whose bits are those of the CPU.
#![allow(unsafe_code)]

use fa_attn::device::{DeviceAppend, Half};
use fa_core::Append;
use fa_kernels::append_entry;

use super::session::{Found, Session};
use crate::append::AppendInputs;
use crate::error::Result;
use crate::grid::{Action, Case};

/// Runs and judges a case.
///
/// # Errors
/// What the GPU reports.
pub(super) fn examine<T: Half>(session: &Session, case: &Case, append: &Append) -> Result<Found> {
    let bound = session.gpu.append(append)?;
    let mut inputs = AppendInputs::<T>::random(append, case.seed());
    let mut want = inputs.clone();
    want.on_cpu()?;
    let replayed = case.action == Action::Relength;
    if replayed {
        // Once more, behind what was appended.
        want.seqused_k = want.used_out.clone();
        want.on_cpu()?;
    }
    let stream = session.gpu.context().new_stream()?;
    {
        let _gpu = session.begin(case);
        inputs.with(|extras, tensors| {
            let mut device = DeviceAppend::upload(&stream, extras, tensors)?;
            if replayed {
                // SAFETY: the graph is dropped before the memory, which stays where it is.
                let graph = unsafe { device.capture(&bound, &stream) }?;
                graph.launch()?;
                if let (Some(lengths), Some(after)) = (&mut device.seqused_k, &device.used_out) {
                    stream.memcpy_dtod(after, lengths)?;
                }
                graph.launch()?;
            } else {
                device.run(&bound, &stream)?;
            }
            Ok(device.download(&stream, extras, tensors)?)
        })?;
    }
    let fault = want.difference(&inputs);
    Ok(Found {
        passed: fault.is_none(),
        ratio: if fault.is_some() { f64::INFINITY } else { 0.0 },
        detail: fault.unwrap_or_else(|| "the CPU's bits".to_owned()),
        ..Found::by(append_entry(append.codes.map(|codes| codes.kind)))
    })
}
