//! A case: a problem, where its tensors lie, what they hold, and what is done with it.

use fa_attn::device::{Half, Placement};
use fa_core::{Append, Descales, Dtype, Mask, Merge, Pass, Problem, Strides, TensorLayout};
use serde::{Deserialize, Serialize};

use crate::sequences::Sequences;
use crate::shape::{append_name, head_dims, merge_name, pair};
use crate::tensors::Inputs;

/// One test case.
#[derive(Clone, Debug)]
pub struct Case {
    /// The group of the case; the first part of its name.
    pub group: &'static str,
    /// What distinguishes it within the group, for its name; may be empty.
    pub what: &'static str,
    /// The problem.
    pub problem: Problem,
    /// The lengths of its sequences, where the problem only has bounds.
    pub sequences: Option<Sequences>,
    /// The layout of its tensors.
    pub arrangement: Arrangement,
    /// Their values.
    pub values: Values,
    /// What to do with it.
    pub action: Action,
    /// What is appended to a cache, for a case of appending; only the types of the problem count then.
    pub append: Option<Append>,
    /// What is merged, for a case of merging; the problem does not count then.
    pub merge: Option<Merge>,
    /// The kernel, where the library does not choose it.
    pub kernel: Option<NamedSpec>,
    /// Whether the library has to choose a kernel whose CTAs share a row's keys.
    pub split: bool,
    /// What is computed and judged: a backward after the library's forward.
    pub pass: Pass,
}

/// A kernel of the case's choice.
#[derive(Clone, Debug)]
pub struct NamedSpec {
    /// What it is called in the case's name.
    pub name: String,
    /// The kernel.
    pub spec: fa_core::KernelSpec,
}

/// The layout of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrangement {
    /// Packed `[batch, seqlen, heads, dim]`.
    Bshd,
    /// Packed `[batch, heads, seqlen, dim]`.
    Bhsd,
    /// BSHD with this many elements behind every row.
    Gap(usize),
    /// BHSD with this many elements behind every row.
    BhsdGap(usize),
    /// One K and V for the whole batch (batch stride 0).
    SharedBatch,
    /// One K and V for all heads (head stride 0).
    SharedHeads,
    /// One K and V row for all positions (seq stride 0).
    SharedRows,
    /// Batch entries more than 2^31 elements from each other, in every tensor.
    FarBatch,
    /// Keys and values at a stride of 2^25 + 8 elements, so that offsets within a head exceed 2^31.
    FarKeys,
}

/// The values of Q, K and V. A kernel's running maximum depends on how scores change along the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// Independent, of unit variance.
    Normal,
    /// Keys grow along the sequence: each step from the front finds a new maximum.
    Rising,
    /// Keys shrink along the sequence: the same for a loop from the back.
    Falling,
    /// Every 97th key is scaled by 30.
    Spikes,
    /// All keys are 0: all probabilities are equal.
    Equal,
    /// Queries and keys are scaled by 8: one key has nearly all of the probability.
    Sharp,
    /// Every score is near the lowest of f32, and all of a row are equal. bf16 with a softmax scale of 1.
    Lowest,
    /// Slopes and sinks up to the largest number of f32, in natural units, among ordinary ones.
    Edges,
}

/// What to do with a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// One run.
    Once,
    /// This many runs, whose outputs must be bit-equal.
    Repeat(usize),
    /// A run captured as a CUDA graph and replayed.
    Graph,
    /// A run on a stream of the caller.
    OwnStream,
    /// Two threads at once, each with a stream, tensors and many runs.
    Threads,
    /// A run captured as a CUDA graph and replayed on other lengths, pages and values in the same memory.
    Relength,
    /// A run, and one of the same kernel on the same rows with lengths that the host knows: the bits must be
    /// equal.
    AsDense,
    /// A run, and one of the same kernel on contiguous keys: the bits must be equal.
    AsContiguous,
    /// A run with entries of the page table that name no page: their keys read as zeros, and are counted.
    BadPages,
    /// Timed runs, whose outputs are not compared.
    Measure,
}

/// How many cases to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Extent {
    /// Cases that an emulation on a CPU runs in seconds; a GPU runs them too.
    Emulated,
    /// Below a minute.
    Quick,
    /// Everything.
    Full,
}

pub(super) const DTYPES: [Dtype; 2] = [Dtype::Bf16, Dtype::F16];
pub(super) const MASKS: [Mask; 2] = [Mask::CAUSAL, Mask::FULL];

/// The problem that cases vary.
pub const BASE: Problem = Problem::square(2, 256, 4, 128, Mask::CAUSAL, Dtype::Bf16);

/// A case of one run on packed BSHD tensors of normal values by the library's kernel.
pub fn case(group: &'static str, problem: Problem) -> Case {
    Case {
        group,
        what: "",
        problem,
        sequences: None,
        arrangement: Arrangement::Bshd,
        values: Values::Normal,
        action: Action::Once,
        append: None,
        merge: None,
        kernel: None,
        split: false,
        pass: Pass::Forward,
    }
}

/// The same for sequences of different lengths.
pub fn case_of(group: &'static str, what: &'static str, problem: Problem, sequences: Sequences) -> Case {
    let problem = problem.with_lengths(sequences.lengths());
    Case { what, sequences: Some(sequences), ..case(group, problem) }
}

impl Case {
    /// `group/what it is`, unique among the cases of a run.
    pub fn name(&self) -> String {
        let mut name = format!("{}/{}", self.group, self.problem_name());
        if self.action != Action::Once {
            name += &format!(" {:?}", self.action).to_lowercase();
        }
        name += match self.pass {
            Pass::Forward => "",
            Pass::Backward { deterministic: false } => " gradients",
            Pass::Backward { deterministic: true } => " deterministic gradients",
        };
        if self.split {
            name += " by splits";
        }
        if let Some(kernel) = &self.kernel {
            name += &format!(" by {}", kernel.name);
        }
        name
    }

    /// The problem and where its tensors lie; cases of one such name share their inputs and the oracle's
    /// results.
    pub fn problem_name(&self) -> String {
        let p = &self.problem;
        let lengths = match &self.sequences {
            Some(sequences) => sequences.name(),
            None => format!("{}x{}", p.lengths.max_q(), p.lengths.max_k()),
        };
        let what = if self.what.is_empty() { String::new() } else { format!("{}, ", self.what) };
        if let Some(append) = &self.append {
            return what + &append_name(append);
        }
        if let Some(merge) = &self.merge {
            return what + &merge_name(merge);
        }
        let mut name = format!(
            "{what}b{} {lengths} h{} hd{} {} {}",
            p.lengths.sequences(),
            pair(p.heads_q, p.heads_kv, ':'),
            head_dims(p),
            p.mask,
            p.types.q
        );
        if p.types.kv != p.types.q {
            name += &format!(" {}kv", p.types.kv);
        }
        if p.descales != Descales::NONE {
            let Descales { q, k, v, .. } = p.descales;
            name += &format!(" descales {q} {k} {v}");
        }
        if let Some(cap) = p.score.softcap {
            name += &format!(" cap {cap}");
        }
        if let Some(alibi) = p.score.alibi {
            name += &format!(" alibi {}", alibi.name());
        }
        if p.score.sinks {
            name += " sinks";
        }
        if let Some(program) = p.score.program {
            name += &format!(" program {:08x}", program.hash64() as u32);
        }
        if let Some(scale) = p.softmax_scale {
            name += &format!(" scale {scale}");
        }
        if self.values != Values::Normal {
            name += &format!(" {:?}", self.values).to_lowercase();
        }
        if self.arrangement != Arrangement::Bshd {
            name += &format!(" {:?}", self.arrangement).to_lowercase();
        }
        name
    }

    /// Whether attention is computed, not an append or a merge.
    pub fn is_attention(&self) -> bool {
        self.append.is_none() && self.merge.is_none()
    }

    /// The sequences.
    pub fn sequences(&self) -> Sequences {
        self.sequences.clone().unwrap_or_else(|| Sequences::filling(&self.problem.lengths))
    }

    /// The placement of Q, K, V and O.
    pub fn placements(&self) -> [Placement; 4] {
        let shapes = self.sequences().shapes(&self.problem);
        let all =
            |placement: fn([usize; 4], usize) -> Placement, gap| shapes.map(|shape| placement(shape, gap));
        let bshd = |shape, gap| Placement::padded(shape, TensorLayout::Bshd, gap);
        let bhsd = |shape, gap| Placement::padded(shape, TensorLayout::Bhsd, gap);
        let packed = all(bshd, 0);
        let with_kv = |change: fn(Strides) -> Strides| {
            let [q, k, v, out] = packed;
            let changed =
                |placement: Placement| Placement { strides: change(placement.strides), ..placement };
            [q, changed(k), changed(v), out]
        };
        match self.arrangement {
            Arrangement::Bshd => packed,
            Arrangement::Bhsd => all(bhsd, 0),
            Arrangement::Gap(gap) => all(bshd, self.gap(gap)),
            Arrangement::BhsdGap(gap) => all(bhsd, self.gap(gap)),
            Arrangement::SharedBatch => with_kv(|strides| Strides { batch: 0, ..strides }),
            Arrangement::SharedHeads => with_kv(|strides| Strides { head: 0, ..strides }),
            Arrangement::SharedRows => with_kv(|strides| Strides { seq: 0, ..strides }),
            Arrangement::FarBatch => packed.map(|placement| Placement {
                strides: Strides { batch: (1 << 31) + 64, ..placement.strides },
                ..placement
            }),
            Arrangement::FarKeys => with_kv(|strides| Strides { seq: (1 << 25) + 8, ..strides }),
        }
    }

    /// Elements of a gap of so many elements of 16 bits: of codes twice as many, which keeps rows aligned.
    pub fn gap(&self, elements: usize) -> usize {
        if self.problem.types.kv.is_code() { 2 * elements } else { elements }
    }

    /// The seed of the inputs, different for every problem.
    pub fn seed(&self) -> u64 {
        // FNV-1a.
        self.problem_name()
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
    }

    /// The inputs.
    pub fn inputs<T: Half>(&self) -> Inputs<T> {
        let mut inputs = Inputs::<T>::drawn(&self.problem, self.sequences(), self.placements(), self.seed());
        let Problem { heads_kv, head_dim, .. } = self.problem;
        let Sequences { k: of_k, .. } = inputs.sequences.clone();
        let mut scale = |tensor: usize, factor: &(dyn Fn(usize) -> f32 + Sync)| {
            for (row, values) in inputs.values[tensor].chunks_mut(head_dim).enumerate() {
                let factor = factor(row);
                let scaled = |value: &mut T| *value = T::from_f32(value.to_f32() * factor);
                values.iter_mut().for_each(scaled);
            }
        };
        let key = |row: usize| {
            let sequence = of_k.sequence_of(row / heads_kv);
            (row / heads_kv - of_k.start(sequence), of_k.len(sequence))
        };
        let share = |row: usize| {
            let (key, len) = key(row);
            key as f32 / len as f32
        };
        match self.values {
            Values::Normal => {}
            Values::Rising => scale(1, &|row| 0.1 + 12.0 * share(row)),
            Values::Falling => scale(1, &|row| 12.1 - 12.0 * share(row)),
            Values::Spikes => scale(1, &|row| if key(row).0 % 97 == 50 { 30.0 } else { 1.0 }),
            Values::Equal => scale(1, &|_| 0.0),
            Values::Sharp => (0..2).for_each(|tensor| scale(tensor, &|_| 8.0)),
            Values::Lowest => {
                // Exact products, of which a row has -2^126.
                let side = 63.0 - 0.5 * (head_dim as f32).log2();
                inputs.values[0].fill(T::from_f32(side.ceil().exp2()));
                inputs.values[1].fill(T::from_f32(-side.floor().exp2()));
            }
            Values::Edges => inputs.mods = inputs.mods.at_the_edges(),
        }
        inputs.held()
    }

    /// Bytes of device memory that the tensors take.
    pub fn device_bytes(&self) -> u64 {
        let elements: u64 = self.placements().iter().map(|placement| placement.span() as u64).sum();
        let tensors = elements * self.problem.types.q.bytes() as u64;
        if !self.pass.is_backward() {
            return tensors;
        }
        // Gradients are as large as their tensors, and dQ's accumulators are f32 in rows as wide as a tile.
        let columns = self.problem.head_dim.next_multiple_of(64) as f64;
        2 * tensors + (4.0 * self.problem.rows() * columns) as u64
    }
}
