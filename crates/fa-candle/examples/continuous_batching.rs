//! Continuous batching: requests arrive and leave while others run. Every step computes the prompts of new
//! requests and a token of each running one in a single call on a cache in pages. The tokens are those of one
//! request at a time. A small random decoder, on the CPU.
//!
//! ```text
//! cargo run --release -p fa-candle --example continuous_batching
//! ```

use std::collections::VecDeque;
use std::time::Instant;

use candle_core::{D, DType, Device, Result, Tensor};
use fa_candle::flash_attn_varlen_paged_windowed;

const VOCAB: usize = 256;
const HEADS: usize = 4;
const HEADS_KV: usize = 2;
const DIM: usize = 32;
const HIDDEN: usize = HEADS * DIM;
const LAYERS: usize = 2;
const PAGE: usize = 16;

fn main() -> Result<()> {
    let model = Model::new(&Device::Cpu)?;
    let requests = requests();
    let start = Instant::now();
    let (together, steps) = Server::new(&model, 40)?.serve(&requests)?;
    let seconds = start.elapsed().as_secs_f64();
    let count: usize = together.iter().map(Vec::len).sum();
    println!(
        "{} requests, {count} tokens in {steps} steps: {:.0} tokens/s",
        requests.len(),
        count as f64 / seconds
    );
    let start = Instant::now();
    let alone = one_at_a_time(&model, &requests)?;
    println!("one at a time: {:.0} tokens/s", count as f64 / start.elapsed().as_secs_f64());
    println!("the same tokens: {}", together == alone);
    Ok(())
}

/// The tokens of each request, computed by itself.
pub(crate) fn one_at_a_time(model: &Model, requests: &[Request]) -> Result<Vec<Vec<u32>>> {
    let serve = |request: &Request| {
        let alone = Request { arrives: 0, ..request.clone() };
        Ok(Server::new(model, 40)?.serve(&[alone])?.0.remove(0))
    };
    requests.iter().map(serve).collect()
}

/// A prompt, and how many tokens are to follow it.
#[derive(Clone)]
pub(crate) struct Request {
    /// The step before which it is not there.
    arrives: usize,
    prompt: Vec<u32>,
    wanted: usize,
}

/// Requests of several lengths that arrive over time.
pub(crate) fn requests() -> Vec<Request> {
    let lengths = [(0, 20, 12), (0, 3, 30), (2, 50, 8), (5, 1, 20), (9, 33, 16), (9, 17, 5), (20, 64, 10)];
    let request = |(number, (arrives, length, wanted)): (usize, (usize, usize, usize))| Request {
        arrives,
        prompt: (0..length).map(|i| ((i * 37 + number * 101 + 5) % VOCAB) as u32).collect(),
        wanted,
    };
    lengths.into_iter().enumerate().map(request).collect()
}

/// A decoder with weights from a formula.
pub(crate) struct Model {
    embedding: Tensor,
    /// From the last layer to tokens.
    head: Tensor,
    /// Of each layer: Q, K, V and O.
    layers: Vec<[Tensor; 4]>,
}

impl Model {
    /// The model on this device.
    pub(crate) fn new(device: &Device) -> Result<Model> {
        let weight = |rows: usize, columns: usize, seed: usize| {
            let scale = (3.0 / rows as f32).sqrt();
            let value = |i: usize| {
                let mut bits = (i as u32).wrapping_mul(0x9e37_79b9) ^ (seed as u32).wrapping_mul(0x85eb_ca6b);
                for factor in [0x7feb_352du32, 0x846c_a68b] {
                    bits = (bits ^ bits >> 16).wrapping_mul(factor);
                }
                ((bits ^ bits >> 16) as f32 / (1u32 << 31) as f32 - 1.0) * scale
            };
            Tensor::from_vec((0..rows * columns).map(value).collect::<Vec<f32>>(), (rows, columns), device)
        };
        let kv = HEADS_KV * DIM;
        let layer = |number: usize| {
            let seed = 10 * number + 1;
            Ok([
                weight(HIDDEN, HIDDEN, seed)?,
                weight(HIDDEN, kv, seed + 1)?,
                weight(HIDDEN, kv, seed + 2)?,
                weight(HIDDEN, HIDDEN, seed + 3)?,
            ])
        };
        let embedding = (weight(VOCAB, HIDDEN, 0)? * 16.0)?;
        let head = weight(HIDDEN, VOCAB, 99)?;
        Ok(Model { embedding, head, layers: (0..LAYERS).map(layer).collect::<Result<Vec<_>>>()? })
    }
}

/// Sines and cosines of a position.
fn position(at: usize) -> impl Iterator<Item = f32> {
    (0..HIDDEN).map(move |i| {
        let angle = at as f32 / 1000f32.powf((i / 2 * 2) as f32 / HIDDEN as f32);
        if i % 2 == 0 { angle.sin() } else { angle.cos() }
    })
}

fn normed(x: &Tensor) -> Result<Tensor> {
    x.broadcast_div(&(x.sqr()?.mean_keepdim(D::Minus1)? + 1e-5)?.sqrt()?)
}

/// A request that runs.
struct Running {
    index: usize,
    tokens: Vec<u32>,
    /// Tokens whose keys are in the cache.
    cached: usize,
    wanted: usize,
    pages: Vec<u32>,
}

/// The cache and the requests that are in it.
pub(crate) struct Server<'a> {
    model: &'a Model,
    /// Of each layer: keys and values, `(pages, page, heads_kv, dim)`.
    pools: Vec<[Tensor; 2]>,
    free: Vec<u32>,
    running: Vec<Running>,
}

impl<'a> Server<'a> {
    /// A server with a cache of this many pages.
    pub(crate) fn new(model: &'a Model, pages: usize) -> Result<Server<'a>> {
        let pool = || Tensor::zeros((pages * PAGE, HEADS_KV * DIM), DType::F32, model.embedding.device());
        let pools = (0..LAYERS).map(|_| Ok([pool()?, pool()?])).collect::<Result<Vec<_>>>()?;
        Ok(Server { model, pools, free: (0..pages as u32).collect(), running: Vec::new() })
    }

    /// The tokens that follow each prompt, and the steps that it took.
    pub(crate) fn serve(&mut self, requests: &[Request]) -> Result<(Vec<Vec<u32>>, usize)> {
        let mut waiting: VecDeque<usize> = (0..requests.len()).collect();
        let mut done = vec![Vec::new(); requests.len()];
        let mut step = 0;
        while !(waiting.is_empty() && self.running.is_empty()) {
            // Whoever has arrived and has room for all its tokens joins.
            while let Some(index) = waiting.front().copied() {
                let Request { arrives, prompt, wanted } = &requests[index];
                let needed = (prompt.len() + wanted).div_ceil(PAGE);
                if needed > self.free.len() && self.running.is_empty() {
                    candle_core::bail!("request {index} needs {needed} pages of {}", self.free.len());
                }
                if *arrives > step || needed > self.free.len() {
                    break;
                }
                waiting.pop_front();
                let pages = (0..needed).filter_map(|_| self.free.pop()).collect();
                self.running.push(Running {
                    index,
                    tokens: prompt.clone(),
                    cached: 0,
                    wanted: *wanted,
                    pages,
                });
            }
            if !self.running.is_empty() {
                for (request, token) in self.step()?.into_iter().enumerate() {
                    self.running[request].tokens.push(token);
                }
            }
            step += 1;
            let (free, requests) = (&mut self.free, &requests);
            self.running.retain_mut(|own| {
                let begin = requests[own.index].prompt.len();
                let is_done = own.tokens.len() >= begin + own.wanted;
                if is_done {
                    done[own.index] = own.tokens.split_off(begin);
                    free.append(&mut own.pages);
                }
                !is_done
            });
        }
        Ok((done, step))
    }

    /// The next token of every running request.
    fn step(&mut self) -> Result<Vec<u32>> {
        let device = self.model.embedding.device();
        let (mut tokens, mut positions, mut slots) = (Vec::new(), Vec::new(), Vec::new());
        let (mut starts_q, mut starts_k) = (vec![0u32], vec![0u32]);
        for own in &mut self.running {
            for at in own.cached..own.tokens.len() {
                tokens.push(own.tokens[at]);
                positions.extend(position(at));
                slots.push(own.pages[at / PAGE] * PAGE as u32 + (at % PAGE) as u32);
            }
            own.cached = own.tokens.len();
            starts_q.push(tokens.len() as u32);
            starts_k.push(starts_k[starts_k.len() - 1] + own.cached as u32);
        }
        let longest =
            |starts: &[u32]| starts.windows(2).map(|two| two[1] - two[0]).max().unwrap_or(0) as usize;
        let (most_q, most_k) = (longest(&starts_q), longest(&starts_k));
        let columns = self.running.iter().map(|own| own.pages.len()).max().unwrap_or(1);
        let padded =
            |own: &Running| (0..columns).map(|i| own.pages.get(i).copied().unwrap_or(0)).collect::<Vec<_>>();
        let table: Vec<u32> = self.running.iter().flat_map(padded).collect();
        let table = Tensor::from_vec(table, (self.running.len(), columns), device)?;
        let rows = tokens.len();
        let ends: Vec<u32> = starts_q[1..].iter().map(|end| end - 1).collect();
        let starts = |starts: Vec<u32>| Tensor::new(starts, device);
        let (starts_q, starts_k) = (starts(starts_q)?, starts(starts_k)?);
        let kv = HEADS_KV * DIM;
        let slots = Tensor::new(slots, device)?.reshape((rows, 1))?.broadcast_as((rows, kv))?.contiguous()?;

        let mut x = self.model.embedding.index_select(&Tensor::new(tokens, device)?, 0)?;
        x = (x + Tensor::from_vec(positions, (rows, HIDDEN), device)?)?;
        for ([wq, wk, wv, wo], [keys, values]) in self.model.layers.iter().zip(&self.pools) {
            let h = normed(&x)?;
            let q = h.matmul(wq)?.reshape((rows, HEADS, DIM))?;
            keys.scatter_set(&slots, &h.matmul(wk)?, 0)?;
            values.scatter_set(&slots, &h.matmul(wv)?, 0)?;
            let paged = |pool: &Tensor| pool.reshape(((), PAGE, HEADS_KV, DIM));
            let scale = 1.0 / (DIM as f32).sqrt();
            let out = flash_attn_varlen_paged_windowed(
                &q,
                &paged(keys)?,
                &paged(values)?,
                &starts_q,
                &starts_k,
                &table,
                None,
                most_q,
                most_k,
                scale,
                None,
                Some(0),
                PAGE,
                None,
            )?;
            x = (x + out.reshape((rows, HIDDEN))?.matmul(wo)?)?;
        }
        let last = normed(&x.index_select(&Tensor::new(ends, device)?, 0)?)?;
        last.matmul(&self.model.head)?.argmax(D::Minus1)?.to_vec1()
    }
}
