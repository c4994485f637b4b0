//! The numbers in the cost model that no datasheet gives: one struct, so that a measurement can replace them.

use fa_core::Arch;
use serde::{Deserialize, Serialize};

/// What the cost model assumes beyond [`fa_core::ArchLimits`]. "Clocks" are SM clocks, "per element" means
/// per score.
///
/// The sm90 set is fitted to rates measured on an H100; the others take over its kernel terms and differ
/// where the hardware does.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostConstants {
    /// Clock under load as a share of the board's boost clock.
    pub clock: f64,
    /// Share of the tensor cores' issue rate that a long run of matrix instructions reaches.
    pub tensor_efficiency: f64,
    /// Rate of mma.sync as a share of the fastest matrix instruction's.
    pub mma_sync_rate: f64,
    /// Share of the peak matrix rate that the power limit sustains: a large plain matrix product.
    pub power_cap: f64,
    /// Share of the L2's bandwidth that streaming K and V reaches.
    pub l2_efficiency: f64,
    /// Bytes per clock that one SM can pull from L2.
    pub sm_bytes_per_clock: f64,
    /// Share of device-memory bandwidth that streaming reaches: a device-to-device copy.
    pub hbm_efficiency: f64,
    /// Share of the L2 that can hold K and V for reuse.
    pub l2_reuse: f64,
    /// Seconds from one kernel to the next in a stream, as events see it.
    pub launch_s: f64,
    /// Bytes per clock at which a tile's first operands arrive in an SM that has nothing else to compute: its
    /// share of the device memory.
    pub first_bytes: f64,

    /// f32 instructions per element of softmax: scale-and-subtract, maximum, sum and half a conversion.
    pub softmax_ops: f64,
    /// Further f32 instructions per element where a mask is tested.
    pub mask_ops: f64,
    /// Further f32 instructions per element of a polynomial exponential.
    pub poly_ops: f64,
    /// Further f32 instructions per element without scale folded into exp2.
    pub exp_ops: f64,
    /// Further f32 instructions per element where exponentials keep denormals.
    pub denormal_ops: f64,
    /// f32 instructions per element and special-function results per element of a soft cap.
    pub softcap_ops: f64,
    /// Share of O's rescaling that is left with a rescale threshold.
    pub rescale_left: f64,

    /// f32 instructions per element of the SM90 forward's softmax, as `softmax_ops`: with a maximum in every
    /// step, and without (`rescale_threshold`).
    pub sm90_softmax_ops: [f64; 2],
    /// Further f32 instructions per element of the SM90 forward where a mask is tested.
    pub sm90_mask_ops: f64,
    /// How well matrix products and softmax hide behind each other in the SM90 forward, by number of MMA
    /// warpgroups, without and with intra-warpgroup overlap: the exponent `p` of `(products^p +
    /// softmax^p)^(1/p)`, 1 for one after the other.
    pub sm90_overlap: [[f64; 2]; 3],
    /// Added to the exponent by ping-pong.
    pub sm90_ping_pong: f64,
    /// Accumulator registers per thread, by number of MMA warpgroups, from which the compiler's schedule
    /// suffers.
    pub sm90_soft_regs: [u32; 3],
    /// Registers less of the above where a mask is tested inside the loop.
    pub sm90_mask_regs: u32,
    /// Time lost per register above that soft limit, as a share.
    pub sm90_strain: f64,
    /// Clocks of a step that nothing hides: barriers, shuffles, the first and last instruction of a run.
    pub sm90_step: f64,
    /// Clocks of a step that storing P for a shared-memory operand adds: fences and a barrier.
    pub sm90_p_store: f64,
    /// Clocks of a tile outside its steps in a persistent CTA, whose next loads overlap the epilogue.
    pub sm90_tile: f64,
    /// The same with one CTA per tile.
    pub sm90_block: f64,
    /// Clocks that a tile waits for its Q where there is one buffer of it, which the tile before still reads.
    pub sm90_q_wait: f64,
    /// Bytes per clock at which an SM gets the Q, K and V of its first step while all others ask for theirs:
    /// between its shares of the device memory (12) and of the L2 (39), which has what CTAs of a head share.
    pub sm90_first_bytes: f64,

    /// The SM90 backward.
    pub sm90_bwd: Sm90BwdConstants,

    /// Clocks per step that a deterministic SM80-class backward waits for the dQ semaphore.
    pub bwd_turn: f64,
    /// L2 cost of one atomically added dQ byte in the SM80-class backward, in read bytes.
    pub bwd_add_weight: f64,

    /// Rate of mma.sync that the SM80-class backward's products reach, as a share of `mma_sync_rate`.
    pub sm80_bwd_tensor: f64,
    /// f32 instructions per element of the SM80-class backward's warps that compute P, and of those that
    /// compute dS.
    pub sm80_bwd_ops: [f64; 2],
    /// The SM80-class backward's products take `(2 / w)^x` times as long where a scheduler has `w < 2` warps:
    /// this `x`.
    pub sm80_bwd_alone: f64,
    /// Clocks of a step that waiting for Q and dO together adds, with two buffers each.
    pub sm80_bwd_wait: f64,
    /// Bytes of dQ per clock that an SM80-class backward's CTA adds while none of its own products run; other
    /// CTAs of the SM go on meanwhile.
    pub sm80_bwd_add_bytes: f64,
    /// Bytes per clock at which an SM adds its parts of dK and dV to f32 accumulators in the SM80-class
    /// backward.
    pub sm80_bwd_atomic_bytes: f64,
    /// Bytes per clock at which the L2 adds those of all CTAs at once (NB-148).
    pub sm80_bwd_part_bytes: f64,
    /// How well what the L2 lost hides behind the rest of the SM80-class backward: the exponent `p` of
    /// `(a^p + b^p)^(1/p)`.
    pub sm80_bwd_missed: f64,
    /// Clocks of an SM80-class backward's CTA outside its steps, beside those for its first queries.
    pub sm80_bwd_block: f64,
    /// Clocks until 128 rows of Q and dO of 128 columns each are there, before a CTA's first step.
    pub sm80_bwd_rows: f64,
    /// The exponent of the SM80-class backward is `1 + sm80_overlap * w / (w + 2)` with `w` warps per
    /// scheduler.
    pub sm80_overlap: f64,
    /// f32 instructions per element of the SM80-class forward's softmax.
    pub sm80_softmax_ops: f64,
    /// Such instructions per element of O and step: rescaling when maxima grow, and copies that the compiler
    /// inserts.
    pub sm80_rescale: f64,
    /// The exponent of the SM80-class forward is `1 + sm80_fwd_overlap * w / (w + 2)` with `w` warps per
    /// scheduler ...
    pub sm80_fwd_overlap: f64,
    /// ... plus this for each further resident CTA, since CTAs do not wait for each other.
    pub sm80_apart: f64,
    /// Clocks of a step of the SM80-class forward that nothing hides, with one resident CTA.
    pub sm80_fwd_step: f64,
    /// Clocks that a step of it waits for the first of K and V with a single buffer, with one resident CTA;
    /// the rest comes at `sm_bytes_per_clock`.
    pub sm80_wait: f64,
    /// Clocks that a tile's second step waits for K and V with fewer than three buffers.
    pub sm80_second: f64,
    /// Clocks of a CTA for each row of a tile with packed heads, whose place in Q and O is computed alone.
    pub sm80_packed_row: f64,
    /// Share of reading Q from shared memory that nothing hides in each step of the SM80-class forward.
    pub sm80_q_shown: f64,
    /// Clocks of a step of all resident CTAs that nothing hides in the SM80-class backward.
    pub sm80_step: f64,
    /// Clocks to wait for K and V where no earlier copy was in flight.
    pub load_latency: f64,
    /// Clocks of a CTA outside its steps, beside those for its rows.
    pub sm80_block: f64,
    /// Clocks for 128 rows of Q and O of 128 columns each, which a CTA loads and stores outside its steps:
    /// all that an SM holds do so in the same waves and share its way to the L2.
    pub sm80_rows: f64,
    /// The same that other CTAs of the SM go on beside: from the request of Q to its arrival, and from the
    /// last product to the last row of O.
    pub sm80_rows_alone: f64,
    /// Shared-memory reads take this many times longer in row-major rows of 128 B and more.
    pub row_major_conflict: f64,
    /// Shared-memory reads take this many times longer without ldmatrix.
    pub plain_loads: f64,

    /// The exponent of the SM100 forward with one and with two query tiles per CTA.
    pub sm100_overlap: [f64; 2],
    /// Share of the SM100 forward's exponentials that run on the FMA units.
    pub sm100_poly: f64,
    /// Clocks of a step that nothing hides in the SM100 forward.
    pub sm100_step: f64,
    /// Clocks of a tile outside its steps in the SM100 forward.
    pub sm100_tile: f64,
}

/// The SM90 kernel's terms and the power cap are fitted to 1,878 rates of this project's own kernels on an
/// H100 SXM5 (2026-11-21, head dims 64 to 256, N = 512 to 16k; tests/data), by error and by how far the first
/// choice is behind the best one measured; the SM90 backward's as it says; the SM80-class forward's to 923 at
/// N = 8192 and the SM80-class backward's to 498 at N = 1k to 16k (`tests/sm80_rates.rs`). Measured in the
/// same runs: a plain matrix product at 785 TFLOP/s (79 % of peak;
/// the fitted cap is a little higher because it is approached, not reached) and a copy at 3.02 TB/s (90 %).
/// From public profiles: mma.sync at 62 % of wgmma's rate, 5.5-way conflicts on row-major rows. The sm100
/// terms are assumptions.
const SM90: CostConstants = CostConstants {
    clock: 1.08,
    tensor_efficiency: 1.0,
    mma_sync_rate: 0.62,
    power_cap: 0.87,
    l2_efficiency: 1.0,
    sm_bytes_per_clock: 64.0,
    hbm_efficiency: 0.90,
    l2_reuse: 0.6,
    launch_s: 3e-6,
    first_bytes: 14.0,

    softmax_ops: 3.15,
    mask_ops: 8.07,
    poly_ops: 6.0,
    exp_ops: 1.0,
    denormal_ops: 2.0,
    softcap_ops: 3.0,
    rescale_left: 0.2,

    sm90_softmax_ops: [2.74, 1.63],
    sm90_mask_ops: 4.73,
    sm90_overlap: [[1.0, 1.367], [1.0, 2.141], [1.711, 8.0]],
    sm90_ping_pong: 0.587,
    sm90_soft_regs: [220, 157, 128],
    sm90_mask_regs: 0,
    sm90_strain: 0.00462,
    sm90_step: 600.0,
    sm90_p_store: 280.0,
    sm90_tile: 561.2,
    sm90_block: 4000.0,
    sm90_q_wait: 280.0,
    sm90_first_bytes: 28.0,

    sm90_bwd: Sm90BwdConstants::H100,

    bwd_turn: 900.0,
    bwd_add_weight: 2.4,

    sm80_bwd_tensor: 0.906,
    sm80_bwd_ops: [1.5, 8.5],
    sm80_bwd_alone: 0.617,
    sm80_bwd_wait: 330.0,
    sm80_bwd_add_bytes: 80.0,
    sm80_bwd_atomic_bytes: 48.2,
    sm80_bwd_part_bytes: 700.0,
    sm80_bwd_missed: 3.44,
    sm80_bwd_block: 4500.0,
    sm80_bwd_rows: 2500.0,
    sm80_overlap: 1.80,
    sm80_softmax_ops: 7.74,
    sm80_rescale: 3.89,
    sm80_fwd_overlap: 2.81,
    sm80_apart: 0.7,
    sm80_fwd_step: 283.0,
    sm80_wait: 250.0,
    sm80_second: 1200.0,
    sm80_packed_row: 19.0,
    sm80_q_shown: 0.1,
    sm80_step: 1270.0,
    load_latency: 800.0,
    sm80_block: 1200.0,
    sm80_rows: 2800.0,
    sm80_rows_alone: 3500.0,
    row_major_conflict: 5.5,
    plain_loads: 1.5,

    sm100_overlap: [1.4, 3.0],
    sm100_poly: 0.2,
    sm100_step: 60.0,
    sm100_tile: 2000.0,
};

impl CostConstants {
    /// The constants for `arch`. Those of SM90 are fitted to rates measured on an H100; the others are
    /// assumed from public figures, and nothing replaces them unless a caller gives its own.
    pub const fn of(arch: Arch) -> CostConstants {
        match arch {
            Arch::Sm90 => SM90,
            // 265 to 275 TFLOP/s of 312 for a plain product.
            Arch::Sm80 => CostConstants { clock: 1.0, mma_sync_rate: 1.0, power_cap: 0.87, ..SM90 },
            Arch::Sm86 | Arch::Sm89 | Arch::Sm120 | Arch::Sm121 => CostConstants {
                clock: 1.0,
                tensor_efficiency: 0.98,
                mma_sync_rate: 1.0,
                power_cap: 1.0,
                ..SM90
            },
            // mma.sync keeps the rate of earlier SMs there, a quarter of tcgen05's.
            Arch::Sm100 | Arch::Sm103 | Arch::Sm110 => {
                CostConstants { mma_sync_rate: 0.25, power_cap: 0.78, ..SM90 }
            }
        }
    }
}

/// What the model of the SM90 backward assumes. "Clocks" are SM clocks, "per element" means per score.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sm90BwdConstants {
    /// Clock under this load as a share of the board's boost clock; the tensor cores issue at their full rate
    /// at it.
    pub clock: f64,
    /// f32 instructions per element of softmax and of the gradient of the scores.
    pub ops: f64,
    /// How well the products' shared-memory reads hide behind the tensor cores: the exponent `p` of
    /// `(a^p + b^p)^(1/p)`, 1 for one after the other.
    pub smem_overlap: f64,
    /// How well products and the rest hide behind each other, with 2 and with 3 MMA warpgroups: exponents as
    /// above.
    pub overlap: [f64; 2],
    /// Clocks of TMA per row of a panel of Q or dO.
    pub copied_row: f64,
    /// Bytes more that an operand counts as for each of its own where products read it from panels of 16
    /// columns, which are swizzled over 32 bytes.
    pub narrow: f64,
    /// Clocks of a step that nothing hides.
    pub step: f64,
    /// Clocks of a step that dQ takes longer than dQ^T (see `Sm90Bwd::dq_swap_ab`).
    pub plain_dq: f64,
    /// Clocks of a step that P through shared memory adds: dV waits for the exchange.
    pub p_store: f64,
    /// Clocks of a step that a single buffer of P and dS adds: a second barrier.
    pub second_barrier: f64,
    /// Clocks that S waits for Q with a single buffer of it, in addition to the copy.
    pub q_latency: f64,
    /// Clocks per step that a deterministic kernel waits for the dQ semaphore.
    pub turn: f64,
    /// Bytes of dQ per clock that an SM adds to device memory by vector atomics.
    pub atomic_bytes: f64,
    /// L2 cost of one atomically added dQ byte, in read bytes.
    pub add_weight: f64,
    /// Bytes per clock that the L2 adds to the f32 accumulators of dK and dV, to which several CTAs add at
    /// once (NB-107).
    pub part_bytes: f64,
    /// Clocks of a CTA outside its steps, beside those for its first queries.
    pub block: f64,
    /// Share of device-memory bandwidth that preprocess reaches: it reads O and dO and zeroes the
    /// accumulators.
    pub prepare_bandwidth: f64,
    /// The same of postprocess, which reads the accumulators of dQ and writes its rows.
    pub finish_bandwidth: f64,
    /// The same of the main kernel.
    pub main_bandwidth: f64,
    /// How well the main kernel's device-memory traffic hides behind the rest of it: an exponent as above.
    pub main_overlap: f64,
}

impl Sm90BwdConstants {
    /// Fitted to the records of problems drawn at random and to the rates in `tests/data/sm90-bwd-h100.txt`
    /// from N 2,048 on, by error and by how far the first choice is behind the best one measured; the
    /// bandwidths of preprocess and postprocess as a profiler shows them (NB-171); `turn` to deterministic
    /// runs at head dim 128.
    const H100: Sm90BwdConstants = Sm90BwdConstants {
        clock: 0.937,
        ops: 12.4,
        smem_overlap: 7.0,
        overlap: [2.02, 19.6],
        copied_row: 1.67,
        narrow: 1.86,
        step: 195.0,
        plain_dq: 30.0,
        p_store: 42.0,
        second_barrier: 200.0,
        q_latency: 2070.0,
        turn: 850.0,
        atomic_bytes: 42.0,
        add_weight: 2.46,
        part_bytes: 1230.0,
        block: 2690.0,
        prepare_bandwidth: 0.865,
        finish_bandwidth: 0.857,
        main_bandwidth: 0.93,
        main_overlap: 2.14,
    };
}
