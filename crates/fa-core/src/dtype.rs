//! Element types of Q, K, V and O.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Element type of an attention problem's tensors.
///
/// `E4m3` is named so that specs and plans can speak of it; what does not compute in it says so with an
/// error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
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
}

impl Dtype {
    /// Every element type, in declaration order.
    pub const ALL: [Dtype; 4] = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::E4m3];

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::E4m3 => 1,
        }
    }

    /// Whether this is one of the 16-bit floating-point types, in which the GPU kernels compute.
    pub const fn is_half(self) -> bool {
        match self {
            Dtype::F16 | Dtype::Bf16 => true,
            Dtype::F32 | Dtype::E4m3 => false,
        }
    }

    /// The name used on the command line, in RON and in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
            Dtype::E4m3 => "e4m3",
        }
    }

    /// Half the distance between 1 and the next larger number: the largest relative rounding error of a
    /// normal number.
    pub const fn unit_roundoff(self) -> f64 {
        match self {
            Dtype::F32 => 1.0 / (1u64 << 24) as f64,
            Dtype::F16 => 1.0 / (1u64 << 11) as f64,
            Dtype::Bf16 => 1.0 / (1u64 << 8) as f64,
            Dtype::E4m3 => 1.0 / (1u64 << 4) as f64,
        }
    }
}

/// The element types of a problem's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Types {
    /// Of Q, K and V, and of their gradients.
    pub qkv: Dtype,
    /// Of O, and of its gradient.
    pub out: Dtype,
}

impl Types {
    /// One type for all tensors.
    pub const fn same(dtype: Dtype) -> Types {
        Types { qkv: dtype, out: dtype }
    }

    /// The type of O where it is not that of Q, K and V.
    pub(crate) fn differing_out(self) -> Option<Dtype> {
        (self.out != self.qkv).then_some(self.out)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no [`Dtype`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown dtype '{0}': use one of f32, f16, bf16, e4m3")]
pub struct ParseDtypeError(pub String);

impl FromStr for Dtype {
    type Err = ParseDtypeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wanted = text.to_ascii_lowercase();
        Dtype::ALL.into_iter().find(|d| d.name() == wanted).ok_or_else(|| ParseDtypeError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
