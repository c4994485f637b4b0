//! The SM90 forward for wide heads: latents (MLA decode) and wide heads with values of their own, by the
//! oracle's rule, with all checks on.

use fa_core::{Arch, Dtype, Kernel, KernelSpec, Lengths, Mask, Problem, Sm90Wide, Types};
use fa_emu::sweep::SEEDS;
use fa_emu::{Batch, Lie, Options, Placement, Trial, with_mods};
use fa_kernels::Headers;
use fa_planner::plan::{PlanOptions, plan};

use crate::emulator;

/// A problem of one K/V head of latents, in sequences of their own where `lie` says how keys lie.
#[derive(Clone, Debug)]
struct Wide {
    head_dims: (usize, usize),
    latent: bool,
    heads: (usize, usize),
    /// Queries and keys of each sequence.
    sequences: &'static [(usize, usize)],
    /// How they lie; `None` for a dense batch of the first one's lengths.
    keys: Option<Lie>,
    mask: Mask,
    dtype: Dtype,
    /// Whether keys are divided among CTAs.
    split: bool,
    sms: u32,
    /// Elements between rows, which are NaN.
    gap: usize,
}

/// Latents of DeepSeek's rows.
const LATENT: Wide = Wide {
    head_dims: (576, 512),
    latent: true,
    heads: (16, 1),
    sequences: &[(1, 65)],
    keys: None,
    mask: Mask::CAUSAL,
    dtype: Dtype::Bf16,
    split: false,
    sms: 2,
    gap: 0,
};

/// Heads whose values are tensors of their own.
const PLAIN: Wide = Wide { head_dims: (512, 512), latent: false, heads: (2, 1), ..LATENT };

impl Wide {
    fn problem(&self) -> Problem {
        let lengths = match self.keys {
            Some(keys) => self.batch(keys).lengths(),
            None => Lengths::uniform(1, self.sequences[0].0, self.sequences[0].1),
        };
        Problem::new(lengths, self.heads, self.head_dims, Types::same(self.dtype))
            .with_mask(self.mask)
            .with_latent(self.latent)
            .with_softmax_scale(self.latent.then_some(0.0721))
    }

    fn batch(&self, keys: Lie) -> Batch {
        Batch { sequences: self.sequences.to_vec(), q: Lie::Padded, k: keys, slack: 0 }
    }

    /// The planner's kernel with or without splits.
    fn spec(&self, problem: &Problem) -> KernelSpec {
        let plans = plan(problem, Arch::Sm90, &PlanOptions::default()).unwrap_or_else(|e| panic!("{e}"));
        let spec = plans.into_iter().map(|plan| plan.spec).next().expect("a plan");
        assert!(matches!(spec.kernel, Kernel::Sm90Wide(_)), "{spec}");
        KernelSpec { split: self.split, ..spec }
    }

    fn check(&self, seeds: &[u64]) {
        let problem = self.problem();
        self.check_spec(&problem, &self.spec(&problem), seeds);
    }

    fn check_spec(&self, problem: &Problem, spec: &KernelSpec, seeds: &[u64]) {
        let unit = emulator()
            .unit(spec, Arch::Sm90, &Headers::embedded())
            .unwrap_or_else(|error| panic!("{spec}: {error}"));
        let placement = Placement::of(fa_core::TensorLayout::Bshd, self.gap);
        let extras = match self.keys {
            Some(keys) => self.batch(keys).extras(problem),
            None => with_mods(fa_cpu::OwnedExtras::NONE, problem),
        };
        let trial = Trial::with(problem, spec.kernel.pass(), placement, &extras);
        let mut launched = Vec::new();
        for &seed in seeds {
            let proof = trial.run(&unit, &Options { sms: self.sms, ..Options::seed(seed) }).unwrap();
            let faults = proof.faults();
            assert!(faults.is_empty(), "{spec} {self:?}, seed {seed}:\n{}", faults.join("\n"));
            launched.extend(proof.outcome.launches.iter().map(|launch| launch.entry.clone()));
        }
        for (entry, is_expected) in [("fa_plan", spec.reads.varied), ("fa_combine", spec.split)] {
            assert_eq!(launched.iter().any(|own| own == entry), is_expected, "{spec} {self:?}: {entry}");
        }
    }
}

/// One token of 16 heads, and 64 of the heads of two.
#[test]
fn latents_of_a_token() {
    for case in [Wide { sequences: &[(1, 130)], ..LATENT }, Wide { heads: (64, 1), ..LATENT }] {
        case.check(&SEEDS[2..]);
    }
}

#[test]
#[ignore = "emulation"]
fn latents_at_every_count_of_heads_and_tokens() {
    for heads in [8, 16, 64, 128] {
        for s_q in [&[(1, 1000)], &[(2, 65)], &[(4, 200)]] {
            for dtype in [Dtype::Bf16, Dtype::F16] {
                Wide { heads: (heads, 1), sequences: s_q, dtype, gap: 8, ..LATENT }.check(&SEEDS);
            }
        }
    }
    for sequences in [&[(1, 0)], &[(1, 1)], &[(4, 3)], &[(1, 63)], &[(1, 64)], &[(70, 65)]] {
        Wide { sequences, ..LATENT }.check(&SEEDS);
        Wide { sequences, mask: Mask::FULL, heads: (3, 1), ..LATENT }.check(&SEEDS[2..]);
    }
}

/// Lengths of a server's step.
const STEP: &[(usize, usize)] = &[(2, 300), (1, 0), (2, 1), (1, 63), (2, 64), (2, 65), (0, 9), (1, 500)];

#[test]
#[ignore = "emulation"]
fn latents_of_varied_lengths_and_pages() {
    for (turn, keys) in [
        Lie::Padded,
        Lie::Packed,
        Lie::Paged(64),
        Lie::Paged(128),
        Lie::Paged(16),
        Lie::Paged(1),
        Lie::Paged(61),
    ]
    .into_iter()
    .enumerate()
    {
        for split in [false, true] {
            let heads = ([8, 16, 128][turn % 3], 1);
            Wide { keys: Some(keys), sequences: STEP, heads, split, sms: 8, ..LATENT }.check(&SEEDS);
        }
    }
}

#[test]
#[ignore = "emulation"]
fn latents_with_divided_keys() {
    for (sms, sequences) in [(4, &[(1, 1000)]), (32, &[(3, 500)])] {
        for heads in [16, 128] {
            Wide { split: true, sequences, sms, heads: (heads, 1), ..LATENT }.check(&SEEDS);
        }
    }
}

/// Latents without further columns, fewer of both, and more K/V heads.
#[test]
#[ignore = "emulation"]
fn latents_of_other_widths() {
    for (head_dims, heads) in
        [((512, 512), (8, 1)), ((288, 256), (6, 2)), ((496, 448), (16, 1)), ((568, 504), (5, 1))]
    {
        Wide { head_dims, heads, sequences: &[(2, 200)], ..LATENT }.check(&SEEDS);
        let keys = Some(Lie::Paged(3));
        Wide { head_dims, heads, sequences: STEP, keys, ..LATENT }.check(&SEEDS[2..]);
    }
    // Several panels of further columns, by boxes.
    for head_dims in [(384, 256), (576, 256)] {
        let keys = Some(Lie::Paged(64));
        Wide { head_dims, sequences: &[(1, 200)], keys, ..LATENT }.check(&SEEDS);
    }
}

#[test]
#[ignore = "emulation"]
fn wide_heads_with_values_of_their_own() {
    for head_dims in [(512, 512), (320, 256), (320, 320), (64, 512), (576, 512), (264, 72)] {
        for mask in [Mask::CAUSAL, Mask::FULL, Mask::window(70, 9)] {
            Wide { head_dims, mask, sequences: &[(150, 200)], ..PLAIN }.check(&SEEDS);
        }
        for (turn, keys) in [Lie::Packed, Lie::Paged(16), Lie::Paged(1)].into_iter().enumerate() {
            let split = turn > 0;
            Wide { head_dims, keys: Some(keys), sequences: STEP, split, sms: 6, ..PLAIN }.check(&SEEDS);
        }
    }
}

/// The kernel of `spec` with other knobs.
fn with(spec: &KernelSpec, change: impl FnOnce(Sm90Wide) -> Sm90Wide) -> KernelSpec {
    let Kernel::Sm90Wide(kernel) = spec.kernel.clone() else { panic!("{spec}") };
    KernelSpec { kernel: Kernel::Sm90Wide(change(kernel)), ..spec.clone() }
}

/// CTAs that compute several tiles, one after the other.
#[test]
#[ignore = "emulation"]
fn a_cta_for_each_sm() {
    for case in [
        Wide { sequences: &[(9, 130)], heads: (64, 1), ..LATENT },
        Wide { sequences: &[(300, 130)], heads: (2, 2), ..PLAIN },
    ] {
        let problem = case.problem();
        for overlap in [false, true] {
            let scheduler = fa_core::spec::Scheduler::Static;
            let spec = with(&case.spec(&problem), |kernel| Sm90Wide {
                scheduler,
                overlap,
                tile_n: 64,
                kv_stages: 1 + u32::from(case.latent),
                ..kernel
            });
            case.check_spec(&problem, &spec, &SEEDS);
        }
    }
}

/// Every step that the planner tries, of products one after the other and of softmax under P V.
#[test]
#[ignore = "emulation"]
fn steps_with_and_without_overlap() {
    for case in [
        Wide { sequences: &[(3, 500)], heads: (16, 1), ..LATENT },
        Wide { sequences: STEP, keys: Some(Lie::Packed), heads: (128, 1), ..LATENT },
        Wide { sequences: STEP, keys: Some(Lie::Paged(16)), sms: 8, ..LATENT },
        Wide { sequences: &[(150, 200)], mask: Mask::window(70, 9), ..PLAIN },
        Wide { sequences: STEP, keys: Some(Lie::Paged(64)), ..PLAIN },
        Wide { sequences: STEP, keys: Some(Lie::Paged(5)), ..PLAIN },
        Wide { head_dims: (320, 256), sequences: &[(70, 300)], mask: Mask::FULL, ..PLAIN },
    ] {
        let problem = case.problem();
        let plans = plan(&problem, Arch::Sm90, &PlanOptions::default()).unwrap_or_else(|e| panic!("{e}"));
        let mut tried = 0;
        for plan in plans.into_iter().filter(|plan| !plan.spec.split) {
            case.check_spec(&problem, &plan.spec, &SEEDS);
            tried += 1;
        }
        assert!(tried >= 2, "{tried} kernels of {case:?}");
    }
}
