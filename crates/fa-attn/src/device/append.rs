//! The device memory of an append.
#![allow(unsafe_code)]

use std::sync::Arc;

use fa_cpu::append::CacheMut;
use fa_cpu::{AppendExtras, AppendTensors, Table};
use fa_kernels::cudarc::driver::{CudaGraph, CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use fa_kernels::{AppendArgs, AppendQueries, AppendTable, BoundAppend, Error, RawAppendArgs, RawTensor};

use super::extras::copy;
use super::forward::capture;
use super::half::Half;
use super::tensor::{DeviceTensor, doing};

/// New keys and values, the cache, and the other tensors of an append. Caches and lengths may belong to a
/// [`super::DeviceForward`]: for those run [`BoundAppend::run`] on the tensors there.
#[derive(Debug)]
pub struct DeviceAppend<T> {
    /// New keys, `[batch, rows, heads_kv, head_dim]` or packed.
    pub k_new: DeviceTensor<T>,
    /// New values, `[batch, rows, heads_kv, head_dim_v]` or packed.
    pub v_new: DeviceTensor<T>,
    /// The cache of keys, written where rows are appended.
    pub k_cache: DeviceCache<T>,
    /// The cache of values.
    pub v_cache: DeviceCache<T>,
    /// Descales of a cache of codes: read, or per row and head written for the new rows.
    pub k_descale: Option<CudaSlice<f32>>,
    /// The same of values.
    pub v_descale: Option<CudaSlice<f32>>,
    /// Queries, rotated in place.
    pub q: Option<DeviceTensor<T>>,
    /// Cosines and sines, `[positions, dim / 2]`.
    pub tables: Option<[DeviceTable<T>; 2]>,
    /// `[batch + 1]`, of packed new keys.
    pub cu_new: Option<CudaSlice<i32>>,
    /// `[batch]`, of new keys used in part.
    pub used_new: Option<CudaSlice<i32>>,
    /// `[batch]`: keys in the cache before.
    pub seqused_k: Option<CudaSlice<i32>>,
    /// `[batch, table_columns]`.
    pub page_table: Option<CudaSlice<i32>>,
    /// `[batch + 1]`, of packed queries.
    pub cu_seqlens_q: Option<CudaSlice<i32>>,
    /// `[batch]`, of queries used in part.
    pub seqused_q: Option<CudaSlice<i32>>,
    /// `[batch]`, written: keys in the cache afterwards.
    pub used_out: Option<CudaSlice<i32>>,
    /// `[1]`: rows skipped for want of a slot, summed over all runs.
    pub dropped: CudaSlice<u32>,
}

/// Cosines or sines in device memory.
#[derive(Debug)]
pub enum DeviceTable<T> {
    /// In f32.
    F32(CudaSlice<f32>),
    /// In the type of the tensors.
    Same(CudaSlice<T>),
}

impl<T: Half> DeviceTable<T> {
    fn upload(stream: &Arc<CudaStream>, table: &Table<'_, T>) -> Result<DeviceTable<T>, Error> {
        Ok(match table {
            Table::F32(values) => DeviceTable::F32(copy(stream, values)?),
            Table::Same(values) => DeviceTable::Same(copy(stream, values)?),
        })
    }

    fn argument(&self) -> AppendTable<'_, T> {
        match self {
            DeviceTable::F32(table) => AppendTable::F32(table),
            DeviceTable::Same(table) => AppendTable::Same(table),
        }
    }

    fn address(&self, stream: &CudaStream) -> u64 {
        match self {
            DeviceTable::F32(table) => table.device_ptr(stream).0,
            DeviceTable::Same(table) => table.device_ptr(stream).0,
        }
    }
}

/// A cache of K or V in device memory.
#[derive(Debug)]
pub enum DeviceCache<T> {
    /// Elements of the new rows' type.
    Same(DeviceTensor<T>),
    /// The bits of codes.
    Codes(DeviceTensor<u8>),
}

impl<T: Half> DeviceCache<T> {
    fn upload(stream: &Arc<CudaStream>, cache: &CacheMut<'_, T>) -> Result<DeviceCache<T>, Error> {
        Ok(match cache {
            CacheMut::Same(tensor) => DeviceCache::Same(DeviceTensor::upload(stream, &tensor.as_ref())?),
            CacheMut::Codes(tensor) => DeviceCache::Codes(DeviceTensor::upload(stream, &tensor.as_ref())?),
        })
    }

    fn download(&self, stream: &Arc<CudaStream>, cache: &mut CacheMut<'_, T>) -> Result<(), Error> {
        match (self, cache) {
            (DeviceCache::Same(from), CacheMut::Same(to)) => from.download(stream, to),
            (DeviceCache::Codes(from), CacheMut::Codes(to)) => from.download(stream, to),
            (DeviceCache::Same(_), CacheMut::Codes(_)) | (DeviceCache::Codes(_), CacheMut::Same(_)) => {
                Err(mixed("the cache that was uploaded"))
            }
        }
    }

    fn raw(&self, stream: &CudaStream) -> RawTensor {
        match self {
            DeviceCache::Same(tensor) => tensor.raw(stream),
            DeviceCache::Codes(tensor) => tensor.raw(stream),
        }
    }
}

/// A cache of another type than that of `kernel`.
fn mixed(kernel: &str) -> Error {
    Error::Mismatch { what: "type of the cache", kernel: kernel.to_owned(), problem: "another type".into() }
}

impl<T: Half> DeviceAppend<T> {
    /// Copies of host tensors and arrays, as [`crate::append`] takes them.
    ///
    /// # Errors
    /// [`Error::Driver`], above all for want of memory.
    pub fn upload(
        stream: &Arc<CudaStream>,
        extras: &AppendExtras<'_>,
        tensors: &AppendTensors<'_, T>,
    ) -> Result<DeviceAppend<T>, Error> {
        let floats = |floats: Option<&[f32]>| floats.map(|floats| copy(stream, floats)).transpose();
        let words = |words: Option<&[i32]>| words.map(|words| copy(stream, words)).transpose();
        let tables = match &tensors.tables {
            Some([cos, sin]) => Some([DeviceTable::upload(stream, cos)?, DeviceTable::upload(stream, sin)?]),
            None => None,
        };
        Ok(DeviceAppend {
            k_new: DeviceTensor::upload(stream, &tensors.k_new)?,
            v_new: DeviceTensor::upload(stream, &tensors.v_new)?,
            k_cache: DeviceCache::upload(stream, &tensors.k_cache)?,
            v_cache: DeviceCache::upload(stream, &tensors.v_cache)?,
            k_descale: floats(extras.k_descale.as_deref())?,
            v_descale: floats(extras.v_descale.as_deref())?,
            q: tensors.q.as_ref().map(|q| DeviceTensor::upload(stream, &q.as_ref())).transpose()?,
            tables,
            cu_new: words(extras.cu_new)?,
            used_new: words(extras.used_new)?,
            seqused_k: words(extras.seqused_k)?,
            page_table: words(extras.page_table)?,
            cu_seqlens_q: words(extras.cu_seqlens_q)?,
            seqused_q: words(extras.seqused_q)?,
            used_out: words(extras.used_out.as_deref())?,
            dropped: stream.alloc_zeros(1).map_err(doing("allocating device memory"))?,
        })
    }

    /// Launches `append` on `stream`: allocates nothing on the device, waits for nothing.
    ///
    /// # Errors
    /// What [`BoundAppend::run`] refuses.
    pub fn run(&mut self, append: &BoundAppend, stream: &CudaStream) -> Result<(), Error> {
        fn read(words: &Option<CudaSlice<i32>>) -> Option<&dyn DevicePtr<i32>> {
            words.as_ref().map(|words| words as &dyn DevicePtr<i32>)
        }
        macro_rules! run {
            ($k:expr, $v:expr) => {
                append.run(
                    stream,
                    AppendArgs {
                        k_new: self.k_new.input(),
                        v_new: self.v_new.input(),
                        k_cache: $k.output(),
                        v_cache: $v.output(),
                        queries: self.q.as_mut().map(|q| AppendQueries::InPlace(q.output())),
                        tables: self.tables.as_ref().map(|[cos, sin]| [cos.argument(), sin.argument()]),
                        cu_new: read(&self.cu_new),
                        used_new: read(&self.used_new),
                        seqused_k: read(&self.seqused_k),
                        page_table: read(&self.page_table),
                        k_descale: self.k_descale.as_mut().map(|to| to as &mut dyn DevicePtrMut<f32>),
                        v_descale: self.v_descale.as_mut().map(|to| to as &mut dyn DevicePtrMut<f32>),
                        cu_seqlens_q: read(&self.cu_seqlens_q),
                        seqused_q: read(&self.seqused_q),
                        used_out: self.used_out.as_mut().map(|to| to as &mut dyn DevicePtrMut<i32>),
                        dropped: Some(&mut self.dropped),
                    },
                )
            };
        }
        match (&mut self.k_cache, &mut self.v_cache) {
            (DeviceCache::Same(k), DeviceCache::Same(v)) => run!(k, v),
            (DeviceCache::Codes(k), DeviceCache::Codes(v)) => run!(k, v),
            (DeviceCache::Same(_), DeviceCache::Codes(_)) | (DeviceCache::Codes(_), DeviceCache::Same(_)) => {
                Err(mixed("the cache of K"))
            }
        }
    }

    /// The addresses.
    pub fn raw(&mut self, stream: &CudaStream) -> RawAppendArgs {
        let at = |words: &Option<CudaSlice<i32>>| words.as_ref().map(|words| words.device_ptr(stream).0);
        RawAppendArgs {
            k_new: self.k_new.raw(stream),
            v_new: self.v_new.raw(stream),
            k_cache: self.k_cache.raw(stream),
            v_cache: self.v_cache.raw(stream),
            q: self.q.as_ref().map(|q| q.raw(stream)),
            q_out: None,
            tables: self.tables.as_ref().map(|[cos, sin]| [cos.address(stream), sin.address(stream)]),
            cu_new: at(&self.cu_new),
            used_new: at(&self.used_new),
            seqused_k: at(&self.seqused_k),
            page_table: at(&self.page_table),
            k_descale: self.k_descale.as_mut().map(|to| to.device_ptr_mut(stream).0),
            v_descale: self.v_descale.as_mut().map(|to| to.device_ptr_mut(stream).0),
            cu_seqlens_q: at(&self.cu_seqlens_q),
            seqused_q: at(&self.seqused_q),
            used_out: self.used_out.as_mut().map(|to| to.device_ptr_mut(stream).0),
            dropped: Some(self.dropped.device_ptr_mut(stream).0),
        }
    }

    /// A launch on `stream` (not the default one) captured as a CUDA graph. Replays append at the lengths
    /// that
    /// `seqused_k` holds then.
    ///
    /// # Safety
    /// As for [`super::capture()`]: this memory stays while the graph is launched.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub unsafe fn capture(
        &mut self,
        append: &BoundAppend,
        stream: &Arc<CudaStream>,
    ) -> Result<CudaGraph, Error> {
        let args = self.raw(stream);
        // SAFETY: the addresses are those of memory of these shapes, which the caller keeps for the graph.
        unsafe { capture(stream, || append.run_raw(stream, &args)) }
    }

    /// Copies the caches, the queries and the new lengths to the host; returns how many rows were skipped
    /// for want of a slot. Waits for the stream.
    ///
    /// # Errors
    /// [`Error::Driver`], also for what went wrong on the GPU meanwhile.
    pub fn download(
        &self,
        stream: &Arc<CudaStream>,
        extras: &mut AppendExtras<'_>,
        tensors: &mut AppendTensors<'_, T>,
    ) -> Result<usize, Error> {
        let read = doing("copying from the GPU");
        self.k_cache.download(stream, &mut tensors.k_cache)?;
        self.v_cache.download(stream, &mut tensors.v_cache)?;
        for (from, to) in [
            (&self.k_descale, extras.k_descale.as_deref_mut()),
            (&self.v_descale, extras.v_descale.as_deref_mut()),
        ] {
            if let (Some(from), Some(to)) = (from, to)
                && !to.is_empty()
            {
                stream.memcpy_dtoh(&from.slice(..to.len()), to).map_err(&read)?;
            }
        }
        if let (Some(from), Some(to)) = (&self.q, &mut tensors.q) {
            from.download(stream, to)?;
        }
        if let (Some(from), Some(to)) = (&self.used_out, extras.used_out.as_deref_mut())
            && !to.is_empty()
        {
            stream.memcpy_dtoh(from, to).map_err(&read)?;
        }
        let dropped = stream.clone_dtoh(&self.dropped).map_err(&read)?;
        stream.synchronize().map_err(read)?;
        Ok(dropped.into_iter().sum::<u32>() as usize)
    }
}
