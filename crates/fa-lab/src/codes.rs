//! Which tensors of a problem hold codes, and what their values and descales are like.

use fa_core::quantize::Codes;
use fa_core::{DescaleForm, Problem};

/// The codes that Q, K and V hold; `None` for elements of 16 bits.
pub fn kinds(problem: &Problem) -> [Option<Codes>; 3] {
    let of_kv = Codes::of(problem.types.kv);
    [Codes::of(problem.types.q), of_kv, of_kv]
}

/// What values of unit variance are multiplied by before they become codes, and descales divided by: integers
/// are few near 0.
pub fn spread(codes: Codes) -> f32 {
    match codes {
        Codes::E4m3 | Codes::E5m2 => 1.0,
        Codes::Int8 => 32.0,
        Codes::Int4 => 2.5,
    }
}

/// The forms of the descales of Q, K and V.
pub(crate) fn forms(problem: &Problem) -> [DescaleForm; 3] {
    [problem.descales.q, problem.descales.k, problem.descales.v]
}
