//! A kernel bound to a problem: the data that is computed once, and the calls that check, encode and launch.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::CudaStream;
use fa_core::{LaunchPlan, Problem};

use crate::Error;
use crate::launch::args::{
    BackwardArgs, Buffer, Element, ForwardArgs, KvElement, RawBackwardArgs, RawForwardArgs,
};
use crate::launch::extras::{Extras, Guards, RawExtras};
use crate::launch::launches::{Addresses, Launches};
use crate::launch::module::LoadedKernel;
use crate::launch::raw_program::RawProgram;
use crate::launch::run::{check_buffers, check_element, enqueue};

/// A kernel bound to a problem, ready to run: a [`Forward`] or a [`Backward`]. Cheap to make from a loaded
/// kernel, cheap to run; shared by threads.
#[derive(Debug)]
pub struct Bound<P> {
    kernel: Arc<LoadedKernel>,
    problem: Problem,
    plan: LaunchPlan,
    launches: Launches,
    pass: PhantomData<fn() -> P>,
}

/// The pass of a [`Forward`].
#[derive(Debug)]
pub enum ForwardPass {}

/// The pass of a [`Backward`].
#[derive(Debug)]
pub enum BackwardPass {}

/// A forward ready to run: O and LSE from Q, K and V.
pub type Forward = Bound<ForwardPass>;

/// A backward ready to run: dQ, dK and dV from Q, K, V, O, LSE and dO.
///
/// Three launches on the caller's stream, and a fourth where several CTAs share a tile of dK and dV:
/// preprocess (row statistics, zeroed accumulators), the products, postprocess (dQ from its accumulators),
/// and the same for dK and dV. With sinks, one more: their gradient from the row statistics.
pub type Backward = Bound<BackwardPass>;

impl<P> Bound<P> {
    /// Binds `kernel` to `problem`, for which `plan` makes `launches`.
    pub(crate) fn of(
        kernel: Arc<LoadedKernel>,
        problem: &Problem,
        plan: &LaunchPlan,
        launches: Launches,
    ) -> Bound<P> {
        Bound { kernel, problem: *problem, plan: plan.clone(), launches, pass: PhantomData }
    }

    /// The problem.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The kernel that computes it.
    pub fn kernel(&self) -> &LoadedKernel {
        &self.kernel
    }

    /// The kernel's spec, and how it divides the work among CTAs.
    pub fn launch_plan(&self) -> &LaunchPlan {
        &self.plan
    }

    /// What a call launches.
    pub fn launches(&self) -> &Launches {
        &self.launches
    }

    /// Bytes of workspace that a call needs, 0 for most forwards. A forward's workspace is zero before the
    /// first call, and each call leaves it zero; a backward's needs no initialisation.
    pub fn workspace_bytes(&self) -> usize {
        self.launches.workspace.bytes
    }

    /// As [`Launches::room_bytes`].
    pub fn room_bytes(&self, program: &RawProgram) -> usize {
        self.launches.room_bytes(program)
    }

    /// Checks a typed call's tensors, in the order of the launches, and its LSE and workspace by length and
    /// stream.
    ///
    /// # Errors
    /// Those of [`check_element`] and [`check_buffers`].
    fn check<T: Element, K: KvElement, Q: KvElement>(
        &self,
        tensors: &[Buffer<'_>],
        lse: Option<(usize, &Arc<CudaStream>)>,
        workspace: Option<(usize, &Arc<CudaStream>)>,
    ) -> Result<(), Error> {
        check_element::<T, K, Q>(&self.problem)?;
        check_buffers(&self.kernel, &self.launches, tensors, lse, workspace)
    }

    /// The addresses of the extras, with the guards to keep until the launch.
    ///
    /// # Errors
    /// Those of [`Extras::raw`].
    fn raw_extras<'a>(
        &self,
        extras: &'a mut Extras<'_>,
        stream: &'a CudaStream,
    ) -> Result<(RawExtras, Guards<'a>), Error> {
        extras.raw(&self.launches.extras, stream, |name, of| self.kernel.check_context(name, of.context()))
    }

    /// Encodes and launches.
    ///
    /// # Safety
    /// As [`Forward::run_raw`] and [`Backward::run_raw`].
    unsafe fn enqueue(&self, stream: &CudaStream, at: &Addresses<'_>) -> Result<(), Error> {
        // SAFETY: the launches are of this kernel; the caller vouches for the memory.
        unsafe { enqueue(&self.kernel, &self.launches, self.problem.types.q, stream, at) }
    }
}

impl Forward {
    /// Launches the kernel on `stream`. Allocates nothing and waits for nothing, so it can be captured in a
    /// CUDA graph (there, use one stream, or switch off cudarc's event tracking, whose events do not outlive
    /// a capture).
    ///
    /// # Safety
    /// What device memory holds is not read on the host. The starts of packed sequences ascend from 0 or more
    /// to the rows that the problem has at most; a work plan is this kernel's and of these lengths; a
    /// workspace is zero before the first call. Lengths in use and entries of a page table may hold anything:
    /// kernels clamp them.
    ///
    /// # Errors
    /// The dtype, a stride, an alignment or a length that does not fit; a missing workspace; a stream or a
    /// tensor of another context; [`Error::Driver`].
    pub unsafe fn run<T: Element, K: KvElement, Q: KvElement>(
        &self,
        stream: &CudaStream,
        args: ForwardArgs<'_, T, K, Q>,
    ) -> Result<(), Error> {
        let ForwardArgs { q, k, v, out, lse, workspace, mut extras } = args;
        let tensors = [q.buffer(), k.buffer(), v.buffer(), out.buffer()];
        let lse_buffer = lse.as_ref().map(|lse| (lse.len(), lse.stream()));
        let workspace_buffer = workspace.as_ref().map(|workspace| (workspace.len(), workspace.stream()));
        self.check::<T, K, Q>(&tensors, lse_buffer, workspace_buffer)?;
        // Dropped after the launch, each guard notes in cudarc that the stream has used its tensor.
        let (extras, _extras) = self.raw_extras(&mut extras, stream)?;
        let ((q, _q), (k, _k), (v, _v)) = (q.raw(stream), k.raw(stream), v.raw(stream));
        let (out, _out) = out.raw(stream);
        let lse = lse.map(|lse| lse.device_ptr_mut(stream));
        let workspace = workspace.map(|workspace| workspace.device_ptr_mut(stream));
        let (lse, workspace) = (lse.as_ref().map(|raw| raw.0), workspace.as_ref().map(|raw| raw.0));
        let args = RawForwardArgs { q, k, v, out, lse, workspace, extras };
        // SAFETY: the tensors' lengths were checked against shapes and strides, they stay borrowed until the
        // launch is enqueued, and cudarc orders the stream before any later use or release of them. The
        // caller vouches for their values.
        unsafe { self.run_raw(stream, &args) }
    }

    /// [`Forward::run`] on addresses alone.
    ///
    /// # Safety
    /// Every element of the problem's shapes under the given strides lies in device memory that the stream's
    /// context can access, and stays there, untouched by others, until the stream has run the kernel. Outputs
    /// share no memory with inputs. The workspace is zero.
    ///
    /// # Errors
    /// As [`Forward::run`], except that lengths are the caller's responsibility.
    pub unsafe fn run_raw(&self, stream: &CudaStream, args: &RawForwardArgs) -> Result<(), Error> {
        let tensors = [args.q, args.k, args.v, args.out];
        let at =
            Addresses { tensors: &tensors, lse: args.lse, workspace: args.workspace, extras: args.extras };
        // SAFETY: the caller vouches for the memory.
        unsafe { self.enqueue(stream, &at) }
    }
}

impl Backward {
    /// Launches the kernels on `stream`. Allocates nothing and waits for nothing, so it can be captured in a
    /// CUDA graph (there, use one stream, or switch off cudarc's event tracking, whose events do not outlive
    /// a capture).
    ///
    /// # Safety
    /// As for [`Forward::run`].
    ///
    /// # Errors
    /// The dtype, a stride, an alignment or a length that does not fit; a stream or a tensor of another
    /// context; [`Error::Driver`].
    pub unsafe fn run<T: Element>(
        &self,
        stream: &CudaStream,
        args: BackwardArgs<'_, T>,
    ) -> Result<(), Error> {
        let BackwardArgs { q, k, v, out, lse, dout, dq, dk, dv, workspace, mut extras } = args;
        let inputs = [q.buffer(), k.buffer(), v.buffer(), out.buffer(), dout.buffer()];
        let tensors: Vec<Buffer<'_>> =
            inputs.into_iter().chain([dq.buffer(), dk.buffer(), dv.buffer()]).collect();
        self.check::<T, T, T>(
            &tensors,
            Some((lse.len(), lse.stream())),
            Some((workspace.len(), workspace.stream())),
        )?;
        // Dropped after the launches, each guard notes in cudarc that the stream has used its tensor.
        let (extras, _extras) = self.raw_extras(&mut extras, stream)?;
        let ((q, _q), (k, _k), (v, _v)) = (q.raw(stream), k.raw(stream), v.raw(stream));
        let ((out, _out), (lse, _lse), (dout, _dout)) =
            (out.raw(stream), lse.device_ptr(stream), dout.raw(stream));
        let ((dq, _dq), (dk, _dk), (dv, _dv)) = (dq.raw(stream), dk.raw(stream), dv.raw(stream));
        let (workspace, _workspace) = workspace.device_ptr_mut(stream);
        let args = RawBackwardArgs { q, k, v, out, lse, dout, dq, dk, dv, workspace, extras };
        // SAFETY: the lengths cover the shapes under the strides, and the guards keep the memory until the
        // launches are in the stream. The caller vouches for the values.
        unsafe { self.run_raw(stream, &args) }
    }

    /// [`Backward::run`] on addresses alone.
    ///
    /// # Safety
    /// Every element of the problem's shapes under the given strides, the LSE and
    /// [`Backward::workspace_bytes`] bytes of workspace lie in device memory that the stream's context can
    /// access, and stay there, untouched by others, until the stream has run the kernels. Gradients and
    /// workspace share no memory with one another and the inputs.
    ///
    /// # Errors
    /// As [`Backward::run`], except that lengths are the caller's responsibility.
    pub unsafe fn run_raw(&self, stream: &CudaStream, args: &RawBackwardArgs) -> Result<(), Error> {
        let tensors = [args.q, args.k, args.v, args.out, args.dout, args.dq, args.dk, args.dv];
        let at = Addresses {
            tensors: &tensors,
            lse: Some(args.lse),
            workspace: Some(args.workspace),
            extras: args.extras,
        };
        // SAFETY: the caller vouches for the memory.
        unsafe { self.enqueue(stream, &at) }
    }
}
