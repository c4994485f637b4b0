//! One attention problem: shapes, types, mask and scalars, with its operation and byte counts.

mod error;

use serde::{Deserialize, Serialize};

use crate::lengths::{Side, SideRows};
use crate::score_mod::Alibi;
use crate::{Dtype, Lengths, Mask, Pass, ScoreMod, Types};

pub use error::ProblemError;

/// `O = softmax(mask(score(scale * Q K^T))) V` for each query head of each sequence.
///
/// Q is `[batch, seqlen_q, heads_q, head_dim]`, K `[batch, seqlen_k, heads_kv, head_dim]`, V `[batch,
/// seqlen_k, heads_kv, head_dim_v]`, O `[batch, seqlen_q, heads_q, head_dim_v]` (or the BHSD forms). Query
/// head `h` reads K and V head `h / (heads_q / heads_kv)`. Packed sides are `[total, heads, head_dim]`, a
/// cache in pages `[pages, page, heads_kv, head_dim]` ([`crate::lengths::SideRows`]).
///
/// As text (JSON, RON) a problem is flat: `batch`, `seqlen_q` and `seqlen_k` for the lengths (upper bounds
/// where lengths are on the device) with `total_q` and `total_k` for packed sides, `page` and `pages` for a
/// cache in pages, `used_q` and `used_k` for lengths in use; `dtype` for the types; `softcap`, `alibi` and
/// `sinks` for the change of scores.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Flat", into = "Flat")]
pub struct Problem {
    /// Sequences, with the queries and keys of each.
    pub lengths: Lengths,
    /// Query heads.
    pub heads_q: usize,
    /// Key and value heads; divides `heads_q`.
    pub heads_kv: usize,
    /// Elements of a query or key.
    pub head_dim: usize,
    /// Elements of a value or output row.
    pub head_dim_v: usize,
    /// Which keys a query sees.
    pub mask: Mask,
    /// Types of the tensors.
    pub types: Types,
    /// Factor on Q K^T; `None` for `1 / sqrt(head_dim)`.
    pub softmax_scale: Option<f64>,
    /// What is done to the scaled scores, before the mask.
    pub score: ScoreMod,
}

/// A problem as text.
#[derive(Serialize, Deserialize)]
#[serde(rename = "Problem", deny_unknown_fields)]
struct Flat {
    batch: usize,
    seqlen_q: usize,
    seqlen_k: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    total_q: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    total_k: Option<usize>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    used_q: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    used_k: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    page: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pages: Option<usize>,
    heads_q: usize,
    heads_kv: usize,
    head_dim: usize,
    head_dim_v: usize,
    mask: Mask,
    dtype: Dtype,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    out_dtype: Option<Dtype>,
    #[serde(default)]
    softmax_scale: Option<f64>,
    #[serde(default)]
    softcap: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    alibi: Option<Alibi>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    sinks: bool,
}

impl TryFrom<Flat> for Problem {
    type Error = ProblemError;

    fn try_from(flat: Flat) -> Result<Problem, ProblemError> {
        let side = |total: Option<usize>, max| match total {
            Some(total) => Side::packed(total, max),
            None => Side::padded(max),
        };
        let q = side(flat.total_q, flat.seqlen_q);
        let k = match (flat.page, flat.pages, flat.total_k) {
            (None, None, total) => side(total, flat.seqlen_k),
            (Some(page), Some(pages), None) => Side::paged(page, pages, flat.seqlen_k),
            (page, pages, total_k) => return Err(ProblemError::Keys { page, pages, total_k }),
        };
        let with_used = |side: Side, used: bool| if used { side.with_used() } else { side };
        Ok(Problem {
            lengths: Lengths::of(flat.batch, with_used(q, flat.used_q), with_used(k, flat.used_k)),
            heads_q: flat.heads_q,
            heads_kv: flat.heads_kv,
            head_dim: flat.head_dim,
            head_dim_v: flat.head_dim_v,
            mask: flat.mask,
            types: Types { qkv: flat.dtype, out: flat.out_dtype.unwrap_or(flat.dtype) },
            softmax_scale: flat.softmax_scale,
            score: ScoreMod { softcap: flat.softcap, alibi: flat.alibi, sinks: flat.sinks },
        })
    }
}

impl From<Problem> for Flat {
    fn from(problem: Problem) -> Flat {
        let Problem { lengths, heads_q, heads_kv, head_dim, head_dim_v, mask, types, softmax_scale, score } =
            problem;
        let total = |side: Side| match side.rows {
            SideRows::Packed { total, .. } => Some(total),
            SideRows::Padded { .. } | SideRows::Paged { .. } => None,
        };
        let (page, pages) = match lengths.k().rows {
            SideRows::Paged { page, pages, .. } => (Some(page), Some(pages)),
            SideRows::Padded { .. } | SideRows::Packed { .. } => (None, None),
        };
        Flat {
            batch: lengths.sequences(),
            seqlen_q: lengths.max_q(),
            seqlen_k: lengths.max_k(),
            total_q: total(lengths.q()),
            total_k: total(lengths.k()),
            used_q: lengths.q().used,
            used_k: lengths.k().used && page.is_none(),
            page,
            pages,
            heads_q,
            heads_kv,
            head_dim,
            head_dim_v,
            mask,
            dtype: types.qkv,
            out_dtype: types.differing_out(),
            softmax_scale,
            softcap: score.softcap,
            alibi: score.alibi,
            sinks: score.sinks,
        }
    }
}

/// The most that a count read on the device may be.
const MAX_I32: usize = i32::MAX as usize;

/// A tensor may have at most `2^ELEMENT_BITS - 1` elements, so that byte offsets fit a signed 64-bit number.
pub const ELEMENT_BITS: u32 = 48;

impl Problem {
    /// A square self-attention problem: equal lengths, heads and head dims, default scale, no cap.
    pub const fn square(
        batch: usize,
        seqlen: usize,
        heads: usize,
        head_dim: usize,
        mask: Mask,
        dtype: Dtype,
    ) -> Self {
        Problem {
            lengths: Lengths::uniform(batch, seqlen, seqlen),
            heads_q: heads,
            heads_kv: heads,
            head_dim,
            head_dim_v: head_dim,
            mask,
            types: Types::same(dtype),
            softmax_scale: None,
            score: ScoreMod::NONE,
        }
    }

    /// Checks the relations between the fields. An empty batch and empty sequences are valid and give empty
    /// or zero outputs; in the limit on elements a length of 0 counts as 1.
    ///
    /// # Errors
    /// The first [`ProblemError`] found.
    pub fn check(&self) -> Result<(), ProblemError> {
        let lengths = [
            ("heads_q", self.heads_q),
            ("heads_kv", self.heads_kv),
            ("head_dim", self.head_dim),
            ("head_dim_v", self.head_dim_v),
        ];
        if let Some(&(name, _)) = lengths.iter().find(|(_, value)| *value == 0) {
            return Err(ProblemError::Zero { name });
        }
        if !self.heads_q.is_multiple_of(self.heads_kv) {
            return Err(ProblemError::HeadsNotDivisible { heads_q: self.heads_q, heads_kv: self.heads_kv });
        }
        let Types { qkv, out } = self.types;
        if qkv != out {
            return Err(ProblemError::Types { qkv, out });
        }
        self.check_lengths()?;
        let (q, k) = (self.rows_of(self.lengths.q()), self.rows_of(self.lengths.k()));
        let tensors = [
            ("q", q, self.heads_q, self.head_dim),
            ("k", k, self.heads_kv, self.head_dim),
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
        Ok(())
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

    /// The factor on Q K^T.
    pub fn scale(&self) -> f64 {
        self.softmax_scale.unwrap_or_else(|| 1.0 / (self.head_dim as f64).sqrt())
    }

    /// Query heads per K/V head; 0 without K/V heads, which [`Problem::check`] refuses.
    pub const fn group_size(&self) -> usize {
        match self.heads_q.checked_div(self.heads_kv) {
            Some(group) => group,
            None => 0,
        }
    }

    /// Visible (query, key) pairs over all heads and sequences. Where lengths are on the device this is an
    /// estimate, as if every sequence had the mean length; who knows the lengths adds up problems of one
    /// sequence each.
    pub fn pairs(&self) -> f64 {
        let pairs = self.mask.pairs(self.lengths.mean_q(), self.lengths.mean_k());
        self.lengths.sequences() as f64 * self.heads_q as f64 * pairs as f64
    }

    /// Floating-point operations of the forward: two products of 2 operations per pair and element,
    /// `2 * pairs * (head_dim + head_dim_v)` (the field's convention; masked pairs do not count).
    pub fn flops_forward(&self) -> f64 {
        2.0 * self.pairs() * (self.head_dim as f64 + self.head_dim_v as f64)
    }

    /// Floating-point operations of the backward, by the field's convention 2.5 times the forward's: five
    /// products of a tile for the forward's two. (With `head_dim != head_dim_v` the exact count is `2 * pairs
    /// * (3 hd + 2 hdv)`.)
    pub fn flops_backward(&self) -> f64 {
        2.5 * self.flops_forward()
    }

    /// [`Problem::flops_forward`] or [`Problem::flops_backward`].
    pub fn flops(&self, pass: Pass) -> f64 {
        match pass {
            Pass::Forward => self.flops_forward(),
            Pass::Backward { .. } => self.flops_backward(),
        }
    }

    /// [`Problem::bytes_forward`] or [`Problem::bytes_backward`].
    pub fn bytes(&self, pass: Pass) -> f64 {
        match pass {
            Pass::Forward => self.bytes_forward(),
            Pass::Backward { .. } => self.bytes_backward(),
        }
    }

    /// Fewest bytes the forward moves: Q, and K and V as far as any query sees them, read once; O and the f32
    /// LSE written once.
    pub fn bytes_forward(&self) -> f64 {
        self.bytes_held(Pass::Forward) - self.unseen_bytes()
    }

    /// Fewest bytes the backward moves: Q, K and V as far as any query sees them, O, dO and LSE read once;
    /// dQ, dK and dV written once.
    pub fn bytes_backward(&self) -> f64 {
        self.bytes_held(Pass::BACKWARD) - self.unseen_bytes()
    }

    /// Bytes of the tensors that a pass reads and writes: Q, K, V, O and LSE, and for the backward dO, dQ, dK
    /// and dV.
    pub fn bytes_held(&self, pass: Pass) -> f64 {
        let (q, k, v, o) = self.elements();
        let (qkv, out) = (self.types.qkv.bytes() as f64, self.types.out.bytes() as f64);
        let times = if pass.is_backward() { 2.0 } else { 1.0 };
        times * (qkv * (q + k + v) + out * o) + 4.0 * self.rows()
    }

    /// Bytes of K and V that no query sees: those before a window. Where lengths are on the device an
    /// estimate by the mean lengths, as for [`Problem::pairs`].
    fn unseen_bytes(&self) -> f64 {
        let (mean_q, mean_k) = (self.lengths.mean_q(), self.lengths.mean_k());
        let seen = self.mask.keys_of_all(mean_q, mean_k).len() as f64;
        let (_, k, v, _) = self.elements();
        self.types.qkv.bytes() as f64 * (k + v) * (1.0 - seen / (mean_k as f64).max(1.0))
    }

    /// Query rows over all heads and sequences: the number of LSE values (at most, where lengths are on the
    /// device).
    pub fn rows(&self) -> f64 {
        self.heads_q as f64 * self.lengths.reach_q() as f64
    }

    fn elements(&self) -> (f64, f64, f64, f64) {
        let keys = self.heads_kv as f64 * self.lengths.reach_k() as f64;
        let (hd, hdv) = (self.head_dim as f64, self.head_dim_v as f64);
        (self.rows() * hd, keys * hd, keys * hdv, self.rows() * hdv)
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

    const BASE: Problem = Problem::square(2, 1024, 16, 128, Mask::FULL, Dtype::Bf16);

    #[test]
    fn counts_follow_the_published_convention() {
        assert_eq!(BASE.flops_forward(), 4.0 * 2.0 * 16.0 * 1024.0 * 1024.0 * 128.0);
        assert_eq!(BASE.flops_backward(), 2.5 * BASE.flops_forward());
        let causal = Problem { mask: Mask::CAUSAL, ..BASE };
        assert_eq!(causal.pairs(), 2.0 * 16.0 * 1024.0 * 1025.0 / 2.0);
        assert_eq!(BASE.bytes_forward(), 2.0 * 16.0 * 1024.0 * (4.0 * 128.0 * 2.0 + 4.0));
        assert_eq!(BASE.bytes_backward(), 2.0 * 16.0 * 1024.0 * (8.0 * 128.0 * 2.0 + 4.0));
        // One token of a window of 128 reads 128 keys of 1,024, and holds them all.
        let lengths = Lengths::uniform(2, 1, 1024);
        let token = Problem { lengths, mask: Mask::causal_window(127), ..BASE };
        let [held, moved] = [token.bytes_held(Pass::Forward), token.bytes_forward()];
        assert_eq!(held, Problem { mask: Mask::CAUSAL, ..token }.bytes_forward());
        assert_eq!(held - moved, 2.0 * 16.0 * (1024.0 - 128.0) * 2.0 * 128.0 * 2.0);
        assert_eq!(token.bytes_held(Pass::BACKWARD) - token.bytes_backward(), held - moved);
    }

    #[test]
    fn estimates_of_problems_that_are_refused_do_not_panic() {
        let lengths = Lengths::uniform(usize::MAX, usize::MAX, usize::MAX);
        let dims = Problem { head_dim: usize::MAX, head_dim_v: usize::MAX, ..BASE };
        for problem in [Problem { lengths, ..BASE }, dims, Problem { lengths, heads_kv: 0, ..dims }] {
            assert!(problem.check().is_err());
            assert!(problem.flops_backward().is_finite() && problem.bytes(Pass::BACKWARD).is_finite());
        }
    }

    #[test]
    fn refusals_name_the_field_and_the_value() {
        let refused = |problem: Problem, part: &str| {
            let text = problem.check().expect_err("must be refused").to_string();
            assert!(text.contains(part), "{text} does not name {part}");
        };
        assert_eq!(BASE.check(), Ok(()));
        assert_eq!(Problem { lengths: Lengths::uniform(0, 0, 1024), ..BASE }.check(), Ok(()));
        refused(Problem { head_dim: 0, ..BASE }, "head_dim is 0");
        refused(Problem { heads_kv: 3, ..BASE }, "heads_kv = 3");
        refused(Problem { heads_kv: 0, ..BASE }, "heads_kv is 0");
        assert_eq!(Problem { heads_kv: 0, ..BASE }.group_size(), 0);
        refused(Problem { types: Types { qkv: Dtype::F16, out: Dtype::F32 }, ..BASE }, "out_dtype is f32");
        refused(Problem { softmax_scale: Some(f64::NAN), ..BASE }, "NaN");
        refused(Problem { score: ScoreMod::softcap(0.0), ..BASE }, "softcap is 0");
        refused(Problem { lengths: Lengths::uniform(2, 1024, usize::MAX), ..BASE }, "k has");
        refused(
            Problem { lengths: Lengths::uniform(0, 1024, usize::MAX), ..BASE },
            "k has the shape 0 x 18446744073709551615",
        );
    }

    #[test]
    fn text_is_flat() {
        const JSON: &str =
            r#"{"batch":2,"seqlen_q":1024,"seqlen_k":512,"heads_q":16,"heads_kv":16,"head_dim":128,"#;
        let base = Problem { lengths: Lengths::uniform(2, 1024, 512), ..BASE };
        let json = |problem: &Problem| serde_json::to_string(problem).unwrap();
        let plain = r#""head_dim_v":128,"mask":{"left":null,"right":null},"dtype":"bf16","#;
        let unset = r#""softmax_scale":null,"softcap":null}"#;
        assert_eq!(json(&base), format!("{JSON}{plain}{unset}"));
        let other = Problem {
            mask: Mask::window(3, 4),
            types: Types::same(Dtype::F16),
            softmax_scale: Some(0.5),
            score: ScoreMod::softcap(30.0),
            ..base
        };
        let text = r#""head_dim_v":128,"mask":{"left":3,"right":4},"dtype":"f16","#;
        let set = r#""softmax_scale":0.5,"softcap":30.0}"#;
        assert_eq!(json(&other), format!("{JSON}{text}{set}"));
        let ron = "(batch:2,seqlen_q:1024,seqlen_k:512,heads_q:16,heads_kv:16,head_dim:128,head_dim_v:128,\
                   mask:(left:Some(3),right:Some(4)),dtype:f16,softmax_scale:Some(0.5),softcap:Some(30.0))";
        assert_eq!(ron::to_string(&other).unwrap(), ron);
        let mixed = Problem { types: Types { qkv: Dtype::F16, out: Dtype::F32 }, ..base };
        for problem in [base, other, mixed] {
            assert_eq!(serde_json::from_str::<Problem>(&json(&problem)).unwrap(), problem);
            assert_eq!(ron::from_str::<Problem>(&ron::to_string(&problem).unwrap()).unwrap(), problem);
        }
        let named: Problem = ron::from_str(&format!("Problem{ron}")).unwrap();
        assert_eq!(named, other);
        // What may be left out, and what may not.
        let short = ron.replace(",softmax_scale:Some(0.5),softcap:Some(30.0)", "");
        let read: Problem = ron::from_str(&short).unwrap();
        assert_eq!(read, Problem { softmax_scale: None, score: ScoreMod::NONE, ..other });
        let error = ron::from_str::<Problem>(&ron.replace("batch:2,", "")).unwrap_err().to_string();
        assert!(error.contains("batch"), "{error}");
        let error =
            ron::from_str::<Problem>(&ron.replace("batch:2,", "batch:2,bias:1,")).unwrap_err().to_string();
        assert!(error.contains("bias"), "{error}");
    }

    #[test]
    fn text_of_varied_problems_says_how_rows_lie() {
        let of = |q, k| Problem { lengths: Lengths::of(3, q, k), ..BASE };
        let sides = [Side::padded(7), Side::padded(7).with_used(), Side::packed(15, 7)];
        for (q, parts_q) in sides.iter().zip([&[][..], &["used_q:true"], &["total_q:Some(15)"]]) {
            for (k, parts_k) in [
                (Side::packed(99, 40), &["total_k:Some(99)"][..]),
                (Side::packed(99, 40).with_used(), &["total_k:Some(99)", "used_k:true"]),
                (Side::padded(40).with_used(), &["used_k:true"]),
                (Side::paged(16, 9, 40), &["page:Some(16)", "pages:Some(9)"]),
            ] {
                let problem = of(*q, k);
                assert_eq!(problem.check(), Ok(()));
                let text = ron::to_string(&problem).unwrap();
                assert!(text.starts_with("(batch:3,seqlen_q:7,seqlen_k:40,"), "{text}");
                let all = ["total_q", "total_k", "used_q", "used_k", "page:", "pages:"];
                let written = all.iter().filter(|name| text.contains(*name)).count();
                assert_eq!(written, parts_q.len() + parts_k.len(), "{text}");
                assert!(parts_q.iter().chain(parts_k).all(|part| text.contains(part)), "{text}");
                assert_eq!(ron::from_str::<Problem>(&text).unwrap(), problem);
                let json = serde_json::to_string(&problem).unwrap();
                assert_eq!(serde_json::from_str::<Problem>(&json).unwrap(), problem);
            }
        }
        let text = ron::to_string(&of(Side::padded(1), Side::paged(16, 9, 40))).unwrap();
        for (from, to) in [("pages:Some(9),", ""), ("page:Some(16),", "page:Some(16),total_k:Some(3),")] {
            let error = ron::from_str::<Problem>(&text.replace(from, to)).unwrap_err().to_string();
            assert!(error.contains("keys in pages need page and pages"), "{error}");
        }
        let score = ScoreMod { softcap: None, alibi: Some(Alibi::PerSequenceHead), sinks: true };
        let text = ron::to_string(&Problem { score, ..BASE }).unwrap();
        assert!(text.ends_with("softcap:None,alibi:Some(per_sequence_head),sinks:true)"), "{text}");
        assert_eq!(ron::from_str::<Problem>(&text).unwrap(), Problem { score, ..BASE });
    }

    #[test]
    fn lengths_on_the_device_fit_32_bits() {
        let check = |q, k| Problem { lengths: Lengths::of(3, q, k), ..BASE }.check();
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
        let error = Problem { lengths: table, ..BASE }.check().unwrap_err().to_string();
        assert!(error.contains("page table has the shape 2147483647 x 2147483647"), "{error}");
    }

    #[test]
    fn counts_of_varied_problems_are_bounded_by_rows_and_lengths() {
        let packed = Problem { lengths: Lengths::packed(4, 1000, 9000, 500, 1000), ..BASE };
        assert_eq!(packed.rows(), 16.0 * 1000.0);
        assert_eq!(packed.pairs(), 4.0 * 16.0 * 250.0 * 1000.0);
        let keys = 4000.0 * 2.0 * 128.0 * 16.0 * 2.0;
        assert_eq!(packed.bytes_forward(), keys + 1000.0 * 16.0 * (2.0 * 128.0 * 2.0 + 4.0));
        let uniform = Problem { lengths: Lengths::uniform(4, 250, 1000), ..BASE };
        assert_eq!(
            (packed.flops_forward(), packed.bytes_backward()),
            (uniform.flops_forward(), uniform.bytes_backward())
        );
    }
}
