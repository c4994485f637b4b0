//! Specs as they are stored under `specs/`.

use serde::{Deserialize, Serialize};

use super::KernelSpec;
#[cfg(feature = "ron")]
use super::SpecError;
#[cfg(feature = "ron")]
use super::text::{Flat, pretty_ron};
use crate::Arch;

/// A spec as it is stored under `specs/`: with the architectures that it ships for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShippedSpec {
    /// Architectures to compile for.
    pub archs: Vec<Arch>,
    /// The kernel.
    pub spec: KernelSpec,
}

#[cfg(feature = "ron")]
impl ShippedSpec {
    /// Reads and checks a shipped spec from RON text.
    ///
    /// # Errors
    /// As [`KernelSpec::from_ron`], and when an architecture cannot run the kernel.
    pub fn from_ron(text: &str) -> Result<ShippedSpec, SpecError> {
        /// As [`ShippedSpec`], with the error of a spec that is invalid.
        #[derive(Deserialize)]
        #[serde(rename = "ShippedSpec", deny_unknown_fields)]
        struct Text {
            archs: Vec<Arch>,
            spec: Flat,
        }
        let Text { archs, spec } = ron::from_str(text).map_err(|e| SpecError::Ron(e.to_string()))?;
        let shipped = ShippedSpec { archs, spec: spec.try_into()? };
        shipped.archs.iter().try_for_each(|&arch| shipped.spec.check_arch(arch))?;
        Ok(shipped)
    }

    /// The spec as RON text, which [`ShippedSpec::from_ron`] reads back.
    pub fn to_ron(&self) -> String {
        pretty_ron(self)
    }
}
