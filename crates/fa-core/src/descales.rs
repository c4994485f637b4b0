//! What the codes of K and V, and of an fp8 Q, are multiplied by.
//!
//! A value is its code (an e4m3 number, or an integer) times a descale. With `s = scale * (q . code_k) *
//! q_descale * k_descale`, a soft cap acts on `s` and masks come after it; `O = (sum P code_v * v_descale) /
//! l`. LSE is that of the descaled scores, and says nothing of V. The descales of Q, too, are per K/V head:
//! the query heads of a group share one.
//!
//! A descale is finite and not negative: a sign belongs to the codes. Calls on host tensors refuse others by
//! name, of those of each row where a sequence has the row. What lies in device memory is not read on the
//! host: there a negative, infinite or NaN descale of K or Q per head, or per sequence and head, makes O and
//! LSE of every row that sees a key NaN (a kernel takes the largest product for the largest score), and one
//! of V makes O what `P code_v * v_descale` gives. Per row and head, codes become numbers as the rule says,
//! whatever the sign.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::lengths::{Side, SideRows};
use crate::with_methods;

/// The shape of a tensor of descales; elements are f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DescaleForm {
    /// No tensor: every descale is 1.
    #[default]
    None,
    /// `[heads_kv]`.
    Head,
    /// `[batch, heads_kv]`.
    SequenceHead,
    /// One for each row of each head, in the layout of K and V: `[batch, seqlen_k, heads_kv]`, `[total_k,
    /// heads_kv]` or `[pages, page, heads_kv]`.
    TokenHead,
}

/// The forms of the descales of K, V, and an fp8 Q.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub struct Descales {
    /// Of `q_descale`: anything but [`DescaleForm::TokenHead`].
    pub q: DescaleForm,
    /// Of `k_descale`.
    pub k: DescaleForm,
    /// Of `v_descale`.
    pub v: DescaleForm,
}

impl DescaleForm {
    /// All, in declaration order.
    pub const ALL: [DescaleForm; 4] =
        [DescaleForm::None, DescaleForm::Head, DescaleForm::SequenceHead, DescaleForm::TokenHead];

    /// The name in text.
    pub const fn name(self) -> &'static str {
        match self {
            DescaleForm::None => "none",
            DescaleForm::Head => "head",
            DescaleForm::SequenceHead => "sequence_head",
            DescaleForm::TokenHead => "token_head",
        }
    }

    /// The form of a tensor of this shape, whose axes are then those of [`crate::Extra::axes_of`], beside
    /// keys of these rows. Of packed keys two axes are `[batch, heads_kv]` where the first is the batch, else
    /// `[total_k, heads_kv]`.
    pub fn of_shape(shape: &[usize], keys: Side, sequences: usize) -> DescaleForm {
        let is_packed = matches!(keys.rows, SideRows::Packed { .. });
        match shape {
            [] | [_] => DescaleForm::Head,
            [rows, _] if is_packed && *rows != sequences => DescaleForm::TokenHead,
            [_, _] => DescaleForm::SequenceHead,
            _ => DescaleForm::TokenHead,
        }
    }

    pub(crate) fn is_none(&self) -> bool {
        *self == DescaleForm::None
    }
}

impl fmt::Display for DescaleForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Descales {
    /// Every descale is 1.
    pub const NONE: Descales = Descales::both(DescaleForm::None);

    /// K's and V's, with none of Q.
    pub const fn new(k: DescaleForm, v: DescaleForm) -> Descales {
        Descales { q: DescaleForm::None, k, v }
    }

    /// The same form for K and V, with none of Q.
    pub const fn both(form: DescaleForm) -> Descales {
        Descales::new(form, form)
    }

    /// The same form for Q, K and V.
    pub const fn all(form: DescaleForm) -> Descales {
        Descales { q: form, k: form, v: form }
    }

    with_methods! {
        with_q(q: DescaleForm),
        with_k(k: DescaleForm),
        with_v(v: DescaleForm),
    }

    /// The first tensor of K and V that there is, with its form.
    pub(crate) fn first_of_kv(self) -> Option<(&'static str, DescaleForm)> {
        [("k_descale", self.k), ("v_descale", self.v)].into_iter().find(|(_, form)| !form.is_none())
    }
}
