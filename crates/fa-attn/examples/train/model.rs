//! A causal transformer of two pre-norm blocks that learns a short text by heart.
//!
//! `scripts/train_torch.py` is the same model in torch, from the same start: parameters are drawn, in the
//! order in which they are declared here, from one generator that both sides implement.

use super::attention::{Attention, Result, Shape};
use super::layers::{self, Param};

/// Width of a token.
const WIDTH: usize = 64;
/// Heads; of 32 elements each.
const HEADS: usize = 2;
/// Width of the hidden layer of a block's network.
const HIDDEN: usize = 128;
/// Blocks.
const BLOCKS: usize = 2;
/// Tokens of a sequence.
const CONTEXT: usize = 64;
/// Sequences, which start at even distances in the text.
const BATCH: usize = 4;
/// Parameters start evenly spread over plus and minus this.
const SPREAD: f32 = 0.08;

const TEXT: &str = include_str!("text.txt");

struct Block {
    query: Param,
    key: Param,
    value: Param,
    output: Param,
    up: Param,
    down: Param,
}

/// What a block's forward leaves for its backward.
struct Trace {
    normed: Vec<f32>,
    factors: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    out: Vec<f32>,
    lse: Vec<f32>,
    normed_after: Vec<f32>,
    factors_after: Vec<f32>,
    hidden: Vec<f32>,
}

/// The model and its text, or the rows of it that a rank has.
pub(crate) struct Model {
    /// Which tokens of each sequence are there.
    places: Vec<usize>,
    tokens: Vec<usize>,
    targets: Vec<usize>,
    classes: usize,
    embedding: Param,
    position: Param,
    blocks: Vec<Block>,
    head: Param,
    steps: i32,
}

/// The numbers that parameters start from: a linear congruential generator modulo 2^32 (Numerical Recipes'
/// constants), of whose states the upper 24 bits become a number from -1 to 1.
struct Generator(u32);

impl Generator {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.0 >> 8) as f32 / (1 << 23) as f32 - 1.0
    }

    fn param(&mut self, len: usize) -> Param {
        Param::new((0..len).map(|_| SPREAD * self.next()).collect())
    }
}

fn shape(seqlen: usize) -> Shape {
    Shape { batch: BATCH, seqlen, heads: HEADS, head_dim: WIDTH / HEADS }
}

impl Model {
    /// The untrained model, on whole sequences.
    pub(crate) fn new() -> Model {
        Model::of((0..CONTEXT).collect())
    }

    /// The untrained model, on the tokens at `places` of each sequence.
    pub(crate) fn of(places: Vec<usize>) -> Model {
        let bytes = TEXT.as_bytes();
        let mut alphabet: Vec<u8> = bytes.to_vec();
        alphabet.sort_unstable();
        alphabet.dedup();
        let ids: Vec<usize> =
            bytes.iter().map(|byte| alphabet.partition_point(|known| known < byte)).collect();
        let stride = (ids.len() - CONTEXT - 1) / (BATCH - 1);
        let windows = |shift: usize| -> Vec<usize> {
            let of = |i: usize| places.iter().map(move |place| i * stride + shift + place);
            (0..BATCH).flat_map(of).map(|at| ids[at]).collect()
        };
        let mut generator = Generator(1);
        let classes = alphabet.len();
        let (tokens, targets) = (windows(0), windows(1));
        Model {
            places,
            tokens,
            targets,
            classes,
            embedding: generator.param(classes * WIDTH),
            position: generator.param(CONTEXT * WIDTH),
            blocks: (0..BLOCKS)
                .map(|_| Block {
                    query: generator.param(WIDTH * WIDTH),
                    key: generator.param(WIDTH * WIDTH),
                    value: generator.param(WIDTH * WIDTH),
                    output: generator.param(WIDTH * WIDTH),
                    up: generator.param(WIDTH * HIDDEN),
                    down: generator.param(HIDDEN * WIDTH),
                })
                .collect(),
            head: generator.param(WIDTH * classes),
            steps: 0,
        }
    }

    /// One step of training; the loss before it, in nats per token.
    ///
    /// # Errors
    /// Those of `attention`.
    pub(crate) fn train(&mut self, attention: &Attention) -> Result<f64> {
        let mut x = vec![0.0; self.tokens.len() * WIDTH];
        for (i, (row, &token)) in x.chunks_exact_mut(WIDTH).zip(&self.tokens).enumerate() {
            let (token, position) = (token * WIDTH, self.places[i % self.places.len()] * WIDTH);
            for (j, x) in row.iter_mut().enumerate() {
                *x = self.embedding.value[token + j] + self.position.value[position + j];
            }
        }
        let mut traces = Vec::with_capacity(BLOCKS);
        for block in &self.blocks {
            traces.push(block.forward(attention, shape(self.places.len()), &mut x)?);
        }
        let (normed, factors) = layers::norm(&x, WIDTH);
        let mut logits = layers::matmul(&normed, &self.head.value, WIDTH, self.classes);
        let mut loss = [layers::cross_entropy(&mut logits, &self.targets, self.classes) as f32];

        let dnormed = layers::matmul_backward(&normed, &mut self.head, &logits, WIDTH, self.classes);
        let mut dx = layers::norm_backward(&normed, &factors, &dnormed, WIDTH);
        for (block, trace) in self.blocks.iter_mut().zip(&traces).rev() {
            block.backward(attention, shape(self.places.len()), trace, &mut dx)?;
        }
        for (i, (row, &token)) in dx.chunks_exact(WIDTH).zip(&self.tokens).enumerate() {
            let (token, position) = (token * WIDTH, self.places[i % self.places.len()] * WIDTH);
            for (j, dx) in row.iter().enumerate() {
                self.embedding.grad[token + j] += dx;
                self.position.grad[position + j] += dx;
            }
        }
        self.steps += 1;
        let steps = self.steps;
        attention.average(&mut loss)?;
        for param in self.params() {
            attention.average(&mut param.grad)?;
            param.step(steps);
        }
        Ok(f64::from(loss[0]))
    }

    fn params(&mut self) -> impl Iterator<Item = &mut Param> {
        let blocks = self.blocks.iter_mut().flat_map(|block| {
            [
                &mut block.query,
                &mut block.key,
                &mut block.value,
                &mut block.output,
                &mut block.up,
                &mut block.down,
            ]
        });
        [&mut self.embedding, &mut self.position, &mut self.head].into_iter().chain(blocks)
    }
}

impl Block {
    /// Adds what the block has to say to `x`.
    fn forward(&self, attention: &Attention, shape: Shape, x: &mut [f32]) -> Result<Trace> {
        let (normed, factors) = layers::norm(x, WIDTH);
        let project = |param: &Param| layers::matmul(&normed, &param.value, WIDTH, WIDTH);
        let (q, k, v) = (project(&self.query), project(&self.key), project(&self.value));
        let (out, lse) = attention.forward(shape, &q, &k, &v)?;
        add(x, &layers::matmul(&out, &self.output.value, WIDTH, WIDTH));
        let (normed_after, factors_after) = layers::norm(x, WIDTH);
        let hidden = layers::matmul(&normed_after, &self.up.value, WIDTH, HIDDEN);
        let active: Vec<f32> = hidden.iter().copied().map(layers::gelu).collect();
        add(x, &layers::matmul(&active, &self.down.value, HIDDEN, WIDTH));
        Ok(Trace { normed, factors, q, k, v, out, lse, normed_after, factors_after, hidden })
    }

    /// From the gradient of the block's output to that of its input, in place.
    fn backward(&mut self, attention: &Attention, shape: Shape, trace: &Trace, dx: &mut [f32]) -> Result<()> {
        let active: Vec<f32> = trace.hidden.iter().copied().map(layers::gelu).collect();
        let mut dhidden = layers::matmul_backward(&active, &mut self.down, dx, HIDDEN, WIDTH);
        for (dhidden, &hidden) in dhidden.iter_mut().zip(&trace.hidden) {
            *dhidden *= layers::gelu_slope(hidden);
        }
        let dnormed = layers::matmul_backward(&trace.normed_after, &mut self.up, &dhidden, WIDTH, HIDDEN);
        add(dx, &layers::norm_backward(&trace.normed_after, &trace.factors_after, &dnormed, WIDTH));

        let dout = layers::matmul_backward(&trace.out, &mut self.output, dx, WIDTH, WIDTH);
        let of = attention.backward(shape, [&trace.q, &trace.k, &trace.v], &trace.out, &trace.lse, &dout)?;
        let mut dnormed = layers::matmul_backward(&trace.normed, &mut self.query, &of.dq, WIDTH, WIDTH);
        add(&mut dnormed, &layers::matmul_backward(&trace.normed, &mut self.key, &of.dk, WIDTH, WIDTH));
        add(&mut dnormed, &layers::matmul_backward(&trace.normed, &mut self.value, &of.dv, WIDTH, WIDTH));
        add(dx, &layers::norm_backward(&trace.normed, &trace.factors, &dnormed, WIDTH));
        Ok(())
    }
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}
