//! Specs as they are stored: under `specs/`, and in files that pin a kernel.

#[cfg(feature = "ron")]
use ron::extensions::Extensions;
use serde::{Deserialize, Serialize};

#[cfg(feature = "ron")]
use super::text::{Flat, pretty_ron};
use super::{KernelSpec, SpecError};
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

/// A kernel that a file pins: a spec as it is stored under `specs/`, or alone, with the division of its work
/// where that is not left to the planner.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PinnedSpec {
    /// Architectures to compile for; empty where none is named.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub archs: Vec<Arch>,
    /// The kernel.
    pub spec: KernelSpec,
    /// Parts of the keys of a forward's tile, as [`crate::Division::splits`]; `None` for as many as the
    /// planner takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub splits: Option<usize>,
}

impl PinnedSpec {
    /// Checks the spec, its architectures and its splits.
    ///
    /// # Errors
    /// As [`KernelSpec::check`], and for an architecture that cannot run the kernel and splits that it does
    /// not have.
    pub fn check(&self) -> Result<(), SpecError> {
        let PinnedSpec { archs, spec, splits } = self;
        spec.check()?;
        archs.iter().try_for_each(|&arch| spec.check_arch(arch))?;
        match splits {
            Some(0) => Err(SpecError::BadValue { field: "splits", value: 0, need: "at least 1".to_owned() }),
            Some(_) if !spec.split => {
                let text = format!("splits: {spec} divides no keys, use a kernel with split: true");
                Err(SpecError::Conflict(text))
            }
            None | Some(_) => Ok(()),
        }
    }

    /// Reads and checks RON text: `(spec: (..), splits: 8)`, with `archs` as under `specs/`, or a bare spec.
    ///
    /// # Errors
    /// [`SpecError::Ron`] with the position of the fault, or what [`PinnedSpec::check`] finds.
    #[cfg(feature = "ron")]
    pub fn from_ron(text: &str) -> Result<PinnedSpec, SpecError> {
        let ron = ron::Options::default().with_default_extension(Extensions::IMPLICIT_SOME);
        let bare = |error: ron::error::SpannedError| match ron.from_str::<KernelSpec>(text) {
            Ok(spec) => Ok(PinnedSpec { archs: Vec::new(), spec, splits: None }),
            // A bare spec has no field of this name.
            Err(bare) if !text.contains("spec:") => Err(SpecError::Ron(bare.to_string())),
            Err(_) => Err(SpecError::Ron(error.to_string())),
        };
        let pinned = ron.from_str(text).or_else(bare)?;
        PinnedSpec::check(&pinned)?;
        Ok(pinned)
    }
}
