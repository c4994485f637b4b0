//! A problem as text (JSON, RON): flat, with a field for each thing that a user can set.

use serde::{Deserialize, Serialize};

use super::{Problem, ProblemError};
use crate::lengths::{Side, SideRows};
use crate::program::Interned;
use crate::score_mod::Alibi;
use crate::{DescaleForm, Descales, Dropout, Dtype, Lengths, Mask, ScoreMod, Types};

/// A problem as text.
#[derive(Serialize, Deserialize)]
#[serde(rename = "Problem", expecting = "the fields of a problem", deny_unknown_fields)]
pub(super) struct Flat {
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
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    latent: bool,
    mask: Mask,
    dtype: Dtype,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kv_dtype: Option<Dtype>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    out_dtype: Option<Dtype>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dkv_dtype: Option<Dtype>,
    #[serde(default, skip_serializing_if = "DescaleForm::is_none")]
    q_descale: DescaleForm,
    #[serde(default, skip_serializing_if = "DescaleForm::is_none")]
    k_descale: DescaleForm,
    #[serde(default, skip_serializing_if = "DescaleForm::is_none")]
    v_descale: DescaleForm,
    #[serde(default)]
    softmax_scale: Option<f64>,
    #[serde(default)]
    softcap: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    alibi: Option<Alibi>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    sinks: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    program: Option<Interned>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dropout: Option<Dropout>,
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
        Ok(Problem::new(
            Lengths::of(flat.batch, with_used(q, flat.used_q), with_used(k, flat.used_k)),
            (flat.heads_q, flat.heads_kv),
            (flat.head_dim, flat.head_dim_v),
            Types::of(flat.dtype, [flat.kv_dtype, flat.out_dtype, flat.dkv_dtype]),
        )
        .with_latent(flat.latent)
        .with_mask(flat.mask)
        .with_descales(Descales { q: flat.q_descale, k: flat.k_descale, v: flat.v_descale })
        .with_softmax_scale(flat.softmax_scale)
        .with_score(
            ScoreMod::NONE
                .with_softcap(flat.softcap)
                .with_alibi(flat.alibi)
                .with_sinks(flat.sinks)
                .with_program(flat.program)
                .with_dropout(flat.dropout),
        ))
    }
}

impl From<Problem> for Flat {
    fn from(problem: Problem) -> Flat {
        let Problem { lengths, heads_q, heads_kv, head_dim, head_dim_v, latent, mask, types, .. } = problem;
        let Problem { descales, softmax_scale, score, .. } = problem;
        let total = |side: Side| match side.rows {
            SideRows::Packed { total, .. } => Some(total),
            SideRows::Padded { .. } | SideRows::Paged { .. } => None,
        };
        let (page, pages) = match lengths.k().rows {
            SideRows::Paged { page, pages, .. } => (Some(page), Some(pages)),
            SideRows::Padded { .. } | SideRows::Packed { .. } => (None, None),
        };
        let [kv_dtype, out_dtype, dkv_dtype] = types.differing();
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
            latent,
            mask,
            dtype: types.q,
            kv_dtype,
            out_dtype,
            dkv_dtype,
            q_descale: descales.q,
            k_descale: descales.k,
            v_descale: descales.v,
            softmax_scale,
            softcap: score.softcap,
            alibi: score.alibi,
            sinks: score.sinks,
            program: score.program,
            dropout: score.dropout,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: Problem = Problem::square(2, 1024, 16, 128, Mask::FULL, Dtype::Bf16);

    #[test]
    fn text_is_flat() {
        const JSON: &str =
            r#"{"batch":2,"seqlen_q":1024,"seqlen_k":512,"heads_q":16,"heads_kv":16,"head_dim":128,"#;
        let base = BASE.with_lengths(Lengths::uniform(2, 1024, 512));
        let json = |problem: &Problem| serde_json::to_string(problem).unwrap();
        let plain = r#""head_dim_v":128,"mask":{"left":null,"right":null},"dtype":"bf16","#;
        let unset = r#""softmax_scale":null,"softcap":null}"#;
        assert_eq!(json(&base), format!("{JSON}{plain}{unset}"));
        let other = base
            .with_mask(Mask::window(3, 4))
            .with_types(Types::same(Dtype::F16))
            .with_softmax_scale(Some(0.5))
            .with_score(ScoreMod::softcap(30.0));
        let text = r#""head_dim_v":128,"mask":{"left":3,"right":4},"dtype":"f16","#;
        let set = r#""softmax_scale":0.5,"softcap":30.0}"#;
        assert_eq!(json(&other), format!("{JSON}{text}{set}"));
        let ron = "(batch:2,seqlen_q:1024,seqlen_k:512,heads_q:16,heads_kv:16,head_dim:128,head_dim_v:128,\
                   mask:(left:Some(3),right:Some(4)),dtype:f16,softmax_scale:Some(0.5),softcap:Some(30.0))";
        assert_eq!(ron::to_string(&other).unwrap(), ron);
        let half = Types::same(Dtype::F16);
        let named = [
            half.with_out(Dtype::F32).with_dkv(Dtype::F32),
            half.with_kv(Dtype::Int8),
            Types::fp8(Dtype::Bf16),
        ];
        let latent = other.with_head_dims(576, 512).with_latent(true);
        let dropout = Dropout::new(0.1, u64::MAX, 1 << 60).unwrap();
        let dropped = other.with_score(dropout.of(other.score).unwrap());
        assert!(
            json(&dropped)
                .contains(r#""dropout":{"p":0.1,"seed":18446744073709551615,"offset":1152921504606846976}"#)
        );
        assert!(json(&latent).contains(r#""head_dim_v":512,"latent":true,"mask""#));
        for problem in
            [base, other, latent, dropped].into_iter().chain(named.map(|types| base.with_types(types)))
        {
            assert_eq!(serde_json::from_str::<Problem>(&json(&problem)).unwrap(), problem);
            assert_eq!(ron::from_str::<Problem>(&ron::to_string(&problem).unwrap()).unwrap(), problem);
        }
        let cache = base.with_types(half.with_kv(Dtype::E4m3));
        let cache = cache.with_descales(Descales::new(DescaleForm::SequenceHead, DescaleForm::TokenHead));
        let text = ron::to_string(&cache).unwrap();
        let part = "dtype:f16,kv_dtype:Some(e4m3),k_descale:sequence_head,v_descale:token_head,softmax_scale";
        assert!(text.contains(part), "{text}");
        assert_eq!(ron::from_str::<Problem>(&text).unwrap(), cache);
        assert_eq!(serde_json::from_str::<Problem>(&json(&cache)).unwrap(), cache);
        let fp8 = base.with_types(Types::fp8(Dtype::Bf16));
        let fp8 = fp8.with_descales(Descales::all(DescaleForm::Head));
        let text = ron::to_string(&fp8).unwrap();
        let part =
            "dtype:e4m3,out_dtype:Some(bf16),q_descale:head,k_descale:head,v_descale:head,softmax_scale";
        assert!(text.contains(part), "{text}");
        assert_eq!(ron::from_str::<Problem>(&text).unwrap(), fp8);
        let error = ron::from_str::<Problem>(&text.replace("e4m3", "e3m4")).unwrap_err().to_string();
        assert!(error.contains("e3m4") && error.contains("e4m3") && error.contains("int8"), "{error}");
        let named: Problem = ron::from_str(&format!("Problem{ron}")).unwrap();
        assert_eq!(named, other);
        // What may be left out, and what may not.
        let short = ron.replace(",softmax_scale:Some(0.5),softcap:Some(30.0)", "");
        let read: Problem = ron::from_str(&short).unwrap();
        assert_eq!(read, other.with_softmax_scale(None).with_score(ScoreMod::NONE));
        let error = ron::from_str::<Problem>(&ron.replace("batch:2,", "")).unwrap_err().to_string();
        assert!(error.contains("batch"), "{error}");
        let error =
            ron::from_str::<Problem>(&ron.replace("batch:2,", "batch:2,bias:1,")).unwrap_err().to_string();
        assert!(error.contains("bias"), "{error}");
    }

    #[test]
    fn text_of_varied_problems_says_how_rows_lie() {
        let of = |q, k| BASE.with_lengths(Lengths::of(3, q, k));
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
        let error = serde_json::from_str::<Problem>("\"x\"").unwrap_err().to_string();
        assert!(error.contains("expected the fields of a problem"), "{error}");
        let score = ScoreMod::NONE.with_alibi(Some(Alibi::PerSequenceHead)).with_sinks(true);
        let text = ron::to_string(&BASE.with_score(score)).unwrap();
        assert!(text.ends_with("softcap:None,alibi:Some(per_sequence_head),sinks:true)"), "{text}");
        assert_eq!(ron::from_str::<Problem>(&text).unwrap(), BASE.with_score(score));
    }
}
