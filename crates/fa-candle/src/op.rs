//! Attention as operations of candle's graph, with their gradients.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::ThreadId;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Storage, Tensor};

use crate::error::{Error, refused};
use crate::problem::{Gradients, Posed};
use crate::{cpu, cuda, direct};

/// O, and LSE where it was asked for.
pub(crate) fn apply(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    posed: Posed,
    needs_lse: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let beside = posed.tracked();
    let tracked = !beside.is_empty() || [q, k, v].iter().any(|tensor| tensor.track_op());
    if tracked {
        // What candle differentiates and this crate cannot is refused before anything is computed.
        posed.problem.check_pass(fa_core::Pass::BACKWARD).map_err(refused)?;
    }
    let kept = Arc::new(OnceLock::new());
    let pass = Pass { posed, gives: Gives::Out, kept: kept.clone(), needs_lse: needs_lse || tracked };
    if !tracked {
        let out = q.apply_op3_no_bwd(k, v, &Attention { pass })?;
        return Ok((out, kept.get().cloned()));
    }
    let of_lse = needs_lse.then(|| Pass { gives: Gives::Lse, ..pass.clone() });
    let out = tracked_op([q, k, v], &beside, pass)?;
    let lse = of_lse.map(|pass| tracked_op([q, k, v], &beside, pass)).transpose()?;
    Ok((out, lse))
}

/// One of the two operations, with gradients.
fn tracked_op([q, k, v]: [&Tensor; 3], beside: &[Tensor], pass: Pass) -> Result<Tensor> {
    if beside.is_empty() {
        return q.apply_op3(k, v, Attention { pass });
    }
    let mut joints = vec![Arc::new(Handed::default())];
    let mut token = k.apply_op2(v, Joined { gradients: joints[0].clone() })?;
    for tensor in beside {
        let gradients = Arc::new(Handed::default());
        token = token.apply_op2(tensor, Joined { gradients: gradients.clone() })?;
        joints.push(gradients);
    }
    q.apply_op2(&token, WithMore { pass, k: k.clone(), v: v.clone(), joints })
}

/// What an operation gives. O and LSE come from one launch, the one for O, and stand in the graph as an
/// operation each.
#[derive(Clone, Copy, PartialEq)]
enum Gives {
    Out,
    Lse,
}

/// What both operations do: a forward that keeps LSE for the backward.
#[derive(Clone)]
struct Pass {
    posed: Posed,
    gives: Gives,
    kept: Arc<OnceLock<Tensor>>,
    needs_lse: bool,
}

impl Pass {
    fn cpu(&self, inputs: [(&CpuStorage, &Layout); 3]) -> Result<(CpuStorage, Shape)> {
        if self.gives == Gives::Lse {
            let (lse, layout) = self.lse()?.storage_and_layout();
            let Storage::Cpu(lse) = &*lse else { return Err(Error::NoForward.into()) };
            return Ok((lse.try_clone(layout)?, layout.shape().clone()));
        }
        let (storage, shape, lse) = cpu::forward(&self.posed, inputs, self.needs_lse)?;
        self.keep(lse);
        Ok((storage, shape))
    }

    fn cuda(&self, inputs: [(&CudaStorage, &Layout); 3]) -> Result<(CudaStorage, Shape)> {
        if self.gives == Gives::Lse {
            let (lse, layout) = self.lse()?.storage_and_layout();
            let Storage::Cuda(lse) = &*lse else { return Err(Error::NoForward.into()) };
            return Ok((lse.try_clone(layout)?, layout.shape().clone()));
        }
        let (storage, shape, lse) = cuda::forward(&self.posed, inputs, self.needs_lse)?;
        self.keep(lse);
        Ok((storage, shape))
    }

    fn keep(&self, lse: Option<Tensor>) {
        if let Some(lse) = lse {
            self.kept.get_or_init(|| lse);
        }
    }

    fn lse(&self) -> Result<&Tensor> {
        Ok(self.kept.get().ok_or(Error::NoForward)?)
    }

    fn gradients(&self, inputs: [&Tensor; 3], out: &Tensor, dout: &Tensor) -> Result<Gradients> {
        if self.gives == Gives::Lse {
            return self.gradients_of_lse(inputs, dout);
        }
        // Gradients of candle's own operations may be broadcast or transposed; rows are read as they lie.
        let dout = if dout.stride().last() == Some(&1) { dout.clone() } else { dout.contiguous()? };
        self.backward(inputs, out, &dout, None)
    }

    /// From the gradient of LSE, with zeros as that of O.
    fn gradients_of_lse(&self, inputs: [&Tensor; 3], dlse: &Tensor) -> Result<Gradients> {
        let q = inputs[0];
        let zeros = Tensor::zeros(self.posed.problem.head_dim_v, q.dtype(), q.device())?;
        let zeros = zeros.broadcast_as(self.posed.out_shape(q.dims()))?;
        self.backward(inputs, &zeros, &zeros, Some(&dlse.contiguous()?))
    }

    fn backward(
        &self,
        inputs: [&Tensor; 3],
        out: &Tensor,
        dout: &Tensor,
        dlse: Option<&Tensor>,
    ) -> Result<Gradients> {
        let lse = self.lse()?;
        if inputs[0].device().is_cpu() {
            cpu::backward(&self.posed, inputs, [out, lse, dout], dlse)
        } else {
            direct::backward(&self.posed, inputs[0].device(), |posed| {
                cuda::backward(posed, inputs, [out, lse, dout], dlse)
            })
        }
    }
}

/// Attention of Q, K and V.
struct Attention {
    pass: Pass,
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.pass.cpu([(q, q_layout), (k, k_layout), (v, v_layout)])
    }

    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.pass.cuda([(q, q_layout), (k, k_layout), (v, v_layout)])
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dq, dk, dv] = self.pass.gradients([q, k, v], out, dout)?.inputs;
        Ok((Some(dq), Some(dk), Some(dv)))
    }
}

/// Attention where more than Q, K and V requires a gradient: sinks, arrays of a program. An operation of
/// candle's has three inputs at the most: all but Q stand in the graph as one tensor without content, which
/// [`Joined`] makes of two at a time, and get their gradients from here.
struct WithMore {
    pass: Pass,
    k: Tensor,
    v: Tensor,
    /// Of K and V, then of each further tensor with those before it.
    joints: Vec<Arc<Handed>>,
}

/// Gradients on their way from one operation to the other. A graph's backward runs on one thread, and several
/// may run at once.
#[derive(Default)]
struct Handed(Mutex<HashMap<ThreadId, (Tensor, Tensor)>>);

impl Handed {
    fn put(&self, gradients: (Tensor, Tensor)) {
        let mut handed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        handed.insert(std::thread::current().id(), gradients);
    }

    fn take(&self) -> Option<(Tensor, Tensor)> {
        let mut handed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        handed.remove(&std::thread::current().id())
    }
}

impl CustomOp2 for WithMore {
    fn name(&self) -> &'static str {
        "attention with more than three inputs"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let [(k, k_layout), (v, v_layout)] = [&self.k, &self.v].map(Tensor::storage_and_layout);
        match (&*k, &*v) {
            (Storage::Cpu(k), Storage::Cpu(v)) => {
                self.pass.cpu([(q, q_layout), (k, k_layout), (v, v_layout)])
            }
            _ => Err(Error::NoForward.into()),
        }
    }

    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let [(k, k_layout), (v, v_layout)] = [&self.k, &self.v].map(Tensor::storage_and_layout);
        match (&*k, &*v) {
            (Storage::Cuda(k), Storage::Cuda(v)) => {
                self.pass.cuda([(q, q_layout), (k, k_layout), (v, v_layout)])
            }
            _ => Err(Error::NoForward.into()),
        }
    }

    fn bwd(
        &self,
        q: &Tensor,
        token: &Tensor,
        out: &Tensor,
        dout: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let gradients = self.pass.gradients([q, &self.k, &self.v], out, dout)?;
        let [dq, dk, dv] = gradients.inputs.clone();
        // candle asks an operation for its gradients where its result has got one.
        let zero = token.zeros_like()?;
        let beside = gradients.beside(&self.pass.posed).into_iter().zip(self.pass.posed.tracked());
        for (joint, (gradient, tensor)) in self.joints[1..].iter().zip(beside) {
            joint.put((zero.clone(), gradient.to_dtype(tensor.dtype())?));
        }
        self.joints[0].put((dk, dv));
        Ok((Some(dq), Some(zero)))
    }
}

/// Two inputs of [`WithMore`] as one.
struct Joined {
    gradients: Arc<Handed>,
}

impl CustomOp2 for Joined {
    fn name(&self) -> &'static str {
        "inputs of attention"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(1)))
    }

    fn cuda_fwd(
        &self,
        like: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        cuda::token(like)
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (first, second) = self.gradients.take().ok_or(Error::NoForward)?;
        Ok((Some(first), Some(second)))
    }
}
