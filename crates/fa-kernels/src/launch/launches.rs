//! A pass as data: its parameters, tensor maps, workspace and list of launches. No CUDA call is made here, so
//! that the driver and an emulation run the same launches.

use fa_core::{Arch, KernelSpec, Problem, Strides};
use fa_planner::account::missing_code;

use crate::Error;
use crate::jit::declare::{ConstF32Ptr, ConstPtr, MutF32Ptr, MutI32Ptr, MutPtr, MutU32Ptr};
use crate::jit::params::{
    BwdParams, ConstTensor, FwdParams, MutTensor, PlanParams, RowStrides, ScoreParams, ShapeParams,
    SplitParams, TmaStrides, VarlenParams,
};
use crate::launch::args::{RawTensor, Shape};
use crate::launch::checks::{check_address, count};
use crate::launch::extras::{Extra, RawExtras};
use crate::launch::tma::{MapShape, MapTemplate, Ragged, TensorMap};
use crate::launch::workspace::{Part, Workspace};

/// LSE is read and written word by word.
const WORD_BYTES: u64 = 4;

/// A kernel's parameters, the first argument of each of its entries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Params {
    /// Of a forward.
    Forward(FwdParams),
    /// Of a backward.
    Backward(BwdParams),
}

impl Params {
    /// Their address and size in bytes, as a launch takes them.
    pub fn raw(&mut self) -> (*mut std::ffi::c_void, usize) {
        match self {
            Params::Forward(params) => ((&raw mut *params).cast(), size_of::<FwdParams>()),
            Params::Backward(params) => ((&raw mut *params).cast(), size_of::<BwdParams>()),
        }
    }
}

/// One kernel launch; grid and CTAs are one-dimensional.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The entry function.
    pub entry: &'static str,
    /// CTAs of the grid, at least 1.
    pub grid: u32,
    /// Threads of a CTA.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a CTA.
    pub smem: u32,
    /// CTAs of a cluster; divides `grid`.
    pub cluster: u32,
    /// Whether the tensor maps follow the parameters in its arguments.
    pub takes_maps: bool,
}

/// One operation on the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Sets a part of the workspace to zero.
    Clear(Part),
    /// Launches the kernel that plans the work of sequences whose lengths are on the device. Left out where
    /// a call brings a plan that was made before.
    Plan(Launch),
    /// Launches a kernel.
    Launch(Launch),
}

/// A tensor of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name and lengths.
    pub shape: Shape,
    /// Whether the pass writes it.
    pub is_output: bool,
}

/// Device addresses of a call's memory.
#[derive(Clone, Copy, Debug)]
pub struct Addresses<'a> {
    /// In the order of [`Launches::tensors`].
    pub tensors: &'a [RawTensor],
    /// LSE; optional for a forward.
    pub lse: Option<u64>,
    /// At least [`Workspace::bytes`] bytes; `None` where those are 0.
    pub workspace: Option<u64>,
    /// What only some problems have.
    pub extras: RawExtras,
}

/// What a pass launches for one problem.
#[derive(Clone, Debug, PartialEq)]
pub struct Launches {
    /// The tensors, in the order of a call: q, k, v, out; of a backward also dout, dq, dk, dv.
    pub tensors: Vec<Tensor>,
    /// What else calls take.
    pub extras: Vec<Extra>,
    /// The memory that the launches share.
    pub workspace: Workspace,
    /// What is enqueued, in this order; empty for a problem without work.
    pub steps: Vec<Step>,
    /// All but addresses and strides.
    pub(crate) params: Params,
    pub(crate) maps: Vec<MapTemplate>,
    /// Bytes of a work plan; 0 where there is none.
    pub plan_bytes: usize,
}

impl Launches {
    /// The launches of a kernel of `spec` for `problem` on a GPU of `arch` with `sms` SMs.
    ///
    /// # Errors
    /// [`Error::Problem`], and what [`KernelSpec::serves`] finds: [`Error::Mismatch`] when the kernel does
    /// not compute the problem, [`Error::Page`] for pages that it cannot load, [`Error::TooLong`] for counts
    /// beyond 2^30, [`Error::Scale`] and [`Error::Softcap`] for numbers that kernels cannot use.
    pub fn of(spec: &KernelSpec, problem: &Problem, arch: Arch, sms: u32) -> Result<Launches, Error> {
        if spec.kernel.is_backward() {
            Launches::backward(spec, problem, arch, sms)
        } else {
            Launches::forward(spec, problem, arch, sms)
        }
    }

    /// Checks strides, alignment and presence of a call's memory. Lengths are the caller's responsibility.
    ///
    /// # Errors
    /// [`Error::Stride`], [`Error::Address`], [`Error::MissingExtra`], [`Error::UnusedExtra`] and
    /// [`Error::NoWorkspace`].
    pub fn check(&self, at: &Addresses) -> Result<(), Error> {
        for (tensor, raw) in self.tensors.iter().zip(at.tensors) {
            tensor.shape.check_strides(&raw.strides, tensor.is_output)?;
            tensor.shape.check_address(raw.address)?;
        }
        for map in self.maps.iter().filter(|map| map.is_ragged) {
            let tensor = &self.tensors[map.tensor].shape;
            Ragged::of(tensor, &at.tensors[map.tensor].strides, map.group).check(tensor.name)?;
        }
        at.extras.check(&self.extras)?;
        let Workspace { bytes, align, .. } = self.workspace;
        if bytes > 0 && at.workspace.is_none() {
            return Err(Error::NoWorkspace { need: bytes });
        }
        if self.steps.is_empty() {
            return Ok(());
        }
        if bytes > 0
            && let Some(address) = at.workspace
        {
            check_address("workspace", address, align)?;
        }
        // Without queries there is no LSE.
        let has_lse = !self.tensors[0].shape.is_empty();
        at.lse.filter(|_| has_lse).map_or(Ok(()), |address| check_address("lse", address, WORD_BYTES))
    }

    /// The parameters of a call.
    pub fn params(&self, at: &Addresses) -> Params {
        let reads = |i: usize| {
            let RawTensor { address, strides } = at.tensors[i];
            let shape = &self.tensors[i].shape;
            ConstTensor { data: ConstPtr(address), strides: row_strides(shape, &strides) }
        };
        let writes = |i: usize| {
            let RawTensor { address, strides } = at.tensors[i];
            let shape = &self.tensors[i].shape;
            MutTensor { data: MutPtr(address), strides: row_strides(shape, &strides) }
        };
        let lse = at.lse.unwrap_or(0);
        let part = |part: Option<Part>| part.map_or(0, |part| at.workspace.unwrap_or(0) + part.offset as u64);
        let floats = |of: Option<Part>| MutF32Ptr(part(of));
        let words = |of: Option<Part>| MutU32Ptr(part(of));
        let parts = &self.workspace;
        let plan = MutI32Ptr(at.extras.plan.unwrap_or_else(|| part(parts.plan)));
        let tma = |i: usize| match self.maps.get(i) {
            Some(map) if map.is_ragged => {
                let strides = &at.tensors[map.tensor].strides;
                Ragged::of(&self.tensors[map.tensor].shape, strides, map.group).params()
            }
            _ => TmaStrides::default(),
        };
        let varlen = |params: VarlenParams| VarlenParams {
            tma_q: tma(0),
            tma_k: tma(1),
            tma_v: tma(2),
            tma_do: tma(3),
            ..at.extras.varlen(params)
        };
        match self.params {
            Params::Forward(params) => Params::Forward(FwdParams {
                q: reads(0),
                k: reads(1),
                v: reads(2),
                out: writes(3),
                lse: MutF32Ptr(lse),
                tile_counter: words(parts.tile_counter),
                varlen: varlen(params.varlen),
                mods: at.extras.mods(params.mods),
                split: SplitParams {
                    out_partial: floats(parts.out_partial),
                    lse_partial: floats(parts.lse_partial),
                    ..params.split
                },
                plan: PlanParams { buffer: plan, ..params.plan },
                ..params
            }),
            Params::Backward(params) => Params::Backward(BwdParams {
                q: reads(0),
                k: reads(1),
                v: reads(2),
                out: reads(3),
                dout: reads(4),
                dq: writes(5),
                dk: writes(6),
                dv: writes(7),
                lse: ConstF32Ptr(lse),
                lse_log2: floats(parts.lse_log2),
                dpsum: floats(parts.dpsum),
                dq_accum: floats(parts.dq_accum),
                dk_accum: floats(parts.dk_accum),
                dv_accum: floats(parts.dv_accum),
                dq_semaphores: words(parts.dq_semaphores),
                tile_counter: words(parts.tile_counter),
                varlen: varlen(params.varlen),
                mods: at.extras.mods(params.mods),
                dkv_semaphores: words(parts.dkv_semaphores),
                dlse: ConstF32Ptr(at.extras.dlse.unwrap_or(0)),
                plan: PlanParams { buffer: plan, ..params.plan },
                ..params
            }),
        }
    }

    /// The tensor maps of a call, in the order of the arguments: four at most.
    pub fn maps<'a>(&'a self, at: &'a Addresses) -> impl ExactSizeIterator<Item = TensorMap> + 'a {
        self.maps.iter().map(|map| {
            let raw = &at.tensors[map.tensor];
            let shape = MapShape::of(&self.tensors[map.tensor].shape, &raw.strides, map);
            TensorMap { tensor: map.name, address: raw.address, shape }
        })
    }
}

/// The kernel of `spec` has device code for all that the spec asks for.
///
/// # Errors
/// [`Error::NoCode`] for the first thing that it lacks.
pub(crate) fn check_code(spec: &KernelSpec) -> Result<(), Error> {
    let kernel = spec.kernel.name();
    missing_code(spec).map_or(Ok(()), |what| Err(Error::NoCode { kernel, what }))
}

/// Packed sequences are one entry whose rows are counted through: no sequence steps along the batch.
fn row_strides(shape: &Shape, strides: &Strides) -> RowStrides {
    let batch = if shape.batch > 1 { strides.batch } else { 0 };
    RowStrides { batch, seq: strides.seq, head: strides.head }
}

/// The lengths, counts and window of `problem`.
pub(crate) fn shape_params(problem: &Problem) -> Result<ShapeParams, Error> {
    Ok(ShapeParams {
        batch: count("batch", problem.lengths.sequences())?,
        heads_q: count("heads_q", problem.heads_q)?,
        heads_kv: count("heads_kv", problem.heads_kv)?,
        group_size: count("heads_q / heads_kv", problem.group_size())?,
        seqlen_q: count("seqlen_q", problem.lengths.max_q())?,
        seqlen_k: count("seqlen_k", problem.lengths.max_k())?,
        head_dim: count("head_dim", problem.head_dim)?,
        head_dim_v: count("head_dim_v", problem.head_dim_v)?,
        window_left: side(problem.mask.left, problem.lengths.max_k()),
        window_right: side(problem.mask.right, problem.lengths.max_q()),
    })
}

/// A side of the window for the kernel: -1 for a side that hides no key of any query, so that the sum of a
/// diagonal and a side fits 32 bits.
fn side(side: Option<u32>, len: usize) -> i32 {
    side.filter(|&side| (side as usize) < len).map_or(-1, |side| side as i32)
}

/// The factors between products and scores, as f32.
///
/// # Errors
/// As [`Problem::check_gpu`], which says what the factors may be.
pub(crate) fn score_params(problem: &Problem) -> Result<ScoreParams, Error> {
    problem.check_gpu()?;
    let scale = problem.scale();
    let scale_log2 = scale * std::f64::consts::LOG2_E;
    let params = ScoreParams { scale: scale as f32, scale_log2: scale_log2 as f32, ..ScoreParams::default() };
    let Some(softcap) = problem.score.softcap else { return Ok(params) };
    let cap = softcap as f32;
    let (near, terms) = softcap_polynomial(scale, softcap);
    Ok(ScoreParams {
        softcap: cap,
        softcap_exponent: 2.0 * std::f32::consts::LOG2_E * params.scale / cap,
        softcap_log2: cap * std::f32::consts::LOG2_E,
        softcap_share: std::f32::consts::LN_2 / cap,
        softcap_near: near,
        softcap_term_0: terms[0],
        softcap_term_1: terms[1],
        softcap_term_2: terms[2],
        softcap_term_3: terms[3],
        ..params
    })
}

/// The soft cap of scores up to half of it as a polynomial: the square of the largest such product and the
/// terms of `f`, with which `log2(e) * cap * tanh(x)` is `product * f(near - product^2)`, x the score over
/// the cap. No product is near (-1) where a term would leave f32's normal numbers.
fn softcap_polynomial(scale: f64, cap: f64) -> (f32, [f32; 4]) {
    const NEAR: f64 = 0.5;
    // tanh(x) / x in NEAR^2 - x^2: minimax of x f - tanh x (Remez), within 1.3e-7.
    const TERMS: [f64; 4] = [0.924_234_059_1, 0.275_613_164_4, 0.098_922_098_19, 0.043_372_464_1];
    let per_cap = scale / cap;
    let mut factor = std::f64::consts::LOG2_E * scale;
    let terms = TERMS.map(|term| {
        let of_product = term * factor;
        factor *= per_cap * per_cap;
        of_product as f32
    });
    let near = (NEAR * NEAR / (per_cap * per_cap)) as f32;
    if near.is_normal() && terms.iter().all(|term| term.is_normal()) {
        (near, terms)
    } else {
        (-1.0, [0.0; 4])
    }
}

#[cfg(test)]
mod tests {
    use fa_core::spec::MAX_SOFTCAP;
    use fa_core::{Dtype, Mask, ScoreMod};

    use super::*;

    /// As `ScoreMod::near_exponent` does it in f32, without the row's maximum.
    fn near_exponent(params: &ScoreParams, product: f32) -> Option<f32> {
        let v = (-product).mul_add(product, params.softcap_near);
        let factor = params.softcap_term_3.mul_add(v, params.softcap_term_2);
        let factor = factor.mul_add(v, params.softcap_term_1).mul_add(v, params.softcap_term_0);
        (v >= 0.0).then_some(product * factor)
    }

    #[test]
    fn the_polynomial_of_scores_far_below_the_cap_is_the_cap_of_them() {
        // The last scale's terms don't fit f32.
        for softmax_scale in [None, Some(1.0), Some(0.0625), Some(1e-9)] {
            for cap in [1.0, 15.0, 30.0, 50.0, MAX_SOFTCAP] {
                let problem = Problem::square(1, 16, 1, 128, Mask::FULL, Dtype::F16);
                let problem = Problem { softmax_scale, score: ScoreMod::softcap(cap), ..problem };
                let params = score_params(&problem).unwrap();
                let per_cap = problem.scale() / cap;
                let (mut near, mut worst) = (0, 0f64);
                for step in -100_000..=100_000 {
                    // Twice the cap to both sides.
                    let product = (f64::from(step) * 2e-5 / per_cap) as f32;
                    let x = f64::from(product) * per_cap;
                    let Some(exponent) = near_exponent(&params, product) else {
                        assert!(x.abs() > 0.499_999 || per_cap < 1e-8, "{x} of {cap}");
                        continue;
                    };
                    assert!(x.abs() < 0.500_001);
                    near += 1;
                    let exact = std::f64::consts::LOG2_E * cap * x.tanh();
                    worst = worst.max((f64::from(exponent) - exact).abs() / cap);
                }
                assert_eq!(near > 0, per_cap > 1e-8, "{cap}");
                // 1.5e-5 of an exponent of 2 at a cap of 50, a twentieth of half a step of f16.
                assert!(worst < 3e-7, "{worst} of {cap}, scale {}", problem.scale());
            }
        }
    }

    #[test]
    fn scales_and_soft_caps_that_spoil_scores_are_refused() {
        let check = |softmax_scale, softcap| {
            let problem = Problem::square(1, 16, 1, 64, Mask::FULL, Dtype::F16);
            score_params(&Problem { softmax_scale, score: ScoreMod::softcap_or_none(softcap), ..problem })
        };
        assert_eq!(check(None, None).unwrap().scale, 0.125);
        for softcap in [1e-3, 30.0, MAX_SOFTCAP] {
            let params = check(None, Some(softcap)).unwrap();
            let exponent = 2.0 * std::f64::consts::LOG2_E * 0.125 / softcap;
            assert!((f64::from(params.softcap_exponent) / exponent - 1.0).abs() < 1e-6, "{params:?}");
            let share = std::f64::consts::LN_2 / softcap;
            assert!((f64::from(params.softcap_share) / share - 1.0).abs() < 1e-6, "{params:?}");
        }
        for softcap in [1e-39, MAX_SOFTCAP * 1.001, 1e300] {
            assert!(matches!(check(None, Some(softcap)), Err(Error::Softcap { .. })), "{softcap}");
        }
        assert!(matches!(check(Some(1e30), Some(1e-30)), Err(Error::Softcap { .. })));
        for scale in [0.0, -1.0, 1e-39, 1e39] {
            assert!(matches!(check(Some(scale), None), Err(Error::Scale { .. })), "{scale}");
        }
    }
}
