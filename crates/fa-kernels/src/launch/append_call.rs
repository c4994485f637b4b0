//! An append of device memory that cudarc owns: checked calls.
#![allow(unsafe_code)]

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use fa_core::Dtype;

use crate::Error;
use crate::launch::append::{BoundAppend, RawAppendArgs};
use crate::launch::args::{Element, Input, KvElement, Output, RawTensor, Shape};

/// Cosines or sines, `[positions, dim / 2]`, in the type that [`fa_core::Rotary::table`] names, on a multiple
/// of 16 bytes.
#[derive(Clone, Copy)]
pub enum AppendTable<'a, T> {
    /// In f32.
    F32(&'a dyn DevicePtr<f32>),
    /// In the type of the tensors.
    Same(&'a dyn DevicePtr<T>),
}

/// Queries that are rotated, `[batch, rows, heads, head_dim]` or packed.
pub enum AppendQueries<'a, T> {
    /// Where they are.
    InPlace(Output<'a, T>),
    /// Copied, all their elements.
    Into {
        /// The queries.
        from: Input<'a, T>,
        /// The rotated ones, in the same shape.
        to: Output<'a, T>,
    },
}

/// The arguments of an append. Shapes are those of [`fa_core::Append`], by each tensor's strides; what the
/// append does not name is `None`. The caches are of `K`: the type of the new rows, or the bits of codes.
pub struct AppendArgs<'a, T, K = T> {
    /// New keys, `[batch, rows, heads_kv, head_dim]` or packed.
    pub k_new: Input<'a, T>,
    /// New values, `[batch, rows, heads_kv, head_dim_v]` or packed.
    pub v_new: Input<'a, T>,
    /// The cache of keys, written where rows are appended.
    pub k_cache: Output<'a, K>,
    /// The cache of values, written where rows are appended.
    pub v_cache: Output<'a, K>,
    /// Queries.
    pub queries: Option<AppendQueries<'a, T>>,
    /// Cosines and sines.
    pub tables: Option<[AppendTable<'a, T>; 2]>,
    /// `[batch + 1]`: the first row of each sequence's new keys, where they are packed.
    pub cu_new: Option<&'a dyn DevicePtr<i32>>,
    /// `[batch]`: new keys in use, where they are used in part.
    pub used_new: Option<&'a dyn DevicePtr<i32>>,
    /// `[batch]`: keys in the cache before; `None` for an empty one.
    pub seqused_k: Option<&'a dyn DevicePtr<i32>>,
    /// `[batch, table_columns]`: pages of each sequence.
    pub page_table: Option<&'a dyn DevicePtr<i32>>,
    /// Descales of K in a cache of codes, [`fa_core::Append::descale_shape`]: read, or per row and head
    /// written for the new rows.
    pub k_descale: Option<&'a mut dyn DevicePtrMut<f32>>,
    /// The same of V.
    pub v_descale: Option<&'a mut dyn DevicePtrMut<f32>>,
    /// `[batch + 1]`: the first query of each sequence, where they are packed.
    pub cu_seqlens_q: Option<&'a dyn DevicePtr<i32>>,
    /// `[batch]`: queries in use, where they are used in part.
    pub seqused_q: Option<&'a dyn DevicePtr<i32>>,
    /// `[batch]`, written: keys in the cache afterwards.
    pub used_out: Option<&'a mut dyn DevicePtrMut<i32>>,
    /// `[1]`, to which the number of rows without a place is added.
    pub dropped: Option<&'a mut dyn DevicePtrMut<u32>>,
}

/// Takes addresses; each guard tells cudarc, when it is dropped after the launch, that the stream has used
/// its memory.
struct Taker<'s, 'b> {
    stream: &'s CudaStream,
    bound: &'b BoundAppend,
    guards: Vec<SyncOnDrop<'s>>,
}

impl<'s> Taker<'s, '_> {
    fn check(&self, tensor: &'static str, have: usize, need: usize, of: &CudaStream) -> Result<(), Error> {
        if have < need {
            return Err(Error::TooShort { tensor, have: have as u64, need: need as u64 });
        }
        self.bound.check_context(tensor, of)
    }

    fn input<T>(&mut self, shape: &Shape, from: Input<'s, T>) -> Result<RawTensor, Error> {
        shape.check_strides(&from.strides, false)?;
        shape.check_len(&from.strides, from.data.len())?;
        self.bound.check_context(shape.name, from.data.stream())?;
        let (address, guard) = from.data.device_ptr(self.stream);
        self.guards.push(guard);
        Ok(RawTensor { address, strides: from.strides })
    }

    fn output<T>(&mut self, shape: &Shape, to: &'s mut Output<'_, T>) -> Result<RawTensor, Error> {
        shape.check_strides(&to.strides, true)?;
        shape.check_len(&to.strides, to.data.len())?;
        self.bound.check_context(shape.name, to.data.stream())?;
        let (address, guard) = to.data.device_ptr_mut(self.stream);
        self.guards.push(guard);
        Ok(RawTensor { address, strides: to.strides })
    }

    fn read<E>(
        &mut self,
        name: &'static str,
        need: usize,
        from: Option<&'s dyn DevicePtr<E>>,
    ) -> Result<Option<u64>, Error> {
        let Some(from) = from else { return Ok(None) };
        self.check(name, from.len(), need, from.stream())?;
        let (address, guard) = from.device_ptr(self.stream);
        self.guards.push(guard);
        Ok(Some(address))
    }

    fn write<E>(
        &mut self,
        name: &'static str,
        need: usize,
        to: Option<&'s mut (dyn DevicePtrMut<E> + '_)>,
    ) -> Result<Option<u64>, Error> {
        let Some(to) = to else { return Ok(None) };
        self.check(name, to.len(), need, to.stream())?;
        let (address, guard) = to.device_ptr_mut(self.stream);
        self.guards.push(guard);
        Ok(Some(address))
    }
}

impl BoundAppend {
    /// Launches the kernel on `stream`: one launch that allocates nothing and waits for nothing, so it can be
    /// captured in a CUDA graph, whose replays append at the lengths that are in device memory then.
    ///
    /// Rows that have no place are left out and added to `dropped`. Of two sequences that append to the same
    /// row of one page, either may win.
    ///
    /// # Errors
    /// The dtype, a stride, an alignment or a length that does not fit; memory that the append does not name,
    /// or lacks; a stream or memory of another context; [`Error::Driver`].
    pub fn run<T: Element, K: KvElement>(
        &self,
        stream: &CudaStream,
        mut args: AppendArgs<'_, T, K>,
    ) -> Result<(), Error> {
        let append = *self.launch().append();
        if !K::holds(append.cache_dtype()) {
            let (kernel, problem) = (append.cache_dtype().to_string(), K::name());
            return Err(Error::Mismatch { what: "type of the cache", kernel, problem });
        }
        let descales = append.descales();
        let descale_len =
            |form| append.descale_shape(form).map_or(0, |shape| shape.iter().product::<usize>());
        if T::DTYPE != append.dtype {
            let (kernel, problem) = (append.dtype.to_string(), T::DTYPE.to_string());
            return Err(Error::Mismatch { what: "dtype", kernel, problem });
        }
        let batch = append.sequences;
        let entries = batch * append.table_columns();
        let shapes: Vec<Shape> = self.launch().tensors().into_iter().map(|(shape, _)| shape).collect();
        let mut taker = Taker { stream, bound: self, guards: Vec::with_capacity(16) };
        let k_new = taker.input(&shapes[0], args.k_new)?;
        let v_new = taker.input(&shapes[1], args.v_new)?;
        let k_cache = taker.output(&shapes[2], &mut args.k_cache)?;
        let v_cache = taker.output(&shapes[3], &mut args.v_cache)?;
        let of_q = shapes.get(4).copied();
        let (q, q_out) = match (&mut args.queries, of_q) {
            (None, _) => (None, None),
            (Some(_), None) => return Err(Error::UnusedExtra { name: "q" }),
            (Some(AppendQueries::InPlace(q)), Some(shape)) => (Some(taker.output(&shape, q)?), None),
            (Some(AppendQueries::Into { from, to }), Some(shape)) => {
                let named = Shape { name: "q_out", ..shape };
                let from = Input { data: from.data, strides: from.strides };
                (Some(taker.input(&shape, from)?), Some(taker.output(&named, to)?))
            }
        };
        let tables = match (args.tables, append.rotary) {
            (Some(tables), Some(rotary)) => {
                let need = rotary.positions * rotary.dim / 2;
                let mut found = [0; 2];
                for ((name, table), to) in ["cos", "sin"].into_iter().zip(tables).zip(&mut found) {
                    let (dtype, address) = match table {
                        AppendTable::F32(table) => (Dtype::F32, taker.read(name, need, Some(table))?),
                        AppendTable::Same(table) => (T::DTYPE, taker.read(name, need, Some(table))?),
                    };
                    if dtype != rotary.table {
                        let (kernel, problem) = (rotary.table.to_string(), dtype.to_string());
                        return Err(Error::Mismatch { what: "type of the tables", kernel, problem });
                    }
                    *to = address.unwrap_or(0);
                }
                Some(found)
            }
            (Some(_), None) => return Err(Error::UnusedExtra { name: "tables" }),
            (None, _) => None,
        };
        let raw = RawAppendArgs {
            k_new,
            v_new,
            k_cache,
            v_cache,
            q,
            q_out,
            tables,
            cu_new: taker.read("cu_new", batch + 1, args.cu_new)?,
            used_new: taker.read("used_new", batch, args.used_new)?,
            seqused_k: taker.read("seqused_k", batch, args.seqused_k)?,
            page_table: taker.read("page_table", entries, args.page_table)?,
            k_descale: taker.write("k_descale", descale_len(descales.k), args.k_descale.as_deref_mut())?,
            v_descale: taker.write("v_descale", descale_len(descales.v), args.v_descale.as_deref_mut())?,
            cu_seqlens_q: taker.read("cu_seqlens_q", batch + 1, args.cu_seqlens_q)?,
            seqused_q: taker.read("seqused_q", batch, args.seqused_q)?,
            used_out: taker.write("used_out", batch, args.used_out.as_deref_mut())?,
            dropped: taker.write("dropped", 1, args.dropped.as_deref_mut())?,
        };
        // SAFETY: the lengths were checked against shapes and strides, what is written is borrowed mutably,
        // and all of it stays borrowed until the launch is enqueued; cudarc orders the stream before any
        // later use or release. The kernel keeps rows within their tensors whatever starts, lengths and pages
        // say.
        let launched = unsafe { self.run_raw(stream, &raw) };
        drop(taker);
        launched
    }
}
