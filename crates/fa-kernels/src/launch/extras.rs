//! Tensors of a call that only some problems have: lengths and starts on the device, pages, slopes, sinks.

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use fa_core::extras::{Extra, Need, Value};
use fa_core::lengths::SideRows;
use fa_core::{DescaleForm, Descales, Lengths, Pass, Problem};

use crate::Error;
use crate::jit::cache_params::{CacheParams, CodeDescales};
use crate::jit::declare::{ConstF32Ptr, ConstI32Ptr, MutF32Ptr, MutU32Ptr};
use crate::jit::params::{ModParams, VarlenParams};
use crate::launch::checks::{check_address, count};
use crate::launch::raw_program::RawProgram;

/// Arguments besides Q, K, V and O, in device memory of cudarc. A call takes exactly those that its problem
/// has.
#[derive(Default)]
pub struct Extras<'a> {
    /// Starts and lengths of sequences, page table, slopes, sinks, the gradient of the LSE.
    pub inputs: fa_core::Extras<&'a dyn DevicePtr<i32>, &'a dyn DevicePtr<f32>>,
    /// `[1]`, and optional: each read of an entry of the page table that names no page of the cache, though
    /// keys are in use there, adds 1. Such keys read as zeros, with or without a count.
    pub page_faults: Option<&'a mut dyn DevicePtrMut<u32>>,
    /// A work plan that `Forward::plan` or `Backward::plan` has written for the same kernel, problem and
    /// lengths, and optional: without one, each call makes its own.
    pub plan: Option<&'a dyn DevicePtr<u8>>,
    /// The gradient of the sinks, `[heads_q]`, written in full; for a backward, and optional.
    pub dsinks: Option<&'a mut dyn DevicePtrMut<f32>>,
    /// The arrays and scalars of the problem's program, by their addresses: cudarc does not track them.
    pub program: Option<RawProgram>,
}

/// [`Extras`] by addresses alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawExtras {
    /// As [`Extras::inputs`].
    pub inputs: fa_core::Extras<u64>,
    /// As [`Extras::page_faults`].
    pub page_faults: Option<u64>,
    /// As [`Extras::plan`], on a multiple of 16 bytes.
    pub plan: Option<u64>,
    /// Two words that are zero, in place of a forward's first two of its workspace, which then needs no
    /// initialisation. Each call leaves them zero; calls that may overlap have words of their own. Without
    /// effect on a forward that counts nothing.
    pub counter: Option<u64>,
    /// As [`Extras::dsinks`].
    pub dsinks: Option<u64>,
    /// The arrays and scalars of the problem's program.
    pub program: Option<RawProgram>,
}

/// Extras are read and written word by word.
const WORD_BYTES: u64 = 4;

/// Entries of a work plan are read at once.
const PLAN_ALIGN: u64 = 16;

/// The extras of calls of `problem`; elements of a work plan are bytes.
pub(crate) fn needs(problem: &Problem, pass: Pass, plan_bytes: usize) -> Vec<Need> {
    let mut needs: Vec<Need> = Extra::ALL.iter().filter_map(|extra| extra.need(problem, pass)).collect();
    let own = [
        ("page_faults", problem.lengths.page().is_some(), 1),
        ("plan", plan_bytes > 0, plan_bytes),
        ("dsinks", problem.score.sinks && pass.is_backward(), problem.heads_q),
    ];
    let own = own.into_iter().filter(|(_, is_needed, _)| *is_needed);
    needs.extend(own.map(|(name, _, len)| Need { name, len, is_optional: true }));
    needs
}

impl RawExtras {
    fn named(&self) -> impl Iterator<Item = (&'static str, Option<u64>)> {
        let inputs = self.inputs.entries().map(|(extra, own)| (extra.name(), own.map(Value::into_inner)));
        let own = [("page_faults", self.page_faults), ("plan", self.plan), ("dsinks", self.dsinks)];
        inputs.into_iter().chain(own)
    }

    /// Checks that exactly the extras in `needs` are given, aligned to a word.
    ///
    /// # Errors
    /// [`Error::MissingExtra`], [`Error::UnusedExtra`] and [`Error::Address`].
    pub(crate) fn check(&self, needs: &[Need]) -> Result<(), Error> {
        if let Some(address) = self.counter {
            check_address("counter", address, WORD_BYTES)?;
        }
        for (name, address) in self.named() {
            match (needs.iter().find(|need| need.name == name), address) {
                (None, None) => (),
                (None, Some(_)) => return Err(Error::UnusedExtra { name }),
                (Some(need), None) if !need.is_optional => {
                    return Err(Error::MissingExtra { name, need: need.len });
                }
                // An empty batch may have no memory.
                (Some(need), Some(address)) if need.len > 0 => {
                    check_address(name, address, if name == "plan" { PLAN_ALIGN } else { WORD_BYTES })?;
                }
                (Some(_), _) => (),
            }
        }
        Ok(())
    }

    /// The parameters of lengths: addresses, and what the problem decides.
    pub(crate) fn varlen(&self, params: VarlenParams) -> VarlenParams {
        let words = |address: Option<u64>| ConstI32Ptr(address.unwrap_or(0));
        let inputs = &self.inputs;
        VarlenParams {
            cu_q: words(inputs.cu_seqlens_q),
            cu_k: words(inputs.cu_seqlens_k),
            used_q: words(inputs.seqused_q),
            used_k: words(inputs.seqused_k),
            page_table: words(inputs.page_table),
            page_faults: MutU32Ptr(self.page_faults.unwrap_or(0)),
            ..params
        }
    }

    /// The parameters of a cache of codes: addresses by the forms of its descales, and what the problem
    /// decides.
    pub(crate) fn cache(&self, params: CacheParams, descales: Descales) -> CacheParams {
        let of = |own: CodeDescales, form: DescaleForm, address: Option<u64>| {
            let address = ConstF32Ptr(address.unwrap_or(0));
            match form {
                DescaleForm::None => own,
                DescaleForm::Head | DescaleForm::SequenceHead => CodeDescales { of_head: address, ..own },
                DescaleForm::TokenHead => CodeDescales { of_rows: address, ..own },
            }
        };
        CacheParams {
            k: of(params.k, descales.k, self.inputs.k_descale),
            v: of(params.v, descales.v, self.inputs.v_descale),
            q: of(params.q, descales.q, self.inputs.q_descale),
        }
    }

    /// The parameters of score changes: addresses, and what the problem decides.
    pub(crate) fn mods(&self, params: ModParams) -> ModParams {
        ModParams {
            alibi_slopes: ConstF32Ptr(self.inputs.alibi_slopes.unwrap_or(0)),
            sinks: ConstF32Ptr(self.inputs.sinks.unwrap_or(0)),
            dsinks: MutF32Ptr(self.dsinks.unwrap_or(0)),
            ..params
        }
    }
}

/// The parameters of lengths that the problem decides.
pub(crate) fn varlen_params(lengths: &Lengths) -> Result<VarlenParams, Error> {
    let (page, pages) = match lengths.k().rows {
        SideRows::Paged { page, pages, .. } => (page, pages),
        SideRows::Padded { .. } | SideRows::Packed { .. } => (0, 0),
    };
    let total_q = match lengths.q().rows {
        SideRows::Packed { total, .. } => total,
        SideRows::Padded { .. } | SideRows::Paged { .. } => 0,
    };
    let total_k = match lengths.k().rows {
        SideRows::Packed { total, .. } => total,
        SideRows::Padded { .. } | SideRows::Paged { .. } => 0,
    };
    let (page_factor, page_shift) = page_division(page);
    Ok(VarlenParams {
        page: count("page", page)?,
        pages: count("pages", pages)?,
        page_factor,
        page_shift,
        table_stride: count("entries of the page table", lengths.table_columns())?,
        total_q: count("total_q", total_q)?,
        total_k: count("total_k", total_k)?,
        ..VarlenParams::default()
    })
}

/// `(factor, shift)` with `key / page = (2 key factor >> 32) >> shift` for every key below 2^31.
fn page_division(page: usize) -> (u32, i32) {
    let page = page.max(1) as u64;
    let shift = page.next_power_of_two().trailing_zeros();
    // At most 2^32 - 1: a power of two has 2^31, and 2^shift is less than twice any other page.
    let factor = (1u64 << (31 + shift)).div_ceil(page);
    (factor as u32, shift as i32)
}

/// The parameters of score changes that the problem decides.
pub(crate) fn mod_params(problem: &Problem) -> ModParams {
    use fa_core::Alibi;
    let per_sequence = problem.score.alibi == Some(Alibi::PerSequenceHead);
    ModParams { alibi_stride: if per_sequence { problem.heads_q as i64 } else { 0 }, ..ModParams::default() }
}

/// The parameters of a cache of codes that the problem decides.
pub(crate) fn cache_params(problem: &Problem) -> CacheParams {
    let of = |form: DescaleForm| {
        let sequence_stride = if form == DescaleForm::SequenceHead { problem.heads_kv as i64 } else { 0 };
        CodeDescales { sequence_stride, ..CodeDescales::default() }
    };
    CacheParams { k: of(problem.descales.k), v: of(problem.descales.v), q: of(problem.descales.q) }
}

/// An address, with a guard that is dropped after the launch and then notes in cudarc that the stream has
/// used the tensor.
type Guarded<'a> = (u64, SyncOnDrop<'a>);

/// The guards of extras.
pub(crate) struct Guards<'a> {
    _inputs: fa_core::Extras<Guarded<'a>>,
    _own: [Option<Guarded<'a>>; 3],
}

impl Extras<'_> {
    /// Checks lengths against `needs` and takes the addresses.
    ///
    /// # Errors
    /// [`Error::TooShort`], and what `check_context` finds of a tensor's context.
    pub(crate) fn raw<'g>(
        &'g mut self,
        needs: &[Need],
        stream: &'g CudaStream,
        check_context: impl Fn(&'static str, &CudaStream) -> Result<(), Error>,
    ) -> Result<(RawExtras, Guards<'g>), Error> {
        let check = |name, have: usize, of: &CudaStream| {
            let need = needs.iter().find(|need| need.name == name).map_or(0, |need| need.len);
            if have < need {
                return Err(Error::TooShort { tensor: name, have: have as u64, need: need as u64 });
            }
            check_context(name, of)
        };
        fn read<'g, T>(
            from: &'g dyn DevicePtr<T>,
            name: &'static str,
            stream: &'g CudaStream,
            check: &impl Fn(&'static str, usize, &CudaStream) -> Result<(), Error>,
        ) -> Result<Guarded<'g>, Error> {
            check(name, from.len(), from.stream())?;
            Ok(from.device_ptr(stream))
        }
        fn write<'g, T>(
            to: &'g mut (dyn DevicePtrMut<T> + '_),
            name: &'static str,
            stream: &'g CudaStream,
            check: &impl Fn(&'static str, usize, &CudaStream) -> Result<(), Error>,
        ) -> Result<Guarded<'g>, Error> {
            check(name, to.len(), to.stream())?;
            Ok(to.device_ptr_mut(stream))
        }
        let inputs = self.inputs.try_map(
            |extra, from| read(from, extra.name(), stream, &check),
            |extra, from| read(from, extra.name(), stream, &check),
        )?;
        let (page_faults, dsinks) = (self.page_faults.as_deref_mut(), self.dsinks.as_deref_mut());
        let page_faults = page_faults.map(|to| write(to, "page_faults", stream, &check)).transpose()?;
        let plan = self.plan.map(|from| read(from, "plan", stream, &check)).transpose()?;
        let dsinks = dsinks.map(|to| write(to, "dsinks", stream, &check)).transpose()?;
        let address = |own: &Option<Guarded<'_>>| own.as_ref().map(|own| own.0);
        let raw = RawExtras {
            inputs: inputs.as_ref().map(|_, own| own.0, |_, own| own.0),
            page_faults: address(&page_faults),
            plan: address(&plan),
            counter: None,
            dsinks: address(&dsinks),
            program: self.program,
        };
        Ok((raw, Guards { _inputs: inputs, _own: [page_faults, plan, dsinks] }))
    }
}

#[cfg(test)]
mod tests {
    use fa_core::{Alibi, Dtype, Mask, ScoreMod};

    use super::*;

    fn problem() -> Problem {
        let score = ScoreMod::NONE.with_alibi(Some(Alibi::PerSequenceHead)).with_sinks(true);
        Problem::square(3, 16, 4, 64, Mask::FULL, Dtype::F16).with_score(score)
    }

    #[test]
    fn a_call_gives_what_its_problem_asks_for() {
        let needs = needs(&problem(), Pass::BACKWARD, 0);
        let names: Vec<_> = needs.iter().map(|need| (need.name, need.len)).collect();
        assert_eq!(names, [("alibi_slopes", 12), ("sinks", 4), ("dlse", 192), ("dsinks", 4)]);
        let inputs = fa_core::Extras { alibi_slopes: Some(256), sinks: Some(512), ..fa_core::Extras::NONE };
        let given = RawExtras { inputs, ..RawExtras::default() };
        given.check(&needs).unwrap();
        let with = |inputs| RawExtras { inputs, ..given };
        let with_dlse = with(fa_core::Extras { dlse: Some(2048), ..inputs });
        RawExtras { dsinks: Some(1024), ..with_dlse }.check(&needs).unwrap();
        let refused = |raw: RawExtras, part: &str| {
            let text = raw.check(&needs).expect_err("must be refused").to_string();
            assert!(text.contains(part), "{text} does not say {part}");
        };
        refused(with(fa_core::Extras { alibi_slopes: None, ..inputs }), "alibi_slopes is missing");
        refused(with(fa_core::Extras { seqused_k: Some(256), ..inputs }), "seqused_k");
        refused(with(fa_core::Extras { sinks: Some(6), ..inputs }), "sinks starts at 0x6");
        let forward = super::needs(&problem(), Pass::Forward, 0);
        let unused = RawExtras { dsinks: Some(1024), ..given }.check(&forward).expect_err("not a backward");
        assert!(matches!(unused, Error::UnusedExtra { name: "dsinks" }));
        let unused = with_dlse.check(&forward).expect_err("not a backward");
        assert!(matches!(unused, Error::UnusedExtra { name: "dlse" }));
    }

    #[test]
    fn pages_are_found_without_a_division() {
        let found = |page: usize, key: u64| {
            let (factor, shift) = page_division(page);
            (2 * key * u64::from(factor)) >> 32 >> shift
        };
        for page in (1..300).chain([1000, 4096, 65535, (1 << 20) + 7, (1 << 30) + 1, (1 << 31) - 1]) {
            let last = (1u64 << 31) - 1;
            let edges = (1..6).flat_map(|n| [n * page as u64, n * page as u64 - 1]);
            for key in edges.chain([0, 1, 12_345_678, last - 1, last, last / page as u64 * page as u64]) {
                if key <= last {
                    assert_eq!(found(page, key), key / page as u64, "key {key}, pages of {page}");
                }
            }
        }
    }

    #[test]
    fn the_problem_decides_strides_and_pages() {
        assert_eq!(mod_params(&problem()).alibi_stride, 4);
        assert_eq!(mod_params(&problem().with_score(ScoreMod::NONE)).alibi_stride, 0);
        let cache = fa_core::Side::paged(16, 10, 100);
        let lengths = Lengths::of(3, fa_core::Side::packed(7, 4), cache);
        let params = varlen_params(&lengths).unwrap();
        assert_eq!((params.page, params.pages, params.table_stride, params.total_q), (16, 10, 7, 7));
        let needs = needs(&problem().with_lengths(lengths).with_score(ScoreMod::NONE), Pass::Forward, 1024);
        let names: Vec<_> = needs.iter().map(|need| (need.name, need.len)).collect();
        assert_eq!(
            names,
            [("cu_seqlens_q", 4), ("seqused_k", 3), ("page_table", 21), ("page_faults", 1), ("plan", 1024)]
        );
    }
}
