//! A kernel as plain data: everything that the kernel sources are specialised on, and nothing of a problem's
//! lengths.

mod derived;
mod error;
mod limits;
mod pages;
mod params;
mod shipped;
mod sm80_bwd;
mod sm80_fwd;
mod sm90_bwd;
mod sm90_fwd;
#[cfg(test)]
mod tests;
mod values;

use std::fmt;
use std::ops::Not;

use serde::{Deserialize, Serialize};

use crate::{Arch, Dtype, Family, Pass, Problem, ScoreKind, Types};

pub use error::{Mismatch, SpecError, Unserved};
pub use pages::{boxes_need, page_part, panel};
pub use params::{Param, ParamValue};
pub use shipped::ShippedSpec;
pub use sm80_bwd::Sm80Bwd;
pub use sm80_fwd::Sm80Fwd;
pub use sm90_bwd::Sm90Bwd;
pub use sm90_fwd::Sm90Fwd;
pub use values::{MAX_COUNT, MAX_HEAD_DIM, MAX_SOFTCAP, MaskKind, Reads, Scheduler, TileOrder, Traits};

/// A kernel's compile-time parameters.
///
/// `head_dim` and `head_dim_v` are the extents of the kernel's tiles: it computes every problem whose head
/// dims are multiples of 8 up to them, padding with zeros. As text (JSON, RON) a spec is flat: `dtype` for
/// the types, `softcap`, `alibi` and `sinks` for the change of scores, `varied` and `paged` for how rows are
/// found; of these, and of `split`, all but `softcap` are written where they are on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Flat", into = "Flat")]
pub struct KernelSpec {
    /// Types of the tensors.
    pub types: Types,
    /// Tile extent of the head dim of Q and K; a multiple of 16 up to [`MAX_HEAD_DIM`].
    pub head_dim: u32,
    /// Tile extent of the head dim of V and O; a multiple of 16 up to [`MAX_HEAD_DIM`].
    pub head_dim_v: u32,
    /// Masking code.
    pub mask: MaskKind,
    /// Code that changes scores before the mask.
    pub score: ScoreKind,
    /// How rows of Q, K and V are found.
    pub reads: Reads,
    /// Several CTAs share the keys of a tile's rows: partial results, and a kernel that combines them.
    /// Forward only; serves every problem that the kernel without it serves.
    pub split: bool,
    /// The kernel and its own parameters.
    pub kernel: Kernel,
}

/// A spec as text.
#[derive(Serialize, Deserialize)]
#[serde(rename = "KernelSpec", deny_unknown_fields)]
struct Flat {
    dtype: Dtype,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    out_dtype: Option<Dtype>,
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
    #[serde(default, skip_serializing_if = "Not::not")]
    split: bool,
    kernel: Kernel,
}

impl From<Flat> for KernelSpec {
    fn from(flat: Flat) -> KernelSpec {
        let Flat { dtype, out_dtype, head_dim, head_dim_v, mask, .. } = flat;
        let Flat { softcap, varied, paged, alibi, sinks, split, kernel, .. } = flat;
        let types = Types { qkv: dtype, out: out_dtype.unwrap_or(dtype) };
        let (score, reads) = (ScoreKind { softcap, alibi, sinks }, Reads { varied, paged });
        KernelSpec { types, head_dim, head_dim_v, mask, score, reads, split, kernel }
    }
}

impl From<KernelSpec> for Flat {
    fn from(spec: KernelSpec) -> Flat {
        let KernelSpec { types, head_dim, head_dim_v, mask, score, reads, split, kernel } = spec;
        let (dtype, out_dtype) = (types.qkv, types.differing_out());
        let (ScoreKind { softcap, alibi, sinks }, Reads { varied, paged }) = (score, reads);
        Flat {
            dtype,
            out_dtype,
            head_dim,
            head_dim_v,
            mask,
            softcap,
            varied,
            paged,
            alibi,
            sinks,
            split,
            kernel,
        }
    }
}

/// The kernels that exist, each with the parameters that only it has.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Kernel {
    /// Forward by mma.sync and cp.async; runs on every architecture from 8.0 on.
    Sm80Fwd(Sm80Fwd),
    /// Forward by wgmma and TMA with warp specialisation; runs on 9.0 only.
    Sm90Fwd(Sm90Fwd),
    /// Backward by wgmma and TMA with warp specialisation; runs on 9.0 only.
    Sm90Bwd(Sm90Bwd),
    /// Backward by mma.sync and cp.async; runs on every architecture from 8.0 on.
    Sm80Bwd(Sm80Bwd),
}

/// The same expression for whichever kernel it is.
macro_rules! of_each {
    ($value:expr, $kernel:ident => $result:expr) => {
        match $value {
            Kernel::Sm80Fwd($kernel) => $result,
            Kernel::Sm90Fwd($kernel) => $result,
            Kernel::Sm90Bwd($kernel) => $result,
            Kernel::Sm80Bwd($kernel) => $result,
        }
    };
}

impl Kernel {
    /// Each kernel with its defaults: small tiles and valid for a head dim of 64, to be changed field by
    /// field.
    pub fn defaults() -> [Kernel; 4] {
        [
            Kernel::Sm80Fwd(Sm80Fwd::default()),
            Kernel::Sm90Fwd(Sm90Fwd::default()),
            Kernel::Sm80Bwd(Sm80Bwd::default()),
            Kernel::Sm90Bwd(Sm90Bwd::default()),
        ]
    }

    /// What the kernel has in common with the others.
    pub const fn traits(&self) -> Traits {
        of_each!(self, kernel => kernel.traits())
    }

    /// The kernel's own parameters, in the order of declaration.
    pub fn params(&self) -> Vec<Param> {
        of_each!(self, kernel => kernel.params())
    }

    /// One of [`Kernel::params`] by its name; `None` where the kernel has no such parameter.
    pub fn param(&self, name: &str) -> Option<ParamValue> {
        self.params().into_iter().find(|param| param.name == name).map(|param| param.value)
    }

    /// What the kernel's parameters describe: the lines of their documentation, each with the space that it
    /// starts with.
    pub const fn doc(&self) -> &'static [&'static str] {
        match self {
            Kernel::Sm80Fwd(_) => Sm80Fwd::DOC,
            Kernel::Sm90Fwd(_) => Sm90Fwd::DOC,
            Kernel::Sm90Bwd(_) => Sm90Bwd::DOC,
            Kernel::Sm80Bwd(_) => Sm80Bwd::DOC,
        }
    }

    /// The kernel's name, as in source files and tables.
    pub const fn name(&self) -> &'static str {
        self.traits().name
    }

    /// What the kernel computes.
    pub const fn pass(&self) -> Pass {
        self.traits().pass
    }

    /// The family that the kernel belongs to.
    pub const fn family(&self) -> Family {
        self.traits().family
    }

    /// Whether the kernel computes gradients.
    pub const fn is_backward(&self) -> bool {
        self.pass().is_backward()
    }
}

impl KernelSpec {
    /// Checks every field against the kernel's rules. Whether the kernel fits a GPU is the planner's
    /// question.
    ///
    /// # Errors
    /// The first [`SpecError`] found.
    pub fn check(&self) -> Result<(), SpecError> {
        let Types { qkv, out } = self.types;
        if !qkv.is_half() {
            return Err(SpecError::Dtype { dtype: qkv, kernel: self.kernel.name() });
        }
        if qkv != out {
            let why =
                format!("out_dtype = {out} and dtype = {qkv}: kernels write O in the type of Q, K and V");
            return Err(SpecError::Conflict(why));
        }
        params::multiple("head_dim", self.head_dim, 16, MAX_HEAD_DIM)?;
        params::multiple("head_dim_v", self.head_dim_v, 16, MAX_HEAD_DIM)?;
        self.check_reads()?;
        let (head_dims, mask) = ((self.head_dim, self.head_dim_v), self.mask);
        of_each!(&self.kernel, kernel => kernel.check(head_dims, mask))
    }

    /// What finds rows, splits keys and shares loads goes together.
    fn check_reads(&self) -> Result<(), SpecError> {
        let Reads { varied, paged } = self.reads;
        let name = self.kernel.name();
        let conflict = |why: String| Err(SpecError::Conflict(why));
        if paged && !varied {
            return conflict("paged needs varied: a cache in pages has its lengths on the device".into());
        }
        if paged && self.kernel.is_backward() {
            return conflict(format!("paged: {name} is a backward, whose keys are padded or packed"));
        }
        if self.split && self.kernel.is_backward() {
            return conflict(format!("split: {name} is a backward; split is for forward kernels"));
        }
        if self.gathers_pages() && !paged {
            let why = "gather needs paged: keys in one piece are loaded by TMA; use gather = false";
            return conflict(why.into());
        }
        let cluster = self.traits().cluster;
        if varied && cluster > 1 {
            return conflict(format!(
                "cluster_m = {cluster} and varied: sequences begin within a cluster's tiles, whose CTAs \
                 would not load the same keys; use cluster_m = 1"
            ));
        }
        if self.split && cluster > 1 {
            return conflict(format!(
                "cluster_m = {cluster} and split: CTAs of a cluster load the same keys, those of a split do \
                 not; use cluster_m = 1"
            ));
        }
        Ok(())
    }

    /// Whether threads of an SM90 forward copy the rows of pages. TMA does otherwise; SM80-class kernels,
    /// which copy all rows so, are not meant.
    pub const fn gathers_pages(&self) -> bool {
        match &self.kernel {
            Kernel::Sm90Fwd(kernel) => kernel.gather,
            Kernel::Sm80Fwd(_) | Kernel::Sm80Bwd(_) | Kernel::Sm90Bwd(_) => false,
        }
    }

    /// Checks that the kernel runs on `arch`.
    ///
    /// # Errors
    /// [`SpecError::Arch`].
    pub fn check_arch(&self, arch: Arch) -> Result<(), SpecError> {
        let family = self.kernel.family();
        if family.runs_on(arch) {
            return Ok(());
        }
        Err(SpecError::Arch { kernel: self.kernel.name(), arch, need: family.needs() })
    }

    /// Checks that the kernel computes `problem`: its types, head dims, mask, changes of scores, ratio of
    /// heads and how rows are found; and that a launch holds it: its counts and factors
    /// ([`Problem::check_gpu`]), the tiles of all heads, its pages. A kernel is compiled without lengths, and
    /// a problem does not name a pass: neither is compared. A kernel that splits keys serves what the same
    /// kernel without splits serves. The problem must be valid ([`Problem::check`]).
    ///
    /// # Errors
    /// The first [`Unserved`] found.
    pub fn serves(&self, problem: &Problem) -> Result<(), Unserved> {
        self.check_compiled(problem)?;
        problem.check_gpu()?;
        self.check_tiles(problem)?;
        self.check_pages(problem)
    }

    /// The kernel was compiled for problems of this kind.
    fn check_compiled(&self, problem: &Problem) -> Result<(), Mismatch> {
        let differs = |what, kernel: String, problem: String| Err(Mismatch { what, kernel, problem });
        for (what, have, need) in
            [("dtype", self.types.qkv, problem.types.qkv), ("out_dtype", self.types.out, problem.types.out)]
        {
            if have != need {
                return differs(what, have.to_string(), need.to_string());
            }
        }
        for (what, have, need) in [
            ("head_dim", self.head_dim, problem.head_dim),
            ("head_dim_v", self.head_dim_v, problem.head_dim_v),
        ] {
            if need > have as usize || !need.is_multiple_of(8) {
                return differs(what, format!("multiples of 8 up to {have}"), need.to_string());
            }
        }
        if !self.mask.serves(&problem.mask) {
            return differs("mask", self.mask.name().to_owned(), problem.mask.to_string());
        }
        let (have, need) = (self.score, problem.score.kind());
        let (reads, of) = (self.reads, Reads::of(problem));
        for (what, have, need, [off, on]) in [
            ("softcap", have.softcap, need.softcap, ["no softcap", "a softcap"]),
            ("alibi", have.alibi, need.alibi, ["no ALiBi", "ALiBi"]),
            ("sinks", have.sinks, need.sinks, ["no sinks", "sinks"]),
            ("paged", reads.paged, of.paged, ["keys in one piece", "keys in pages"]),
            ("varied", reads.varied, of.varied, ["uniform lengths", "lengths on the device"]),
        ] {
            if have != need {
                let text = |is_on: bool| if is_on { on } else { off }.to_owned();
                return differs(what, text(have), text(need));
            }
        }
        let (group, tile_m) = (problem.group_size(), self.tile().0);
        if self.traits().tile_queries(group) == 0 {
            let kernel = format!("groups that fit tile_m = {tile_m}");
            return differs("pack_gqa", kernel, format!("{group} query heads per K/V head"));
        }
        Ok(())
    }

    /// What the kernel has in common with the others.
    pub const fn traits(&self) -> Traits {
        self.kernel.traits()
    }

    /// Every compile-time parameter in the order of declaration: those of all kernels, then the kernel's own.
    pub fn params(&self) -> Vec<Param> {
        let KernelSpec { types, head_dim, head_dim_v, mask, score, reads, split, kernel } = self;
        let param = |name, doc, value| Param { name, doc, value };
        let mut all = vec![
            param("dtype", &[" Type of Q, K, V and O."] as &[_], types.qkv.into()),
            param("head_dim", &[" Tile extent of the head dim of Q and K."], (*head_dim).into()),
            param("head_dim_v", &[" Tile extent of the head dim of V and O."], (*head_dim_v).into()),
            param("mask", &[" Masking code."], (*mask).into()),
            param("softcap", &[" Scores pass through cap * tanh(s / cap)."], score.softcap.into()),
            param(
                "varied",
                &[" Lengths and starts of sequences are read on the device."],
                reads.varied.into(),
            ),
            param("paged", &[" K and V lie in pages, found through a table."], reads.paged.into()),
            param(
                "alibi",
                &[" slope * |i + seqlen_k - seqlen_q - j| is subtracted from scores."],
                score.alibi.into(),
            ),
            param("sinks", &[" A logit per query head joins the denominator."], score.sinks.into()),
            param("split", &[" Several CTAs share the keys of a tile's rows."], (*split).into()),
        ];
        all.extend(kernel.params());
        all
    }

    /// Threads of a CTA.
    pub const fn threads(&self) -> u32 {
        self.traits().threads
    }

    /// Query rows and keys of a tile.
    pub const fn tile(&self) -> (u32, u32) {
        self.traits().tile
    }

    /// Bytes of an element of Q, K and V.
    pub const fn elem_bytes(&self) -> u32 {
        self.types.qkv.bytes() as u32
    }

    /// Reads and checks a spec from RON text.
    ///
    /// # Errors
    /// [`SpecError::Ron`] with the position of the fault, or what [`KernelSpec::check`] finds.
    #[cfg(feature = "ron")]
    pub fn from_ron(text: &str) -> Result<KernelSpec, SpecError> {
        let spec: KernelSpec = ron::from_str(text).map_err(|e| SpecError::Ron(e.to_string()))?;
        spec.check()?;
        Ok(spec)
    }

    /// The spec as RON text, which [`KernelSpec::from_ron`] reads back.
    #[cfg(feature = "ron")]
    pub fn to_ron(&self) -> String {
        pretty_ron(self)
    }
}

#[cfg(feature = "ron")]
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
        write!(f, "-{tile_m}x{tile_n}")?;
        let parts = of_each!(&self.kernel, kernel => kernel.name_parts());
        parts.iter().filter(|(on, _)| *on).try_for_each(|(_, name)| write!(f, "-{name}"))
    }
}
