//! Causal self-attention of the example, over ranks: threads on the CPU in f32, or GPUs in bf16.

use std::cell::RefCell;
use std::sync::Arc;

use fa_attn::device::{DeviceBackward, DeviceForward, DeviceTensor, Gpu, Placement};
use fa_core::{Dtype, Lengths, Mask, Pass, Problem, TensorLayout};
use fa_cpu::tiled::BackwardInputs;
use fa_cpu::{Extras, TensorMut, TensorRef};
use fa_dist::{
    Bootstrap, DeviceAttention, HostAttention, HostTransport, Layout, MemoryTransport, Place, Rank,
    RankOptions, Scheme, ShardPlan,
};
use half::bf16;

/// Any error of either backend.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// `[batch, seqlen, heads, head_dim]`, packed, of a rank's Q, K, V and all that has their shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Shape {
    /// Sequences.
    pub batch: usize,
    /// The rank's tokens of a sequence.
    pub seqlen: usize,
    /// Heads.
    pub heads: usize,
    /// Elements of a head's row.
    pub head_dim: usize,
}

/// Gradients of Q, K and V.
pub(crate) struct Gradients {
    /// Of Q.
    pub dq: Vec<f32>,
    /// Of K.
    pub dk: Vec<f32>,
    /// Of V.
    pub dv: Vec<f32>,
}

/// What computes attention: this rank of several.
#[allow(clippy::large_enum_variant)]
pub(crate) enum Attention {
    /// A thread, in f32.
    Cpu(RefCell<HostAttention<MemoryTransport>>),
    /// A GPU; inputs and outputs are rounded to bf16.
    Gpu(RefCell<DeviceAttention>, Arc<Gpu>),
}

/// The example's problem over ranks: 4 sequences of 64 tokens, 2 heads of 32.
pub(crate) fn plan(ranks: usize, scheme: Scheme) -> Result<ShardPlan> {
    problem_plan(ranks, scheme, Dtype::F32)
}

fn problem_plan(ranks: usize, scheme: Scheme, dtype: Dtype) -> Result<ShardPlan> {
    let problem = Problem::square(4, 64, 2, 32, Mask::CAUSAL, dtype);
    Ok(ShardPlan::new(&problem, ranks, scheme, Layout::Zigzag)?)
}

impl Attention {
    /// A rank that is a thread.
    pub(crate) fn cpu(plan: &ShardPlan, transport: MemoryTransport) -> Result<Attention> {
        Ok(Attention::Cpu(RefCell::new(HostAttention::new(plan, transport)?)))
    }

    /// A rank that is a process with a GPU.
    pub(crate) fn gpu(bootstrap: &Bootstrap, place: Place, scheme: Scheme) -> Result<Attention> {
        let gpu = Arc::new(Gpu::nth(place.local)?);
        let rank = Rank::join(&gpu, bootstrap, place, &RankOptions::default())?;
        let plan = problem_plan(place.world, scheme, Dtype::Bf16)?;
        let attention = DeviceAttention::new(rank, &plan, Some(Pass::BACKWARD))?;
        Ok(Attention::Gpu(RefCell::new(attention), gpu))
    }

    /// The rank.
    pub(crate) fn rank(&self) -> usize {
        match self {
            Attention::Cpu(rank) => rank.borrow().rank(),
            Attention::Gpu(rank, _) => rank.borrow_mut().rank().place().rank,
        }
    }

    /// The rank's tokens of a sequence.
    pub(crate) fn places(&self) -> Vec<usize> {
        let of = |plan: &ShardPlan| plan.queries().positions(self.rank()).collect();
        match self {
            Attention::Cpu(rank) => {
                let plan = rank.borrow().plan().clone();
                of(&plan)
            }
            Attention::Gpu(rank, _) => {
                let plan = rank.borrow().plan().clone();
                of(&plan)
            }
        }
    }

    /// The average over all ranks, which have as many rows each.
    pub(crate) fn average(&self, values: &mut [f32]) -> Result<()> {
        let world = match self {
            Attention::Cpu(rank) => {
                let mut rank = rank.borrow_mut();
                let transport = rank.transport();
                let (own, world) = (transport.rank(), transport.world());
                let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                let others: Vec<usize> = (0..world).filter(|other| *other != own).collect();
                let sends = others.iter().map(|other| (*other, bytes.clone())).collect();
                let recvs: Vec<(usize, usize)> = others.iter().map(|other| (*other, bytes.len())).collect();
                let mut all = transport.exchange(sends, &recvs)?;
                all.insert(own, bytes);
                values.fill(0.0);
                for bytes in all {
                    let (words, _) = bytes.as_chunks::<4>();
                    values
                        .iter_mut()
                        .zip(words)
                        .for_each(|(value, word)| *value += f32::from_le_bytes(*word));
                }
                world
            }
            Attention::Gpu(rank, _) => {
                let mut rank = rank.borrow_mut();
                rank.rank().sum(values)?;
                rank.rank().place().world
            }
        };
        values.iter_mut().for_each(|value| *value /= world as f32);
        Ok(())
    }

    /// O and the LSE of the rank's rows.
    pub(crate) fn forward(
        &self,
        shape: Shape,
        q: &[f32],
        k: &[f32],
        v: &[f32],
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        match self {
            Attention::Cpu(rank) => {
                let (mut out, mut lse) = (vec![0.0; q.len()], vec![0.0; q.len() / shape.head_dim]);
                let mut to = TensorMut::packed("out", &mut out, axes(shape), TensorLayout::Bshd)?;
                let inputs = [view(q, shape)?, view(k, shape)?, view(v, shape)?];
                rank.borrow_mut().forward(inputs, &mut to, &mut lse, &Extras::NONE)?;
                Ok((out, lse))
            }
            Attention::Gpu(rank, gpu) => {
                let mut tensors = uploaded(gpu, shape, [q, k, v])?;
                let mut rank = rank.borrow_mut();
                rank.forward(&mut tensors, &gpu.stream)?;
                rank.rank().wait(&gpu.stream)?;
                let found = tensors.read(&gpu.stream)?;
                Ok((widened(&found.out), found.lse))
            }
        }
    }

    /// Gradients of the rank's rows from that of O.
    pub(crate) fn backward(
        &self,
        shape: Shape,
        [q, k, v]: [&[f32]; 3],
        out: &[f32],
        lse: &[f32],
        dout: &[f32],
    ) -> Result<Gradients> {
        match self {
            Attention::Cpu(rank) => {
                let mut made = [0, 1, 2].map(|_| vec![0.0; q.len()]);
                let [dq, dk, dv] = &mut made;
                let given = BackwardInputs {
                    q: view(q, shape)?,
                    k: view(k, shape)?,
                    v: view(v, shape)?,
                    out: view(out, shape)?,
                    lse,
                    dout: view(dout, shape)?,
                };
                let to = |values| TensorMut::packed("gradient", values, axes(shape), TensorLayout::Bshd);
                let (mut dq, mut dk, mut dv) = (to(dq)?, to(dk)?, to(dv)?);
                rank.borrow_mut().backward(&given, [&mut dq, &mut dk, &mut dv], None, &Extras::NONE)?;
                let [dq, dk, dv] = made;
                Ok(Gradients { dq, dk, dv })
            }
            Attention::Gpu(rank, gpu) => {
                let stream = &gpu.stream;
                let mut forward = uploaded(gpu, shape, [q, k, v])?;
                let upload = |values: &[f32]| -> Result<DeviceTensor<bf16>> {
                    let values = rounded(values);
                    Ok(DeviceTensor::upload(stream, &view(&values, shape)?)?)
                };
                forward.out = upload(out)?;
                forward.lse = stream.clone_htod(lse)?;
                let placement = Placement::packed(axes(shape), TensorLayout::Bshd);
                let room = || DeviceTensor::nan(stream, placement);
                let mut tensors = DeviceBackward {
                    dout: upload(dout)?,
                    dq: room()?,
                    dk: room()?,
                    dv: room()?,
                    dsinks: None,
                    workspace: stream.alloc_zeros(16)?,
                    room: None,
                };
                let mut rank = rank.borrow_mut();
                rank.backward(&forward, &mut tensors, stream)?;
                rank.rank().wait(stream)?;
                let [dq, dk, dv] = tensors.read(stream)?.values.map(|values| widened(&values));
                Ok(Gradients { dq, dk, dv })
            }
        }
    }
}

fn axes(shape: Shape) -> [usize; 4] {
    [shape.batch, shape.seqlen, shape.heads, shape.head_dim]
}

fn view<T>(values: &[T], shape: Shape) -> Result<TensorRef<'_, T>> {
    Ok(TensorRef::packed("input", values, axes(shape), TensorLayout::Bshd)?)
}

fn rounded(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&value| bf16::from_f32(value)).collect()
}

fn widened(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|value| value.to_f32()).collect()
}

fn uploaded(gpu: &Gpu, shape: Shape, qkv: [&[f32]; 3]) -> Result<DeviceForward<bf16>> {
    let problem =
        Problem::square(shape.batch, shape.seqlen, shape.heads, shape.head_dim, Mask::CAUSAL, Dtype::Bf16);
    let problem = problem.with_lengths(Lengths::uniform(shape.batch, shape.seqlen, shape.seqlen));
    let [q, k, v] = qkv.map(rounded);
    let [q, k, v] = [view(&q, shape)?, view(&k, shape)?, view(&v, shape)?];
    let placement = Placement::packed(axes(shape), TensorLayout::Bshd);
    Ok(DeviceForward::upload(&gpu.stream, &problem, 0, [&q, &k, &v], placement)?)
}
