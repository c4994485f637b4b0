//! Causal self-attention of the example, on the CPU in f32 or on a GPU in bf16.

use fa_attn::{Backend, CpuOptions, Element, Engine, Mask, Output, Tensor, TensorLayout, bf16};

/// Any error of either backend.
pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// `[batch, seqlen, heads, head_dim]`, packed, of Q, K, V and all that has their shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Shape {
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence.
    pub seqlen: usize,
    /// Heads.
    pub heads: usize,
    /// Elements of a head's row.
    pub head_dim: usize,
}

/// What computes attention.
pub(crate) enum Attention {
    /// The CPU, in f32.
    Cpu(Engine),
    /// A GPU; inputs and outputs are rounded to bf16.
    Gpu(Engine),
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

impl Shape {
    fn tensor<T: Element>(self, values: &[f32]) -> Result<Tensor<T>> {
        let data = values.iter().map(|&value| T::from_f32(value)).collect();
        Ok(Tensor::with_layout(
            [self.batch, self.seqlen, self.heads, self.head_dim],
            TensorLayout::Bshd,
            data,
        )?)
    }
}

impl Attention {
    /// The CPU.
    ///
    /// # Errors
    /// None on any CPU today.
    pub(crate) fn cpu() -> Result<Attention> {
        Ok(Attention::Cpu(Engine::with(Backend::Cpu(CpuOptions::default()))?))
    }

    /// The first GPU.
    ///
    /// # Errors
    /// Without a driver or a GPU.
    pub(crate) fn gpu() -> Result<Attention> {
        Ok(Attention::Gpu(Engine::with(Backend::Gpu)?))
    }

    /// The average over all that train together: one process is alone.
    ///
    /// # Errors
    /// None here.
    pub(crate) fn average(&self, _: &mut [f32]) -> Result<()> {
        Ok(())
    }

    /// O and the LSE.
    ///
    /// # Errors
    /// Those of the backend.
    pub(crate) fn forward(
        &self,
        shape: Shape,
        q: &[f32],
        k: &[f32],
        v: &[f32],
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        match self {
            Attention::Cpu(engine) => forward::<f32>(engine, shape, [q, k, v]),
            Attention::Gpu(engine) => forward::<bf16>(engine, shape, [q, k, v]),
        }
    }

    /// Gradients from that of O.
    ///
    /// # Errors
    /// Those of the backend.
    pub(crate) fn backward(
        &self,
        shape: Shape,
        qkv: [&[f32]; 3],
        out: &[f32],
        lse: &[f32],
        dout: &[f32],
    ) -> Result<Gradients> {
        match self {
            Attention::Cpu(engine) => backward::<f32>(engine, shape, qkv, out, lse, dout),
            Attention::Gpu(engine) => backward::<bf16>(engine, shape, qkv, out, lse, dout),
        }
    }
}

fn forward<T: Element>(engine: &Engine, shape: Shape, qkv: [&[f32]; 3]) -> Result<(Vec<f32>, Vec<f32>)> {
    let [q, k, v] = qkv.map(|values| shape.tensor::<T>(values));
    let Output { out, lse } = engine.attention(&q?, &k?, &v?, Mask::CAUSAL)?;
    Ok((widened(&out), lse))
}

fn backward<T: Element>(
    engine: &Engine,
    shape: Shape,
    qkv: [&[f32]; 3],
    out: &[f32],
    lse: &[f32],
    dout: &[f32],
) -> Result<Gradients> {
    let [q, k, v] = qkv.map(|values| shape.tensor::<T>(values));
    let output = Output { out: shape.tensor::<T>(out)?, lse: lse.to_vec() };
    let dout = shape.tensor(dout)?;
    let fa_attn::Gradients { dq, dk, dv, .. } =
        engine.gradients([&q?, &k?, &v?], Mask::CAUSAL, &output, &dout)?;
    Ok(Gradients { dq: widened(&dq), dk: widened(&dk), dv: widened(&dv) })
}

fn widened<T: Element>(tensor: &Tensor<T>) -> Vec<f32> {
    tensor.data.iter().map(|&value| value.to_f32()).collect()
}
