//! The shapes that the kernels are measured by, fixed so that results can be compared over time.

mod batches;
mod groups;
mod models;
mod serving;
mod wanted;

use std::str::FromStr;

use fa_core::{Dtype, Family, Mask, Pass, Problem};

pub use wanted::{Unit, Wanted};

/// A fixed list of shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marks {
    /// mma.sync kernels next to FlashAttention 2: bf16, head dims 64 and 128, 16k tokens, 1k to 16k long; and
    /// grouped heads and models' shapes, summarised separately
    Sm80,
    /// wgmma kernels next to all peers: bf16, head dims 64, 128, 256, 192-128, 16k tokens, 512 to 16k long;
    /// and f16 causal
    Sm90,
    /// Gradients by mma.sync kernels next to FlashAttention 2: as sm80
    Sm80Bwd,
    /// Gradients by wgmma kernels next to all peers: the bf16 shapes of sm90
    Sm90Bwd,
    /// Layers of released models, either pass, by the fastest kernels that the GPU runs
    Models,
    /// Layers of models that no kernel was tuned for, either pass
    HeldOut,
    /// Whole sequences on one of the GPUs that share a model's heads, either pass
    Sharded,
    /// Sizes of groups with head dims, masks, lengths and both types, either pass
    Groups,
    /// Packed batches of uneven, equal and short sequences
    Packed,
    /// Their gradients
    PackedBwd,
    /// Packed batches of released models, either pass
    PackedModels,
    /// One query token on long caches, as replays of a CUDA graph
    Decode,
    /// Decoding by released models, as replays of a CUDA graph
    DecodeModels,
    /// Chunks of prompts on one of the GPUs that share a model's heads.
    Chunks,
    /// Steps of served models that mix chunks of prompts with decoding
    Mixed,
    /// A cache in pages: one query token and 512
    Paged,
    /// A logit per head in the denominator, with and without a window
    Sinks,
    /// The attention of one step of a served model, as a CUDA graph
    Step,
    /// The plan kernel alone, for batches whose lengths are on the device
    Plan,
}

/// Positions of all sequences together in most rows.
pub const TOKENS: usize = 16384;

/// Query heads and K/V heads by head dims: 2048 columns, or what models with that head dim have.
const HEADS: [(usize, usize, usize); 4] = [(64, 64, 32), (128, 128, 16), (256, 256, 8), (192, 128, 16)];

/// Batch, length, query and K/V heads, head dim, mask.
type Square = (usize, usize, (usize, usize), usize, Mask);

/// Grouped heads and models' shapes that the SM80 class is also measured by.
const SM80_OTHERS: [Square; 9] = [
    (1, 4096, (64, 8), 128, Mask::FULL),
    (1, 4096, (64, 8), 128, Mask::CAUSAL),
    (1, 4096, (64, 1), 128, Mask::FULL),
    (1, 4096, (64, 1), 128, Mask::CAUSAL),
    (4, 4096, (16, 16), 96, Mask::FULL),
    (4, 4096, (16, 16), 96, Mask::CAUSAL),
    (32, 577, (16, 16), 64, Mask::FULL),
    (4, 4096, (8, 8), 256, Mask::FULL),
    (4, 4096, (8, 8), 256, Mask::CAUSAL),
];

/// Lengths of a published benchmark in f16: causal, B = 4, 32 heads, head dim 128.
const F16_LENGTHS: [usize; 5] = [1024, 2048, 4096, 8192, 16384];

impl Marks {
    /// All of them.
    pub const ALL: [Marks; 19] = [
        Marks::Sm80,
        Marks::Sm90,
        Marks::Sm80Bwd,
        Marks::Sm90Bwd,
        Marks::Models,
        Marks::HeldOut,
        Marks::Sharded,
        Marks::Groups,
        Marks::Packed,
        Marks::PackedBwd,
        Marks::PackedModels,
        Marks::Decode,
        Marks::DecodeModels,
        Marks::Chunks,
        Marks::Mixed,
        Marks::Paged,
        Marks::Sinks,
        Marks::Step,
        Marks::Plan,
    ];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Marks::Sm80 => "sm80",
            Marks::Sm90 => "sm90",
            Marks::Sm80Bwd => "sm80-bwd",
            Marks::Sm90Bwd => "sm90-bwd",
            Marks::Models => "models",
            Marks::HeldOut => "held-out",
            Marks::Sharded => "sharded",
            Marks::Groups => "groups",
            Marks::Packed => "packed",
            Marks::PackedBwd => "packed-bwd",
            Marks::PackedModels => "packed-models",
            Marks::Decode => "decode",
            Marks::DecodeModels => "decode-models",
            Marks::Chunks => "chunks",
            Marks::Mixed => "mixed",
            Marks::Paged => "paged",
            Marks::Sinks => "sinks",
            Marks::Step => "step",
            Marks::Plan => "plan",
        }
    }

    /// A description in one line.
    pub const fn about(self) -> &'static str {
        match self {
            Marks::Sm80 => {
                "mma.sync kernels beside FlashAttention 2: bf16, head dims 64 and 128, 16k tokens, 1k to 16k \
                 long; and grouped heads and real shapes"
            }
            Marks::Sm90 => {
                "wgmma kernels beside all peers: bf16, head dims 64, 128, 256, 192-128, 16k tokens, 512 to \
                 16k long; and f16 causal"
            }
            Marks::Sm80Bwd => "Gradients by mma.sync kernels beside FlashAttention 2: as sm80",
            Marks::Sm90Bwd => "Gradients by wgmma kernels beside all peers: the bf16 shapes of sm90",
            Marks::Models => {
                "Layers of released models, with --mode fwd or bwd, by the fastest kernels that the GPU runs"
            }
            Marks::HeldOut => "As models, of models that no kernel and no constant was tuned to",
            Marks::Sharded => {
                "Whole sequences on one of the GPUs that share a model's heads, with --mode fwd or bwd"
            }
            Marks::Groups => {
                "32 query heads in groups of 1 to 32, by head dims, masks, lengths and both types; with \
                 --mode fwd or bwd"
            }
            Marks::Packed => "Packed batches of uneven, equal and short sequences, TFLOP/s of visible pairs",
            Marks::PackedBwd => "Gradients of packed: the same batches",
            Marks::PackedModels => {
                "Packed batches of released models, their prompts, documents and images; --mode fwd or bwd"
            }
            Marks::Decode => "One query token on 1k to 128k keys: TB/s of K and V, replays of a CUDA graph",
            Marks::DecodeModels => "Decoding by released models, 1 to 8 query tokens: as decode",
            Marks::Chunks => {
                "Chunks of prompts on one of the GPUs that share a model's heads: few tiles and long caches"
            }
            Marks::Mixed => {
                "Steps of served models, alone: chunks of prompts mixed with decoding, and decoding on few \
                 heads; lengths on the device, replays of a CUDA graph"
            }
            Marks::Paged => "64 x 4k keys in one piece and in pages of 16, 64, 128 and 1: one query and 512",
            Marks::Sinks => {
                "gpt-oss's layers with sinks and without, causal and with a window of 128; --mode fwd or bwd"
            }
            Marks::Step => {
                "The attention of a served model's step: 32 layers of decoding, 32 sequences, one CUDA \
                 graph, one plan"
            }
            Marks::Plan => {
                "The kernel that plans a batch's work, alone: 1 to 8,300 sequences, microseconds in a CUDA \
                 graph"
            }
        }
    }

    /// The kernels that are measured; `None` for the fastest that the GPU runs.
    pub const fn family(self) -> Option<Family> {
        match self {
            Marks::Sm80 | Marks::Sm80Bwd => Some(Family::Sm80),
            Marks::Sm90 | Marks::Sm90Bwd => Some(Family::Sm90),
            Marks::Models
            | Marks::HeldOut
            | Marks::Sharded
            | Marks::Groups
            | Marks::Packed
            | Marks::PackedBwd
            | Marks::PackedModels
            | Marks::Decode
            | Marks::DecodeModels
            | Marks::Chunks
            | Marks::Mixed
            | Marks::Paged
            | Marks::Sinks
            | Marks::Step
            | Marks::Plan => None,
        }
    }

    /// Checks that these shapes are measured for `pass`.
    ///
    /// # Errors
    /// What to ask for instead.
    pub fn check_pass(self, pass: Pass) -> Result<(), String> {
        let measured = match self {
            Marks::Sm80
            | Marks::Sm90
            | Marks::Packed
            | Marks::Decode
            | Marks::DecodeModels
            | Marks::Chunks
            | Marks::Mixed
            | Marks::Paged
            | Marks::Step
            | Marks::Plan => !pass.is_backward(),
            Marks::Sm80Bwd | Marks::Sm90Bwd | Marks::PackedBwd => pass.is_backward(),
            Marks::Models
            | Marks::HeldOut
            | Marks::Sharded
            | Marks::Groups
            | Marks::PackedModels
            | Marks::Sinks => true,
        };
        let why = "the marks sm80, sm90, packed, decode, decode-models, chunks, mixed, paged, step and plan \
                   go with --mode fwd, sm80-bwd, sm90-bwd and packed-bwd with --mode bwd, models, held-out, \
                   sharded, groups, packed-models and sinks with either";
        if measured { Ok(()) } else { Err(why.to_owned()) }
    }

    /// Whether other libraries are timed beside them: they have no kernel that only plans.
    pub const fn has_peers(self) -> bool {
        !matches!(self, Marks::Plan)
    }

    /// The peers that are asked; all, if empty.
    pub fn peers(self) -> Vec<String> {
        match self {
            // FlashAttention 2 is made of mma.sync as well; the others need newer GPUs.
            Marks::Sm80 | Marks::Sm80Bwd => vec!["fa2".to_owned()],
            Marks::Sm90
            | Marks::Sm90Bwd
            | Marks::Models
            | Marks::HeldOut
            | Marks::Sharded
            | Marks::Groups
            | Marks::Plan => Vec::new(),
            // torch's own kernels take neither packed batches nor pages nor sinks, and align a causal mask at
            // the top left.
            Marks::Packed
            | Marks::PackedBwd
            | Marks::PackedModels
            | Marks::Chunks
            | Marks::Mixed
            | Marks::Paged
            | Marks::Sinks
            | Marks::Step => vec!["fa3".to_owned(), "fa4".to_owned()],
            // FlashAttention 4 does not split keys on this architecture.
            Marks::Decode | Marks::DecodeModels => {
                vec!["fa3".to_owned(), "cudnn".to_owned(), "fa2".to_owned()]
            }
        }
    }

    /// The shapes.
    pub fn shapes(self) -> Vec<Wanted> {
        let (dims, shortest): (&[_], usize) = match self {
            Marks::Sm80 | Marks::Sm80Bwd => (&HEADS[..2], 1024),
            Marks::Sm90 | Marks::Sm90Bwd => (&HEADS, 512),
            Marks::Models => return models::shapes(),
            Marks::HeldOut => return models::held_out(),
            Marks::Sharded => return models::sharded(),
            Marks::Groups => return groups::shapes(),
            Marks::Packed | Marks::PackedBwd => return serving::packed(),
            Marks::PackedModels => return batches::packed_models(),
            Marks::Decode => return serving::decode(),
            Marks::DecodeModels => return models::decoding(),
            Marks::Chunks => return models::chunks(),
            Marks::Mixed => return serving::mixed(),
            Marks::Paged => return serving::paged(),
            Marks::Sinks => return serving::sinks(),
            Marks::Step => return serving::step(),
            Marks::Plan => return serving::plan(),
        };
        let mut shapes = Vec::new();
        for &(head_dim, head_dim_v, heads) in dims {
            for mask in [Mask::FULL, Mask::CAUSAL] {
                let mut seqlen = shortest;
                while seqlen <= TOKENS {
                    let square = Problem::square(TOKENS / seqlen, seqlen, heads, head_dim, mask, Dtype::Bf16);
                    shapes.push(Wanted::new(square.with_head_dim_v(head_dim_v), "bf16, 16k tokens"));
                    seqlen *= 2;
                }
            }
        }
        if matches!(self, Marks::Sm80 | Marks::Sm80Bwd) {
            shapes.extend(SM80_OTHERS.map(|(batch, seqlen, (heads_q, heads_kv), head_dim, mask)| {
                let square = Problem::square(batch, seqlen, heads_q, head_dim, mask, Dtype::Bf16);
                Wanted::new(square.with_heads_kv(heads_kv), "bf16, groups and real shapes")
            }));
        }
        if self == Marks::Sm90 {
            shapes.extend(F16_LENGTHS.map(|seqlen| {
                Wanted::new(Problem::square(4, seqlen, 32, 128, Mask::CAUSAL, Dtype::F16), "f16, batch 4")
            }));
        }
        shapes
    }
}

impl FromStr for Marks {
    type Err = String;

    fn from_str(text: &str) -> Result<Marks, String> {
        let names = Marks::ALL.map(Marks::name).join(", ");
        let found = Marks::ALL.into_iter().find(|marks| marks.name() == text);
        found.ok_or_else(|| format!("unknown marks '{text}': use one of {names}"))
    }
}

#[cfg(test)]
mod tests {
    use fa_core::Arch;
    use fa_planner::cost::MOST_DECODED;
    use fa_planner::plan::{PlanOptions, plan};

    use super::*;

    #[test]
    fn the_marks_are_the_agreed_shapes() {
        let sm80 = Marks::Sm80.shapes();
        let of = |group: &str| sm80.iter().filter(|wanted| wanted.group == group).count();
        assert_eq!(of("bf16, 16k tokens"), 2 * 2 * 5);
        assert_eq!(of("bf16, groups and real shapes"), SM80_OTHERS.len());
        assert_eq!(sm80.len(), 2 * 2 * 5 + SM80_OTHERS.len());
        let shapes = Marks::Sm90.shapes();
        assert_eq!(shapes.len(), 4 * 2 * 6 + 5);
        assert_eq!(Marks::Sm80Bwd.shapes(), Marks::Sm80.shapes());
        assert_eq!(Marks::Sm90Bwd.shapes(), shapes[..48]);
        for Wanted { problem, .. } in &sm80[20..] {
            for pass in [Pass::Forward, Pass::BACKWARD] {
                let options = PlanOptions::default().with_family(Some(Family::Sm80)).with_pass(pass);
                plan(problem, Arch::Sm90, &options).unwrap_or_else(|error| panic!("{problem:?}: {error}"));
            }
        }
        for shape in &shapes[..48] {
            assert_eq!(shape.problem.lengths.sequences() * shape.problem.lengths.max_q(), TOKENS);
            shape.problem.check().expect("a valid problem");
        }
    }

    #[test]
    fn every_model_has_a_name_and_a_plan_for_both_passes() {
        let shapes: Vec<_> = [Marks::Models, Marks::HeldOut, Marks::Sharded].map(Marks::shapes).concat();
        for Wanted { name, problem, .. } in &shapes {
            let name = name.expect("a model");
            assert_eq!(
                shapes.iter().filter(|other| other.name == Some(name)).count(),
                1,
                "{name} stands twice"
            );
            for pass in [Pass::Forward, Pass::BACKWARD] {
                assert_eq!(Marks::Models.check_pass(pass), Ok(()));
                let options = PlanOptions::default().with_pass(pass);
                plan(problem, Arch::Sm90, &options).unwrap_or_else(|error| panic!("{name}: {error}"));
            }
        }
        let models = Marks::Models.shapes();
        assert!(models.iter().filter(|wanted| wanted.problem.group_size() > 1).count() > models.len() / 2);
    }

    #[test]
    fn decoding_models_have_names_and_plans() {
        let shapes = Marks::DecodeModels.shapes();
        for Wanted { name, problem, unit, graph, .. } in &shapes {
            let name = name.expect("a model");
            assert!(*unit == Unit::KvBytes && *graph > 0, "{name}");
            assert!(problem.lengths.max_q() <= MOST_DECODED && problem.mask.left.is_none(), "{name}");
            plan(problem, Arch::Sm90, &PlanOptions::default())
                .unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        assert!(shapes.iter().any(|wanted| wanted.problem.lengths.max_q() > 1));
    }

    #[test]
    fn chunks_leave_sms_idle_unless_their_keys_are_divided() {
        for Wanted { name, problem, .. } in Marks::Chunks.shapes() {
            let name = name.expect("a model");
            let tiles = problem.lengths.most_tiles_q(128) * problem.heads_q;
            assert!(tiles <= 66 && problem.lengths.max_q() > MOST_DECODED, "{name}: {tiles} tiles");
            let best = plan(&problem, Arch::Sm90, &PlanOptions::default());
            let best = best.unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!(best[0].spec.split, "{name}: {}", best[0].spec);
        }
    }

    #[test]
    fn steps_mix_chunks_and_decoding() {
        let shapes = Marks::Mixed.shapes();
        let (mixed, decoding): (Vec<_>, Vec<_>) =
            shapes.into_iter().partition(|wanted| wanted.problem.lengths.q().is_packed());
        let sequences = |wanted: &Wanted| wanted.sequences.clone().expect("lengths on the device");
        let lens = |wanted: &Wanted| {
            let own = sequences(wanted);
            (0..own.count()).map(|i| (own.q.len(i), own.k.len(i))).collect::<Vec<_>>()
        };
        for wanted in &mixed {
            let (name, problem) = (wanted.name.expect("a model"), &wanted.problem);
            assert!(
                wanted.unit == Unit::Flops && wanted.graph > 0 && problem.lengths.page().is_some(),
                "{name}"
            );
            assert!(lens(wanted).iter().any(|own| own.0 > MOST_DECODED), "{name}");
            assert!(
                lens(wanted).iter().all(|own| own.0 <= own.1 && own.1 <= problem.lengths.max_k()),
                "{name}"
            );
        }
        assert!(mixed.iter().filter(|wanted| lens(wanted).iter().any(|own| own.0 == 1)).count() >= 5);
        for wanted in &decoding {
            assert!(wanted.unit == Unit::KvBytes && wanted.problem.heads_kv <= 2, "{:?}", wanted.name);
            assert!(!wanted.problem.lengths.is_uniform());
        }
        // Chunks compute by tiles of two warpgroups at least; one alone would do for what decodes.
        let of = |name: &str| {
            let wanted = mixed.iter().find(|wanted| wanted.name.is_some_and(|own| own.starts_with(name)));
            let problem = wanted.expect("a step of that name").problem;
            plan(&problem, Arch::Sm90, &PlanOptions::default()).expect("a plan")[0].spec.tile().0
        };
        assert!(of("Llama 3 8B, 512 on 16k") >= 128 && of("Llama 3 8B, 2,048 new") >= 128);
    }

    #[test]
    fn marks_of_one_pass_refuse_the_other() {
        assert!(Marks::Sm90.check_pass(Pass::BACKWARD).is_err_and(|why| why.contains("--mode fwd")));
        assert!(Marks::Sm80Bwd.check_pass(Pass::Forward).is_err());
        assert_eq!(Marks::Sm90Bwd.check_pass(Pass::DETERMINISTIC_BACKWARD), Ok(()));
        assert!(
            Marks::PackedBwd.check_pass(Pass::Forward).is_err()
                && Marks::Decode.check_pass(Pass::BACKWARD).is_err()
        );
        assert_eq!(Marks::Sinks.check_pass(Pass::BACKWARD), Ok(()));
        assert!(Marks::Plan.check_pass(Pass::BACKWARD).is_err_and(|why| why.contains("step and plan")));
        assert!(Marks::ALL.into_iter().all(|marks| marks.has_peers() != (marks == Marks::Plan)));
    }
}
