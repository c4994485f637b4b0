//! A kernel's parameters, declared once: the struct, its text form, its defaults, the ranges of its numbers
//! and the list of fields that CUDA's config, tables and queries are written from.

use std::fmt;

use super::error::SpecError;
use super::values::{MaskKind, Scheduler, TileOrder};
use crate::Dtype;

/// A parameter of a kernel with its value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Param {
    /// The field's name, in Rust as in CUDA and in text.
    pub name: &'static str,
    /// What it means: the lines of its documentation, each with the space that it starts with.
    pub doc: &'static [&'static str],
    /// Its value.
    pub value: ParamValue,
}

/// The value of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParamValue {
    /// A size or a count.
    Count(u32),
    /// On or off.
    Switch(bool),
    /// An element type.
    Dtype(Dtype),
    /// Masking code.
    Mask(MaskKind),
    /// How tiles are assigned to CTAs.
    Scheduler(Scheduler),
    /// The order of tiles.
    TileOrder(TileOrder),
}

/// As in a spec's text.
impl fmt::Display for ParamValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ParamValue::Count(count) => write!(f, "{count}"),
            ParamValue::Switch(on) => write!(f, "{on}"),
            ParamValue::Dtype(dtype) => write!(f, "{dtype}"),
            ParamValue::Mask(mask) => write!(f, "{}", mask.name()),
            ParamValue::Scheduler(scheduler) => write!(f, "{scheduler:?}"),
            ParamValue::TileOrder(order) => write!(f, "{order:?}"),
        }
    }
}

macro_rules! from_value {
    ($($type:ty => $variant:ident),+ $(,)?) => {
        $(impl From<$type> for ParamValue {
            fn from(value: $type) -> ParamValue {
                ParamValue::$variant(value)
            }
        })+
    };
}

from_value! {
    u32 => Count,
    bool => Switch,
    Dtype => Dtype,
    MaskKind => Mask,
    Scheduler => Scheduler,
    TileOrder => TileOrder,
}

/// Declares the parameters of a kernel: `name: type = default`, and for numbers the rule that each obeys on
/// its own, `=> range(least, most)` or `=> multiple(step, least, most)`. A switch that is newer than
/// specs on disk has `#[serde(default, skip_serializing_if = "..")]`: its text is left out where it is off.
macro_rules! kernel_params {
    ($(#[doc = $doc:literal])+ pub struct $kernel:ident {
        $(
            $(#[doc = $field_doc:literal])+
            $(#[serde($($serde:tt)+)])?
            $field:ident: $type:ty = $default:expr $(=> $rule:ident($($limit:expr),+))?,
        )+
    }) => {
        $(#[doc = $doc])+
        #[derive(Clone, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct $kernel {
            $($(#[doc = $field_doc])+ $(#[serde($($serde)+)])? pub $field: $type,)+
        }

        impl Default for $kernel {
            fn default() -> $kernel {
                $kernel { $($field: $default,)+ }
            }
        }

        impl $kernel {
            /// What the kernel is: the lines of its documentation.
            pub(super) const fn doc(&self) -> &'static [&'static str] {
                &[$($doc),+]
            }

            /// Every parameter in the order of declaration, which is also that of the text and of CUDA's
            /// config.
            pub fn params(&self) -> Vec<$crate::spec::params::Param> {
                vec![$($crate::spec::params::Param {
                    name: stringify!($field),
                    doc: &[$($field_doc),+],
                    value: self.$field.into(),
                }),+]
            }

            /// Checks each number alone against its rule.
            fn check_numbers(&self) -> Result<(), $crate::spec::error::SpecError> {
                $($($crate::spec::params::$rule(stringify!($field), self.$field, $($limit),+)?;)?)+
                Ok(())
            }
        }
    };
}

pub(super) use kernel_params;

/// A number from `min` to `max`.
pub(super) fn range(field: &'static str, value: u32, min: u32, max: u32) -> Result<(), SpecError> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(SpecError::BadValue { field, value, need: format!("{min} to {max}") })
}

/// A multiple of `step` from `min` to `max`.
pub(super) fn multiple(
    field: &'static str,
    value: u32,
    step: u32,
    min: u32,
    max: u32,
) -> Result<(), SpecError> {
    if value.is_multiple_of(step) && (min..=max).contains(&value) {
        return Ok(());
    }
    Err(SpecError::BadValue { field, value, need: format!("a multiple of {step} from {min} to {max}") })
}
