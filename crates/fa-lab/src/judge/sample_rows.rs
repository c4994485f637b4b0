//! Is an output right? Judged on a few rows, so that a large problem is checked in a moment before it is timed.

use fa_attn::device::{DeviceOutput, Half};
use fa_core::{Lengths, Mask, Problem, Strides};
use fa_cpu::compare::{self, Comparison};
use fa_cpu::reference::{self, low_precision};
use fa_cpu::{CpuError, TensorRef};
use rayon::prelude::*;
use serde::Serialize;

use crate::random::Random;
use crate::tensors::Inputs;

/// Query rows of a block.
const ROWS: usize = 4;

/// Blocks in heads drawn at random, beside those of the first and the last head.
const DRAWN: usize = 4;

/// Query rows of one head with their exact output.
struct Block {
    batch: usize,
    head: usize,
    first: usize,
    rows: usize,
    /// `[rows, head_dim_v]`.
    out: Vec<f64>,
    low: Vec<f64>,
    noise: f64,
    lse: Vec<f64>,
}

/// What an output of one problem must be on some rows.
pub struct SampleRows {
    problem: Problem,
    blocks: Vec<Block>,
}

/// How far an output is from what it must be, at its worst.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Judged {
    /// Rows compared.
    pub rows: usize,
    /// Largest difference.
    pub max_abs: f64,
    /// What it may be.
    pub tolerance: f64,
    /// Whether all rows are near enough, their LSEs too, and every element of the whole output was written.
    pub passed: bool,
}

impl SampleRows {
    /// Computes the rows in f64: the first, middle and last ones of some heads.
    ///
    /// # Errors
    /// [`CpuError`] when the inputs do not fit their problem.
    pub fn new<T: Half>(inputs: &Inputs<T>, seed: u64) -> Result<SampleRows, CpuError> {
        let problem = inputs.problem;
        let Problem { heads_q, .. } = problem;
        let (batch, seqlen_q) = (problem.lengths.sequences(), problem.lengths.max_q());
        if batch == 0 || seqlen_q == 0 {
            return Ok(SampleRows { problem, blocks: Vec::new() });
        }
        let mut random = Random::new(seed);
        let mut heads = vec![(0, 0), (batch - 1, heads_q - 1)];
        heads.extend((0..DRAWN).map(|_| (random.below(batch), random.below(heads_q))));
        let rows = ROWS.min(seqlen_q);
        let placements = [0, (seqlen_q - rows) / 2, seqlen_q - rows];
        let wanted: Vec<_> = heads.iter().flat_map(|&head| placements.map(|first| (head, first))).collect();
        let compute = |&((batch, head), first)| block(inputs, batch, head, first, rows);
        let blocks = wanted.par_iter().map(compute).collect::<Result<_, CpuError>>()?;
        Ok(SampleRows { problem, blocks })
    }

    /// No rows: nothing but that outputs are written is judged.
    pub fn none(problem: &Problem) -> SampleRows {
        SampleRows { problem: *problem, blocks: Vec::new() }
    }

    /// Judges a whole output by these rows.
    ///
    /// # Errors
    /// [`CpuError`] when the output does not have the problem's size.
    pub fn judge<T: Half>(&self, outputs: &DeviceOutput<T>) -> Result<Judged, CpuError> {
        let Problem { heads_q, head_dim_v, .. } = self.problem;
        let (seqlen_q, dtype) = (self.problem.lengths.max_q(), self.problem.types.qkv);
        fa_cpu::check::check_len(
            "out",
            outputs.out.len(),
            fa_cpu::check::out_shape(&self.problem).iter().product(),
        )?;
        let mut worst = Judged { rows: 0, max_abs: 0.0, tolerance: 0.0, passed: true };
        let written = outputs.out.par_iter().all(|value| !value.to_f32().is_nan());
        worst.passed &= written && outputs.lse.par_iter().all(|lse| !lse.is_nan());
        for block in &self.blocks {
            let Block { batch, head, first, rows, .. } = *block;
            let row = |i: usize| ((batch * seqlen_q + first + i) * heads_q + head) * head_dim_v;
            let out: Vec<T> =
                (0..rows).flat_map(|i| &outputs.out[row(i)..row(i) + head_dim_v]).copied().collect();
            let shape = [1, rows, 1, head_dim_v];
            let found =
                compare::compare(shape, dtype, &out, &block.out, Some(&block.low))?.allowing(block.noise);
            let at = (batch * heads_q + head) * seqlen_q + first;
            let lse = &outputs.lse[at..at + rows];
            let lse = compare::compare_lse([1, 1, rows], dtype, lse, &block.lse)?;
            worst.passed &= found.passed() && lse.passed();
            worst.rows += rows;
            let nearer = |a: &Comparison| a.max_abs * worst.tolerance <= worst.max_abs * a.tolerance;
            if worst.tolerance == 0.0 || !nearer(&found) {
                (worst.max_abs, worst.tolerance) = (found.max_abs, found.tolerance);
            }
        }
        Ok(worst)
    }
}

/// The exact rows `first..first + rows` of one head, as a problem of their own.
///
/// Masks are aligned at the bottom right: with the keys behind the last row's diagonal left out, the rows keep their
/// placements in it. A mask that looks to the right is cut off where its last row ends.
fn block<T: Half>(
    inputs: &Inputs<T>,
    batch: usize,
    head: usize,
    first: usize,
    rows: usize,
) -> Result<Block, CpuError> {
    let whole = &inputs.problem;
    let kv_head = head / whole.group_size();
    // Full masks have no diagonal. Others: the keys that the last of these rows may see, if its right side were 0.
    let diagonal = (first + rows + whole.lengths.max_k()).saturating_sub(whole.lengths.max_q());
    let seqlen_k = match whole.mask {
        Mask { left: None, right: None } => whole.lengths.max_k(),
        Mask { right: Some(0), .. } => diagonal.min(whole.lengths.max_k()),
        // With a window to the right only the last rows can stand by themselves.
        _ => whole.lengths.max_k(),
    };
    let first = match whole.mask {
        Mask { left: None, right: None } | Mask { right: Some(0), .. } => first,
        _ => whole.lengths.max_q() - rows,
    };
    let problem = Problem { lengths: Lengths::uniform(1, rows, seqlen_k), heads_q: 1, heads_kv: 1, ..*whole };
    let [q, k, v] = &inputs.values;
    let (hd, hdv) = (whole.head_dim, whole.head_dim_v);
    let row = |seqlen: usize, heads: usize, dim: usize, first: usize, head: usize| {
        ((batch * seqlen + first) * heads + head) * dim
    };
    let strides = |heads: usize, dim: usize| Strides { batch: 0, seq: (heads * dim) as i64, head: 0, dim: 1 };
    let q = TensorRef::new(
        "q",
        &q[row(whole.lengths.max_q(), whole.heads_q, hd, first, head)..],
        [1, rows, 1, hd],
        strides(whole.heads_q, hd),
    )?;
    let k = TensorRef::new(
        "k",
        &k[row(whole.lengths.max_k(), whole.heads_kv, hd, 0, kv_head)..],
        [1, seqlen_k, 1, hd],
        strides(whole.heads_kv, hd),
    )?;
    let v = TensorRef::new(
        "v",
        &v[row(whole.lengths.max_k(), whole.heads_kv, hdv, 0, kv_head)..],
        [1, seqlen_k, 1, hdv],
        strides(whole.heads_kv, hdv),
    )?;
    let exact = reference::forward(&problem, &q, &k, &v)?;
    let low = low_precision::forward(&problem, &q, &k, &v)?;
    Ok(Block {
        batch,
        head,
        first,
        rows,
        out: exact.out,
        low: low.out.iter().map(|value| value.to_f64()).collect(),
        noise: exact.out_noise,
        lse: exact.lse,
    })
}
