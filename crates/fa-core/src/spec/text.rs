//! Specs as text: RON files, and the names that tables show.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Kernel, KernelSpec, MaskKind, SpecError};
use crate::{Arch, Dtype, ScoreKind, Types};

/// A spec as it is stored under `specs/`: with the architectures that it ships for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShippedSpec {
    /// Architectures to compile for.
    pub archs: Vec<Arch>,
    /// The kernel.
    pub spec: KernelSpec,
}

/// A spec as text.
#[derive(Serialize, Deserialize)]
#[serde(rename = "KernelSpec", deny_unknown_fields)]
pub(super) struct Flat {
    dtype: Dtype,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    out_dtype: Option<Dtype>,
    head_dim: u32,
    head_dim_v: u32,
    mask: MaskKind,
    #[serde(default)]
    softcap: bool,
    kernel: Kernel,
}

impl From<Flat> for KernelSpec {
    fn from(Flat { dtype, out_dtype, head_dim, head_dim_v, mask, softcap, kernel }: Flat) -> KernelSpec {
        let types = Types { qkv: dtype, out: out_dtype.unwrap_or(dtype) };
        KernelSpec { types, head_dim, head_dim_v, mask, score: ScoreKind { softcap }, kernel }
    }
}

impl From<KernelSpec> for Flat {
    fn from(KernelSpec { types, head_dim, head_dim_v, mask, score, kernel }: KernelSpec) -> Flat {
        let (dtype, out_dtype) = (types.qkv, types.differing_out());
        Flat { dtype, out_dtype, head_dim, head_dim_v, mask, softcap: score.softcap, kernel }
    }
}

impl KernelSpec {
    /// Reads and checks a spec from RON text.
    ///
    /// # Errors
    /// [`SpecError::Ron`] with the position of the fault, or what [`KernelSpec::check`] finds.
    pub fn from_ron(text: &str) -> Result<KernelSpec, SpecError> {
        let spec: KernelSpec = ron::from_str(text).map_err(|e| SpecError::Ron(e.to_string()))?;
        spec.check()?;
        Ok(spec)
    }

    /// The spec as RON text, which [`KernelSpec::from_ron`] reads back.
    pub fn to_ron(&self) -> String {
        pretty_ron(self)
    }
}

impl ShippedSpec {
    /// Reads and checks a shipped spec from RON text.
    ///
    /// # Errors
    /// As [`KernelSpec::from_ron`], and when an architecture cannot run the kernel.
    pub fn from_ron(text: &str) -> Result<ShippedSpec, SpecError> {
        let shipped: ShippedSpec = ron::from_str(text).map_err(|e| SpecError::Ron(e.to_string()))?;
        shipped.spec.check()?;
        shipped.archs.iter().try_for_each(|&arch| shipped.spec.check_arch(arch))?;
        Ok(shipped)
    }

    /// The spec as RON text, which [`ShippedSpec::from_ron`] reads back.
    pub fn to_ron(&self) -> String {
        pretty_ron(self)
    }
}

fn pretty_ron(value: &impl Serialize) -> String {
    ron::ser::to_string_pretty(value, ron::ser::PrettyConfig::default())
        .expect("plain structs of numbers and names always serialise")
}

/// A short name, distinct among the specs of a table: kernel, dtype, head dims, mask, tile and the switches
/// that are on.
impl fmt::Display for KernelSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tile_m, tile_n) = self.tile();
        let head_dim = if self.head_dim == self.head_dim_v {
            self.head_dim.to_string()
        } else {
            format!("{}-{}", self.head_dim, self.head_dim_v)
        };
        write!(f, "{}-{}-hd{head_dim}-{}", self.kernel.name(), self.types.qkv, self.mask.name())?;
        if self.score.softcap {
            f.write_str("-softcap")?;
        }
        write!(f, "-{tile_m}x{tile_n}")?;
        let parts = match &self.kernel {
            Kernel::Sm80Fwd(kernel) => kernel.name_parts(),
            Kernel::Sm90Fwd(kernel) => kernel.name_parts(),
            Kernel::Sm80Bwd(kernel) => kernel.name_parts(),
            Kernel::Sm90Bwd(kernel) => kernel.name_parts(),
        };
        parts.iter().filter(|(on, _)| *on).try_for_each(|(_, name)| write!(f, "-{name}"))
    }
}
