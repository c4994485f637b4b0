//! Tensors of a call that only some problems have: lengths and starts on the device, pages, slopes, sinks.

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use fa_core::lengths::SideRows;
use fa_core::{Lengths, Problem};

use crate::Error;
use crate::jit::declare::{ConstF32Ptr, ConstI32Ptr, MutF32Ptr, MutU32Ptr};
use crate::jit::params::{ModParams, VarlenParams};
use crate::launch::checks::{check_address, count};

/// Arguments besides Q, K, V and O, in device memory of cudarc. A call takes exactly those that its problem
/// has.
#[derive(Default)]
pub struct Extras<'a> {
    /// `[batch + 1]`: the first row of each sequence of packed queries, then the end of the last.
    pub cu_q: Option<&'a dyn DevicePtr<i32>>,
    /// `[batch + 1]`: the same for packed keys.
    pub cu_k: Option<&'a dyn DevicePtr<i32>>,
    /// `[batch]`: queries in use, where the problem's queries are used in part.
    pub used_q: Option<&'a dyn DevicePtr<i32>>,
    /// `[batch]`: keys in use, where the problem's keys are used in part or lie in pages.
    pub used_k: Option<&'a dyn DevicePtr<i32>>,
    /// `[batch, Lengths::table_columns]`: the pages of each sequence.
    pub page_table: Option<&'a dyn DevicePtr<i32>>,
    /// `[1]`, and optional: each read of an entry of the page table that names no page of the cache, though
    /// keys are in use there, adds 1. Such keys read as zeros, with or without a count.
    pub page_faults: Option<&'a mut dyn DevicePtrMut<u32>>,
    /// A work plan that `Forward::plan` or `Backward::plan` has written for the same kernel, problem and
    /// lengths, and optional: without one, each call makes its own.
    pub plan: Option<&'a dyn DevicePtr<u8>>,
    /// ALiBi's slopes, `[heads_q]` or `[batch, heads_q]`.
    pub alibi_slopes: Option<&'a dyn DevicePtr<f32>>,
    /// Sinks, `[heads_q]`, in natural units.
    pub sinks: Option<&'a dyn DevicePtr<f32>>,
    /// The gradient of the sinks, `[heads_q]`, written in full; for a backward, and optional.
    pub dsinks: Option<&'a mut dyn DevicePtrMut<f32>>,
    /// The gradient of the LSE, in its shape, `[batch, heads_q, seqlen_q]` or `[heads_q, total_q]`; for a
    /// backward, and optional. Where the LSE is -inf it is not read.
    pub dlse: Option<&'a dyn DevicePtr<f32>>,
}

/// [`Extras`] by addresses alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawExtras {
    /// As [`Extras::cu_q`].
    pub cu_q: Option<u64>,
    /// As [`Extras::cu_k`].
    pub cu_k: Option<u64>,
    /// As [`Extras::used_q`].
    pub used_q: Option<u64>,
    /// As [`Extras::used_k`].
    pub used_k: Option<u64>,
    /// As [`Extras::page_table`].
    pub page_table: Option<u64>,
    /// As [`Extras::page_faults`].
    pub page_faults: Option<u64>,
    /// As [`Extras::plan`], on a multiple of 16 bytes.
    pub plan: Option<u64>,
    /// Two words that are zero, in place of a forward's first two of its workspace, which then needs no
    /// initialisation. Each call leaves them zero; calls that may overlap have words of their own. Without
    /// effect on a forward that counts nothing.
    pub counter: Option<u64>,
    /// As [`Extras::alibi_slopes`].
    pub alibi_slopes: Option<u64>,
    /// As [`Extras::sinks`].
    pub sinks: Option<u64>,
    /// As [`Extras::dsinks`].
    pub dsinks: Option<u64>,
    /// As [`Extras::dlse`].
    pub dlse: Option<u64>,
}

/// One of the [`Extras`] that a problem has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extra {
    /// Its field's name.
    pub name: &'static str,
    /// Its elements, of 4 bytes; of a work plan, bytes.
    pub len: usize,
    /// Whether a call may leave it out.
    pub is_optional: bool,
}

/// Extras are read and written word by word.
const WORD_BYTES: u64 = 4;

/// Entries of a work plan are read at once.
const PLAN_ALIGN: u64 = 16;

impl Extra {
    /// The extras of calls of `problem`.
    pub(crate) fn of(problem: &Problem, is_backward: bool, plan_bytes: usize) -> Vec<Extra> {
        let (lengths, heads) = (&problem.lengths, problem.heads_q);
        let batch = lengths.sequences();
        let is_packed = |rows| matches!(rows, SideRows::Packed { .. });
        let rows = match lengths.q().rows {
            SideRows::Packed { total, .. } => total,
            SideRows::Padded { .. } | SideRows::Paged { .. } => batch.saturating_mul(lengths.max_q()),
        };
        let lse_len = heads.saturating_mul(rows);
        let slopes = problem.score.alibi.map_or(0, |alibi| alibi.count(batch, heads));
        let needs = [
            ("cu_q", is_packed(lengths.q().rows), batch + 1),
            ("cu_k", is_packed(lengths.k().rows), batch + 1),
            ("used_q", lengths.q().used, batch),
            ("used_k", lengths.k().used, batch),
            ("page_table", lengths.page().is_some(), batch * lengths.table_columns()),
            ("page_faults", lengths.page().is_some(), 1),
            ("plan", plan_bytes > 0, plan_bytes),
            ("alibi_slopes", problem.score.alibi.is_some(), slopes),
            ("sinks", problem.score.sinks, heads),
            ("dsinks", problem.score.sinks && is_backward, heads),
            ("dlse", is_backward, lse_len),
        ];
        let needed = needs.into_iter().filter(|(_, is_needed, _)| *is_needed);
        needed
            .map(|(name, _, len)| Extra {
                name,
                len,
                is_optional: ["dsinks", "dlse", "page_faults", "plan"].contains(&name),
            })
            .collect()
    }
}

impl RawExtras {
    fn named(&self) -> [(&'static str, Option<u64>); 11] {
        [
            ("cu_q", self.cu_q),
            ("cu_k", self.cu_k),
            ("used_q", self.used_q),
            ("used_k", self.used_k),
            ("page_table", self.page_table),
            ("page_faults", self.page_faults),
            ("plan", self.plan),
            ("alibi_slopes", self.alibi_slopes),
            ("sinks", self.sinks),
            ("dsinks", self.dsinks),
            ("dlse", self.dlse),
        ]
    }

    /// Checks that exactly the extras in `needs` are given, aligned to a word.
    ///
    /// # Errors
    /// [`Error::MissingExtra`], [`Error::UnusedExtra`] and [`Error::Address`].
    pub(crate) fn check(&self, needs: &[Extra]) -> Result<(), Error> {
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
        VarlenParams {
            cu_q: words(self.cu_q),
            cu_k: words(self.cu_k),
            used_q: words(self.used_q),
            used_k: words(self.used_k),
            page_table: words(self.page_table),
            page_faults: MutU32Ptr(self.page_faults.unwrap_or(0)),
            ..params
        }
    }

    /// The parameters of score changes: addresses, and what the problem decides.
    pub(crate) fn mods(&self, params: ModParams) -> ModParams {
        ModParams {
            alibi_slopes: ConstF32Ptr(self.alibi_slopes.unwrap_or(0)),
            sinks: ConstF32Ptr(self.sinks.unwrap_or(0)),
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

/// The guards of extras: dropped after the launch, each notes in cudarc that the stream has used its tensor.
pub(crate) type Guards<'a> = [Option<SyncOnDrop<'a>>; 11];

impl Extras<'_> {
    /// Checks lengths against `needs` and takes the addresses.
    ///
    /// # Errors
    /// [`Error::TooShort`], and what `check_context` finds of a tensor's context.
    pub(crate) fn raw<'g>(
        &'g mut self,
        needs: &[Extra],
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
            from: Option<&'g dyn DevicePtr<T>>,
            name: &'static str,
            stream: &'g CudaStream,
            check: &impl Fn(&'static str, usize, &CudaStream) -> Result<(), Error>,
        ) -> Result<(Option<u64>, Option<SyncOnDrop<'g>>), Error> {
            let Some(from) = from else { return Ok((None, None)) };
            check(name, from.len(), from.stream())?;
            let (address, guard) = from.device_ptr(stream);
            Ok((Some(address), Some(guard)))
        }
        fn write<'g, T>(
            to: Option<&'g mut (dyn DevicePtrMut<T> + '_)>,
            name: &'static str,
            stream: &'g CudaStream,
            check: &impl Fn(&'static str, usize, &CudaStream) -> Result<(), Error>,
        ) -> Result<(Option<u64>, Option<SyncOnDrop<'g>>), Error> {
            let Some(to) = to else { return Ok((None, None)) };
            check(name, to.len(), to.stream())?;
            let (address, guard) = to.device_ptr_mut(stream);
            Ok((Some(address), Some(guard)))
        }
        let (cu_q, cu_q_guard) = read(self.cu_q, "cu_q", stream, &check)?;
        let (cu_k, cu_k_guard) = read(self.cu_k, "cu_k", stream, &check)?;
        let (used_q, used_q_guard) = read(self.used_q, "used_q", stream, &check)?;
        let (used_k, used_k_guard) = read(self.used_k, "used_k", stream, &check)?;
        let (page_table, page_table_guard) = read(self.page_table, "page_table", stream, &check)?;
        let (plan, plan_guard) = read(self.plan, "plan", stream, &check)?;
        let (page_faults, faults_guard) =
            write(self.page_faults.as_deref_mut(), "page_faults", stream, &check)?;
        let (alibi_slopes, slopes_guard) = read(self.alibi_slopes, "alibi_slopes", stream, &check)?;
        let (sinks, sinks_guard) = read(self.sinks, "sinks", stream, &check)?;
        let (dsinks, dsinks_guard) = write(self.dsinks.as_deref_mut(), "dsinks", stream, &check)?;
        let (dlse, dlse_guard) = read(self.dlse, "dlse", stream, &check)?;
        let raw = RawExtras {
            cu_q,
            cu_k,
            used_q,
            used_k,
            page_table,
            page_faults,
            plan,
            counter: None,
            alibi_slopes,
            sinks,
            dsinks,
            dlse,
        };
        let guards = [
            cu_q_guard,
            cu_k_guard,
            used_q_guard,
            used_k_guard,
            page_table_guard,
            faults_guard,
            plan_guard,
            slopes_guard,
            sinks_guard,
            dsinks_guard,
            dlse_guard,
        ];
        Ok((raw, guards))
    }
}

#[cfg(test)]
mod tests {
    use fa_core::{Alibi, Dtype, Mask, ScoreMod};

    use super::*;

    fn problem() -> Problem {
        let score = ScoreMod { alibi: Some(Alibi::PerSequenceHead), sinks: true, ..ScoreMod::NONE };
        Problem { score, ..Problem::square(3, 16, 4, 64, Mask::FULL, Dtype::F16) }
    }

    #[test]
    fn a_call_gives_what_its_problem_asks_for() {
        let needs = Extra::of(&problem(), true, 0);
        let names: Vec<_> = needs.iter().map(|need| (need.name, need.len)).collect();
        assert_eq!(names, [("alibi_slopes", 12), ("sinks", 4), ("dsinks", 4), ("dlse", 192)]);
        let given = RawExtras { alibi_slopes: Some(256), sinks: Some(512), ..RawExtras::default() };
        given.check(&needs).unwrap();
        RawExtras { dsinks: Some(1024), dlse: Some(2048), ..given }.check(&needs).unwrap();
        let refused = |raw: RawExtras, part: &str| {
            let text = raw.check(&needs).expect_err("must be refused").to_string();
            assert!(text.contains(part), "{text} does not say {part}");
        };
        refused(RawExtras { alibi_slopes: None, ..given }, "alibi_slopes is missing");
        refused(RawExtras { used_k: Some(256), ..given }, "used_k");
        refused(RawExtras { sinks: Some(6), ..given }, "sinks starts at 0x6");
        let forward = Extra::of(&problem(), false, 0);
        let unused = RawExtras { dsinks: Some(1024), ..given }.check(&forward).expect_err("not a backward");
        assert!(matches!(unused, Error::UnusedExtra { name: "dsinks" }));
        let unused = RawExtras { dlse: Some(2048), ..given }.check(&forward).expect_err("not a backward");
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
        assert_eq!(mod_params(&Problem { score: ScoreMod::NONE, ..problem() }).alibi_stride, 0);
        let cache = fa_core::Side::paged(16, 10, 100);
        let lengths = Lengths::of(3, fa_core::Side::packed(7, 4), cache);
        let params = varlen_params(&lengths).unwrap();
        assert_eq!((params.page, params.pages, params.table_stride, params.total_q), (16, 10, 7, 7));
        let needs = Extra::of(&Problem { lengths, score: ScoreMod::NONE, ..problem() }, false, 1024);
        let names: Vec<_> = needs.iter().map(|need| (need.name, need.len)).collect();
        assert_eq!(
            names,
            [("cu_q", 4), ("used_k", 3), ("page_table", 21), ("page_faults", 1), ("plan", 1024)]
        );
    }
}
