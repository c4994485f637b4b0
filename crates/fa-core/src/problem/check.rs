//! Which problems are valid: relations between the fields, and sizes that can be addressed.

use super::{Problem, ProblemError};
use crate::lengths::{Side, SideRows};
use crate::{DescaleForm, Pass};

/// The most that a count read on the device may be.
const MAX_I32: usize = i32::MAX as usize;

/// Bits of the largest element count of a tensor: at most `2^ELEMENT_BITS - 1` elements, so that byte offsets
/// fit a signed 64-bit number.
pub const ELEMENT_BITS: u32 = 48;

/// The most heads. A tensor without rows takes no memory whatever its shape, but what is computed head by
/// head does.
const MOST_HEADS: usize = 1 << 20;

/// The most columns of a head: likewise, and of V's the output has as many although V may have no rows.
const MOST_HEAD_DIM: usize = 1 << 16;

/// The largest offset of a mask with ALiBi: f32 has every integer up to it.
const ALIBI_OFFSET: u64 = 1 << 24;

/// The largest offset of a mask with a program.
const PROGRAM_OFFSET: u64 = 1 << 30;

impl Problem {
    /// Checks the relations between the fields. An empty batch and empty sequences are valid and give empty
    /// or zero outputs; in the limit on elements a length of 0 counts as 1.
    ///
    /// # Errors
    /// The first [`ProblemError`] found.
    pub fn check(&self) -> Result<(), ProblemError> {
        let lengths = [
            ("heads_q", self.heads_q, MOST_HEADS),
            ("heads_kv", self.heads_kv, MOST_HEADS),
            ("head_dim", self.head_dim, MOST_HEAD_DIM),
            ("head_dim_v", self.head_dim_v, MOST_HEAD_DIM),
        ];
        for (name, value, limit) in lengths {
            match value {
                0 => return Err(ProblemError::Zero { name }),
                _ if value > limit => return Err(ProblemError::TooMany { name, value, limit }),
                _ => {}
            }
        }
        if !self.heads_q.is_multiple_of(self.heads_kv) {
            return Err(ProblemError::HeadsNotDivisible { heads_q: self.heads_q, heads_kv: self.heads_kv });
        }
        self.check_latent()?;
        self.types.check()?;
        self.check_codes()?;
        self.check_offset()?;
        self.check_lengths()?;
        let (q, k) = (self.rows_of(self.lengths.q()), self.rows_of(self.lengths.k()));
        let tensors = [
            ("q", q, self.heads_q, self.head_dim),
            ("k", k, self.heads_kv, self.head_dim_k()),
            ("v", k, self.heads_kv, self.head_dim_v),
            ("out", q, self.heads_q, self.head_dim_v),
        ];
        for (tensor, (b, s), h, d) in tensors {
            check_elements(tensor, [b, s, h, d])?;
        }
        if let Some(value) = self.softmax_scale.filter(|scale| !scale.is_finite()) {
            return Err(ProblemError::BadScalar { name: "softmax_scale", value, need: "finite" });
        }
        if let Some(value) = self.score.softcap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
            return Err(ProblemError::BadScalar { name: "softcap", value, need: "finite and above 0" });
        }
        let changes = self.score.kind().changes();
        let own = [
            ("softcap", "(cap * tanh(s / cap))", self.score.softcap.is_some()),
            ("alibi", "(s - slope[h] * abs(q + off - k))", self.score.alibi.is_some()),
        ];
        if let Some((name, text, _)) = own.into_iter().find(|&(_, _, is_on)| is_on && changes) {
            return Err(ProblemError::Program { name, text });
        }
        Ok(())
    }

    /// Keys of a latent problem have their values' columns, and its scale is known.
    fn check_latent(&self) -> Result<(), ProblemError> {
        let Problem { head_dim, head_dim_v, .. } = *self;
        if self.latent && head_dim < head_dim_v {
            return Err(ProblemError::LatentColumns { head_dim, head_dim_v });
        }
        if self.latent && self.softmax_scale.is_none() {
            return Err(ProblemError::LatentScale { head_dim });
        }
        Ok(())
    }

    /// [`Problem::check`], and that there is such a pass of it: codes have no gradients.
    ///
    /// # Errors
    /// The first [`ProblemError`] found.
    pub fn check_pass(&self, pass: Pass) -> Result<(), ProblemError> {
        self.check()?;
        if pass.is_backward() { Ok(self.types.check_gradients()?) } else { Ok(()) }
    }

    /// Descales are of codes, and rows of K and V are whole elements.
    fn check_codes(&self) -> Result<(), ProblemError> {
        let (of_q, dtype) = (self.types.q, self.types.kv);
        for (name, value) in [("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)] {
            if !value.is_multiple_of(dtype.per_element()) {
                return Err(ProblemError::OddRow { name, value, dtype });
            }
        }
        if let (Some((name, _)), false) = (self.descales.first_of_kv(), dtype.is_code()) {
            return Err(ProblemError::Descale { name, dtype });
        }
        let form = self.descales.q;
        if !form.is_none() && !of_q.is_code() {
            return Err(ProblemError::QDescale { dtype: of_q });
        }
        if form == DescaleForm::TokenHead { Err(ProblemError::QDescaleForm { form }) } else { Ok(()) }
    }

    /// ALiBi's distances are exact in f32 as far as the offset goes, and a program's `off` fits an i32.
    fn check_offset(&self) -> Result<(), ProblemError> {
        let offset = self.mask.offset;
        let of_alibi = self.score.alibi.map(|_| ("ALiBi, whose distances are f32", ALIBI_OFFSET));
        let of_program = self.score.program.map(|_| ("a program, whose `off` is i32", PROGRAM_OFFSET));
        match of_alibi.or(of_program).filter(|(_, limit)| offset.unsigned_abs() > *limit) {
            Some((what, limit)) => Err(ProblemError::Offset { offset, what, limit }),
            None => Ok(()),
        }
    }

    /// The outer lengths of a side's tensor: sequences and rows, 1 and all rows, or pages and rows of one.
    fn rows_of(&self, side: Side) -> (usize, usize) {
        match side.rows {
            SideRows::Padded { len } => (self.lengths.sequences(), len),
            SideRows::Packed { total, .. } => (1, total),
            SideRows::Paged { page, pages, .. } => (pages, page),
        }
    }

    /// What is read as i32 on the device fits one, and pages hold something.
    fn check_lengths(&self) -> Result<(), ProblemError> {
        let lengths = &self.lengths;
        if lengths.is_uniform() {
            return Ok(());
        }
        if let SideRows::Paged { page, .. } = lengths.q().rows {
            return Err(ProblemError::PagedQueries { page });
        }
        let too_long = |name, value: usize, limit| {
            (value > limit).then_some(ProblemError::TooLong { name, value, limit })
        };
        let (batch, max_q, max_k) = (lengths.sequences(), lengths.max_q(), lengths.max_k());
        let mut counts = vec![("batch", batch), ("seqlen_q", max_q), ("seqlen_k", max_k)];
        if let SideRows::Packed { total, .. } = lengths.q().rows {
            counts.push(("total_q", total));
        }
        match lengths.k().rows {
            SideRows::Padded { .. } => (),
            SideRows::Packed { total, .. } => counts.push(("total_k", total)),
            SideRows::Paged { page: 0, .. } => return Err(ProblemError::Zero { name: "page" }),
            SideRows::Paged { pages: 0, max: 1.., .. } => return Err(ProblemError::Zero { name: "pages" }),
            SideRows::Paged { page, pages, .. } => counts.extend([("page", page), ("pages", pages)]),
        }
        if let Some(error) = counts.into_iter().find_map(|(name, value)| too_long(name, value, MAX_I32)) {
            return Err(error);
        }
        check_elements("page table", [batch, lengths.table_columns(), 1, 1])
    }
}

/// Refuses a tensor of more elements than can be addressed.
fn check_elements(tensor: &'static str, shape: [usize; 4]) -> Result<(), ProblemError> {
    let elements = shape.iter().try_fold(1u64, |n, &len| n.checked_mul(len.max(1) as u64));
    if elements.is_some_and(|n| n >> ELEMENT_BITS == 0) {
        return Ok(());
    }
    let shape = shape.map(|len| len.to_string()).join(" x ");
    Err(ProblemError::TooLarge { tensor, shape, limit_bits: ELEMENT_BITS })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Descales, Dtype, Lengths, Mask, ScoreMod, Types};

    #[test]
    fn rows_of_codes_end_with_a_byte() {
        let int4 = BASE.with_types(Types::same(Dtype::Bf16).with_kv(Dtype::Int4));
        assert_eq!(int4.with_head_dims(34, 2).check(), Ok(()));
        for (problem, name) in
            [(int4.with_head_dim(33), "head_dim = 33"), (int4.with_head_dim_v(1), "head_dim_v = 1")]
        {
            let text = problem.check().expect_err("must be refused").to_string();
            assert!(text.starts_with(name) && text.contains("in int4") && text.contains("even"), "{text}");
        }
    }

    const BASE: Problem = Problem::square(2, 1024, 16, 128, Mask::FULL, Dtype::Bf16);

    #[test]
    fn refusals_name_the_field_and_the_value() {
        let refused = |problem: Problem, part: &str| {
            let text = problem.check().expect_err("must be refused").to_string();
            assert!(text.contains(part), "{text} does not name {part}");
        };
        assert_eq!(BASE.check(), Ok(()));
        assert_eq!(BASE.with_lengths(Lengths::uniform(0, 0, 1024)).check(), Ok(()));
        refused(BASE.with_head_dim(0), "head_dim is 0");
        refused(BASE.with_heads_kv(3), "heads_kv = 3");
        refused(BASE.with_heads_kv(0), "heads_kv is 0");
        assert_eq!(BASE.with_heads_kv(0).group_size(), 0);
        refused(BASE.with_head_dim(MOST_HEAD_DIM + 1), "head_dim = 65537: at most 65536");
        // V without a row takes no memory, the output would take 2^40 columns a row.
        let empty = BASE.with_lengths(Lengths::uniform(2, 1024, 0));
        refused(empty.with_head_dim_v(1 << 40), "head_dim_v = 1099511627776: at most 65536");
        assert_eq!(empty.with_head_dim_v(MOST_HEAD_DIM).check(), Ok(()));
        let rowless = BASE.with_lengths(Lengths::uniform(1, 0, 0));
        refused(rowless.with_heads_q(1 << 40), "heads_q = 1099511627776: at most 1048576");
        refused(rowless.with_heads_kv(usize::MAX), "heads_kv = 18446744073709551615");
        assert_eq!(rowless.with_heads_q(MOST_HEADS).check(), Ok(()));
        let (half, fp8) = (Types::same(Dtype::F16), Types::same(Dtype::E4m3));
        for (types, part) in [
            (
                half.with_out(Dtype::F32),
                "out_dtype is f32 and dtype is f16: nothing writes O wider than a Q of 16 bits",
            ),
            (half.with_kv(Dtype::Bf16), "kv_dtype is bf16 and dtype is f16: K and V have the type of Q"),
            (fp8.with_kv(Dtype::Int8), "kv_dtype is int8 and dtype is e4m3: K and V have the type of Q"),
            (
                half.with_kv(Dtype::E4m3).with_dkv(Dtype::E4m3),
                "dkv_dtype is e4m3 and dtype is f16: dK and dV are written in",
            ),
            (half.with_out(Dtype::Bf16), "O is written in the type of Q, K and V"),
            (half.with_dkv(Dtype::F32), "dkv_dtype is f32 and dtype is f16: dK and dV are written in"),
            (fp8, "out_dtype is e4m3 and dtype is e4m3: O of an fp8 forward is wider than its codes; set"),
            (fp8.with_out(Dtype::Int8), "out_dtype is int8 and dtype is e4m3: O of an fp8 forward"),
            (Types::fp8(Dtype::Bf16).with_dkv(Dtype::F32), "dkv_dtype is f32 and dtype is e4m3"),
            (Types::same(Dtype::Int8), "dtype is int8: of codes Q has e4m3 alone"),
            (Types::same(Dtype::Int4), "dtype is int4: of codes Q has e4m3 alone"),
        ] {
            refused(BASE.with_types(types), part);
        }
        for (q, kv) in [(Dtype::F16, Dtype::E4m3), (Dtype::Bf16, Dtype::Int8), (Dtype::F32, Dtype::Int4)] {
            let cache = BASE.with_types(Types::same(q).with_kv(kv));
            assert_eq!(cache.with_descales(Descales::both(DescaleForm::TokenHead)).check(), Ok(()));
            assert_eq!(cache.check_pass(Pass::Forward), Ok(()));
            let text = cache.check_pass(Pass::BACKWARD).unwrap_err().to_string();
            assert!(
                text.contains(&format!("kv_dtype is {kv} and dtype is {q}: K and V in codes have no")),
                "{text}"
            );
        }
        for out in Dtype::COMPUTED {
            let fp8 = BASE.with_types(Types::fp8(out)).with_head_dims(20, 3);
            let all = Descales::both(DescaleForm::TokenHead).with_q(DescaleForm::SequenceHead);
            assert_eq!(fp8.with_descales(all).check_pass(Pass::Forward), Ok(()));
            let text = fp8.check_pass(Pass::BACKWARD).unwrap_err().to_string();
            assert!(text.contains("which takes O and LSE of the fp8 forward"), "{text}");
            refused(
                fp8.with_descales(all.with_q(DescaleForm::TokenHead)),
                "q_descale is token_head: it is per",
            );
        }
        let of_q = Descales::NONE.with_q(DescaleForm::Head);
        refused(BASE.with_descales(of_q), "q_descale with Q in bf16");
        refused(BASE.with_types(half.with_kv(Dtype::E4m3)).with_descales(of_q), "q_descale with Q in f16");
        let descales = Descales::NONE.with_v(DescaleForm::Head);
        refused(BASE.with_descales(descales), "v_descale with K and V in bf16");
        refused(BASE.with_softmax_scale(Some(f64::NAN)), "NaN");
        let latent = BASE.with_head_dims(576, 512).with_latent(true);
        refused(latent, "192^-0.5");
        let latent = latent.with_softmax_scale(Some(0.07217));
        assert_eq!((latent.check(), latent.head_dim_k()), (Ok(()), 64));
        let equal = latent.with_head_dim(512);
        assert_eq!((equal.check(), equal.head_dim_k()), (Ok(()), 0));
        refused(latent.with_head_dim(511), "head_dim = 511 and head_dim_v = 512 of a latent problem");
        refused(BASE.with_score(ScoreMod::softcap(0.0)), "softcap is 0");
        let program = crate::program::Program::parse("k <= q + off").unwrap().intern().unwrap();
        let own = BASE.with_score(ScoreMod::NONE.with_program(Some(program)));
        for types in [Types::fp8(Dtype::Bf16), half.with_kv(Dtype::Int8)] {
            assert_eq!(own.with_types(types).check(), Ok(()));
        }
        let moved = |offset| own.with_mask(Mask::CAUSAL.with_offset(offset));
        assert_eq!(moved(-(1 << 30)).check(), Ok(()));
        refused(moved((1 << 30) + 1), "query_offset = 1073741825 with a program");
        refused(BASE.with_lengths(Lengths::uniform(2, 1024, usize::MAX)), "k has");
        refused(
            BASE.with_lengths(Lengths::uniform(0, 1024, usize::MAX)),
            "k has the shape 0 x 18446744073709551615",
        );
    }

    #[test]
    fn lengths_on_the_device_fit_32_bits() {
        let check = |q, k| BASE.with_lengths(Lengths::of(3, q, k)).check();
        let long = MAX_I32 + 1;
        let too_long = |name| Err(ProblemError::TooLong { name, value: long, limit: MAX_I32 });
        assert_eq!(check(Side::packed(0, 0), Side::packed(0, 0)), Ok(()));
        // Fewer queries than sequences: some have none.
        assert_eq!(check(Side::packed(2, 1), Side::packed(9, 9)), Ok(()));
        assert_eq!(check(Side::packed(long, 1), Side::padded(1)), too_long("total_q"));
        assert_eq!(check(Side::packed(1, long), Side::padded(1)), too_long("seqlen_q"));
        assert_eq!(check(Side::packed(1, 1), Side::packed(long, 1)), too_long("total_k"));
        assert_eq!(check(Side::padded(1), Side::packed(1, long)), too_long("seqlen_k"));
        assert_eq!(check(Side::padded(1), Side::paged(1, long, 1)), too_long("pages"));
        assert_eq!(check(Side::padded(1), Side::paged(long, 1, 1)), too_long("page"));
        assert_eq!(check(Side::padded(1), Side::paged(0, 1, 1)), Err(ProblemError::Zero { name: "page" }));
        assert_eq!(check(Side::padded(1), Side::paged(1, 0, 1)), Err(ProblemError::Zero { name: "pages" }));
        assert_eq!(check(Side::padded(1), Side::paged(1, 0, 0)), Ok(()));
        assert_eq!(check(Side::paged(4, 2, 8), Side::padded(8)), Err(ProblemError::PagedQueries { page: 4 }));
        let table = Lengths::of(MAX_I32, Side::packed(1, 1), Side::paged(1, 1, MAX_I32));
        let error = BASE.with_lengths(table).check().unwrap_err().to_string();
        assert!(error.contains("page table has the shape 2147483647 x 2147483647"), "{error}");
    }
}
