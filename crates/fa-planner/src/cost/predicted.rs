//! What the model says of a pass: its time, where it goes, and what it waits for.

use fa_core::{Pass, Problem};
use serde::Serialize;

use crate::work::Work;

/// Predicted time of one pass.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cost {
    /// Seconds per launch.
    pub seconds: f64,
    /// Rate in 10^12 operations per second, by the field's count ([`Problem::flops_forward`],
    /// [`Problem::flops_backward`]).
    pub tflops: f64,
    /// Compulsory bytes a second ([`Problem::bytes`]): the rate that counts where few operations are done for
    /// each byte, as in decode.
    pub bytes_per_s: f64,
    /// The largest of `terms`.
    pub bottleneck: Bottleneck,
    /// Where the time goes.
    pub terms: Terms,
    /// Query tiles over all heads and sequences; with splits, their parts.
    pub tiles: f64,
    /// Tiles that the GPU works on at once.
    pub slots: f64,
    /// Steps over all tiles.
    pub steps: f64,
    /// Steps that test a mask.
    pub masked_steps: f64,
    /// CTAs that share the keys of a tile's rows: the most, where lengths are on the device.
    pub splits: usize,
    /// A step on one SM.
    pub step: StepClocks,
}

/// Clocks of a step on one SM: those in which each of its resident CTAs makes one step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepClocks {
    /// CTAs on the SM.
    pub resident: f64,
    /// The tensor cores are busy for so long.
    pub tensor: f64,
    /// The softmax pipes.
    pub exp: f64,
    /// Shared memory.
    pub smem: f64,
    /// What nothing hides: barriers, shuffles, waits.
    pub exposed: f64,
    /// The step, with the overlap that was calibrated.
    pub total: f64,
}

/// Seconds that each resource alone would take with all SMs equally busy. They overlap and do not add up to
/// the total.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Terms {
    /// Matrix products, at the rate that the power limit sustains.
    pub tensor: f64,
    /// Softmax: exponentials and the f32 instructions around them.
    pub exp: f64,
    /// Shared-memory traffic.
    pub smem: f64,
    /// L2 to SM traffic.
    pub l2: f64,
    /// Device-memory traffic.
    pub hbm: f64,
    /// Idle SMs: a partial last wave, tiles of unequal length, fewer tiles than SMs.
    pub waves: f64,
    /// Launch, and the clocks of tiles and steps that nothing hides.
    pub latency: f64,
}

/// What a kernel waits for most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Bottleneck {
    /// Matrix products.
    Tensor,
    /// Exponentials and the rest of softmax.
    Exp,
    /// Shared-memory bandwidth.
    Smem,
    /// L2 bandwidth.
    L2,
    /// Device-memory bandwidth.
    Hbm,
    /// Idle SMs.
    Waves,
    /// Launch and the latency of dependent steps.
    Latency,
}

impl Bottleneck {
    /// The name used in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Bottleneck::Tensor => "tensor",
            Bottleneck::Exp => "exp",
            Bottleneck::Smem => "smem",
            Bottleneck::L2 => "l2",
            Bottleneck::Hbm => "hbm",
            Bottleneck::Waves => "waves",
            Bottleneck::Latency => "latency",
        }
    }
}

impl Cost {
    /// The cost of what cannot be computed.
    pub const NEVER: Cost = Cost {
        seconds: f64::INFINITY,
        tflops: 0.0,
        bytes_per_s: 0.0,
        bottleneck: Bottleneck::Latency,
        terms: Terms {
            tensor: 0.0,
            exp: 0.0,
            smem: 0.0,
            l2: 0.0,
            hbm: 0.0,
            waves: 0.0,
            latency: f64::INFINITY,
        },
        tiles: 0.0,
        slots: 0.0,
        steps: 0.0,
        masked_steps: 0.0,
        splits: 1,
        step: StepClocks { resident: 0.0, tensor: 0.0, exp: 0.0, smem: 0.0, exposed: 0.0, total: 0.0 },
    };

    /// The cost of a pass that takes `seconds` on `slots` tiles at once, whose keys `splits` CTAs share.
    pub(crate) fn of(
        problem: &Problem,
        pass: Pass,
        (work, splits): (&Work, usize),
        seconds: f64,
        terms: Terms,
        slots: f64,
        step: StepClocks,
    ) -> Cost {
        Cost {
            seconds,
            tflops: problem.flops(pass) / seconds / 1e12,
            bytes_per_s: problem.bytes(pass) / seconds,
            bottleneck: terms.largest(),
            terms,
            tiles: work.tiles,
            slots,
            steps: work.steps(),
            masked_steps: work.masked(),
            splits,
            step,
        }
    }
}

impl Terms {
    /// Every term with the bottleneck that it stands for.
    pub const fn named(&self) -> [(Bottleneck, f64); 7] {
        [
            (Bottleneck::Tensor, self.tensor),
            (Bottleneck::Exp, self.exp),
            (Bottleneck::Smem, self.smem),
            (Bottleneck::L2, self.l2),
            (Bottleneck::Hbm, self.hbm),
            (Bottleneck::Waves, self.waves),
            (Bottleneck::Latency, self.latency),
        ]
    }

    fn largest(&self) -> Bottleneck {
        let named = self.named();
        named.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).map_or(Bottleneck::Latency, |(name, _)| name)
    }
}
