//! The merge kernel: partial results over different keys of the same queries, combined
//! ([`fa_core::Merge`]). One kernel for all problems, one launch.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use fa_core::{Dtype, Merge, Strides};

use crate::Error;
use crate::jit::declare::{ConstF32Ptr, ConstPtr, MutF32Ptr, MutPtr};
use crate::jit::entries::MERGE_THREADS;
use crate::jit::merge_params::{MergeParams, MergePart as PartParams, MergeParts};
use crate::jit::params::{ConstTensor, MutTensor, RowStrides};
use crate::launch::args::{Element, Input, Output, RawTensor, STEP, Shape};
use crate::launch::checks::check_address;
use crate::launch::single::Single;

/// CTAs of an SM, whose warps take row after row.
const CTAS_PER_SM: usize = 8;

/// A partial result on the device.
pub struct PartialResult<'a, T> {
    /// O over the part's keys, `[batch, seqlen, heads, dim]`.
    pub out: Input<'a, T>,
    /// Its LSE, `[batch, heads, seqlen]` packed.
    pub lse: &'a dyn DevicePtr<f32>,
}

/// The arguments of a merge of parts of type `P` into a result of type `O`.
pub struct MergeArgs<'a, P, O> {
    /// The parts, as many as the merge has.
    pub parts: &'a [PartialResult<'a, P>],
    /// The merged O, in the shape of the parts; every element is written.
    pub out: Output<'a, O>,
    /// The merged LSE, `[batch, heads, seqlen]` packed; `None` for none.
    pub lse: Option<&'a mut dyn DevicePtrMut<f32>>,
    /// `[heads]`, in natural units, where sinks join the result.
    pub sinks: Option<&'a dyn DevicePtr<f32>>,
}

/// [`PartialResult`] by addresses alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RawPartialResult {
    /// O.
    pub out: RawTensor,
    /// LSE; 0 for none, of all parts or of no part: they are then added up, in their order, and rounded once.
    pub lse: u64,
}

/// [`MergeArgs`] by addresses alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RawMergeArgs<'a> {
    /// The parts.
    pub parts: &'a [RawPartialResult],
    /// The merged O.
    pub out: RawTensor,
    /// The merged LSE; `None` for none.
    pub lse: Option<u64>,
    /// Sinks.
    pub sinks: Option<u64>,
}

impl RawMergeArgs<'_> {
    /// Whether the parts are added up: none has an LSE.
    fn adds(&self) -> bool {
        !self.parts.is_empty() && self.parts.iter().all(|part| part.lse == 0)
    }
}

/// The launch of a merge, as data: nothing here calls CUDA.
#[derive(Clone, Debug, PartialEq)]
pub struct MergeLaunch {
    /// CTAs; 0 where there is nothing to do.
    pub grid: u32,
    /// Threads of a CTA.
    pub threads: u32,
    merge: Merge,
}

/// The kernel's number for a type.
const fn type_of(dtype: Dtype) -> i32 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::F16 => 1,
        Dtype::Bf16 | Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => 2,
    }
}

impl MergeLaunch {
    /// The launch of `merge` on a GPU with `sms` SMs.
    ///
    /// # Errors
    /// [`Error::Merge`].
    pub fn new(merge: &Merge, sms: u32) -> Result<MergeLaunch, Error> {
        merge.check()?;
        let warps = MERGE_THREADS as usize / 32;
        let grid = merge.rows().div_ceil(warps).min(CTAS_PER_SM * sms.max(1) as usize);
        Ok(MergeLaunch { grid: grid as u32, threads: MERGE_THREADS, merge: *merge })
    }

    /// What is merged.
    pub fn merge(&self) -> &Merge {
        &self.merge
    }

    fn shape(&self, name: &'static str) -> Shape {
        let [batch, seqlen, heads, dim] = self.merge.shape();
        Shape { name, batch, seqlen, heads, dim, step: STEP }
    }

    /// Checks counts, strides, alignment and presence of a call's memory. Lengths are the caller's
    /// responsibility.
    ///
    /// # Errors
    /// [`Error::Stride`], [`Error::Address`], [`Error::Parts`], [`Error::MissingExtra`] and
    /// [`Error::UnusedExtra`].
    pub fn check(&self, at: &RawMergeArgs<'_>) -> Result<(), Error> {
        let merge = &self.merge;
        if at.parts.len() != merge.parts {
            return Err(Error::Parts { have: at.parts.len(), need: merge.parts });
        }
        match (at.sinks, merge.sinks) {
            (None, true) => return Err(Error::MissingExtra { name: "sinks", need: merge.heads }),
            (Some(_), false) => return Err(Error::UnusedExtra { name: "sinks" }),
            _ => {}
        }
        let out = self.shape("out");
        out.check_strides(&at.out.strides, true)?;
        out.check_address(at.out.address)?;
        let part = self.shape("a part's out");
        for raw in at.parts {
            part.check_strides(&raw.out.strides, false)?;
            part.check_address(raw.out.address)?;
        }
        if at.adds() {
            return match (at.lse, at.sinks) {
                (None, None) => Ok(()),
                (Some(_), _) => Err(Error::UnusedExtra { name: "lse" }),
                (None, Some(_)) => Err(Error::UnusedExtra { name: "sinks" }),
            };
        }
        if merge.rows() > 0 {
            let lse = at.parts.iter().map(|part| ("a part's lse", part.lse));
            let more = [("lse", at.lse), ("sinks", at.sinks)];
            let more = more.into_iter().filter_map(|(name, address)| Some((name, address?)));
            for (name, address) in lse.chain(more) {
                check_address(name, address, 4)?;
            }
        }
        Ok(())
    }

    /// The kernel's parameters, of arguments that have been checked.
    pub fn params(&self, at: &RawMergeArgs<'_>) -> MergeParams {
        let Merge { parts, batch, seqlen, heads, dim, part, out, .. } = self.merge;
        let strides =
            |strides: &Strides| RowStrides { batch: strides.batch, seq: strides.seq, head: strides.head };
        let mut all = MergeParts::default();
        for (to, from) in all.0.iter_mut().zip(at.parts) {
            let out = ConstTensor { data: ConstPtr(from.out.address), strides: strides(&from.out.strides) };
            *to = PartParams { out, lse: ConstF32Ptr(from.lse) };
        }
        MergeParams {
            parts: all,
            out: MutTensor { data: MutPtr(at.out.address), strides: strides(&at.out.strides) },
            lse: MutF32Ptr(at.lse.unwrap_or(0)),
            sinks: ConstF32Ptr(at.sinks.unwrap_or(0)),
            count: parts as i32,
            batch: batch as i32,
            seqlen: seqlen as i32,
            heads: heads as i32,
            dim: dim as i32,
            part_type: type_of(part),
            out_type: type_of(out),
        }
    }
}

/// A merge ready to run. Cheap to make from a loaded kernel, cheap to run; shared by threads.
#[derive(Clone, Debug)]
pub struct BoundMerge {
    kernel: Arc<Single>,
    launch: MergeLaunch,
}

fn check_type<T: Element>(what: &'static str, need: Dtype) -> Result<(), Error> {
    if T::DTYPE == need {
        return Ok(());
    }
    Err(Error::Mismatch { what, kernel: need.to_string(), problem: T::DTYPE.to_string() })
}

impl BoundMerge {
    /// The merge kernel, bound to what is merged.
    pub(crate) fn new(kernel: Arc<Single>, launch: MergeLaunch) -> BoundMerge {
        BoundMerge { kernel, launch }
    }

    /// What a call launches.
    pub fn launch(&self) -> &MergeLaunch {
        &self.launch
    }

    /// Launches the kernel on `stream`: one launch that allocates nothing on the device and waits for
    /// nothing, so it can be captured in a CUDA graph.
    ///
    /// # Errors
    /// A type, a count, a stride, an alignment or a length that does not fit; sinks that the merge does not
    /// name, or lacks; a stream or memory of another context; [`Error::Driver`].
    pub fn run<P: Element, O: Element>(
        &self,
        stream: &CudaStream,
        mut args: MergeArgs<'_, P, O>,
    ) -> Result<(), Error> {
        let merge = &self.launch.merge;
        check_type::<P>("type of the parts", merge.part)?;
        check_type::<O>("type of the result", merge.out)?;
        let single = &self.kernel;
        let enough = |tensor, have: usize, need: usize, of: &CudaStream| {
            if have < need {
                return Err(Error::TooShort { tensor, have: have as u64, need: need as u64 });
            }
            single.check_context(tensor, of)
        };
        let part = self.launch.shape("a part's out");
        let mut guards: Vec<SyncOnDrop<'_>> = Vec::with_capacity(2 * merge.parts + 3);
        let mut parts = Vec::with_capacity(args.parts.len());
        for PartialResult { out, lse } in args.parts {
            part.check_strides(&out.strides, false)?;
            part.check_len(&out.strides, out.data.len())?;
            single.check_context(part.name, out.data.stream())?;
            enough("a part's lse", lse.len(), merge.rows(), lse.stream())?;
            let (address, guard) = out.data.device_ptr(stream);
            let (lse, lse_guard) = lse.device_ptr(stream);
            guards.extend([guard, lse_guard]);
            parts.push(RawPartialResult { out: RawTensor { address, strides: out.strides }, lse });
        }
        let out = self.launch.shape("out");
        out.check_strides(&args.out.strides, true)?;
        out.check_len(&args.out.strides, args.out.data.len())?;
        single.check_context(out.name, args.out.data.stream())?;
        let (address, guard) = args.out.data.device_ptr_mut(stream);
        guards.push(guard);
        let lse = match args.lse.as_deref_mut() {
            Some(lse) => {
                enough("lse", lse.len(), merge.rows(), lse.stream())?;
                let (address, guard) = lse.device_ptr_mut(stream);
                guards.push(guard);
                Some(address)
            }
            None => None,
        };
        let sinks = match args.sinks {
            Some(sinks) => {
                enough("sinks", sinks.len(), merge.heads, sinks.stream())?;
                let (address, guard) = sinks.device_ptr(stream);
                guards.push(guard);
                Some(address)
            }
            None => None,
        };
        let out = RawTensor { address, strides: args.out.strides };
        let raw = RawMergeArgs { parts: &parts, out, lse, sinks };
        // SAFETY: the lengths were checked against shapes and strides, what is written is borrowed mutably,
        // and all of it stays borrowed until the launch is enqueued; cudarc orders the stream before any
        // later use or release.
        let launched = unsafe { self.run_raw(stream, &raw) };
        drop(guards);
        launched
    }

    /// [`BoundMerge::run`] on addresses alone, or the sum of parts without LSEs.
    ///
    /// # Safety
    /// Every element of the shapes under the given strides, the LSEs and the sinks lie in device memory that
    /// the stream's context can access, and stay there, untouched by others, until the stream has run the
    /// kernel. The result shares no memory with the parts,
    /// except that a sum may be one of them.
    ///
    /// # Errors
    /// Those of [`MergeLaunch::check`], [`Error::Context`] and [`Error::Driver`].
    pub unsafe fn run_raw(&self, stream: &CudaStream, args: &RawMergeArgs<'_>) -> Result<(), Error> {
        self.launch.check(args)?;
        let MergeLaunch { grid, threads, .. } = self.launch;
        if grid == 0 {
            return Ok(());
        }
        // SAFETY: the entry takes these parameters; the caller vouches for the addresses.
        unsafe { self.kernel.launch(stream, (grid, threads, 0), self.launch.params(args)) }
    }
}
