//! One attention problem: shapes, types, mask and scalars, with its operation and byte counts.

use serde::{Deserialize, Serialize};

use crate::{Dtype, Lengths, Mask, Pass, ScoreMod, Types};

/// `O = softmax(mask(score(scale * Q K^T))) V` for each query head of each sequence.
///
/// Q is `[batch, seqlen_q, heads_q, head_dim]`, K `[batch, seqlen_k, heads_kv, head_dim]`, V `[batch,
/// seqlen_k, heads_kv, head_dim_v]`, O `[batch, seqlen_q, heads_q, head_dim_v]` (or the BHSD forms). Query
/// head `h` reads K and V head `h / (heads_q / heads_kv)`.
///
/// As text (JSON, RON) a problem is flat: `batch`, `seqlen_q` and `seqlen_k` for the lengths, `dtype` for the
/// types, `softcap` for the change of scores.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Flat", into = "Flat")]
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
}

impl From<Flat> for Problem {
    fn from(flat: Flat) -> Problem {
        Problem {
            lengths: Lengths::uniform(flat.batch, flat.seqlen_q, flat.seqlen_k),
            heads_q: flat.heads_q,
            heads_kv: flat.heads_kv,
            head_dim: flat.head_dim,
            head_dim_v: flat.head_dim_v,
            mask: flat.mask,
            types: Types { qkv: flat.dtype, out: flat.out_dtype.unwrap_or(flat.dtype) },
            softmax_scale: flat.softmax_scale,
            score: ScoreMod { softcap: flat.softcap },
        }
    }
}

impl From<Problem> for Flat {
    fn from(problem: Problem) -> Flat {
        let Problem { lengths, heads_q, heads_kv, head_dim, head_dim_v, mask, types, softmax_scale, score } =
            problem;
        let (batch, seqlen_q, seqlen_k) = match lengths {
            Lengths::Uniform(_) => (lengths.sequences(), lengths.max_q(), lengths.max_k()),
        };
        Flat {
            batch,
            seqlen_q,
            seqlen_k,
            heads_q,
            heads_kv,
            head_dim,
            head_dim_v,
            mask,
            dtype: types.qkv,
            out_dtype: types.differing_out(),
            softmax_scale,
            softcap: score.softcap,
        }
    }
}

/// Why a [`Problem`] is invalid.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProblemError {
    /// A length that must be at least 1 is 0.
    #[error("{name} is 0: it must be at least 1")]
    Zero {
        /// The field.
        name: &'static str,
    },
    /// The number of query heads is not a multiple of the number of K/V heads.
    #[error(
        "heads_q = {heads_q} is not a multiple of heads_kv = {heads_kv}: each K/V head serves \
         heads_q / heads_kv query heads"
    )]
    HeadsNotDivisible {
        /// Query heads.
        heads_q: usize,
        /// Key and value heads.
        heads_kv: usize,
    },
    /// The type of O is not that of Q, K and V.
    #[error(
        "out_dtype is {out} and dtype is {qkv}: O is written in the type of Q, K and V, leave out_dtype out"
    )]
    Types {
        /// Type of Q, K and V.
        qkv: Dtype,
        /// Type of O.
        out: Dtype,
    },
    /// A tensor would have more elements than can be addressed.
    #[error(
        "{tensor} has the shape {shape}, of more than 2^{limit_bits} - 1 elements (a length of 0 counts \
         as 1): split the batch"
    )]
    TooLarge {
        /// The tensor.
        tensor: &'static str,
        /// Its shape as text.
        shape: String,
        /// Bits of the largest count of elements.
        limit_bits: u32,
    },
    /// A scalar that must be finite is not, or must be positive and is not.
    #[error("{name} is {value}: it must be {need}")]
    BadScalar {
        /// The field.
        name: &'static str,
        /// Its value.
        value: f64,
        /// What it must be.
        need: &'static str,
    },
}

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
        let (batch, seqlen_q, seqlen_k) =
            (self.lengths.sequences(), self.lengths.max_q(), self.lengths.max_k());
        for (tensor, [b, s, h, d]) in [
            ("q", [batch, seqlen_q, self.heads_q, self.head_dim]),
            ("k", [batch, seqlen_k, self.heads_kv, self.head_dim]),
            ("v", [batch, seqlen_k, self.heads_kv, self.head_dim_v]),
            ("out", [batch, seqlen_q, self.heads_q, self.head_dim_v]),
        ] {
            let elements = [b, s, h, d].iter().try_fold(1u64, |n, &len| n.checked_mul(len.max(1) as u64));
            if elements.is_none_or(|n| n >> ELEMENT_BITS != 0) {
                let shape = format!("{b} x {s} x {h} x {d}");
                return Err(ProblemError::TooLarge { tensor, shape, limit_bits: ELEMENT_BITS });
            }
        }
        if let Some(value) = self.softmax_scale.filter(|scale| !scale.is_finite()) {
            return Err(ProblemError::BadScalar { name: "softmax_scale", value, need: "finite" });
        }
        if let Some(value) = self.score.softcap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
            return Err(ProblemError::BadScalar { name: "softcap", value, need: "finite and above 0" });
        }
        Ok(())
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

    /// Visible (query, key) pairs over all heads and sequences.
    pub fn pairs(&self) -> f64 {
        match self.lengths {
            Lengths::Uniform(_) => {
                let pairs = self.mask.pairs(self.lengths.max_q(), self.lengths.max_k());
                self.lengths.sequences() as f64 * self.heads_q as f64 * pairs as f64
            }
        }
    }

    /// Floating-point operations of the forward: two products of 2 operations per pair and element,
    /// `2 * pairs * (head_dim + head_dim_v)` (the field's convention; masked pairs do not count).
    pub fn flops_forward(&self) -> f64 {
        2.0 * self.pairs() * (self.head_dim + self.head_dim_v) as f64
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

    /// Fewest bytes the forward moves: Q, K, V read once, O and the f32 LSE written once.
    pub fn bytes_forward(&self) -> f64 {
        let (q, k, v, o) = self.elements();
        let (qkv, out) = (self.types.qkv.bytes() as f64, self.types.out.bytes() as f64);
        qkv * (q + k + v) + out * o + 4.0 * self.rows()
    }

    /// Fewest bytes the backward moves: Q, K, V, O, dO and LSE read once, dQ, dK and dV written once.
    pub fn bytes_backward(&self) -> f64 {
        let (q, k, v, o) = self.elements();
        let (qkv, out) = (self.types.qkv.bytes() as f64, self.types.out.bytes() as f64);
        2.0 * (qkv * (q + k + v) + out * o) + 4.0 * self.rows()
    }

    /// Query rows over all heads and sequences: the number of LSE values.
    pub fn rows(&self) -> f64 {
        self.heads_q as f64 * self.total(Lengths::max_q)
    }

    /// A length summed over the sequences.
    fn total(&self, length: fn(&Lengths) -> usize) -> f64 {
        match self.lengths {
            Lengths::Uniform(_) => self.lengths.sequences() as f64 * length(&self.lengths) as f64,
        }
    }

    fn elements(&self) -> (f64, f64, f64, f64) {
        let keys = self.heads_kv as f64 * self.total(Lengths::max_k);
        let (hd, hdv) = (self.head_dim as f64, self.head_dim_v as f64);
        (self.rows() * hd, keys * hd, keys * hdv, self.rows() * hdv)
    }
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
}
