//! A kernel as plain data: all that the kernel sources are specialised on, and nothing of any one problem's lengths.

mod base;
mod check;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Arch, Dtype, Family, Mask, Pass, Problem, ScoreKind, Types};
use check::multiple;

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

/// A kernel's compile-time parameters.
///
/// `head_dim` and `head_dim_v` are the extents of the kernel's tiles: it computes every problem whose head dims are
/// multiples of 8 up to them, padding with zeros. As text (JSON, RON) a spec is flat: `dtype` for the types, `softcap` for the
/// change of scores.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Flat", into = "Flat")]
pub struct KernelSpec {
    /// Types of the tensors.
    pub types: Types,
    /// Tile extent of the head dim of Q and K.
    pub head_dim: u32,
    /// Tile extent of the head dim of V and O.
    pub head_dim_v: u32,
    /// Masking code.
    pub mask: MaskKind,
    /// Code that changes scores before the mask.
    pub score: ScoreKind,
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

/// Parameters of the SM80-class forward. Each optimisation step is a switch, so that it can be measured alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sm80Fwd {
    /// Query rows of a block; a multiple of `16 * num_warps`.
    pub tile_m: u32,
    /// Keys per step; a multiple of 16.
    pub tile_n: u32,
    /// Warps of a block; each owns `tile_m / num_warps` rows.
    pub num_warps: u32,
    /// K/V buffers in flight, 1 to 4; a step waits for all but the newest copies.
    pub stages: u32,
    /// Keep the Q fragments in registers for the whole walk.
    pub q_in_regs: bool,
    /// Resident blocks per SM that the compiler is asked to leave registers for.
    pub blocks_per_sm: u32,
    /// XOR-swizzled shared memory instead of plain row-major rows.
    pub swizzle: bool,
    /// ldmatrix instead of plain 32-bit fragment loads.
    pub ldmatrix: bool,
    /// exp2 with the scale folded into one multiply-add instead of exp of scaled scores.
    pub exp2: bool,
    /// Flush-to-zero exponentials and approximate division.
    pub fast_math: bool,
    /// Separate loops for masked and unmasked tiles instead of a mask on every tile.
    pub loop_split: bool,
    /// Last query tiles first, so that the causal mask's longest tiles start earliest.
    pub reverse_blocks: bool,
}

/// How tiles are handed to blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Scheduler {
    /// One block per tile.
    PerTile,
    /// One block per SM; block `b` takes the tiles `b`, `b + grid`, and so on.
    Static,
    /// One block per SM; tiles are drawn from a counter in device memory.
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

/// Parameters of the SM90 forward.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sm90Fwd {
    /// Query rows of a block: `64 * num_wg`.
    pub tile_m: u32,
    /// Keys per step; a multiple of 16 up to 256.
    pub tile_n: u32,
    /// MMA warp groups; one more warp group loads.
    pub num_wg: u32,
    /// P as a register operand of P V instead of through shared memory.
    pub pv_is_rs: bool,
    /// S of the next step is issued before P V of this one (intra-warp-group overlap).
    pub overlap_wg: bool,
    /// Q buffers: with 2, the next tile's Q is loaded while this one's is in use.
    pub q_stages: u32,
    /// K and V buffers in flight, 1 to 4.
    pub kv_stages: u32,
    /// Warp groups take turns at the tensor cores, so that one's softmax runs under the other's products.
    pub ping_pong: bool,
    /// How tiles are handed to blocks.
    pub scheduler: Scheduler,
    /// The order of tiles.
    pub tile_order: TileOrder,
    /// Blocks of a cluster that share K/V loads by multicast: 1 or 2 (2 for the full mask only: neighbours must walk the
    /// same keys).
    pub cluster_m: u32,
    /// Of 16 exponentials, how many are computed by polynomial on the FMA units: 0 to 16.
    pub exp_poly_of_16: u32,
    /// Rescale O only when the running maximum grew by more than this many powers of 2; 0 rescales whenever it grew. With
    /// `pv_is_rs` and `overlap_wg` no maximum is taken at all until the sum of a block's weights shows that it has grown so
    /// far. At most 15: the weights must stay within f16.
    pub rescale_threshold: u32,
    /// Fold the query heads of a K/V head into the rows of a tile.
    pub pack_gqa: bool,
}

/// Parameters of the SM90 backward. A block owns `tile_n` keys and walks the tiles of `tile_m` queries that see them.
///
/// Five products make a step: S and dP (`[tile_m, tile_n]`), dK and dV (`[tile_n, head dim]`) and dQ (`[tile_m, head dim]`).
/// Each can be computed transposed (swap_ab), and shares its rows or its columns out to the warp groups (atom layout).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sm90Bwd {
    /// Queries per step; a multiple of 16 up to 128.
    pub tile_m: u32,
    /// Keys of a block; a multiple of 16 up to 128.
    pub tile_n: u32,
    /// MMA warp groups, 2 or 3; one more warp group loads, and adds dQ to device memory.
    pub num_wg: u32,
    /// Q buffers, 1 or 2.
    pub q_stages: u32,
    /// dO buffers, 1 or 2.
    pub do_stages: u32,
    /// Buffers of P and dS, 1 or 2; with 2 a step has one barrier over the warp groups instead of two.
    pub pds_stages: u32,
    /// Compute S and dP transposed.
    pub sdp_swap_ab: bool,
    /// Compute dK and dV transposed.
    pub dkv_swap_ab: bool,
    /// Compute dQ transposed.
    pub dq_swap_ab: bool,
    /// Warp groups along `tile_m` in S and dP: 1 or `num_wg`.
    pub atom_layout_m_sdp: u32,
    /// Warp groups along `tile_n` in dK and dV: 1 or `num_wg`.
    pub atom_layout_n_dkv: u32,
    /// Warp groups along `tile_m` in dQ: 1 or `num_wg`.
    pub atom_layout_m_dq: u32,
    /// P and dS as register operands of dV and dK instead of through shared memory.
    pub mma_dkv_is_rs: bool,
    /// dQ goes to device memory through shared memory by the bulk copy engine; otherwise by vector atomics from registers.
    pub dq_via_smem: bool,
    /// Parts in which dQ is computed, one after the other in the same registers: 1 or 2.
    pub dq_slices: u32,
    /// The order of tiles.
    pub tile_order: TileOrder,
    /// Key tiles add to dQ in a fixed order, so that equal inputs give equal bits.
    pub deterministic: bool,
}

/// Parameters of the SM80-class backward. A block owns `tile_n` keys and walks the tiles of `tile_m` queries that see them.
///
/// Each of the five products of a step (see [`Sm90Bwd`]) is cut among the warps into shares of whole 16 x 16 blocks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sm80Bwd {
    /// Queries per step; a multiple of 16 up to 128.
    pub tile_m: u32,
    /// Keys of a block; a multiple of 16 up to 128.
    pub tile_n: u32,
    /// Warps, 2 to 8: half of them compute P and dV, half dS and dK.
    pub num_warps: u32,
    /// Q buffers, 2 or 3: P runs a step ahead. With 2 the next Q arrives during the step that needs it.
    pub q_stages: u32,
    /// dO buffers, 1 or 2.
    pub do_stages: u32,
    /// Warps of a half along `tile_m` in S and dP; divides `num_warps / 2`.
    pub atom_layout_m_sdp: u32,
    /// Warps of a half along `tile_n` in dK and dV; divides `num_warps / 2`.
    pub atom_layout_n_dkv: u32,
    /// Warps of a half along `tile_m` in dQ; divides `num_warps / 2`.
    pub atom_layout_m_dq: u32,
    /// Columns of dQ that the first half of the warps computes, less than the head dim; the second computes the others.
    pub dq_first: u32,
    /// Resident blocks per SM that the register budget is set for.
    pub blocks_per_sm: u32,
    /// The order of tiles.
    pub tile_order: TileOrder,
    /// Key tiles add to dQ in a fixed order, so that equal inputs give equal bits.
    pub deterministic: bool,
}

/// A spec as it is stored under `specs/`: with the architectures that it ships for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShippedSpec {
    /// Architectures to compile for.
    pub archs: Vec<Arch>,
    /// The kernel.
    pub spec: KernelSpec,
}

/// Why a spec is none.
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
        /// Where it runs.
        need: &'static str,
    },
    /// The text is no RON, or has unknown or missing fields.
    #[error("not a kernel spec: {0}")]
    Ron(String),
}

/// The largest head dim that a kernel's tiles may span.
pub const MAX_HEAD_DIM: u32 = 256;

/// What every kernel has, whatever its parameters: the one exhaustive match on kernels that others read.
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

impl Kernel {
    /// What the kernel has in common with the others.
    pub const fn traits(&self) -> Traits {
        match self {
            Kernel::Sm80Fwd(kernel) => Traits {
                name: "sm80_fwd",
                pass: Pass::Forward,
                family: Family::Sm80,
                tile: (kernel.tile_m, kernel.tile_n),
                threads: 32 * kernel.num_warps,
                blocks_per_sm: kernel.blocks_per_sm,
                cluster: 1,
                scheduler: Scheduler::PerTile,
                tile_order: if kernel.reverse_blocks { TileOrder::LongestFirst } else { TileOrder::Natural },
                packs_gqa: false,
            },
            Kernel::Sm90Fwd(kernel) => Traits {
                name: "sm90_fwd",
                pass: Pass::Forward,
                family: Family::Sm90,
                tile: (kernel.tile_m, kernel.tile_n),
                threads: 128 * (kernel.num_wg + 1),
                blocks_per_sm: 1,
                cluster: kernel.cluster_m,
                scheduler: kernel.scheduler,
                tile_order: kernel.tile_order,
                packs_gqa: kernel.pack_gqa,
            },
            Kernel::Sm80Bwd(kernel) => Traits {
                name: "sm80_bwd",
                pass: Pass::Backward { deterministic: kernel.deterministic },
                family: Family::Sm80,
                tile: (kernel.tile_m, kernel.tile_n),
                threads: 32 * kernel.num_warps,
                blocks_per_sm: kernel.blocks_per_sm,
                cluster: 1,
                scheduler: Scheduler::PerTile,
                tile_order: kernel.tile_order,
                packs_gqa: false,
            },
            Kernel::Sm90Bwd(kernel) => Traits {
                name: "sm90_bwd",
                pass: Pass::Backward { deterministic: kernel.deterministic },
                family: Family::Sm90,
                tile: (kernel.tile_m, kernel.tile_n),
                threads: 128 * (kernel.num_wg + 1),
                blocks_per_sm: 1,
                cluster: 1,
                scheduler: Scheduler::PerTile,
                tile_order: kernel.tile_order,
                packs_gqa: false,
            },
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

impl KernelSpec {
    /// Checks every field against the kernel's rules: what it means, not whether it fits a GPU (the planner's part).
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
                format!("out_dtype = {out} beside dtype = {qkv}: kernels write O in the type of Q, K and V");
            return Err(SpecError::Conflict(why));
        }
        multiple("head_dim", self.head_dim, 16, MAX_HEAD_DIM)?;
        multiple("head_dim_v", self.head_dim_v, 16, MAX_HEAD_DIM)?;
        match &self.kernel {
            Kernel::Sm80Fwd(kernel) => kernel.check(),
            Kernel::Sm90Fwd(kernel) if kernel.cluster_m > 1 && self.mask != MaskKind::Full => {
                let why = "cluster_m = 2 needs mask full: blocks of a cluster walk the same keys; use cluster_m = 1";
                Err(SpecError::Conflict(why.into()))
            }
            Kernel::Sm90Fwd(kernel) => kernel.check(),
            Kernel::Sm90Bwd(kernel) => kernel.check(self.head_dim, self.head_dim_v),
            Kernel::Sm80Bwd(kernel) => kernel.check(self.head_dim, self.head_dim_v),
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

    /// Checks that the kernel computes `problem`: its type, head dims, mask, soft cap and ratio of heads. Lengths, which a kernel
    /// does not know, and the pass, which a problem does not say, are no part of it; the problem is taken to be valid.
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

/// A short name that tells specs apart in tables: kernel, dtype, head dims, mask, tile and the switches that are on.
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
        let switches: Vec<(bool, String)> = match &self.kernel {
            Kernel::Sm80Fwd(k) => vec![
                (true, format!("w{}", k.num_warps)),
                (true, format!("s{}", k.stages)),
                (k.q_in_regs, "qr".into()),
                (true, format!("b{}", k.blocks_per_sm)),
                (k.swizzle, "swz".into()),
                (k.ldmatrix, "ldm".into()),
                (k.exp2, "exp2".into()),
                (k.fast_math, "fast".into()),
                (k.loop_split, "split".into()),
                (k.reverse_blocks, "rev".into()),
            ],
            Kernel::Sm90Fwd(k) => vec![
                (true, if k.pv_is_rs { "rs".into() } else { "ss".into() }),
                (k.overlap_wg, "ovl".into()),
                (k.q_stages > 1, format!("q{}", k.q_stages)),
                (true, format!("s{}", k.kv_stages)),
                (k.ping_pong, "pp".into()),
                (k.scheduler != Scheduler::PerTile, format!("{:?}", k.scheduler).to_lowercase()),
                (k.tile_order == TileOrder::LongestFirst, "lpt".into()),
                (k.cluster_m > 1, format!("c{}", k.cluster_m)),
                (k.exp_poly_of_16 > 0, format!("poly{}", k.exp_poly_of_16)),
                (k.rescale_threshold > 0, format!("rt{}", k.rescale_threshold)),
                (k.pack_gqa, "pack".into()),
            ],
            Kernel::Sm80Bwd(k) => vec![
                (true, format!("w{}", k.num_warps)),
                (true, format!("s{}{}", k.q_stages, k.do_stages)),
                (true, format!("a{}{}{}", k.atom_layout_m_sdp, k.atom_layout_n_dkv, k.atom_layout_m_dq)),
                (true, format!("q{}", k.dq_first)),
                (true, format!("b{}", k.blocks_per_sm)),
                (k.tile_order == TileOrder::LongestFirst, "lpt".into()),
                (k.deterministic, "det".into()),
            ],
            Kernel::Sm90Bwd(k) => vec![
                (true, format!("wg{}", k.num_wg)),
                (true, format!("s{}{}{}", k.q_stages, k.do_stages, k.pds_stages)),
                (
                    k.sdp_swap_ab || k.dkv_swap_ab || k.dq_swap_ab,
                    [
                        "swap",
                        if k.sdp_swap_ab { "S" } else { "" },
                        if k.dkv_swap_ab { "K" } else { "" },
                        if k.dq_swap_ab { "Q" } else { "" },
                    ]
                    .concat(),
                ),
                (true, format!("a{}{}{}", k.atom_layout_m_sdp, k.atom_layout_n_dkv, k.atom_layout_m_dq)),
                (k.mma_dkv_is_rs, "rs".into()),
                (!k.dq_via_smem, "red".into()),
                (k.dq_slices > 1, format!("sl{}", k.dq_slices)),
                (k.tile_order == TileOrder::LongestFirst, "lpt".into()),
                (k.deterministic, "det".into()),
            ],
        };
        switches.iter().filter(|(on, _)| *on).try_for_each(|(_, name)| write!(f, "-{name}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ScoreMod;

    fn sm80() -> KernelSpec {
        KernelSpec {
            types: Types::same(Dtype::F16),
            head_dim: 128,
            head_dim_v: 128,
            mask: MaskKind::Causal,
            score: ScoreKind::NONE,
            kernel: Kernel::Sm80Fwd(Sm80Fwd { tile_m: 128, tile_n: 64, ..Sm80Fwd::default() }),
        }
    }

    fn sm90() -> KernelSpec {
        KernelSpec {
            kernel: Kernel::Sm90Fwd(Sm90Fwd {
                tile_m: 128,
                tile_n: 176,
                ping_pong: true,
                scheduler: Scheduler::Static,
                ..Sm90Fwd::default()
            }),
            ..sm80()
        }
    }

    fn backward() -> KernelSpec {
        KernelSpec {
            kernel: Kernel::Sm90Bwd(Sm90Bwd {
                tile_m: 64,
                tile_n: 128,
                num_wg: 2,
                q_stages: 2,
                do_stages: 2,
                pds_stages: 2,
                sdp_swap_ab: true,
                dkv_swap_ab: false,
                dq_swap_ab: false,
                atom_layout_m_sdp: 1,
                atom_layout_n_dkv: 2,
                atom_layout_m_dq: 1,
                mma_dkv_is_rs: true,
                dq_via_smem: true,
                dq_slices: 1,
                tile_order: TileOrder::LongestFirst,
                deterministic: false,
            }),
            ..sm80()
        }
    }

    #[test]
    fn backward_shapes_follow_the_tensor_cores() {
        let refused = |change: fn(&mut Sm90Bwd), part: &str| {
            let mut spec = backward();
            let Kernel::Sm90Bwd(kernel) = &mut spec.kernel else { panic!("a backward") };
            change(kernel);
            let error = spec.check().expect_err("must be refused").to_string();
            assert!(error.contains(part), "{error} does not name {part}");
        };
        assert_eq!(backward().check(), Ok(()));
        refused(|k| k.tile_m = 80, "dQ: [80, 128]");
        refused(|k| k.sdp_swap_ab = false, "mma_dkv_is_rs");
        refused(|k| k.atom_layout_n_dkv = 3, "atom_layout_n_dkv = 3: must be 1 or num_wg = 2");
        refused(|k| k.dq_slices = 2, "dq_slices = 2");
        refused(|k| k.q_stages = 3, "q_stages = 3");
        refused(|k| k.tile_n = 144, "tile_n = 144");
    }

    fn backward_sm80() -> KernelSpec {
        KernelSpec {
            kernel: Kernel::Sm80Bwd(Sm80Bwd {
                tile_m: 64,
                tile_n: 128,
                num_warps: 8,
                q_stages: 3,
                do_stages: 2,
                atom_layout_m_sdp: 2,
                atom_layout_n_dkv: 2,
                atom_layout_m_dq: 2,
                dq_first: 64,
                blocks_per_sm: 1,
                tile_order: TileOrder::LongestFirst,
                deterministic: false,
            }),
            ..sm80()
        }
    }

    #[test]
    fn warps_of_the_sm80_backward_take_whole_blocks() {
        let refused = |change: fn(&mut Sm80Bwd), part: &str| {
            let mut spec = backward_sm80();
            let Kernel::Sm80Bwd(kernel) = &mut spec.kernel else { panic!("a backward") };
            change(kernel);
            let error = spec.check().expect_err("must be refused").to_string();
            assert!(error.contains(part), "{error} does not name {part}");
        };
        assert_eq!(backward_sm80().check(), Ok(()));
        refused(|k| k.atom_layout_m_sdp = 8, "atom_layout_m_sdp = 8");
        refused(|k| k.dq_first = 24, "dQ: [64, 104] cannot be cut into 2 x 2 warps");
        refused(|k| k.atom_layout_n_dkv = 3, "atom_layout_n_dkv = 3: must be a divisor of num_warps / 2 = 4");
        refused(|k| k.q_stages = 1, "q_stages = 1");
        refused(|k| k.num_warps = 7, "num_warps = 7");
        refused(|k| k.dq_first = 128, "dq_first = 128: must be less than the head dim, 128");
        refused(|k| k.tile_n = 144, "tile_n = 144");
    }

    #[test]
    fn ron_reads_back_what_it_wrote() {
        for spec in [sm80(), sm90(), backward(), backward_sm80()] {
            assert_eq!(KernelSpec::from_ron(&spec.to_ron()), Ok(spec.clone()));
            let shipped = ShippedSpec { archs: vec![Arch::Sm90], spec };
            assert_eq!(ShippedSpec::from_ron(&shipped.to_ron()), Ok(shipped));
        }
    }

    #[test]
    fn unknown_fields_and_bad_values_are_refused() {
        let text = sm80().to_ron();
        let refused = |text: &str, part: &str| {
            let error = KernelSpec::from_ron(text).expect_err("must be refused").to_string();
            assert!(error.contains(part), "{error} does not name {part}");
        };
        refused(&text.replace("stages", "stagez"), "stagez");
        refused(&text.replace("softcap: false", "softcap: false, sinks: true"), "sinks");
        refused(&text.replace("tile_n: 64", "tile_n: 60"), "tile_n = 60");
        refused(&text.replace("tile_n: 64", "tile_n: -1"), "not a kernel spec");
        refused(&text.replace("f16", "e4m3"), "dtype e4m3");
        refused(&sm90().to_ron().replace("tile_m: 128", "tile_m: 192"), "64 * num_wg = 128");
    }

    #[test]
    fn wgmma_kernels_ship_for_sm90_only() {
        let shipped = ShippedSpec { archs: vec![Arch::Sm90, Arch::Sm80], spec: sm90() };
        assert!(matches!(
            ShippedSpec::from_ron(&shipped.to_ron()),
            Err(SpecError::Arch { arch: Arch::Sm80, .. })
        ));
    }

    #[test]
    fn a_spec_serves_what_its_kernel_computes() {
        let base = Problem::square(2, 1024, 4, 128, Mask::CAUSAL, Dtype::F16);
        let differs = |spec: &KernelSpec, problem: Problem, what: &str| {
            assert_eq!(spec.serves(&problem).expect_err("it differs").what, what);
        };
        for spec in [sm80(), sm90(), backward(), backward_sm80()] {
            assert_eq!(spec.serves(&base), Ok(()));
            assert_eq!(spec.serves(&Problem { head_dim: 104, head_dim_v: 8, heads_kv: 2, ..base }), Ok(()));
            differs(&spec, Problem { types: Types::same(Dtype::Bf16), ..base }, "dtype");
            differs(&spec, Problem { head_dim: 136, ..base }, "head_dim");
            differs(&spec, Problem { head_dim_v: 100, ..base }, "head_dim_v");
            differs(&spec, Problem { mask: Mask::FULL, ..base }, "mask");
            differs(&spec, Problem { score: ScoreMod::softcap(1.0), ..base }, "softcap");
            let window = KernelSpec { mask: MaskKind::Window, ..spec };
            assert_eq!(window.serves(&Problem { mask: Mask::window(3, 4), ..base }), Ok(()));
        }
    }

    #[test]
    fn packed_heads_must_divide_the_tile() {
        let packed = Kernel::Sm90Fwd(Sm90Fwd { tile_m: 128, pack_gqa: true, ..Sm90Fwd::default() });
        let packed = KernelSpec { kernel: packed, ..sm90() };
        let of = |heads_q, heads_kv| Problem {
            heads_q,
            heads_kv,
            ..Problem::square(1, 64, 1, 128, Mask::CAUSAL, Dtype::F16)
        };
        assert_eq!(packed.serves(&of(8, 1)), Ok(()));
        let error = packed.serves(&of(6, 1)).expect_err("6 does not divide 128").to_string();
        assert!(error.contains("6 query heads") && error.contains("tile_m = 128"), "{error}");
        assert!(packed.serves(&of(6, 0)).is_err());
        assert_eq!(sm90().serves(&of(6, 1)), Ok(()));
    }

    #[test]
    fn names_tell_the_switches() {
        assert_eq!(
            sm80().to_string(),
            "sm80_fwd-f16-hd128-causal-128x64-w4-s2-b1-swz-ldm-exp2-fast-split-rev"
        );
        assert_eq!(sm90().to_string(), "sm90_fwd-f16-hd128-causal-128x176-rs-ovl-s2-pp-static");
        assert_eq!(backward().to_string(), "sm90_bwd-f16-hd128-causal-64x128-wg2-s222-swapS-a121-rs-lpt");
        assert_eq!(backward_sm80().to_string(), "sm80_bwd-f16-hd128-causal-64x128-w8-s32-a222-q64-b1-lpt");
    }
}
