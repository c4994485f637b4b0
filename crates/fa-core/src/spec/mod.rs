//! A kernel as plain data: everything that the kernel sources are specialised on, and nothing of a problem's
//! lengths.

mod derived;
mod error;
mod pages;
mod params;
mod serves;
mod shipped;
mod sm100_fwd;
mod sm80_bwd;
mod sm80_fwd;
mod sm90_bwd;
mod sm90_fwd;
mod sm90_fwd_fp8;
mod sm90_wide;
#[cfg(test)]
mod tests;
mod text;
mod values;

use serde::{Deserialize, Serialize};

use crate::{Arch, Dtype, Family, Pass, ScoreKind, Types};

pub use derived::{BackwardTraits, StoredGradient};
pub use error::{Mismatch, SpecError, Unserved};
pub use pages::{boxes_need, byte_panel, operand_columns, operand_panel, page_part, panel};
pub use params::{Param, ParamValue};
pub use shipped::{PinnedSpec, ShippedSpec};
pub use sm80_bwd::Sm80Bwd;
pub use sm80_fwd::Sm80Fwd;
pub use sm90_bwd::Sm90Bwd;
pub use sm90_fwd::Sm90Fwd;
pub use sm90_fwd_fp8::Sm90FwdFp8;
pub use sm90_wide::Sm90Wide;
pub use sm100_fwd::Sm100Fwd;
pub use values::{
    MAX_COUNT, MAX_HEAD_DIM, MAX_SOFTCAP, MaskKind, Reads, Scheduler, TileOrder, Traits, WHOLE_ROW_HEAD_DIM,
    tile_queries,
};

/// A kernel's compile-time parameters.
///
/// `head_dim` and `head_dim_v` are the extents of the kernel's tiles: it computes every problem whose head
/// dims are multiples of 8 up to them, padding with zeros. As text (JSON, RON) a spec is flat: `dtype` for
/// the types, `softcap`, `alibi` and `sinks` for the change of scores, `varied` and `paged` for how rows are
/// found; of these, and of `split`, all but `softcap` are written where they are on. Reading one checks it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "text::Flat", into = "text::Flat")]
pub struct KernelSpec {
    /// Types of the tensors.
    pub types: Types,
    /// Tile extent of the head dim of Q and K; a multiple of 16 up to [`Traits::max_head_dim`].
    pub head_dim: u32,
    /// Tile extent of the head dim of V and O; a multiple of 16 up to [`Traits::max_head_dim`].
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

/// The kernels that exist, each with the parameters that only it has.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kernel {
    /// Forward by mma.sync and cp.async; runs on every architecture from 8.0 on.
    Sm80Fwd(Sm80Fwd),
    /// Forward by wgmma and TMA with warp specialisation; runs on 9.0 only.
    Sm90Fwd(Sm90Fwd),
    /// Backward by wgmma and TMA with warp specialisation; runs on 9.0 only.
    Sm90Bwd(Sm90Bwd),
    /// Backward by mma.sync and cp.async; runs on every architecture from 8.0 on.
    Sm80Bwd(Sm80Bwd),
    /// Forward by tcgen05 and TMA in tensor memory, on 10.0 and 10.3. Assembled and emulated, never run on a
    /// GPU.
    Sm100Fwd(Sm100Fwd),
    /// Forward for heads wider than a warpgroup's registers and for latents; runs on 9.0 only.
    Sm90Wide(Sm90Wide),
    /// Forward of e4m3 tensors by wgmma and TMA with warp specialisation; runs on 9.0 only.
    Sm90FwdFp8(Sm90FwdFp8),
}

macro_rules! from_params {
    ($($kernel:ident),+) => {
        $(impl From<$kernel> for Kernel {
            fn from(params: $kernel) -> Kernel {
                Kernel::$kernel(params)
            }
        })+
    };
}

from_params!(Sm80Fwd, Sm90Fwd, Sm90Bwd, Sm80Bwd, Sm100Fwd, Sm90Wide, Sm90FwdFp8);

/// The same expression for whichever kernel a [`Kernel`] is, with its parameters bound to a name: the one
/// match that names every kernel. A crate that treats kernels differently declares a trait, implements it for
/// the parameters of each, and calls it through this macro: a kernel without an implementation does not
/// compile.
///
/// ```
/// use fa_core::{Kernel, Sm100Fwd, Sm80Bwd, Sm80Fwd, Sm90Bwd, Sm90Fwd, Sm90FwdFp8, Sm90Wide, each_kernel};
///
/// trait Warps {
///     fn warps(&self) -> u32;
/// }
/// # impl Warps for Sm90Fwd { fn warps(&self) -> u32 { 4 * (self.num_wg + 1) } }
/// # impl Warps for Sm90Wide { fn warps(&self) -> u32 { 12 } }
/// # impl Warps for Sm90FwdFp8 { fn warps(&self) -> u32 { 4 * (self.num_wg + 1) } }
/// # impl Warps for Sm100Fwd { fn warps(&self) -> u32 { 4 * (self.q_tiles + 2) } }
/// # impl Warps for Sm80Bwd { fn warps(&self) -> u32 { self.num_warps } }
/// # impl Warps for Sm90Bwd { fn warps(&self) -> u32 { 4 * (self.num_wg + 1) } }
/// impl Warps for Sm80Fwd {
///     fn warps(&self) -> u32 {
///         self.num_warps
///     }
/// }
///
/// for kernel in Kernel::defaults() {
///     assert_eq!(each_kernel!(&kernel, params => params.warps()) * 32, kernel.traits().threads);
/// }
/// ```
#[macro_export]
macro_rules! each_kernel {
    ($value:expr, $params:ident => $result:expr) => {
        match $value {
            $crate::Kernel::Sm80Fwd($params) => $result,
            $crate::Kernel::Sm90Fwd($params) => $result,
            $crate::Kernel::Sm90Bwd($params) => $result,
            $crate::Kernel::Sm80Bwd($params) => $result,
            $crate::Kernel::Sm100Fwd($params) => $result,
            $crate::Kernel::Sm90Wide($params) => $result,
            $crate::Kernel::Sm90FwdFp8($params) => $result,
        }
    };
}

impl Kernel {
    /// Each kernel with its defaults: small tiles and valid for a head dim of 64 ([`Kernel::Sm90Wide`] of
    /// 128), to be changed field by field.
    pub fn defaults() -> [Kernel; 7] {
        [
            Kernel::Sm80Fwd(Sm80Fwd::default()),
            Kernel::Sm90Fwd(Sm90Fwd::default()),
            Kernel::Sm80Bwd(Sm80Bwd::default()),
            Kernel::Sm90Bwd(Sm90Bwd::default()),
            Kernel::Sm100Fwd(Sm100Fwd::default()),
            Kernel::Sm90Wide(Sm90Wide::default()),
            Kernel::Sm90FwdFp8(Sm90FwdFp8::default()),
        ]
    }

    /// What the kernel has in common with the others.
    pub const fn traits(&self) -> Traits {
        each_kernel!(self, kernel => kernel.traits())
    }

    /// The kernel's own parameters, in the order of declaration.
    pub fn params(&self) -> Vec<Param> {
        each_kernel!(self, kernel => kernel.params())
    }

    /// One of [`Kernel::params`] by its name; `None` where the kernel has no such parameter.
    pub fn param(&self, name: &str) -> Option<ParamValue> {
        self.params().into_iter().find(|param| param.name == name).map(|param| param.value)
    }

    /// What the kernel's parameters describe: the lines of their documentation, each with the space that it
    /// starts with.
    pub const fn doc(&self) -> &'static [&'static str] {
        each_kernel!(self, kernel => kernel.doc())
    }

    /// The family's kernel for `pass` in 16 bits and head dims up to [`WHOLE_ROW_HEAD_DIM`] with its default
    /// parameters; `None` where the family has none.
    pub fn of(family: Family, pass: Pass) -> Option<Kernel> {
        Kernel::all_of(family, pass, Types::same(Dtype::Bf16)).next()
    }

    /// All of the family's kernels for `pass` of tensors of these types with their default parameters, those
    /// for wide heads last.
    pub fn all_of(family: Family, pass: Pass, types: Types) -> impl Iterator<Item = Kernel> {
        let is_asked = move |kernel: &Kernel| {
            kernel.family() == family
                && kernel.is_backward() == pass.is_backward()
                && kernel.computes_in_8_bits() == (types.q == Dtype::E4m3)
        };
        Kernel::defaults().into_iter().filter(is_asked)
    }

    /// Whether the kernel multiplies e4m3 numbers.
    pub const fn computes_in_8_bits(&self) -> bool {
        match self {
            Kernel::Sm90FwdFp8(_) => true,
            Kernel::Sm80Fwd(_)
            | Kernel::Sm90Fwd(_)
            | Kernel::Sm90Bwd(_)
            | Kernel::Sm80Bwd(_)
            | Kernel::Sm100Fwd(_)
            | Kernel::Sm90Wide(_) => false,
        }
    }

    /// The types of Q that the kernel computes in, as error messages say it.
    const fn dtypes(&self) -> &'static str {
        if self.computes_in_8_bits() { "e4m3" } else { "f16 or bf16" }
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
        self.types.check().map_err(|error| SpecError::Conflict(error.to_string()))?;
        let dtype = self.types.q;
        if !(dtype.is_half() || dtype == Dtype::E4m3)
            || self.kernel.computes_in_8_bits() != (dtype == Dtype::E4m3)
        {
            return Err(SpecError::Dtype { dtype, kernel: self.kernel.name(), need: self.kernel.dtypes() });
        }
        let widest = self.kernel.traits().max_head_dim;
        params::multiple("head_dim", self.head_dim, 16, 16, widest)?;
        params::multiple("head_dim_v", self.head_dim_v, 16, 16, widest)?;
        self.check_reads()?;
        let (head_dims, mask) = ((self.head_dim, self.head_dim_v), self.mask);
        each_kernel!(&self.kernel, kernel => kernel.check(head_dims, mask))?;
        if !self.reads_codes() {
            return Ok(());
        }
        // Lanes copy 16 bytes.
        let whole = 16 * self.types.kv.per_element() as u32;
        params::multiple("head_dim", self.head_dim, whole, whole, widest)?;
        params::multiple("head_dim_v", self.head_dim_v, whole, whole, widest)?;
        each_kernel!(&self.kernel, kernel => kernel.check_codes(self.types.kv))
    }

    /// Whether K and V are codes, which the kernel converts to the type of Q.
    pub const fn reads_codes(&self) -> bool {
        self.types.kv.is_code() && !self.types.q.is_code()
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
        if self.traits().gathers && !paged {
            let why = "gather needs paged: keys in one piece are loaded by TMA; use gather = false";
            return conflict(why.into());
        }
        let has_whole_keys = self.backward().is_some_and(|own| own.whole_keys);
        if has_whole_keys && (varied || self.mask == MaskKind::Window || self.score.program.is_some()) {
            return conflict(
                "whole_keys needs varied = false, a full or causal mask and no program: a tile has all keys \
                 of a sequence, and every query sees one of them; use whole_keys = false"
                    .into(),
            );
        }
        let cluster = self.traits().cluster;
        if varied && cluster > 1 {
            return conflict(format!(
                "cluster_m = {cluster} and varied: sequences begin within a cluster's tiles, whose CTAs \
                 would not load the same keys; use cluster_m = 1"
            ));
        }
        if self.score.masks() && cluster > 1 {
            return conflict(format!(
                "cluster_m = {cluster} and a program that masks: the CTAs of a cluster would visit different \
                 tiles of keys; use cluster_m = 1"
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

    /// What the kernel has in common with the others. Codes are copied by threads, whatever loads Q.
    pub const fn traits(&self) -> Traits {
        let traits = self.kernel.traits();
        let tensor_maps: &[&str] = if traits.uses_tma() { &["q"] } else { &[] };
        if self.reads_codes() { Traits { tensor_maps, ..traits } } else { traits }
    }

    /// Every compile-time parameter in the order of declaration: those of all kernels, then the kernel's own.
    pub fn params(&self) -> Vec<Param> {
        let KernelSpec { types, head_dim, head_dim_v, mask, score, reads, split, kernel } = self;
        let param = |name, doc, value| Param { name, doc, value };
        let mut all = vec![
            param("dtype", &[" Type of Q and O, and of the tiles of K and V."] as &[_], types.q.into()),
            param("head_dim", &[" Tile extent of the head dim of Q and K."], (*head_dim).into()),
            param("head_dim_v", &[" Tile extent of the head dim of V and O."], (*head_dim_v).into()),
            param("mask", &[" The mask that there is code for."], (*mask).into()),
            param("softcap", &[" Scores become cap * tanh(s / cap)."], score.softcap.into()),
            param(
                "varied",
                &[" Lengths and starts of sequences are read on the device."],
                reads.varied.into(),
            ),
            param("paged", &[" K and V are in pages, found through a page table."], reads.paged.into()),
            param(
                "alibi",
                &[" slope * |i + seqlen_k - seqlen_q - j| is subtracted from scores."],
                score.alibi.into(),
            ),
            param("sinks", &[" A logit per query head joins the softmax denominator."], score.sinks.into()),
            param("split", &[" Split keys: several CTAs share the keys of a tile."], (*split).into()),
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
        self.types.q.bytes() as u32
    }
}
