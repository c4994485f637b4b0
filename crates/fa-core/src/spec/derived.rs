//! Properties that follow from a spec's parameters, decide how its kernel computes, and have to be known on
//! the host as well. Planner and launch ask here; CUDA's config lists them after the parameters.

use super::pages::{operand_columns, panel};
use super::params::Param;
use super::values::{MaskKind, TileOrder};
use super::{Kernel, KernelSpec, Sm80Bwd, Sm80Fwd, Sm90Bwd, Sm90Fwd, Sm90FwdFp8, Sm90Wide, Sm100Fwd};
use crate::each_kernel;

/// Properties of a backward that follow from its parameters, in addition to its [`super::Traits`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackwardTraits {
    /// Whether the kernel can store the first sums of a tile of dQ by bulk copies, instead of adding them to
    /// zeros (NB-082): SM90 backwards. With uniform lengths, the key tile that stores is drawn before the
    /// others: the first one under a full mask; under a causal one and a window the last that the queries
    /// see, since tiles are drawn with the last keys first. With lengths on the device, and under a program's
    /// mask, it is the first to arrive, or in deterministic kernels with lengths on the device the one whose
    /// turn is first (NB-093, NB-208).
    pub may_store_dq: bool,
    /// Semaphores of a tile of dQ in a launch that orders the sums: `dq_turns` in `cuda/attn/bwd_tile.cuh`.
    pub dq_semaphores: usize,
    /// dQ has no accumulators: a tile has all keys of its sequence.
    pub whole_keys: bool,
}

/// The gradient of an array that a main kernel may store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredGradient {
    /// Its place in the program's gradients.
    pub index: usize,
    /// Keys of a panel of the tile that is stored.
    pub panel: u32,
}

/// Codes that an SM has room for in flight, but for the limits on their stages; of 8 bits as many bytes.
const CODES_IN_FLIGHT: u32 = 64 << 10;

/// Registers per thread for a soft cap's two ways beside S, P and O: by consumer warpgroups (one or two, or
/// three), fewer with lengths on the device.
const fn near_cap_registers(num_wg: u32, varied: bool) -> u32 {
    match num_wg {
        3 => 0,
        _ if varied => 176,
        _ => 256,
    }
}

impl Sm90Fwd {
    /// Whether P is computed against the current maximum, and its sum shows that the scores have outgrown it.
    /// In the tiles (nearly all) where they have not, no maximum is taken and O is not rescaled. Any
    /// reference within `2^rescale_threshold` of the maximum gives the same relative precision.
    pub const fn lazy_max(&self) -> bool {
        self.overlap_wg && self.pv_is_rs && self.rescale_threshold > 0
    }

    /// Whether tiles whose scores are all at most half a soft cap take it as a polynomial, on the FMA units
    /// alone (NB-080). Both ways need registers beside S, P and O.
    pub fn near_cap(&self, spec: &KernelSpec) -> bool {
        let need = self.tile_n / 4 * 3 + spec.head_dim_v / 2;
        let fits = need <= near_cap_registers(self.num_wg, spec.reads.varied);
        let others = spec.score.alibi || spec.score.program.is_some();
        // The polynomial's terms would be those of each tile's descale.
        spec.score.softcap && !others && self.lazy_max() && fits && !spec.reads_codes()
    }

    /// Whether a warpgroup skips tiles of keys that only rows of later warpgroups see, in tiles of fewer keys
    /// than the CTA has rows. It needs two stages: the K of all skipped tiles, at most two, is released
    /// before the wait for the first V.
    pub const fn skips_blocks(&self, mask: MaskKind) -> bool {
        let is_masked = !matches!(mask, MaskKind::Full);
        is_masked && self.tile_n < self.tile_m && self.tile_n >= 64 && self.kv_stages >= 2
    }

    /// Whether tiles of V begin on a sector where rows do not (NB-157). With three warpgroups on long tiles
    /// O's store, which skips these columns, would spill.
    pub const fn shifts_values(&self) -> bool {
        self.num_wg < 3 || self.tile_n <= 64
    }

    fn derived(&self, spec: &KernelSpec) -> Vec<Param> {
        vec![
            switch("lazy_max", LAZY_MAX, self.lazy_max()),
            switch("near_cap", NEAR_CAP, self.near_cap(spec)),
            switch("skips_blocks", SKIPS_BLOCKS, self.skips_blocks(spec.mask) && !spec.score.masks()),
            switch("shifts_values", SHIFTS_VALUES, self.shifts_values() && !spec.reads_codes()),
            kv_dtype(spec),
            Param { name: "code_stages", doc: CODE_STAGES, value: self.code_stages(spec).into() },
            own_plan(spec),
        ]
    }

    /// Stages of the codes of K and V: as many as keep an SM's share of the device memory's
    /// bandwidth busy while others are converted; 0 for other types.
    pub fn code_stages(&self, spec: &KernelSpec) -> u32 {
        let step = self.tile_n * (operand_columns(spec.head_dim) + operand_columns(spec.head_dim_v));
        if spec.reads_codes() { (CODES_IN_FLIGHT / step.max(1)).clamp(2, 4) } else { 0 }
    }

    const fn backward(&self, _: &KernelSpec) -> Option<BackwardTraits> {
        None
    }
}

impl Sm80Fwd {
    fn derived(&self, spec: &KernelSpec) -> Vec<Param> {
        vec![kv_dtype(spec)]
    }

    const fn backward(&self, _: &KernelSpec) -> Option<BackwardTraits> {
        None
    }
}

impl Sm100Fwd {
    fn derived(&self, _: &KernelSpec) -> Vec<Param> {
        Vec::new()
    }

    const fn backward(&self, _: &KernelSpec) -> Option<BackwardTraits> {
        None
    }
}

impl Sm90Wide {
    fn derived(&self, spec: &KernelSpec) -> Vec<Param> {
        vec![kv_dtype(spec), own_plan(spec)]
    }

    /// Columns of a key's row: of latents K's hold V's.
    pub const fn key_columns(&self, spec: &KernelSpec) -> u32 {
        if self.latent { spec.head_dim } else { spec.head_dim + spec.head_dim_v }
    }

    const fn backward(&self, _: &KernelSpec) -> Option<BackwardTraits> {
        None
    }
}

impl Sm90FwdFp8 {
    fn derived(&self, spec: &KernelSpec) -> Vec<Param> {
        vec![
            Param { name: "out_dtype", doc: &[" Type of O."], value: spec.types.out.into() },
            Param { name: "slice", doc: SLICE, value: self.slice(spec.head_dim_v).into() },
            own_plan(spec),
        ]
    }

    const fn backward(&self, _: &KernelSpec) -> Option<BackwardTraits> {
        None
    }
}

impl Sm90Bwd {
    fn may_store_dq(&self, spec: &KernelSpec) -> bool {
        let is_drawn_first = match spec.mask {
            MaskKind::Full => true,
            MaskKind::Causal | MaskKind::Window => {
                self.deterministic || matches!(self.tile_order, TileOrder::LongestFirst)
            }
        };
        // Which tile comes first under a program's mask is not known: it claims.
        let knows =
            if spec.score.masks() { !self.deterministic } else { spec.reads.varied || is_drawn_first };
        self.dq_via_smem && knows
    }

    fn derived(&self, spec: &KernelSpec) -> Vec<Param> {
        vec![switch("may_store_dq", MAY_STORE_DQ, self.may_store_dq(spec))]
    }

    fn backward(&self, spec: &KernelSpec) -> Option<BackwardTraits> {
        let claims = (spec.reads.varied || spec.score.masks()) && !self.deterministic;
        let dq_semaphores = if claims { 2 * self.num_wg as usize } else { 1 };
        let may_store_dq = self.may_store_dq(spec);
        Some(BackwardTraits { may_store_dq, dq_semaphores, whole_keys: self.whole_keys })
    }
}

impl Sm80Bwd {
    fn derived(&self, _: &KernelSpec) -> Vec<Param> {
        Vec::new()
    }

    const fn backward(&self, _: &KernelSpec) -> Option<BackwardTraits> {
        let dq_semaphores = if self.dq_first > 0 { 2 } else { 1 };
        Some(BackwardTraits { may_store_dq: false, dq_semaphores, whole_keys: false })
    }
}

fn kv_dtype(spec: &KernelSpec) -> Param {
    Param { name: "kv_dtype", doc: KV_DTYPE, value: spec.types.kv.into() }
}

fn own_plan(spec: &KernelSpec) -> Param {
    switch("own_plan", OWN_PLAN, spec.plans_for_itself())
}

fn switch(name: &'static str, doc: &'static [&'static str], on: bool) -> Param {
    Param { name, doc, value: on.into() }
}

impl KernelSpec {
    /// The derived properties of a backward; `None` for a forward.
    pub fn backward(&self) -> Option<BackwardTraits> {
        each_kernel!(&self.kernel, kernel => kernel.backward(self))
    }

    /// The array whose gradient the main kernel may store: that of the scores, which SM90 backwards have in
    /// shared memory in the type of Q.
    pub fn stored_gradient(&self) -> Option<StoredGradient> {
        let Kernel::Sm90Bwd(kernel) = &self.kernel else { return None };
        let program = self.score.program?;
        let index = program.added_array()?;
        let element = program.arrays()[program.gradients()[index].array].element;
        // A transposed dK divides the keys, whose panels belong to one warpgroup.
        let atoms = if kernel.dkv_swap_ab { kernel.atom_layout_n_dkv } else { 1 };
        let share = kernel.tile_n / atoms.max(1);
        let panel = panel(kernel.tile_n).min(panel(share));
        (element.narrow() == Some(self.types.q) && share.is_multiple_of(16))
            .then_some(StoredGradient { index, panel })
    }

    /// Whether CTAs list their work themselves where a call brings no plan and tiles are few: those of SM90
    /// forwards that divide the keys of sequences whose lengths are on the device.
    pub fn plans_for_itself(&self) -> bool {
        let divides = self.reads.varied && self.split;
        match self.kernel {
            Kernel::Sm90Fwd(_) | Kernel::Sm90FwdFp8(_) | Kernel::Sm90Wide(_) => divides,
            Kernel::Sm80Fwd(_) | Kernel::Sm80Bwd(_) | Kernel::Sm90Bwd(_) | Kernel::Sm100Fwd(_) => false,
        }
    }

    /// The fields that CUDA's config of this kernel has after [`KernelSpec::params`], in the order of
    /// declaration.
    pub fn derived(&self) -> Vec<Param> {
        each_kernel!(&self.kernel, kernel => kernel.derived(self))
    }
}

const LAZY_MAX: &[&str] = &[
    " P is computed against the current maximum, and its sum shows whether the scores have outgrown it. In",
    " tiles where they have not (nearly all) no maximum is taken and O is not rescaled. Any reference within",
    " 2^rescale_threshold of the maximum gives the same relative precision.",
];
const NEAR_CAP: &[&str] = &[
    " In tiles whose scores are all at most half the soft cap, the cap is a polynomial, on the FMA units",
    " alone (NB-080). Both paths need registers beside S, P and O.",
];
const SKIPS_BLOCKS: &[&str] = &[
    " A warpgroup skips tiles of keys that only rows of later warpgroups see. It releases the K of all",
    " skipped tiles, at most two, before it waits for the first V; this needs two stages.",
];
const SHIFTS_VALUES: &[&str] =
    &[" V's tiles begin on a sector (fwd_shift.cuh): not where O's store would then spill."];
const SLICE: &[&str] =
    &[" Columns of O that one product of P and V has: those for whose sums there are registers."];
const KV_DTYPE: &[&str] = &[" Type of K and V in device memory: `dtype`, or codes."];
const CODE_STAGES: &[&str] = &[" Stages of codes in flight; 0 for K and V of 16 bits."];
const OWN_PLAN: &[&str] = &[
    " CTAs list their work themselves where a call brings no plan and tiles are few",
    " (attn/plan_few.cuh).",
];
const MAY_STORE_DQ: &[&str] = &[
    " The first sums of a tile of dQ can be stored, by bulk copies, instead of added to zeros (NB-082). With",
    " equal lengths the tile of keys that stores was drawn before the others: the first one under a full",
    " mask; under a causal mask or a window the last one that the queries see, as tiles are drawn with the",
    " last keys first. With lengths on the device, and under a program's mask, it is the first to arrive, or",
    " in deterministic kernels with lengths on the device the one whose turn comes first (NB-093, NB-208).",
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Reads, ScoreKind, Types};

    fn spec(kernel: Kernel) -> KernelSpec {
        KernelSpec {
            types: Types::same(Dtype::Bf16),
            head_dim: 128,
            head_dim_v: 128,
            mask: MaskKind::Causal,
            score: ScoreKind { softcap: true, ..ScoreKind::NONE },
            reads: Reads::UNIFORM,
            split: false,
            kernel,
        }
    }

    #[test]
    fn a_soft_cap_by_polynomial_needs_registers_and_a_lazy_maximum() {
        let lazy = Sm90Fwd { rescale_threshold: 8, ..Sm90Fwd::default() };
        let capped = spec(Kernel::Sm90Fwd(lazy.clone()));
        assert!(lazy.near_cap(&capped));
        assert!(!Sm90Fwd { rescale_threshold: 0, ..lazy.clone() }.near_cap(&capped));
        assert!(!Sm90Fwd { num_wg: 3, tile_m: 192, ..lazy.clone() }.near_cap(&capped));
        let uncapped = KernelSpec { score: ScoreKind::NONE, ..capped.clone() };
        let score = ScoreKind { alibi: true, ..capped.score };
        let sloped = KernelSpec { score, ..capped.clone() };
        assert!(!lazy.near_cap(&uncapped) && !lazy.near_cap(&sloped));
        // 128 keys and values of 256 take 96 + 128 registers: too many beside lengths on the device.
        let wide = KernelSpec { head_dim_v: 256, ..capped };
        let varied = KernelSpec { reads: Reads { varied: true, paged: false }, ..wide.clone() };
        assert!(lazy.near_cap(&wide) && !lazy.near_cap(&varied));
    }

    #[test]
    fn warpgroups_skip_tiles_of_keys_that_others_see() {
        let of = |tile_n, kv_stages| Sm90Fwd { tile_n, kv_stages, ..Sm90Fwd::default() };
        assert!(of(64, 2).skips_blocks(MaskKind::Causal) && of(112, 3).skips_blocks(MaskKind::Window));
        assert!(!of(64, 2).skips_blocks(MaskKind::Full));
        // One stage holds no skipped K, and tiles below 64 keys are more than two.
        assert!(!of(64, 1).skips_blocks(MaskKind::Causal) && !of(48, 2).skips_blocks(MaskKind::Causal));
        assert!(!of(128, 2).skips_blocks(MaskKind::Causal));
    }

    #[test]
    fn tiles_of_v_begin_on_a_sector_where_o_has_registers() {
        let of = |num_wg, tile_n| Sm90Fwd { num_wg, tile_m: 64 * num_wg, tile_n, ..Sm90Fwd::default() };
        assert!(of(2, 128).shifts_values() && of(3, 64).shifts_values() && !of(3, 80).shifts_values());
    }

    fn stores(spec: &KernelSpec) -> bool {
        spec.backward().expect("a backward").may_store_dq
    }

    #[test]
    fn first_sums_are_stored_where_their_tile_is_drawn_first() {
        let of = |mask, tile_order, deterministic| {
            let kernel = Sm90Bwd { tile_order, deterministic, ..Sm90Bwd::default() };
            stores(&KernelSpec { mask, ..spec(Kernel::Sm90Bwd(kernel)) })
        };
        let (natural, longest) = (TileOrder::Natural, TileOrder::LongestFirst);
        assert!(of(MaskKind::Full, natural, false) && of(MaskKind::Causal, longest, false));
        assert!(!of(MaskKind::Causal, natural, false) && of(MaskKind::Causal, natural, true));
        assert!(of(MaskKind::Window, longest, false) && !of(MaskKind::Window, natural, false));
        // Of lengths on the device whoever comes first stores.
        let packed = spec(Kernel::Sm90Bwd(Sm90Bwd::default()));
        let reads = Reads { varied: true, paged: false };
        assert!(stores(&KernelSpec { mask: MaskKind::Window, reads, ..packed }));
        // So it is under a program's mask, but of deterministic kernels.
        let program = crate::program::Program::parse("q % 3 == k % 3").unwrap().intern().unwrap();
        let masked = |deterministic| {
            let kernel = Kernel::Sm90Bwd(Sm90Bwd { deterministic, ..Sm90Bwd::default() });
            let score = ScoreKind { program: Some(program), ..ScoreKind::NONE };
            KernelSpec { mask: MaskKind::Full, score, ..spec(kernel) }
        };
        let semaphores = |spec: &KernelSpec| spec.backward().map(|traits| traits.dq_semaphores);
        assert!(stores(&masked(false)) && !stores(&masked(true)));
        assert_eq!((semaphores(&masked(false)), semaphores(&masked(true))), (Some(4), Some(1)));
        let red = Sm90Bwd { dq_via_smem: false, ..Sm90Bwd::default() };
        assert!(!stores(&KernelSpec { mask: MaskKind::Full, ..spec(Kernel::Sm90Bwd(red)) }));
    }

    #[test]
    fn a_dq_tile_has_a_semaphore_for_each_group_that_adds_to_it() {
        let of = |kernel, varied| {
            let reads = Reads { varied, paged: false };
            KernelSpec { reads, ..spec(kernel) }.backward().map(|traits| traits.dq_semaphores)
        };
        let deterministic = Sm90Bwd { deterministic: true, ..Sm90Bwd::default() };
        for (kernel, varied, semaphores) in [
            (Kernel::Sm90Bwd(Sm90Bwd { num_wg: 2, ..Sm90Bwd::default() }), true, Some(4)),
            (Kernel::Sm90Bwd(Sm90Bwd::default()), false, Some(1)),
            (Kernel::Sm90Bwd(deterministic), true, Some(1)),
            (Kernel::Sm80Bwd(Sm80Bwd { dq_first: 32, ..Sm80Bwd::default() }), false, Some(2)),
            (Kernel::Sm80Bwd(Sm80Bwd { dq_first: 0, ..Sm80Bwd::default() }), true, Some(1)),
            (Kernel::Sm80Fwd(Sm80Fwd::default()), true, None),
            (Kernel::Sm90Fwd(Sm90Fwd::default()), true, None),
        ] {
            assert_eq!(of(kernel.clone(), varied), semaphores, "{kernel:?}");
        }
    }
}
