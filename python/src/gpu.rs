//! Calls on arrays in a GPU's memory: kernels bound once for each problem, launched on the caller's stream.
//! Only the caller's library allocates, but for the counters of captured graphs and the workspaces that calls
//! share, and nothing waits.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use fa_attn::device::{BindOptions, Bound as Kernel, Gpu};
use fa_attn::{Append, Division, Error, Pass, Problem, ProblemKey, Tuning, TuningOutcome};
use fa_core::Merge;
use fa_kernels::cudarc::driver::sys::CUstreamCaptureStatus;
use fa_kernels::cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use fa_kernels::{
    Forward, RawAppendArgs, RawBackwardArgs, RawExtras, RawForwardArgs, RawKept, RawMergeArgs,
    RawPartialResult,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::call_program::CallProgram;
use crate::dlpack::View;
use crate::error::{DeviceError, InputError, UnsupportedError, raised};
use crate::given::Given;
use crate::host::{Appended, Backward, Merged, Written};
use crate::raw::{extras, floats, on_device, raw};

/// The most bound kernels that are kept: lengths that never recur must not fill the memory.
const KEPT: usize = 4096;

/// A map whose keys are hashed in a tenth of the standard library's time, which each call notices. They are
/// the process's own problems and streams, and few: nobody makes them collide on purpose.
type Table<K, V> = HashMap<K, V, BuildHasherDefault<Mixed>>;

/// A hash of words, each multiplied into the state.
#[derive(Default)]
struct Mixed(u64);

impl Hasher for Mixed {
    fn finish(&self) -> u64 {
        // The high bits have seen all words, and tables go by the low ones.
        self.0.rotate_left(26)
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, n: u8) {
        self.write_u64(u64::from(n));
    }

    fn write_u32(&mut self, n: u32) {
        self.write_u64(u64::from(n));
    }

    fn write_u64(&mut self, n: u64) {
        // The multiplier of PCG's generators.
        self.0 = (self.0.rotate_left(23) ^ n).wrapping_mul(0x5851_F42D_4C95_7F2D);
    }

    fn write_usize(&mut self, n: usize) {
        self.write_u64(n as u64);
    }

    fn write_isize(&mut self, n: isize) {
        self.write_u64(n as u64);
    }
}

/// A GPU with the kernels that were bound for its problems.
pub(crate) struct Device {
    gpu: Gpu,
    bound: Mutex<Kept>,
    streams: Mutex<Table<u64, Arc<CudaStream>>>,
    workspaces: Mutex<Table<u64, Arc<Workspace>>>,
    counters: OnceLock<Option<Counters>>,
}

/// Counters for the calls of captured graphs, one for each call: replays may run beside other calls. Zero
/// when they are made, and left zero by each call, so that a graph need not clear them. They are not taken
/// again: nothing tells when a graph is gone.
struct Counters {
    _memory: CudaSlice<u64>,
    address: u64,
    taken: AtomicU64,
}

/// The number of counters, 1 MiB of them.
const COUNTERS: usize = 1 << 17;

impl Counters {
    /// Makes them on `stream`, which is not capturing. `None` where the driver refuses.
    fn new(stream: &Arc<CudaStream>) -> Option<Counters> {
        let memory = stream.alloc_zeros::<u64>(COUNTERS).ok()?;
        // Graphs may be replayed on other streams.
        stream.synchronize().ok()?;
        let address = memory.device_ptr(stream).0;
        Some(Counters { _memory: memory, address, taken: AtomicU64::new(0) })
    }

    /// The address of one that nobody had; `None` where all are taken.
    fn take(&self) -> Option<u64> {
        let number = self.taken.fetch_add(1, Ordering::Relaxed);
        (number < COUNTERS as u64).then_some(self.address + 8 * number)
    }
}

/// Memory for the forwards on a stream. Kernels use it in turn: each leaves at zero what the next one needs
/// to be zero.
struct Workspace {
    _memory: Memory,
    address: u64,
    bytes: usize,
    /// A counter apart from it; the memory is then not cleared.
    counter: Option<u64>,
    /// Keeps the launches of a call together, whatever other threads put on the stream.
    turn: Mutex<()>,
}

/// The most workspaces that are kept: streams come and go.
const WORKSPACES: usize = 64;
/// The most bytes of one that is kept. The parts of divided keys that fill a GPU once take some 20 MB.
const KEPT_BYTES: usize = 64 << 20;

/// A problem, a pass of it, how its work is divided, and whether its kernel is pinned.
type Key = (ProblemKey, Pass, Division, bool);

/// Bound kernels, why others are not supported, and the number of tuning's winners when the first of them was
/// bound.
#[derive(Default)]
struct Kept {
    entries: Table<Key, Arc<Entry>>,
    refused: Table<Key, String>,
    winners: u64,
}

/// A bound kernel.
pub(crate) struct Entry {
    pub kernel: Kernel,
    /// The key of its work plans.
    number: u64,
}

/// The caller's side of a call: a stream's handle, `allocate(bytes, zero, device)` for device memory of the
/// caller's library, and the work plans that calls of the same lengths share.
#[derive(Clone, Copy)]
pub(crate) struct Caller<'a, 'py> {
    pub stream: u64,
    pub allocate: Option<&'a Bound<'py, PyAny>>,
    pub plans: Option<&'a Bound<'py, PyDict>>,
}

/// The bound kernels.
static ENTRIES: AtomicU64 = AtomicU64::new(0);

impl Device {
    pub(crate) fn new(gpu: Gpu) -> Device {
        Device {
            gpu,
            bound: Mutex::default(),
            streams: Mutex::default(),
            workspaces: Mutex::default(),
            counters: OnceLock::new(),
        }
    }

    /// Switches tuning on or off, and forgets bound kernels, so that they are bound again and their
    /// candidates measured.
    ///
    /// # Errors
    /// As [`Gpu::set_tuning`].
    pub(crate) fn set_tuning(&self, tuning: Tuning) -> Result<(), Error> {
        self.gpu.set_tuning(tuning)?;
        lock(&self.bound).entries.clear();
        Ok(())
    }

    pub(crate) fn finish_tuning(&self) -> Vec<TuningOutcome> {
        self.gpu.finish_tuning()
    }

    pub(crate) fn name(&self) -> String {
        self.gpu.name()
    }

    /// The kernel for a pass of `problem`, chosen for lengths rounded up, and of a forward so that it
    /// divides the work as the caller says; one that is pinned no measurement of tuning changes.
    ///
    /// # Errors
    /// As [`Gpu::bind`].
    pub(crate) fn bind(
        &self,
        py: Python<'_>,
        problem: &Problem,
        pass: Pass,
        (division, pinned): (Division, bool),
    ) -> PyResult<Arc<Entry>> {
        let key = (ProblemKey::from(problem), pass, division, pinned);
        let winners = self.gpu.tuned_winners();
        {
            let mut bound = lock(&self.bound);
            if bound.winners != winners {
                *bound = Kept { winners, ..Kept::default() };
            } else if let Some(entry) = bound.entries.get(&key) {
                return Ok(entry.clone());
            } else if let Some(why) = bound.refused.get(&key) {
                return Err(UnsupportedError::new_err(why.clone()));
            }
        }
        // Compiling takes a second; other threads go on meanwhile.
        let options = BindOptions::default().with_division(division).with_rounded(true).with_pinned(pinned);
        let kernel = match py.detach(|| self.gpu.bind(problem, pass, &options)).map_err(raised) {
            Ok(kernel) => kernel,
            Err(error) => {
                if error.is_instance_of::<UnsupportedError>(py) {
                    let mut bound = lock(&self.bound);
                    if bound.refused.len() >= KEPT {
                        bound.refused.clear();
                    }
                    bound.refused.insert(key, error.value(py).to_string());
                }
                return Err(error);
            }
        };
        let number = ENTRIES.fetch_add(1, Ordering::Relaxed);
        let entry = Arc::new(Entry { kernel, number });
        let mut bound = lock(&self.bound);
        if bound.entries.len() >= KEPT {
            bound.entries.clear();
        }
        Ok(bound.entries.entry(key).or_insert(entry).clone())
    }

    fn stream(&self, handle: u64) -> Arc<CudaStream> {
        let mut streams = lock(&self.streams);
        let made = streams.entry(handle).or_insert_with(|| {
            // SAFETY: the handle is a stream of the primary context, which the caller's library keeps.
            unsafe { self.gpu.context().wrap_borrowed_stream(handle as *mut _) }
        });
        made.clone()
    }

    /// Launches the pass of `entry` for the caller.
    ///
    /// # Errors What the launch refuses, and arrays on another device.
    pub(crate) fn run(
        &self,
        py: Python<'_>,
        entry: &Entry,
        given: &Given<'_>,
        to: &Written<'_, '_>,
        from: Caller<'_, '_>,
    ) -> PyResult<()> {
        let place = given.place();
        let Caller { stream: handle, allocate, plans } = from;
        let stream = self.stream(handle);
        let Given { q, k, v, beside, program, .. } = given;
        let (q, k, v) = (raw("q", q, place)?, raw("k", k, place)?, raw("v", v, place)?);
        let mut extras = extras(beside);
        let of_kernel = entry.kernel.spec().score.program;
        extras.program = program.as_ref().filter(|_| of_kernel.is_some()).map(CallProgram::raw);
        match (&entry.kernel, to) {
            (Kernel::Forward(forward), Written::Forward { out, lse }) => {
                let workspace = self.workspace(forward.workspace_bytes(), &stream, from)?;
                extras.counter = workspace.as_ref().and_then(|workspace| workspace.counter);
                if let Some(plans) = plans {
                    extras.plan = entry.shared_plan(py, forward, (&stream, &extras), from, plans)?;
                }
                let args = RawForwardArgs {
                    q,
                    k,
                    v,
                    out: raw("out", out, place)?,
                    lse: lse.map(|lse| floats("softmax_lse", lse, place)).transpose()?,
                    workspace: workspace.as_ref().map(|workspace| workspace.address),
                    extras,
                };
                let launch = || {
                    let _turn = workspace.as_ref().map(|workspace| lock(&workspace.turn));
                    // SAFETY: the views were read from live arrays of the problem's shapes; the stream is
                    // theirs, and their library frees memory in its order.
                    unsafe { forward.run_raw(&stream, &args) }
                };
                py.detach(launch).map_err(launched)
            }
            (
                Kernel::Backward(backward),
                Written::Backward(Backward { dout, out, lse, dq, dk, dv, dsinks }),
            ) => {
                extras.dsinks = dsinks.map(|dsinks| floats("dsinks", dsinks, place)).transpose()?;
                let (_scratch, workspace) =
                    scratch(backward.workspace_bytes().max(16), false, &stream, allocate)?;
                let bytes = extras.program.as_ref().map_or(0, |program| backward.room_bytes(program));
                // Where there is no memory for it, gradients are computed without.
                let room = (bytes > 0).then(|| scratch(bytes, false, &stream, allocate).ok()).flatten();
                if let (Some(program), Some((_, address))) = (&mut extras.program, &room) {
                    program.room = *address;
                }
                let args = RawBackwardArgs {
                    q,
                    k,
                    v,
                    out: raw("out", out, place)?,
                    lse: floats("softmax_lse", lse, place)?,
                    dout: raw("dout", dout, place)?,
                    dq: raw("dq", dq, place)?,
                    dk: raw("dk", dk, place)?,
                    dv: raw("dv", dv, place)?,
                    workspace,
                    extras,
                };
                // SAFETY: as above; the workspace is freed in the stream's order.
                py.detach(|| unsafe { backward.run_raw(&stream, &args) }).map_err(launched)
            }
            (Kernel::Forward(_), Written::Backward(_)) | (Kernel::Backward(_), Written::Forward { .. }) => {
                Err(InputError::new_err("the call is bound to the other pass"))
            }
        }
    }

    /// Memory for a forward, kept for its stream. A captured graph gets memory of its own, since replays may
    /// run beside other calls.
    fn workspace(
        &self,
        bytes: usize,
        stream: &Arc<CudaStream>,
        from: Caller<'_, '_>,
    ) -> PyResult<Option<Arc<Workspace>>> {
        if bytes == 0 {
            return Ok(None);
        }
        let is_capturing = is_capturing(stream);
        let kept = lock(&self.workspaces).get(&from.stream).cloned();
        if let Some(kept) = kept.filter(|kept| !is_capturing && kept.bytes >= bytes) {
            return Ok(Some(kept));
        }
        if !is_capturing {
            self.counters.get_or_init(|| Counters::new(stream));
            if let Some(made) = self.kept_workspace(bytes.next_power_of_two(), stream, from.stream) {
                return Ok(Some(made));
            }
        }
        let counters = self.counters.get().and_then(Option::as_ref).filter(|_| is_capturing);
        let counter = counters.and_then(Counters::take);
        let (memory, address) = scratch(bytes, counter.is_none(), stream, from.allocate)?;
        Ok(Some(Arc::new(Workspace { _memory: memory, address, bytes, counter, turn: Mutex::default() })))
    }

    /// A workspace that calls on a stream share from now on; `None` where it would be too large, where too
    /// many streams have one and where the driver has no memory for it. It is no memory of the caller's
    /// library: a pool that a program is in, as of a graph that is warmed up, is given back or unmapped
    /// whole.
    fn kept_workspace(&self, bytes: usize, stream: &Arc<CudaStream>, handle: u64) -> Option<Arc<Workspace>> {
        let has_room =
            |kept: &Table<u64, Arc<Workspace>>| kept.len() < WORKSPACES || kept.contains_key(&handle);
        if bytes > KEPT_BYTES || !has_room(&lock(&self.workspaces)) {
            return None;
        }
        let (memory, address) = scratch(bytes, true, stream, None).ok()?;
        let turn = Mutex::default();
        let made = Arc::new(Workspace { _memory: memory, address, bytes, counter: None, turn });
        lock(&self.workspaces).insert(handle, made.clone());
        Some(made)
    }

    /// Launches an append.
    ///
    /// # Errors
    /// What the append refuses.
    pub(crate) fn append(
        &self,
        py: Python<'_>,
        append: &Append,
        arrays: &Appended<'_>,
        handle: u64,
    ) -> PyResult<()> {
        let bound = py.detach(|| self.gpu.append(append)).map_err(raised)?;
        let stream = self.stream(handle);
        let place = arrays.k_cache.place;
        let tensor = |name: &'static str, view: &View<'_>| raw(name, view, place);
        let address = |name: &str, view: &Option<View<'_>>| {
            view.as_ref().map(|view| on_device(name, view, place)).transpose()
        };
        let tables = match &arrays.tables {
            Some([cos, sin]) => {
                Some([on_device("rotary_cos", cos, place)?, on_device("rotary_sin", sin, place)?])
            }
            None => None,
        };
        let args = RawAppendArgs {
            k_new: tensor("k", &arrays.k_new)?,
            v_new: tensor("v", &arrays.v_new)?,
            k_cache: tensor("k_cache", &arrays.k_cache)?,
            v_cache: tensor("v_cache", &arrays.v_cache)?,
            q: arrays.q.as_ref().map(|q| tensor("q", q)).transpose()?,
            q_out: arrays.q_out.as_ref().map(|q| tensor("q", q)).transpose()?,
            tables,
            cu_new: address("cu_seqlens_k_new", &arrays.cu_new)?,
            used_new: None,
            seqused_k: address("cache_seqlens", &arrays.seqused_k)?,
            page_table: address("page_table (block_table)", &arrays.page_table)?,
            k_descale: address("k_descale", &arrays.k_descale)?,
            v_descale: address("v_descale", &arrays.v_descale)?,
            cu_seqlens_q: address("cu_seqlens_q", &arrays.cu_seqlens_q)?,
            seqused_q: None,
            used_out: address("cache_seqlens", &arrays.used_out)?,
            dropped: None,
        };
        // SAFETY: as in `run`.
        py.detach(|| unsafe { bound.run_raw(&stream, &args) }).map_err(launched)
    }

    /// Writes the bits that dropout keeps, `[heads, queries, words]` of the heads of all sequences.
    pub(crate) fn dropout(
        &self,
        py: Python<'_>,
        [heads, queries, words]: [usize; 3],
        bits: u64,
        kept: RawKept,
        handle: u64,
    ) -> PyResult<()> {
        let bound = py.detach(|| self.gpu.dropout(heads, queries, words)).map_err(raised)?;
        let stream = self.stream(handle);
        // SAFETY: as in `run`.
        py.detach(|| unsafe { bound.run_raw(&stream, bits, kept) }).map_err(launched)
    }

    /// Launches a merge.
    ///
    /// # Errors
    /// What the merge refuses.
    pub(crate) fn merge(
        &self,
        py: Python<'_>,
        merge: &Merge,
        arrays: &Merged<'_>,
        handle: u64,
    ) -> PyResult<()> {
        let bound = py.detach(|| self.gpu.merge(merge)).map_err(raised)?;
        let stream = self.stream(handle);
        let place = arrays.out.place;
        let part = |(out, lse): (&View<'_>, &View<'_>)| {
            Ok(RawPartialResult { out: raw("outs", out, place)?, lse: floats("lses", lse, place)? })
        };
        let parts: Vec<RawPartialResult> =
            arrays.outs.iter().zip(&arrays.lses).map(part).collect::<PyResult<_>>()?;
        let args = RawMergeArgs {
            parts: &parts,
            out: raw("out", &arrays.out, place)?,
            lse: Some(floats("softmax_lse", &arrays.lse, place)?),
            sinks: arrays.sinks.as_ref().map(|sinks| floats("sinks", sinks, place)).transpose()?,
        };
        // SAFETY: as in `run`.
        py.detach(|| unsafe { bound.run_raw(&stream, &args) }).map_err(launched)
    }
}

impl Entry {
    /// This kernel's work plan among `plans`, made by the first call on a stream. Calls in a captured graph
    /// plan their own work, for the lengths at the time of a replay.
    fn shared_plan(
        &self,
        py: Python<'_>,
        forward: &Forward,
        (stream, extras): (&CudaStream, &RawExtras),
        from: Caller<'_, '_>,
        plans: &Bound<'_, PyDict>,
    ) -> PyResult<Option<u64>> {
        let bytes = forward.plan_bytes();
        if bytes == 0 || is_capturing(stream) {
            return Ok(None);
        }
        let key = (self.number, from.stream);
        if let Some(kept) = plans.get_item(key)? {
            let (_, address): (Bound<'_, PyAny>, u64) = kept.extract()?;
            return Ok(Some(address));
        }
        let Some(allocate) = from.allocate else {
            return Err(InputError::new_err("a plan that calls share needs `allocate`"));
        };
        let (memory, address) = library_memory(bytes, true, stream, allocate)?;
        let extras = RawExtras { plan: Some(address), ..*extras };
        // SAFETY: as in `run`; the plan's memory is kept by `plans`.
        py.detach(|| unsafe { forward.plan_raw(stream, &extras) }).map_err(launched)?;
        plans.set_item(key, (memory, address))?;
        Ok(Some(address))
    }
}

fn is_capturing(stream: &CudaStream) -> bool {
    !matches!(stream.capture_status(), Ok(CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE))
}

/// Device memory for a kernel.
enum Memory {
    /// Of the caller's library.
    Library { _owner: Py<PyAny> },
    /// Of the stream's pool, freed in its order.
    Stream { _slice: CudaSlice<u8> },
}

/// `bytes` bytes of device memory and their address, of the caller's library where it has a function for
/// that.
fn scratch(
    bytes: usize,
    zero: bool,
    stream: &Arc<CudaStream>,
    allocate: Option<&Bound<'_, PyAny>>,
) -> PyResult<(Memory, u64)> {
    if let Some(allocate) = allocate {
        let (owner, address) = library_memory(bytes, zero, stream, allocate)?;
        return Ok((Memory::Library { _owner: owner }, address));
    }
    let slice = if zero {
        stream.alloc_zeros(bytes)
    } else {
        // SAFETY: kernels write what they read of a workspace that need not be 0.
        unsafe { stream.alloc(bytes) }
    };
    let slice: CudaSlice<u8> =
        slice.map_err(|error| DeviceError::new_err(format!("{bytes} bytes of workspace: {error}")))?;
    let address = slice.device_ptr(stream).0;
    Ok((Memory::Stream { _slice: slice }, address))
}

/// `bytes` bytes of device memory of the caller's library, on the stream's device.
fn library_memory(
    bytes: usize,
    zero: bool,
    stream: &CudaStream,
    allocate: &Bound<'_, PyAny>,
) -> PyResult<(Py<PyAny>, u64)> {
    let memory = allocate.call1((bytes, zero, stream.context().ordinal()))?;
    let address = View::of("workspace", &memory, None)?.address();
    Ok((memory.unbind(), address))
}

fn launched(error: fa_kernels::Error) -> PyErr {
    raised(Error::Kernels(error))
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The maps are whole whatever a panicking thread was doing.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
