//! Causal self-attention of the example, on the CPU in f32 or on a GPU in bf16.

use fa_core::{Dtype, Mask, Problem, TensorLayout};
use fa_cpu::{TensorMut, TensorRef, tiled};
use fa_kernels::cudarc::driver::CudaStream;
use fa_kernels::{BackwardArgs, ForwardArgs, Input, Kernels, Output, driver};
use half::bf16;
use std::sync::Arc;

/// Any error of either backend.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// `[batch, seqlen, heads, head_dim]`, packed, of Q, K, V and all that has their shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
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
pub enum Attention {
    /// fa-cpu, in f32.
    Cpu,
    /// The kernels of a GPU; inputs and outputs are rounded to bf16.
    Gpu(Box<Gpu>),
}

/// A context's kernels and a stream.
pub struct Gpu {
    kernels: Kernels,
    stream: Arc<CudaStream>,
}

/// Gradients of Q, K and V.
pub struct Gradients {
    /// Of Q.
    pub dq: Vec<f32>,
    /// Of K.
    pub dk: Vec<f32>,
    /// Of V.
    pub dv: Vec<f32>,
}

impl Shape {
    fn problem(self, dtype: Dtype) -> Problem {
        Problem::square(self.batch, self.seqlen, self.heads, self.head_dim, Mask::CAUSAL, dtype)
    }

    fn len(self) -> usize {
        self.batch * self.seqlen * self.heads * self.head_dim
    }

    fn view(self, data: &[f32]) -> Result<TensorRef<'_, f32>> {
        let shape = [self.batch, self.seqlen, self.heads, self.head_dim];
        Ok(TensorRef::packed("attention", data, shape, TensorLayout::Bshd)?)
    }

    fn view_mut(self, data: &mut [f32]) -> Result<TensorMut<'_, f32>> {
        let shape = [self.batch, self.seqlen, self.heads, self.head_dim];
        Ok(TensorMut::packed("attention", data, shape, TensorLayout::Bshd)?)
    }
}

impl Attention {
    /// The first GPU.
    ///
    /// # Errors
    /// Without a driver or a GPU.
    pub fn gpu() -> Result<Attention> {
        let context = driver::context(0)?;
        let stream = context.default_stream();
        Ok(Attention::Gpu(Box::new(Gpu { kernels: Kernels::new(&context)?, stream })))
    }

    /// O and the LSE.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn forward(&self, shape: Shape, q: &[f32], k: &[f32], v: &[f32]) -> Result<(Vec<f32>, Vec<f32>)> {
        match self {
            Attention::Cpu => {
                let (mut out, mut lse) =
                    (vec![0.0; shape.len()], vec![0.0; shape.batch * shape.heads * shape.seqlen]);
                let problem = shape.problem(Dtype::F32);
                let (q, k, v) = (shape.view(q)?, shape.view(k)?, shape.view(v)?);
                tiled::forward(&problem, &q, &k, &v, &mut shape.view_mut(&mut out)?, Some(&mut lse))?;
                Ok((out, lse))
            }
            Attention::Gpu(gpu) => gpu.forward(shape, q, k, v),
        }
    }

    /// Gradients from that of O.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn backward(
        &self,
        shape: Shape,
        qkv: [&[f32]; 3],
        out: &[f32],
        lse: &[f32],
        dout: &[f32],
    ) -> Result<Gradients> {
        match self {
            Attention::Cpu => {
                let zeros = || vec![0.0; shape.len()];
                let mut of = Gradients { dq: zeros(), dk: zeros(), dv: zeros() };
                let [q, k, v] = qkv;
                tiled::backward(
                    &shape.problem(Dtype::F32),
                    &shape.view(q)?,
                    &shape.view(k)?,
                    &shape.view(v)?,
                    &shape.view(out)?,
                    lse,
                    &shape.view(dout)?,
                    &mut shape.view_mut(&mut of.dq)?,
                    &mut shape.view_mut(&mut of.dk)?,
                    &mut shape.view_mut(&mut of.dv)?,
                )?;
                Ok(of)
            }
            Attention::Gpu(gpu) => gpu.backward(shape, qkv, out, lse, dout),
        }
    }
}

impl Gpu {
    fn forward(&self, shape: Shape, q: &[f32], k: &[f32], v: &[f32]) -> Result<(Vec<f32>, Vec<f32>)> {
        let stream = &self.stream;
        let forward = self.kernels.forward(&shape.problem(Dtype::Bf16))?;
        let strides = TensorLayout::Bshd.strides(shape.seqlen, shape.heads, shape.head_dim);
        let load = |x: &[f32]| stream.clone_htod(&rounded(x));
        let (q, k, v) = (load(q)?, load(k)?, load(v)?);
        let mut out = stream.alloc_zeros::<bf16>(shape.len())?;
        let mut lse = stream.alloc_zeros::<f32>(shape.batch * shape.heads * shape.seqlen)?;
        let mut workspace = stream.alloc_zeros::<u8>(forward.workspace_bytes().max(1))?;
        forward.run(
            stream,
            ForwardArgs {
                q: Input { data: &q, strides },
                k: Input { data: &k, strides },
                v: Input { data: &v, strides },
                out: Output { data: &mut out, strides },
                lse: Some(&mut lse),
                workspace: Some(&mut workspace),
            },
        )?;
        Ok((widened(&stream.clone_dtoh(&out)?), stream.clone_dtoh(&lse)?))
    }

    fn backward(
        &self,
        shape: Shape,
        qkv: [&[f32]; 3],
        out: &[f32],
        lse: &[f32],
        dout: &[f32],
    ) -> Result<Gradients> {
        let stream = &self.stream;
        let backward = self.kernels.backward(&shape.problem(Dtype::Bf16), false)?;
        let strides = TensorLayout::Bshd.strides(shape.seqlen, shape.heads, shape.head_dim);
        let load = |x: &[f32]| stream.clone_htod(&rounded(x));
        let [q, k, v] = [load(qkv[0])?, load(qkv[1])?, load(qkv[2])?];
        let (out, dout, lse) = (load(out)?, load(dout)?, stream.clone_htod(lse)?);
        let zeros = || stream.alloc_zeros::<bf16>(shape.len());
        let (mut dq, mut dk, mut dv) = (zeros()?, zeros()?, zeros()?);
        let mut workspace = stream.alloc_zeros::<u8>(backward.workspace_bytes().max(1))?;
        backward.run(
            stream,
            BackwardArgs {
                q: Input { data: &q, strides },
                k: Input { data: &k, strides },
                v: Input { data: &v, strides },
                out: Input { data: &out, strides },
                lse: &lse,
                dout: Input { data: &dout, strides },
                dq: Output { data: &mut dq, strides },
                dk: Output { data: &mut dk, strides },
                dv: Output { data: &mut dv, strides },
                workspace: &mut workspace,
            },
        )?;
        let back = |x| -> Result<Vec<f32>> { Ok(widened(&stream.clone_dtoh(x)?)) };
        Ok(Gradients { dq: back(&dq)?, dk: back(&dk)?, dv: back(&dv)? })
    }
}

fn rounded(x: &[f32]) -> Vec<bf16> {
    x.iter().map(|&x| bf16::from_f32(x)).collect()
}

fn widened(x: &[bf16]) -> Vec<f32> {
    x.iter().map(|x| x.to_f32()).collect()
}
