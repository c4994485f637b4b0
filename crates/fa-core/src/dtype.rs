//! Element types of Q, K, V and O.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, DeserializeSeed, EnumAccess, VariantAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::with_methods;

/// Element type of an attention problem's tensors.
///
/// Values of the types of 8 and 4 bits are codes times a descale: of K and V alone, or, in e4m3, of Q as
/// well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// IEEE binary16: 10 mantissa bits.
    F16,
    /// bfloat16: 7 mantissa bits, the exponent range of f32.
    Bf16,
    /// 8-bit float with 4 exponent and 3 mantissa bits (OCP OFP8, "fn" variant: no infinities).
    E4m3,
    /// 8-bit signed integers of a quantised cache: a value is its code times a scale.
    Int8,
    /// 4-bit signed integers of a quantised cache, two to a byte: the lower half has the first. Tensors of
    /// them are tensors of bytes, whose rows have half as many elements as numbers.
    Int4,
    /// 8-bit float with 5 exponent and 2 mantissa bits (OCP OFP8), the upper byte of an f16, of a quantised
    /// cache.
    E5m2,
}

impl Dtype {
    /// Every element type, in declaration order.
    pub const ALL: [Dtype; 7] =
        [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::E4m3, Dtype::Int8, Dtype::Int4, Dtype::E5m2];

    /// The types of numbers that stand for themselves: the CPU computes all of them, GPU kernels the 16-bit
    /// ones.
    pub const COMPUTED: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

    /// Bytes of one element of a tensor.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => 1,
        }
    }

    /// Numbers in one element of a tensor: two of int4, else one.
    pub const fn per_element(self) -> usize {
        match self {
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 | Dtype::E4m3 | Dtype::Int8 | Dtype::E5m2 => 1,
            Dtype::Int4 => 2,
        }
    }

    /// Elements of a tensor's row of so many numbers.
    pub const fn elements(self, numbers: usize) -> usize {
        numbers.div_ceil(self.per_element())
    }

    /// Bytes of a number, of which int4 has two in one.
    pub const fn bytes_per_number(self) -> f64 {
        self.bytes() as f64 / self.per_element() as f64
    }

    /// Whether this is one of the 16-bit floating-point types, in which the GPU kernels compute.
    pub const fn is_half(self) -> bool {
        match self {
            Dtype::F16 | Dtype::Bf16 => true,
            Dtype::F32 | Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => false,
        }
    }

    /// The types of codes: K and V may have one, beside a Q of a type of [`Dtype::COMPUTED`], or all three
    /// e4m3.
    pub const CODES: [Dtype; 4] = [Dtype::E4m3, Dtype::Int8, Dtype::Int4, Dtype::E5m2];

    /// Whether this is one of [`Dtype::CODES`].
    pub const fn is_code(self) -> bool {
        match self {
            Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => true,
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => false,
        }
    }

    /// The name used on the command line, in RON and in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
            Dtype::E4m3 => "e4m3",
            Dtype::Int8 => "int8",
            Dtype::Int4 => "int4",
            Dtype::E5m2 => "e5m2",
        }
    }

    /// Half the distance between 1 and the next larger number: the largest relative rounding error of a
    /// normal number; of an integer code, half a step of the largest.
    pub const fn unit_roundoff(self) -> f64 {
        match self {
            Dtype::F32 => 1.0 / (1u64 << 24) as f64,
            Dtype::F16 => 1.0 / (1u64 << 11) as f64,
            Dtype::Bf16 => 1.0 / (1u64 << 8) as f64,
            Dtype::E4m3 => 1.0 / (1u64 << 4) as f64,
            Dtype::Int8 => 0.5 / 127.0,
            Dtype::Int4 => 0.5 / 7.0,
            Dtype::E5m2 => 1.0 / (1u64 << 3) as f64,
        }
    }
}

/// The element types of a problem's tensors, by role.
///
/// Text (JSON, RON) has `dtype` for all of them, and `kv_dtype`, `out_dtype` and `dkv_dtype` where one
/// differs. What nothing computes yet can be named and is refused by name ([`Types::check`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Types {
    /// Of Q, and of its gradient: e4m3 for an fp8 forward.
    pub q: Dtype,
    /// Of K and V: codes for a quantised cache.
    pub kv: Dtype,
    /// Of O, and of its gradient: f32 for partial results that several GPUs combine. Of an fp8 forward bf16,
    /// or on the CPU f16 or f32.
    pub out: Dtype,
    /// Of the gradients of K and V: f32 where several GPUs add them up.
    pub dkv: Dtype,
}

/// Types that nothing computes together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} is {value}{}: {need}", beside_q(name, *q))]
pub struct TypesError {
    /// The field whose type is refused, as text has it.
    pub name: &'static str,
    /// Its type.
    pub value: Dtype,
    /// Type of Q.
    pub q: Dtype,
    /// Why, and what works.
    pub need: &'static str,
}

/// Q's type, where another field is refused for it.
fn beside_q(name: &str, q: Dtype) -> String {
    if name == "dtype" { String::new() } else { format!(" and dtype is {q}") }
}

impl Types {
    /// One type for all tensors.
    pub const fn same(dtype: Dtype) -> Types {
        Types { q: dtype, kv: dtype, out: dtype, dkv: dtype }
    }

    /// Q, K and V in e4m3, and O in `out`.
    pub const fn fp8(out: Dtype) -> Types {
        Types::same(Dtype::E4m3).with_out(out)
    }

    /// The type of a call's numbers: that of Q, or of O where Q is codes.
    pub const fn wide(&self) -> Dtype {
        if self.is_fp8() { self.out } else { self.q }
    }

    /// Whether Q, K and V are in e4m3.
    pub const fn is_fp8(&self) -> bool {
        matches!(self.q, Dtype::E4m3)
    }

    with_methods! {
        with_kv(kv: Dtype),
        with_out(out: Dtype),
        with_dkv(dkv: Dtype),
    }

    /// Checks that something computes these types together: one type, or one and K and V in codes, or Q, K
    /// and V in e4m3 and O in a wider type. Which types are computed is the question of each backend.
    ///
    /// # Errors
    /// [`TypesError`] for the first that differs.
    pub fn check(&self) -> Result<(), TypesError> {
        let Types { q, kv, out, dkv } = *self;
        let refuse = |name, value, need| Err(TypesError { name, value, q, need });
        if matches!(q, Dtype::Int8 | Dtype::Int4 | Dtype::E5m2) {
            return refuse("dtype", q, CACHE_ALONE);
        }
        let is_cache = kv.is_code() && !q.is_code();
        if kv != q && !is_cache {
            return refuse("kv_dtype", kv, MIXED);
        }
        if self.is_fp8() {
            if out.is_code() {
                return refuse("out_dtype", out, FP8_OUT);
            }
        } else if out != q {
            return match (q, out) {
                (Dtype::F16 | Dtype::Bf16, Dtype::F32) => refuse("out_dtype", out, WIDE_OUT),
                _ => refuse("out_dtype", out, MIXED_OUT),
            };
        }
        if dkv != q {
            return refuse("dkv_dtype", dkv, WIDE_DKV);
        }
        Ok(())
    }

    /// Checks that Q, K and V have gradients.
    ///
    /// # Errors
    /// [`TypesError`] where they are codes.
    pub fn check_gradients(&self) -> Result<(), TypesError> {
        let Types { q, kv, .. } = *self;
        if self.is_fp8() {
            return Err(TypesError { name: "dtype", value: q, q, need: FP8_GRADIENTS });
        }
        if kv.is_code() {
            return Err(TypesError { name: "kv_dtype", value: kv, q, need: NO_GRADIENTS });
        }
        Ok(())
    }

    /// The types of K and V, of O, and of the gradients of K and V where they are not that of Q, as text has
    /// them.
    pub(crate) fn differing(self) -> [Option<Dtype>; 3] {
        [self.kv, self.out, self.dkv].map(|dtype| (dtype != self.q).then_some(dtype))
    }

    /// The inverse of [`Types::differing`].
    pub(crate) fn of(dtype: Dtype, [kv, out, dkv]: [Option<Dtype>; 3]) -> Types {
        let or_same = |other: Option<Dtype>| other.unwrap_or(dtype);
        Types { q: dtype, kv: or_same(kv), out: or_same(out), dkv: or_same(dkv) }
    }
}

const MIXED: &str = "K and V have the type of Q, or are codes beside a wider Q (e4m3, int8, int4 or e5m2); \
                     convert them and leave kv_dtype out";
const NO_GRADIENTS: &str = "K and V in codes have no gradients; dequantise them into Q's type and leave \
                            kv_dtype out";
const CACHE_ALONE: &str = "of codes Q has e4m3 alone; use f16, bf16 or e4m3, and kv_dtype int8, int4 or \
                           e5m2 for K and V alone";
const FP8_OUT: &str = "O of an fp8 forward is wider than its codes; set out_dtype to bf16 (on the CPU also \
                       f16 or f32)";
const FP8_GRADIENTS: &str = "fp8 Q, K and V have no gradients; dequantise them into 16 bits for the \
                             backward, which takes O and LSE of the fp8 forward";
const WIDE_OUT: &str = "nothing writes O wider than a Q of 16 bits; leave out_dtype out, and combine partial \
                        results by their LSE in f32";
const MIXED_OUT: &str = "O is written in the type of Q, K and V; leave out_dtype out";
const WIDE_DKV: &str = "dK and dV are written in the type of K and V; leave dkv_dtype out, and add \
                        them up in f32 after each call";

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A text that is not the name of a [`Dtype`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown dtype '{0}': use one of f32, f16, bf16, e4m3, int8, int4, e5m2")]
pub struct ParseDtypeError(pub String);

impl FromStr for Dtype {
    type Err = ParseDtypeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wanted = text.to_ascii_lowercase();
        Dtype::ALL.into_iter().find(|d| d.name() == wanted).ok_or_else(|| ParseDtypeError(text.to_owned()))
    }
}

impl<'de> Deserialize<'de> for Dtype {
    /// From the name, in any format. The error for an unknown name lists all.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Dtype, D::Error> {
        deserializer.deserialize_enum("Dtype", &NAMES, DtypeVisitor)
    }
}

const NAMES: [&str; 7] = ["f32", "f16", "bf16", "e4m3", "int8", "int4", "e5m2"];

struct DtypeVisitor;

impl<'de> Visitor<'de> for DtypeVisitor {
    type Value = Dtype;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an element type, one of {}", NAMES.join(", "))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, data: A) -> Result<Dtype, A::Error> {
        let (dtype, variant) = data.variant_seed(DtypeName)?;
        variant.unit_variant()?;
        Ok(dtype)
    }
}

/// The name alone.
struct DtypeName;

impl<'de> DeserializeSeed<'de> for DtypeName {
    type Value = Dtype;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Dtype, D::Error> {
        deserializer.deserialize_identifier(self)
    }
}

impl Visitor<'_> for DtypeName {
    type Value = Dtype;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        DtypeVisitor.expecting(f)
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<Dtype, E> {
        let known = Dtype::ALL.into_iter().find(|dtype| dtype.name() == name);
        known.ok_or_else(|| E::unknown_variant(name, &NAMES))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_offer_all_types() {
        assert_eq!(Dtype::ALL.map(Dtype::name), NAMES);
        for dtype in Dtype::ALL {
            assert_eq!(ron::from_str(dtype.name()), Ok(dtype));
            assert_eq!(serde_json::from_str::<Dtype>(&format!("\"{dtype}\"")).unwrap(), dtype);
        }
        let errors = [
            ron::from_str::<Dtype>("e3m4").unwrap_err().to_string(),
            serde_json::from_str::<Dtype>("\"e3m4\"").unwrap_err().to_string(),
            "e3m4".parse::<Dtype>().unwrap_err().to_string(),
        ];
        for error in errors {
            let named = Dtype::ALL.iter().all(|dtype| error.contains(dtype.name()));
            assert!(named && error.contains("e3m4"), "{error}");
        }
    }

    #[test]
    fn names_parse_back_to_their_dtype() {
        for dtype in Dtype::ALL {
            assert_eq!(dtype.name().parse(), Ok(dtype));
            assert_eq!(serde_json::to_string(&dtype).unwrap(), format!("\"{dtype}\""));
        }
        assert_eq!("fp16".parse::<Dtype>(), Err(ParseDtypeError("fp16".into())));
    }

    #[test]
    fn unit_roundoff_is_half_a_step_at_one() {
        assert_eq!(Dtype::F32.unit_roundoff(), f64::from(f32::EPSILON) / 2.0);
    }
}
