//! A kernel as plain data: everything that the kernel sources are specialised on, and nothing of a problem's
//! lengths.

mod params;
mod sm80_bwd;
mod sm80_fwd;
mod sm90_bwd;
mod sm90_fwd;
#[cfg(test)]
mod tests;
mod text;

use serde::{Deserialize, Serialize};

use crate::{Arch, Dtype, Family, Mask, Pass, Problem, ScoreKind, Types};

pub use params::{Param, ParamValue};
pub use sm80_bwd::Sm80Bwd;
pub use sm80_fwd::Sm80Fwd;
pub use sm90_bwd::Sm90Bwd;
pub use sm90_fwd::Sm90Fwd;
pub use text::ShippedSpec;

/// The largest head dim that a kernel's tiles may span.
pub const MAX_HEAD_DIM: u32 = 256;

/// A kernel's compile-time parameters.
///
/// `head_dim` and `head_dim_v` are the extents of the kernel's tiles: it computes every problem whose head
/// dims are multiples of 8 up to them, padding with zeros. As text (JSON, RON) a spec is flat: `dtype` for
/// the types, `softcap` for the change of scores.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "text::Flat", into = "text::Flat")]
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
    /// The kernel and its own parameters.
    pub kernel: Kernel,
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

/// Which masking code a kernel holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MaskKind {
    /// Only the end of the keys is masked.
    Full,
    /// The end of the keys and the causal diagonal.
    Causal,
    /// A window with run-time sides; also serves causal windows.
    Window,
}

impl MaskKind {
    /// The cheapest kind that computes `mask`.
    pub const fn of(mask: &Mask) -> MaskKind {
        if mask.is_full() {
            MaskKind::Full
        } else if mask.is_causal() {
            MaskKind::Causal
        } else {
            MaskKind::Window
        }
    }

    /// Whether code of this kind computes `mask`.
    pub fn serves(self, mask: &Mask) -> bool {
        self == MaskKind::Window || self == MaskKind::of(mask)
    }

    /// The name used in RON, in spec names and in tables.
    pub const fn name(self) -> &'static str {
        match self {
            MaskKind::Full => "full",
            MaskKind::Causal => "causal",
            MaskKind::Window => "window",
        }
    }
}

/// How tiles are given to CTAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Scheduler {
    /// One CTA per tile.
    PerTile,
    /// One CTA per SM; CTA `b` takes the tiles `b`, `b + grid`, and so on.
    Static,
    /// One CTA per SM; tiles are drawn from a counter in device memory.
    Dynamic,
}

/// The order in which tiles are numbered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TileOrder {
    /// Query tiles from first to last within a head.
    Natural,
    /// Longest first: query tiles from last to first, heads of an L2-sized section together.
    LongestFirst,
}

/// What every kernel has, whatever its parameters. Code that does not differ by kernel reads this instead of
/// matching on [`Kernel`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Traits {
    /// The kernel's name, as in source files and tables.
    pub name: &'static str,
    /// What it computes.
    pub pass: Pass,
    /// Its family, which says where it runs ([`Family::archs`]).
    pub family: Family,
    /// Query rows and keys of a tile.
    pub tile: (u32, u32),
    /// Threads of a CTA.
    pub threads: u32,
    /// Resident CTAs per SM that its launch bounds ask the compiler for.
    pub blocks_per_sm: u32,
    /// CTAs of a cluster.
    pub cluster: u32,
    /// How tiles are given to CTAs.
    pub scheduler: Scheduler,
    /// The order of tiles.
    pub tile_order: TileOrder,
    /// Whether the query heads of a K/V head are folded into the rows of a tile.
    pub packs_gqa: bool,
}

/// Why a [`KernelSpec`] is invalid.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SpecError {
    /// A number is outside its range or not a multiple of what it must be.
    #[error("{field} = {value}: must be {need}")]
    BadValue {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u32,
        /// What it must be.
        need: String,
    },
    /// The kernel does not compute in this type.
    #[error("dtype {dtype} is not supported by {kernel}: use f16 or bf16")]
    Dtype {
        /// The type.
        dtype: Dtype,
        /// The kernel.
        kernel: &'static str,
    },
    /// Two options exclude each other.
    #[error("{0}")]
    Conflict(String),
    /// The kernel does not run on this architecture.
    #[error("{kernel} does not run on {arch}: it needs {need}")]
    Arch {
        /// The kernel.
        kernel: &'static str,
        /// The architecture.
        arch: Arch,
        /// What its family needs.
        need: &'static str,
    },
    /// The text is not RON, or has unknown or missing fields.
    #[error("not a kernel spec: {0}")]
    Ron(String),
}

/// Why a kernel does not compute a problem: the first thing in which they differ.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: the kernel computes {kernel}, not {problem}")]
pub struct Mismatch {
    /// What differs, mostly a field.
    pub what: &'static str,
    /// What the kernel computes.
    pub kernel: String,
    /// What the problem asks for.
    pub problem: String,
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
        of_each!(&self.kernel, kernel => kernel.check(self))
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

    /// Checks that the kernel computes `problem`: its types, head dims, mask, soft cap and ratio of heads. A
    /// kernel is compiled without lengths, and a problem does not name a pass: neither is compared. The
    /// problem must be valid ([`Problem::check`]).
    ///
    /// # Errors
    /// The first [`Mismatch`] found.
    pub fn serves(&self, problem: &Problem) -> Result<(), Mismatch> {
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
        if have.softcap != need.softcap {
            let text = |on: bool| if on { "a softcap" } else { "no softcap" };
            return differs("softcap", text(have.softcap).into(), text(need.softcap).into());
        }
        let Traits { packs_gqa, tile: (tile_m, _), .. } = self.traits();
        let group = problem.group_size();
        if packs_gqa && !(tile_m as usize).is_multiple_of(group) {
            let kernel = format!("groups that divide tile_m = {tile_m}");
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
        let KernelSpec { types, head_dim, head_dim_v, mask, score, kernel } = self;
        let param = |name, doc, value| Param { name, doc, value };
        let mut all = vec![
            param("dtype", &[" Type of Q, K, V and O."] as &[_], types.qkv.into()),
            param("head_dim", &[" Tile extent of the head dim of Q and K."], (*head_dim).into()),
            param("head_dim_v", &[" Tile extent of the head dim of V and O."], (*head_dim_v).into()),
            param("mask", &[" Masking code."], (*mask).into()),
            param("softcap", &[" Scores pass through cap * tanh(s / cap)."], score.softcap.into()),
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
}
