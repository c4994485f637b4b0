//! The append kernel: new keys and values into a cache in place, keys and queries rotated by their positions
//! ([`fa_core::Append`]). One kernel for all problems, one launch.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::CudaStream;
use fa_core::quantize::Codes;
use fa_core::{Append, DescaleForm, Dtype, QueryPositions, RotaryPairs, Side, SideRows, Strides};

use crate::Error;
use crate::jit::append_params::{AppendCodes, AppendCodesParams, AppendDescales, AppendParams};
use crate::jit::declare::{ConstF32Ptr, ConstI32Ptr, ConstPtr, MutF32Ptr, MutI32Ptr, MutPtr, MutU32Ptr};
use crate::jit::entries::{APPEND_SMEM, APPEND_THREADS};
use crate::jit::params::{ConstTensor, MutTensor, RowStrides};
use crate::launch::args::{RawTensor, Shape, step_of};
use crate::launch::checks::check_address;
use crate::launch::single::Single;

/// The most rows of a CTA.
const MAX_ROWS: usize = 32;

/// The arguments of an append by addresses alone; what a problem does not have is `None`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RawAppendArgs {
    /// New keys, `[batch, rows, heads_kv, head_dim]` or packed.
    pub k_new: RawTensor,
    /// New values.
    pub v_new: RawTensor,
    /// The cache of keys, written where rows are appended.
    pub k_cache: RawTensor,
    /// The cache of values.
    pub v_cache: RawTensor,
    /// Queries.
    pub q: Option<RawTensor>,
    /// Where rotated queries go; `None` for in place.
    pub q_out: Option<RawTensor>,
    /// Cosines and sines, `[positions, dim / 2]`, each on a multiple of 16 bytes.
    pub tables: Option<[u64; 2]>,
    /// `[batch + 1]` i32, of packed new keys.
    pub cu_new: Option<u64>,
    /// `[batch]` i32, of new keys used in part.
    pub used_new: Option<u64>,
    /// `[batch]` i32: keys in the cache before; `None` for an empty one.
    pub seqused_k: Option<u64>,
    /// `[batch, table_columns]` i32.
    pub page_table: Option<u64>,
    /// f32 descales of K in a cache of codes: read, or per row and head written for the new rows.
    pub k_descale: Option<u64>,
    /// The same of V.
    pub v_descale: Option<u64>,
    /// `[batch + 1]` i32, of packed queries.
    pub cu_seqlens_q: Option<u64>,
    /// `[batch]` i32, of queries used in part.
    pub seqused_q: Option<u64>,
    /// `[batch]` i32, written: keys in the cache afterwards. Not `seqused_k`, which other CTAs still read.
    pub used_out: Option<u64>,
    /// u32, to which the number of rows without a place is added.
    pub dropped: Option<u64>,
}

/// The launch of an append, as data: nothing here calls CUDA.
#[derive(Clone, Debug, PartialEq)]
pub struct AppendLaunch {
    /// CTAs; 0 where there is nothing to do.
    pub grid: u32,
    /// Threads of a CTA.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a CTA.
    pub smem: u32,
    append: Append,
    pub(super) params: AppendParams,
}

const fn is_packed(side: Side) -> bool {
    matches!(side.rows, SideRows::Packed { .. })
}

/// Rows of each sequence, or of all of them together.
const fn rows_of(side: Side) -> usize {
    match side.rows {
        SideRows::Padded { len } => len,
        SideRows::Packed { total, .. } => total,
        SideRows::Paged { .. } => 0,
    }
}

impl AppendLaunch {
    /// The launch of `append` on a GPU with `sms` SMs.
    ///
    /// # Errors
    /// [`Error::Append`].
    pub fn new(append: &Append, sms: u32) -> Result<AppendLaunch, Error> {
        append.check_on_gpu()?;
        let queries = append.queries();
        let batch = append.sequences;
        let none = Side::padded(0);
        let of_q = queries.map_or(none, |queries| queries.rows);
        let (new, q) = (append.new.total(batch), of_q.total(batch));
        // One row per CTA while all CTAs are resident; otherwise several, which share one look-up.
        let rows_per_cta = ((new + q) / (8 * sms.max(1) as usize)).clamp(1, MAX_ROWS);
        let (ctas_new, ctas_q) = (new.div_ceil(rows_per_cta), q.div_ceil(rows_per_cta));
        let (page, pages) = match append.cache.rows {
            SideRows::Paged { page, pages, .. } => (page, pages),
            SideRows::Padded { .. } | SideRows::Packed { .. } => (0, 0),
        };
        let rotary = append.rotary;
        let params = AppendParams {
            batch: batch as i32,
            heads_q: queries.map_or(0, |queries| queries.heads) as i32,
            heads_kv: append.heads_kv as i32,
            head_dim: append.head_dim as i32,
            head_dim_v: append.head_dim_v as i32,
            rows_new: rows_of(append.new) as i32,
            rows_q: rows_of(of_q) as i32,
            capacity: append.cache.max() as i32,
            page: page.min(1 << 30) as i32,
            pages: pages.min(1 << 30) as i32,
            table_stride: append.table_columns() as i32,
            rotary_dim: rotary.map_or(0, |rotary| rotary.dim) as i32,
            positions: rotary.map_or(0, |rotary| rotary.positions) as i32,
            interleaved: rotary.is_some_and(|rotary| rotary.pairs == RotaryPairs::Neighbours).into(),
            table_f32: rotary.is_some_and(|rotary| rotary.table == Dtype::F32).into(),
            is_f16: (append.dtype == Dtype::F16).into(),
            q_fixed: queries.is_some_and(|queries| queries.positions == QueryPositions::Same).into(),
            rows_per_cta: rows_per_cta as i32,
            ctas_new: ctas_new as i32,
            ..AppendParams::default()
        };
        // The lengths afterwards are written even where nothing is appended.
        let grid = if batch == 0 { 0 } else { (ctas_new + ctas_q).max(1) };
        Ok(AppendLaunch {
            grid: grid as u32,
            threads: APPEND_THREADS,
            smem: APPEND_SMEM,
            append: *append,
            params,
        })
    }

    /// What is appended.
    pub fn append(&self) -> &Append {
        &self.append
    }

    /// The tensors of a call, `k_new`, `v_new`, `k_cache`, `v_cache` and, where there are queries, `q`, with
    /// whether they are written.
    pub fn tensors(&self) -> Vec<(Shape, bool)> {
        let append = &self.append;
        let of = |name, [batch, seqlen, heads, dim]: [usize; 4], dtype: Dtype, is_output| {
            (Shape { name, batch, seqlen, heads, dim, step: step_of(dtype) }, is_output)
        };
        let shape = |name, shape, is_output| of(name, shape, append.dtype, is_output);
        let cache = |name, shape| of(name, shape, append.cache_dtype(), true);
        let mut all = vec![
            shape("k_new", append.new_shape(append.head_dim), false),
            shape("v_new", append.new_shape(append.head_dim_v), false),
            cache("k_cache", append.cache_shape(append.head_dim)),
            cache("v_cache", append.cache_shape(append.head_dim_v)),
        ];
        if append.queries().is_some() {
            all.push(shape("q", append.query_shape(), true));
        }
        all
    }

    /// Checks strides, alignment and presence of a call's memory. Lengths are the caller's responsibility.
    ///
    /// # Errors
    /// [`Error::Stride`], [`Error::Address`], [`Error::MissingExtra`] and [`Error::UnusedExtra`].
    pub fn check(&self, at: &RawAppendArgs) -> Result<(), Error> {
        let append = &self.append;
        let queries = append.queries();
        let given = |name, given: bool, asked: bool, need: usize| match (given, asked) {
            (false, true) => Err(Error::MissingExtra { name, need }),
            (true, false) => Err(Error::UnusedExtra { name }),
            _ => Ok(()),
        };
        let of_q = queries.map_or(Side::padded(0), |queries| queries.rows);
        let batch = append.sequences;
        given("q", at.q.is_some(), queries.is_some(), of_q.total(batch))?;
        given("q_out", at.q_out.is_some(), queries.is_some() && at.q_out.is_some(), 0)?;
        let table = append.rotary.map_or(0, |rotary| rotary.positions * rotary.dim / 2);
        given("tables", at.tables.is_some(), append.rotary.is_some(), table)?;
        given("cu_new", at.cu_new.is_some(), is_packed(append.new), batch + 1)?;
        given("used_new", at.used_new.is_some(), append.new.used, batch)?;
        let is_paged = matches!(append.cache.rows, SideRows::Paged { .. });
        given("page_table", at.page_table.is_some(), is_paged, batch * append.table_columns())?;
        let descales = append.descales();
        for (name, form, address) in
            [("k_descale", descales.k, at.k_descale), ("v_descale", descales.v, at.v_descale)]
        {
            let need: usize = append.descale_shape(form).map_or(0, |shape| shape.iter().product());
            given(name, address.is_some(), form != DescaleForm::None, need)?;
            if let (Some(address), true) = (address, need > 0) {
                check_address(name, address, 4)?;
            }
        }
        given("cu_seqlens_q", at.cu_seqlens_q.is_some(), is_packed(of_q), batch + 1)?;
        given("seqused_q", at.seqused_q.is_some(), of_q.used, batch)?;
        let mut raw = vec![at.k_new, at.v_new, at.k_cache, at.v_cache];
        raw.extend(at.q);
        for ((shape, is_output), raw) in self.tensors().iter().zip(&raw) {
            shape.check_strides(&raw.strides, *is_output)?;
            shape.check_address(raw.address)?;
        }
        if let (Some(out), Some((shape, _))) = (&at.q_out, self.tensors().last()) {
            let shape = Shape { name: "q_out", ..*shape };
            shape.check_strides(&out.strides, true)?;
            shape.check_address(out.address)?;
        }
        for (name, address) in ["cos", "sin"].into_iter().zip(at.tables.into_iter().flatten()) {
            if table > 0 {
                check_address(name, address, 16)?;
            }
        }
        for (name, address) in [
            ("cu_new", at.cu_new),
            ("used_new", at.used_new),
            ("seqused_k", at.seqused_k),
            ("cu_seqlens_q", at.cu_seqlens_q),
            ("seqused_q", at.seqused_q),
            ("used_out", at.used_out),
            ("dropped", at.dropped),
        ] {
            if let (Some(address), true) = (address, batch > 0) {
                check_address(name, address, 4)?;
            }
        }
        // A cache may have no pages, and its table no columns.
        if let (Some(address), true) = (at.page_table, batch * append.table_columns() > 0) {
            check_address("page_table", address, 4)?;
        }
        match (at.seqused_k, at.used_out) {
            // Empty arrays share an address, mostly 0, and no memory.
            (Some(before), Some(after)) if before == after && batch > 0 => {
                Err(Error::SameMemory { tensor: "used_out", with: "seqused_k" })
            }
            _ => Ok(()),
        }
    }

    /// The parameters of the kernel of caches of codes.
    pub fn codes_params(&self, at: &RawAppendArgs) -> AppendCodesParams {
        let of = |form: DescaleForm, address: Option<u64>| {
            let address = address.unwrap_or(0);
            match form {
                DescaleForm::None => AppendDescales::default(),
                DescaleForm::Head | DescaleForm::SequenceHead => AppendDescales {
                    of_head: ConstF32Ptr(address),
                    sequence_stride: if form == DescaleForm::Head { 0 } else { self.append.heads_kv as i64 },
                    ..AppendDescales::default()
                },
                DescaleForm::TokenHead => {
                    AppendDescales { of_rows: MutF32Ptr(address), ..AppendDescales::default() }
                }
            }
        };
        let descales = self.append.descales();
        AppendCodesParams {
            append: self.params(at),
            codes: AppendCodes {
                k: of(descales.k, at.k_descale),
                v: of(descales.v, at.v_descale),
                block_rows: self.append.cache_shape(0)[1].min(1 << 30) as i32,
                kind: match self.append.codes.map(|codes| codes.kind) {
                    None | Some(Codes::E4m3 | Codes::Int4) => 0,
                    Some(Codes::Int8) => 1,
                    Some(Codes::E5m2) => 2,
                },
            },
        }
    }

    /// The kernel's parameters.
    pub fn params(&self, at: &RawAppendArgs) -> AppendParams {
        let append = &self.append;
        let strides = |strides: &Strides, packed: bool| RowStrides {
            batch: if packed { 0 } else { strides.batch },
            seq: strides.seq,
            head: strides.head,
        };
        let packed_q = append.queries().is_some_and(|queries| is_packed(queries.rows));
        let packed_new = is_packed(append.new);
        let reads = |raw: RawTensor, packed| ConstTensor {
            data: ConstPtr(raw.address),
            strides: strides(&raw.strides, packed),
        };
        let writes = |raw: RawTensor, packed| MutTensor {
            data: MutPtr(raw.address),
            strides: strides(&raw.strides, packed),
        };
        let words = |address: Option<u64>| ConstI32Ptr(address.unwrap_or(0));
        let [cos, sin] = at.tables.unwrap_or_default().map(ConstPtr);
        let q_columns = if at.q_out.is_some() { self.params.head_dim } else { self.params.rotary_dim };
        AppendParams {
            k_new: reads(at.k_new, packed_new),
            v_new: reads(at.v_new, packed_new),
            k_cache: writes(at.k_cache, false),
            v_cache: writes(at.v_cache, false),
            q: at.q.map_or_else(ConstTensor::default, |q| reads(q, packed_q)),
            q_out: at.q_out.or(at.q).map_or_else(MutTensor::default, |q| writes(q, packed_q)),
            cos,
            sin,
            cu_new: words(at.cu_new),
            used_new: words(at.used_new),
            used_k: words(at.seqused_k),
            page_table: words(at.page_table),
            cu_q: words(at.cu_seqlens_q),
            used_q: words(at.seqused_q),
            used_out: MutI32Ptr(at.used_out.unwrap_or(0)),
            dropped: MutU32Ptr(at.dropped.unwrap_or(0)),
            q_columns,
            ..self.params
        }
    }
}

/// An append ready to run. Cheap to make from a loaded kernel, cheap to run; shared by threads.
#[derive(Clone, Debug)]
pub struct BoundAppend {
    kernel: Arc<Single>,
    launch: AppendLaunch,
}

impl BoundAppend {
    /// The append kernel, bound to what is appended.
    pub(crate) fn new(kernel: Arc<Single>, launch: AppendLaunch) -> BoundAppend {
        BoundAppend { kernel, launch }
    }

    /// What a call launches.
    pub fn launch(&self) -> &AppendLaunch {
        &self.launch
    }

    /// Checks that memory of `of` is in the kernel's context.
    ///
    /// # Errors
    /// [`Error::Context`].
    pub(crate) fn check_context(&self, name: &'static str, of: &CudaStream) -> Result<(), Error> {
        self.kernel.check_context(name, of)
    }

    /// [`BoundAppend::run`] on addresses alone.
    ///
    /// # Safety
    /// Every element of the shapes of [`AppendLaunch::tensors`] under the given strides, and the arrays
    /// beside them, lie in device memory that the stream's context can access, and stay there, untouched by
    /// others, until the stream has run the kernel. What is written shares no memory with what is read,
    /// except that queries may be rotated in place. No two sequences that are appended to share a page.
    ///
    /// # Errors
    /// Those of [`AppendLaunch::check`], [`Error::Context`] and [`Error::Driver`].
    pub unsafe fn run_raw(&self, stream: &CudaStream, args: &RawAppendArgs) -> Result<(), Error> {
        self.launch.check(args)?;
        let AppendLaunch { grid, threads, smem, .. } = self.launch;
        if grid == 0 {
            return Ok(());
        }
        // SAFETY: the entry takes these parameters; the caller vouches for the addresses.
        unsafe {
            match self.launch.append.codes {
                Some(_) => self.kernel.launch(stream, (grid, threads, smem), self.launch.codes_params(args)),
                None => self.kernel.launch(stream, (grid, threads, smem), self.launch.params(args)),
            }
        }
    }
}
