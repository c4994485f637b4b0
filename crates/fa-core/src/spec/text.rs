//! A spec as text: RON and JSON, flat, and the name that tables show.

use std::fmt;
use std::ops::Not;

use serde::{Deserialize, Serialize};

use super::{Kernel, KernelSpec, MaskKind, Reads, SpecError};
use crate::dtype::of_kv;
use crate::program::Interned;
use crate::{Dtype, ScoreKind, Types, each_kernel};

/// A spec as text.
#[derive(Serialize, Deserialize)]
#[serde(rename = "KernelSpec", expecting = "the fields of a kernel spec", deny_unknown_fields)]
pub(super) struct Flat {
    dtype: Dtype,
    #[serde(default, deserialize_with = "of_kv", skip_serializing_if = "Option::is_none")]
    kv_dtype: Option<Dtype>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    out_dtype: Option<Dtype>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dkv_dtype: Option<Dtype>,
    head_dim: u32,
    head_dim_v: u32,
    mask: MaskKind,
    #[serde(default)]
    softcap: bool,
    #[serde(default, skip_serializing_if = "Not::not")]
    varied: bool,
    #[serde(default, skip_serializing_if = "Not::not")]
    paged: bool,
    #[serde(default, skip_serializing_if = "Not::not")]
    alibi: bool,
    #[serde(default, skip_serializing_if = "Not::not")]
    sinks: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    program: Option<Interned>,
    #[serde(default, skip_serializing_if = "Not::not")]
    split: bool,
    kernel: Kernel,
}

impl TryFrom<Flat> for KernelSpec {
    type Error = SpecError;

    /// Checked, so that whatever text a spec is read from, as a part of a record as well, it is valid.
    fn try_from(flat: Flat) -> Result<KernelSpec, SpecError> {
        let Flat { dtype, kv_dtype, out_dtype, dkv_dtype, head_dim, head_dim_v, mask, .. } = flat;
        let Flat { softcap, varied, paged, alibi, sinks, program, split, kernel, .. } = flat;
        let types = Types::of(dtype, [kv_dtype, out_dtype, dkv_dtype]);
        let (score, reads) = (ScoreKind { softcap, alibi, sinks, program }, Reads { varied, paged });
        let spec = KernelSpec { types, head_dim, head_dim_v, mask, score, reads, split, kernel };
        spec.check().map(|()| spec)
    }
}

impl From<KernelSpec> for Flat {
    fn from(spec: KernelSpec) -> Flat {
        let KernelSpec { types, head_dim, head_dim_v, mask, score, reads, split, kernel } = spec;
        let (dtype, [kv_dtype, out_dtype, dkv_dtype]) = (types.q, types.differing());
        let (ScoreKind { softcap, alibi, sinks, program }, Reads { varied, paged }) = (score, reads);
        Flat {
            dtype,
            kv_dtype,
            out_dtype,
            dkv_dtype,
            head_dim,
            head_dim_v,
            mask,
            softcap,
            varied,
            paged,
            alibi,
            sinks,
            program,
            split,
            kernel,
        }
    }
}

impl KernelSpec {
    /// Reads and checks a spec from RON text.
    ///
    /// # Errors
    /// [`SpecError::Ron`] with the position of the fault, or what [`KernelSpec::check`] finds.
    #[cfg(feature = "ron")]
    pub fn from_ron(text: &str) -> Result<KernelSpec, SpecError> {
        let flat: Flat = ron::from_str(text).map_err(|e| SpecError::Ron(e.to_string()))?;
        flat.try_into()
    }

    /// The spec as RON text, which [`KernelSpec::from_ron`] reads back.
    #[cfg(feature = "ron")]
    pub fn to_ron(&self) -> String {
        pretty_ron(self)
    }
}

#[cfg(feature = "ron")]
pub(super) fn pretty_ron(value: &impl Serialize) -> String {
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
        write!(f, "{}-{}", self.kernel.name(), self.types.q)?;
        if self.reads_codes() {
            write!(f, "-{}kv", self.types.kv)?;
        }
        write!(f, "-hd{head_dim}-{}", self.mask.name())?;
        for (on, name) in [
            (self.score.softcap, "-softcap"),
            (self.score.alibi, "-alibi"),
            (self.score.sinks, "-sinks"),
            (self.reads.varied, "-varlen"),
            (self.reads.paged, "-paged"),
            (self.split, "-split"),
        ] {
            f.write_str(if on { name } else { "" })?;
        }
        if let Some(program) = self.score.program {
            write!(f, "-program{:08x}", program.hash64() as u32)?;
        }
        write!(f, "-{tile_m}x{tile_n}")?;
        let parts = each_kernel!(&self.kernel, kernel => kernel.name_parts());
        parts.iter().filter(|(on, _)| *on).try_for_each(|(_, name)| write!(f, "-{name}"))
    }
}
