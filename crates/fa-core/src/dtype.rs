//! Element types of Q, K, V and O.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, DeserializeSeed, EnumAccess, VariantAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::with_methods;

/// Element type of an attention problem's tensors.
///
/// The 8-bit types are those of K and V alone, whose values are codes times a descale; nothing computes in
/// them. Error messages about a problem's type offer those of [`Dtype::COMPUTED`].
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
}

impl Dtype {
    /// Every element type, in declaration order.
    pub const ALL: [Dtype; 5] = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::E4m3, Dtype::Int8];

    /// The types that are computed in: by the CPU all of them, by GPU kernels the 16-bit ones.
    pub const COMPUTED: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::E4m3 | Dtype::Int8 => 1,
        }
    }

    /// Whether this is one of the 16-bit floating-point types, in which the GPU kernels compute.
    pub const fn is_half(self) -> bool {
        match self {
            Dtype::F16 | Dtype::Bf16 => true,
            Dtype::F32 | Dtype::E4m3 | Dtype::Int8 => false,
        }
    }

    /// The types of codes: K and V may have one, beside a Q of a type of [`Dtype::COMPUTED`].
    pub const CODES: [Dtype; 2] = [Dtype::E4m3, Dtype::Int8];

    /// Whether this is one of [`Dtype::CODES`].
    pub const fn is_code(self) -> bool {
        match self {
            Dtype::E4m3 | Dtype::Int8 => true,
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
        }
    }

    /// Half the distance between 1 and the next larger number: the largest relative rounding error of a
    /// normal number; of an int8 code, half a step of the largest.
    pub const fn unit_roundoff(self) -> f64 {
        match self {
            Dtype::F32 => 1.0 / (1u64 << 24) as f64,
            Dtype::F16 => 1.0 / (1u64 << 11) as f64,
            Dtype::Bf16 => 1.0 / (1u64 << 8) as f64,
            Dtype::E4m3 => 1.0 / (1u64 << 4) as f64,
            Dtype::Int8 => 0.5 / 127.0,
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
    /// Of Q, and of its gradient.
    pub q: Dtype,
    /// Of K and V: 8 bits for a quantised cache.
    pub kv: Dtype,
    /// Of O, and of its gradient: f32 for partial results that several GPUs combine.
    pub out: Dtype,
    /// Of the gradients of K and V: f32 where several GPUs add them up.
    pub dkv: Dtype,
}

/// Types that nothing computes together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} is {value} and dtype is {q}: {need}")]
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

impl Types {
    /// One type for all tensors.
    pub const fn same(dtype: Dtype) -> Types {
        Types { q: dtype, kv: dtype, out: dtype, dkv: dtype }
    }

    with_methods! {
        with_kv(kv: Dtype),
        with_out(out: Dtype),
        with_dkv(dkv: Dtype),
    }

    /// Checks that something computes these types together: one type, or one and K and V in 8 bits. Which
    /// types are computed is the question of each backend.
    ///
    /// # Errors
    /// [`TypesError`] for the first that differs.
    pub fn check(&self) -> Result<(), TypesError> {
        let Types { q, kv, out, dkv } = *self;
        let refuse = |name, value, need| Err(TypesError { name, value, q, need });
        let is_cache = kv.is_code() && !q.is_code();
        if kv != q && !is_cache {
            return refuse("kv_dtype", kv, MIXED);
        }
        if out != q {
            return match (q, out) {
                (Dtype::E4m3, Dtype::F16 | Dtype::Bf16) => refuse("out_dtype", out, FP8),
                (Dtype::F16 | Dtype::Bf16, Dtype::F32) => refuse("out_dtype", out, WIDE_OUT),
                _ => refuse("out_dtype", out, MIXED_OUT),
            };
        }
        if dkv != q {
            return refuse("dkv_dtype", dkv, WIDE_DKV);
        }
        Ok(())
    }

    /// Checks that K and V have gradients.
    ///
    /// # Errors
    /// [`TypesError`] where they are codes.
    pub fn check_gradients(&self) -> Result<(), TypesError> {
        let Types { q, kv, .. } = *self;
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

const MIXED: &str = "K and V have the type of Q, or 8 bits beside a wider Q (e4m3 or int8); convert them and \
                     leave kv_dtype out";
const NO_GRADIENTS: &str = "8-bit K and V have no gradients; dequantise them into Q's type and leave \
                            kv_dtype out";
const FP8: &str = "nothing computes an fp8 forward yet; convert Q, K and V to the type of O";
const WIDE_OUT: &str = "nothing writes O wider than Q yet; leave out_dtype out, and combine partial results \
                        by their LSE in f32";
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
#[error("unknown dtype '{0}': use one of f32, f16, bf16")]
pub struct ParseDtypeError(pub String);

impl FromStr for Dtype {
    type Err = ParseDtypeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wanted = text.to_ascii_lowercase();
        Dtype::ALL.into_iter().find(|d| d.name() == wanted).ok_or_else(|| ParseDtypeError(text.to_owned()))
    }
}

impl<'de> Deserialize<'de> for Dtype {
    /// From the name, in any format. The error for an unknown name lists the types of [`Dtype::COMPUTED`].
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Dtype, D::Error> {
        deserializer.deserialize_enum("Dtype", &NAMES, DtypeVisitor(&NAMES))
    }
}

/// Reads the type of K and V, which may be codes: errors offer these too.
pub(crate) fn of_kv<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Dtype>, D::Error> {
    struct OfKv(Dtype);
    impl<'de> Deserialize<'de> for OfKv {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<OfKv, D::Error> {
            deserializer.deserialize_enum("Dtype", &KV_NAMES, DtypeVisitor(&KV_NAMES)).map(OfKv)
        }
    }
    Ok(Option::<OfKv>::deserialize(deserializer)?.map(|OfKv(dtype)| dtype))
}

const NAMES: [&str; 3] = ["f32", "f16", "bf16"];
const KV_NAMES: [&str; 5] = ["f32", "f16", "bf16", "e4m3", "int8"];

/// With the names that errors offer.
#[derive(Clone, Copy)]
struct DtypeVisitor(&'static [&'static str]);

impl<'de> Visitor<'de> for DtypeVisitor {
    type Value = Dtype;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an element type, one of {}", self.0.join(", "))
    }

    fn visit_enum<A: EnumAccess<'de>>(self, data: A) -> Result<Dtype, A::Error> {
        let (dtype, variant) = data.variant_seed(DtypeName(self))?;
        variant.unit_variant()?;
        Ok(dtype)
    }
}

/// The name alone.
struct DtypeName(DtypeVisitor);

impl<'de> DeserializeSeed<'de> for DtypeName {
    type Value = Dtype;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Dtype, D::Error> {
        deserializer.deserialize_identifier(self)
    }
}

impl Visitor<'_> for DtypeName {
    type Value = Dtype;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.expecting(f)
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<Dtype, E> {
        let known = Dtype::ALL.into_iter().find(|dtype| dtype.name() == name);
        known.ok_or_else(|| E::unknown_variant(name, self.0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_offer_what_something_computes_in() {
        assert_eq!(Dtype::COMPUTED.map(Dtype::name), NAMES);
        for dtype in Dtype::ALL {
            assert_eq!(ron::from_str(dtype.name()), Ok(dtype));
            assert_eq!(serde_json::from_str::<Dtype>(&format!("\"{dtype}\"")).unwrap(), dtype);
        }
        let errors = [
            ron::from_str::<Dtype>("bf17").unwrap_err().to_string(),
            serde_json::from_str::<Dtype>("\"bf17\"").unwrap_err().to_string(),
            "bf17".parse::<Dtype>().unwrap_err().to_string(),
        ];
        for error in errors {
            let named = Dtype::COMPUTED.iter().all(|dtype| error.contains(dtype.name()));
            assert!(named && error.contains("bf17") && !error.contains("e4m3"), "{error}");
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
