//! Running launches on a stream: the checks of a call's buffers, and the only function that enqueues.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::Arc;

use cudarc::driver::sys::CUtensorMap;
use cudarc::driver::{CudaStream, result};
use fa_core::{Dtype, Problem};

use crate::Error;
use crate::launch::args::{Buffer, Element, KvElement};
use crate::launch::launches::{Addresses, Launches, Step};
use crate::launch::module::LoadedKernel;
use crate::launch::tma;

/// The most tensor maps that a kernel takes.
const MAX_MAPS: usize = 5;

/// Enqueues the steps of `launches`, which `kernel` made. Allocates nothing and waits for nothing.
///
/// # Safety
/// Every element of the tensors under their strides, the LSE and the workspace lie in device memory that the
/// stream's context can access, and stay there, untouched by others, until the stream has run the steps.
/// Outputs share no memory with one another and the inputs. A workspace that has to start as zero does.
///
/// # Errors
/// Those of [`Launches::check`], [`Error::Context`], [`Error::TensorMap`] and [`Error::Driver`].
pub(crate) unsafe fn enqueue(
    kernel: &LoadedKernel,
    launches: &Launches,
    dtype: Dtype,
    stream: &CudaStream,
    at: &Addresses<'_>,
) -> Result<(), Error> {
    launches.check(at)?;
    let clear = |address, bytes, doing| {
        // SAFETY: what is cleared lies in the workspace, or is a gradient of an array, whose bytes these are.
        unsafe { result::memset_d8_async(address, 0, bytes, stream.cu_stream()) }
            .map_err(|source| Error::Driver { doing, source })
    };
    let mut unread = launches.unread(at).peekable();
    if launches.steps.is_empty() && unread.peek().is_none() {
        return Ok(());
    }
    kernel.enter(stream)?;
    for (address, bytes) in unread {
        clear(address, bytes, "clearing an array's gradient")?;
    }
    let mut params = launches.argument(at);
    let mut encoded = [const { MaybeUninit::<CUtensorMap>::uninit() }; MAX_MAPS];
    let mut arguments = [
        params.raw(),
        std::ptr::null_mut(),
        std::ptr::null_mut(),
        std::ptr::null_mut(),
        std::ptr::null_mut(),
        std::ptr::null_mut(),
    ];
    let mut filled = 1;
    for (map, slot) in launches.maps(at).zip(&mut encoded) {
        let map: *mut CUtensorMap = slot.write(tma::encode(&map, dtype)?);
        arguments[filled] = map.cast::<c_void>();
        filled += 1;
    }
    for step in launches.steps.iter().filter(|step| launches.takes(step, at)) {
        match step {
            Step::Clear(part) => {
                let address = at.workspace.unwrap_or(0) + part.offset as u64;
                clear(address, part.bytes, "clearing a part of the workspace")?;
            }
            Step::ClearGradient => {
                let (address, bytes) = launches.cleared(at).unwrap_or_default();
                clear(address, bytes, "clearing an array's gradient")?;
            }
            Step::Plan(launch) | Step::Launch(launch) => {
                let launch = &launches.launch_at(launch, at);
                let taken = if launch.takes_maps { filled } else { 1 };
                // SAFETY: every entry takes the parameters, those with maps the maps after them; the caller
                // vouches for the addresses.
                unsafe { kernel.launch(stream, launch, &mut arguments[..taken])? }
            }
        }
    }
    Ok(())
}

/// Checks that T is the type of the problem's O, Q that of Q, and K that of K and V.
///
/// # Errors
/// [`Error::Mismatch`].
pub(crate) fn check_element<T: Element, K: KvElement, Q: KvElement>(problem: &Problem) -> Result<(), Error> {
    let types = problem.types;
    for (what, dtype, holds, name) in [
        ("dtype", types.q, Q::holds(types.q), Q::name()),
        ("kv_dtype", types.kv, K::holds(types.kv), K::name()),
        ("out_dtype", types.out, T::DTYPE == types.out, T::DTYPE.to_string()),
    ] {
        if !holds {
            return Err(Error::Mismatch { what, kernel: dtype.to_string(), problem: name });
        }
    }
    Ok(())
}

/// Checks strides, lengths and contexts of a call's buffers; LSE and workspace by their length and stream.
///
/// # Errors
/// [`Error::Stride`], [`Error::TooShort`] and [`Error::Context`].
pub(crate) fn check_buffers(
    kernel: &LoadedKernel,
    launches: &Launches,
    buffers: &[Buffer<'_>],
    lse: Option<(usize, &Arc<CudaStream>)>,
    workspace: Option<(usize, &Arc<CudaStream>)>,
) -> Result<(), Error> {
    for (tensor, Buffer { strides, len, stream }) in launches.tensors.iter().zip(buffers) {
        tensor.shape.check_strides(strides, tensor.is_output)?;
        tensor.shape.check_len(strides, *len)?;
        kernel.check_context(tensor.shape.name, stream.context())?;
    }
    let q = &launches.tensors[0].shape;
    let rows = q.batch * q.heads * q.seqlen;
    for (tensor, buffer, need) in [("lse", lse, rows), ("workspace", workspace, launches.workspace.bytes)] {
        let Some((have, stream)) = buffer else { continue };
        if have < need {
            return Err(Error::TooShort { tensor, have: have as u64, need: need as u64 });
        }
        kernel.check_context(tensor, stream.context())?;
    }
    Ok(())
}
