//! Passes on a GPU: a rank's shard in device memory, computed by fa-attn's kernels, moved by NCCL or by
//! copies out of other ranks' memory.
//!
//! Everything is made when a rank is bound to a plan: kernels, memory, events. A call enqueues on the
//! caller's stream and on one of its own, and waits for nothing but NCCL's enqueuing.

mod copies;
mod engine;
mod marks;
mod meet;
mod memory;
mod options;
mod page;
mod prepared;
mod rank;
mod transfers;

use std::sync::Arc;

use fa_attn::device::args::KvElement;
use fa_attn::device::{DeviceBackward, DeviceForward, Half, Stored};
use fa_core::{KernelSpec, Pass};
use fa_kernels::cudarc::driver::CudaStream;

pub use marks::StepTime;
pub use options::{RankOptions, Transport};
pub use prepared::one_gpu;
pub use rank::Rank;

use crate::bootstrap::Place;
use crate::error::Error;
use crate::plan::ShardPlan;
use crate::program::Buffer;
use engine::{Given, launch};
use marks::Marks;
use prepared::Prepared;

/// One rank's part of a sharded problem, on a GPU.
pub struct DeviceAttention {
    rank: Rank,
    plan: ShardPlan,
    forward: Prepared,
    backward: Option<Prepared>,
}

impl DeviceAttention {
    /// Agrees with the other ranks on the plan and on kernels, compiles and allocates. Of a training step
    /// give the backward pass, too.
    ///
    /// # Errors
    /// [`Error::Mismatch`] where a rank has another plan or an error, and those of planning, compiling and
    /// allocating.
    pub fn new(mut rank: Rank, plan: &ShardPlan, backward: Option<Pass>) -> Result<DeviceAttention, Error> {
        let Place { rank: own, world, .. } = rank.place;
        if world != plan.world() {
            let need = format!("the {} ranks of the plan", plan.world());
            return Err(Error::Ranks { name: "world", value: world, need });
        }
        if backward.is_some() {
            check_arrays(plan)?;
        }
        let passes: Vec<Pass> = [Some(Pass::Forward), backward].into_iter().flatten().collect();
        let specs = passes.iter().map(|pass| Ok(one_gpu(&rank.gpu, plan, *pass)?.spec().clone()));
        let specs = specs.collect::<Result<Vec<_>, Error>>();
        let text = specs.iter().flatten().map(KernelSpec::to_string).collect::<Vec<_>>().join(" and ");
        // Every rank gives back what it knows of the others' memory, then its own.
        rank.close();
        let specs = rank.agree(&format!("{} by {text}", plan.descriptor()), specs)?;
        rank.forget();
        let pairs = passes.iter().zip(&specs);
        let prepared = pairs.map(|(pass, spec)| Prepared::new(&rank.gpu, plan, own, *pass, spec));
        // A rank without the memory for it, or whose compiler fails, says so before others wait for it.
        let mut prepared = rank.agree("kernels and memory", prepared.collect::<Result<Vec<_>, Error>>())?;
        rank.link(plan, &passes, &mut prepared)?;
        let mut prepared = prepared.into_iter();
        let Some(forward) = prepared.next() else { unreachable!("a forward is always prepared") };
        let backward = prepared.next();
        Ok(DeviceAttention { rank, plan: plan.clone(), forward, backward })
    }

    /// The plan.
    pub fn plan(&self) -> &ShardPlan {
        &self.plan
    }

    /// The rank, given back for another plan. What others may copy of this plan's memory stays until then.
    pub fn into_rank(self) -> Rank {
        self.rank
    }

    /// The rank.
    pub fn rank(&mut self) -> &mut Rank {
        &mut self.rank
    }

    /// Bytes of device memory that the plan takes on this rank besides the caller's tensors.
    pub fn workspace_bytes(&self) -> usize {
        self.forward.bytes() + self.backward.as_ref().map_or(0, Prepared::bytes)
    }

    /// Enqueues the forward on `stream`: O and LSE of the rank's queries, there once [`Rank::wait`] says so.
    /// Every rank calls it, in the same order. An error ends the ranks' connections: the others get
    /// [`Error::PeerLost`] in [`Rank::wait`] or their next call.
    ///
    /// # Errors
    /// [`Error::Tensor`], [`Error::PeerLost`], [`Error::Nccl`], [`Error::Transport`], and those of launches.
    pub fn forward<T: Half, K: Stored + KvElement>(
        &mut self,
        tensors: &mut DeviceForward<T, K, T>,
        stream: &Arc<CudaStream>,
    ) -> Result<(), Error> {
        let done = self.enqueue(tensors, stream, None);
        self.rank.told(done)
    }

    /// A forward whose steps are timed one by one, in the order of the program; waits for it. Every rank
    /// calls it. Events around each step make short ones a few microseconds longer.
    ///
    /// # Errors
    /// As [`DeviceAttention::forward`].
    pub fn timed<T: Half, K: Stored + KvElement>(
        &mut self,
        tensors: &mut DeviceForward<T, K, T>,
        stream: &Arc<CudaStream>,
    ) -> Result<Vec<StepTime>, Error> {
        let marks = Marks::new(&self.rank.gpu, self.forward.program.steps.len())?;
        let done = self.enqueue(tensors, stream, Some(&marks));
        self.rank.told(done)?;
        self.rank.wait(stream)?;
        marks.times(&self.forward.program)
    }

    fn enqueue<T: Half, K: Stored + KvElement>(
        &mut self,
        tensors: &mut DeviceForward<T, K, T>,
        stream: &Arc<CudaStream>,
        marks: Option<&Marks>,
    ) -> Result<(), Error> {
        self.rank.check("a forward")?;
        self.check_types::<T, K>()?;
        let placed = [
            ("q", Buffer::Q, tensors.q.placement.shape),
            ("k", Buffer::K, tensors.k.placement.shape),
            ("v", Buffer::V, tensors.v.placement.shape),
            ("out", Buffer::Out, tensors.out.placement.shape),
        ];
        self.check(&placed)?;
        self.check_lse(tensors.rows)?;
        let raw = tensors.raw(stream);
        let given = Given {
            q: Some(raw.q),
            k: Some(raw.k),
            v: Some(raw.v),
            out: Some(raw.out),
            lse: raw.lse.unwrap_or(0),
            extras: raw.extras,
            ..Given::default()
        };
        self.plan.check_extras(&given.extras.inputs, Pass::Forward)?;
        self.check_extents(&given)?;
        launch(&mut self.rank, &self.forward, given, stream, marks)
    }

    /// Enqueues the backward on `stream`: gradients of the rank's queries, keys and values, and that of the
    /// sinks over what this rank computes, to be added up over ranks as those of weights are. Of a plan that
    /// has them ([`ShardPlan::with_arrays`]) every rank gets the gradients of the program's arrays over all
    /// ranks (`DeviceProgram::want_gradients`). Every rank calls it, in the same order.
    ///
    /// # Errors
    /// As [`DeviceAttention::forward`]; [`Error::Refused`] where no backward was prepared.
    pub fn backward<T: Half>(
        &mut self,
        forward: &DeviceForward<T>,
        tensors: &mut DeviceBackward<T>,
        stream: &Arc<CudaStream>,
    ) -> Result<(), Error> {
        let done = self.enqueue_backward(forward, tensors, stream, None);
        self.rank.told(done)
    }

    /// A backward whose steps are timed, as [`DeviceAttention::timed`] times those of a forward.
    ///
    /// # Errors
    /// As [`DeviceAttention::backward`].
    pub fn timed_backward<T: Half>(
        &mut self,
        forward: &DeviceForward<T>,
        tensors: &mut DeviceBackward<T>,
        stream: &Arc<CudaStream>,
    ) -> Result<Vec<StepTime>, Error> {
        let Some(prepared) = &self.backward else { return Err(self.no_backward()) };
        let marks = Marks::new(&self.rank.gpu, prepared.program.steps.len())?;
        let done = self.enqueue_backward(forward, tensors, stream, Some(&marks));
        self.rank.told(done)?;
        self.rank.wait(stream)?;
        self.backward.as_ref().map_or(Ok(Vec::new()), |own| marks.times(&own.program))
    }

    fn no_backward(&self) -> Error {
        Error::Refused {
            scheme: self.plan.scheme().name(),
            world: self.plan.world(),
            what: "gradients, which were not asked for".to_owned(),
            instead: "make the attention with a backward pass".to_owned(),
        }
    }

    fn enqueue_backward<T: Half>(
        &mut self,
        forward: &DeviceForward<T>,
        tensors: &mut DeviceBackward<T>,
        stream: &Arc<CudaStream>,
        marks: Option<&Marks>,
    ) -> Result<(), Error> {
        self.rank.check("a backward")?;
        self.check_types::<T, T>()?;
        self.check(&[
            ("q", Buffer::Q, forward.q.placement.shape),
            ("k", Buffer::K, forward.k.placement.shape),
            ("v", Buffer::V, forward.v.placement.shape),
            ("out", Buffer::Out, forward.out.placement.shape),
            ("dout", Buffer::Dout, tensors.dout.placement.shape),
            ("dq", Buffer::Dq, tensors.dq.placement.shape),
            ("dk", Buffer::Dk, tensors.dk.placement.shape),
            ("dv", Buffer::Dv, tensors.dv.placement.shape),
        ])?;
        self.check_lse(forward.rows)?;
        let Some(prepared) = &self.backward else { return Err(self.no_backward()) };
        let raw = tensors.raw(forward, stream);
        let given = Given {
            q: Some(raw.q),
            k: Some(raw.k),
            v: Some(raw.v),
            out: Some(raw.out),
            lse: raw.lse,
            dout: Some(raw.dout),
            gradients: [Some(raw.dq), Some(raw.dk), Some(raw.dv)],
            dsinks: raw.extras.dsinks.unwrap_or(0),
            dlse: raw.extras.inputs.dlse.unwrap_or(0),
            darrays: raw.extras.program.unwrap_or_default().gradients,
            extras: raw.extras,
        };
        self.plan.check_extras(&given.extras.inputs, Pass::BACKWARD)?;
        self.check_extents(&given)?;
        self.check_darrays(&given.darrays)?;
        if self.plan.problem().score.sinks && raw.extras.dsinks.is_none() {
            let (got, need) = ("not given".to_owned(), format!("{} elements", self.plan.problem().heads_q));
            return Err(Error::Tensor { tensor: "dsinks", got, need });
        }
        launch(&mut self.rank, prepared, given, stream, marks)
    }

    /// Whether the arrays of a call are those of the plan.
    fn check_extents(&self, given: &Given) -> Result<(), Error> {
        let program = given.extras.program.unwrap_or_default();
        self.plan.check_arrays(&program.arrays.map(|array| array.extents))
    }

    /// Whether there is room for the gradients of the plan's arrays, and of no others.
    fn check_darrays(&self, darrays: &[u64]) -> Result<(), Error> {
        for (array, address) in darrays.iter().enumerate() {
            let is_wanted = self.plan.arrays().iter().any(|own| own.array == array);
            if is_wanted == (*address != 0) {
                continue;
            }
            let program = self.plan.problem().score.program;
            let decls = program.as_deref().map_or(&[][..], |program| program.arrays());
            let name = decls.get(array).map_or("", |decl| &decl.name);
            if *address != 0 {
                return Err(self.plan.without_extents(name));
            }
            let (got, need) = ("not given".to_owned(), format!("that of the array {name}"));
            return Err(Error::Tensor { tensor: "the gradient of an array", got, need });
        }
        Ok(())
    }

    fn check(&self, tensors: &[(&'static str, Buffer, [usize; 4])]) -> Result<(), Error> {
        for (tensor, buffer, got) in tensors {
            let shape = self.plan.shape(self.rank.place.rank, *buffer);
            let need = [shape.batch, shape.rows, shape.heads, shape.dim];
            if *got != need {
                let (got, need) = (format!("{got:?}"), format!("{need:?}"));
                return Err(Error::Tensor { tensor, got, need });
            }
        }
        Ok(())
    }

    /// Whether elements are of the problem's types: launches by addresses do not see them.
    fn check_types<T: KvElement, K: KvElement>(&self) -> Result<(), Error> {
        let types = self.plan.problem().types;
        let of_q = ("q", types.q, T::holds(types.q), T::name());
        for (tensor, need, is_held, got) in [of_q, ("k", types.kv, K::holds(types.kv), K::name())] {
            if !is_held {
                return Err(Error::Tensor { tensor, got, need: need.to_string() });
            }
        }
        Ok(())
    }

    fn check_lse(&self, got: usize) -> Result<(), Error> {
        let need = self.plan.shape(self.rank.place.rank, Buffer::Lse).elements();
        if got == need {
            return Ok(());
        }
        let (got, need) = (format!("{got} elements"), format!("{need}"));
        Err(Error::Tensor { tensor: "lse", got, need })
    }
}

/// Kernels add up the gradients of arrays where these are read at a call's own numbers: of arrays that a part
/// has its own elements of.
fn check_arrays(plan: &ShardPlan) -> Result<(), Error> {
    let Some(program) = plan.problem().score.program else { return Ok(()) };
    let decls = program.arrays();
    if let (Some(array), []) = (decls.iter().find(|array| array.gradient), plan.arrays()) {
        return Err(plan.without_extents(&array.name));
    }
    let refused =
        plan.arrays().iter().find_map(|own| Some((own, own.axes.as_ref().err().filter(|_| own.is_read)?)));
    let Some((own, why)) = refused else { return Ok(()) };
    Err(Error::Refused {
        scheme: plan.scheme().name(),
        world: plan.world(),
        what: format!("the gradient of the array {}, which {why}, on GPUs", decls[own.array].name),
        instead: "declare it without grad, or use one GPU, fa_attn.distributed of Python, or HostAttention"
            .to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use fa_core::program::Program;
    use fa_core::{Dtype, Mask, Problem};

    use super::*;
    use crate::plan::Scheme;
    use crate::shard::Layout;

    #[test]
    fn gradients_that_kernels_do_not_sum_are_refused_by_name() {
        let plain = Problem::square(1, 64, 2, 64, Mask::FULL, Dtype::Bf16);
        let direct = "array bias: f32[_, _] grad; score = s + bias[h, k];";
        let table = "array bias: f32[_, _] grad; score = s + bias[h, q - k + 63];";
        let extents = [[2, 64, 1, 1]];
        for (text, extents, part) in [
            (direct, None, "whose extents it does not know: give them by ShardPlan::with_arrays"),
            (direct, Some(extents), ""),
            (direct, Some([[2, 63, 1, 1]]), "bias, which has other extents than 1, the heads and"),
            (table, Some([[2, 127, 1, 1]]), "bias, which is read at other indices than b, h, hk, q and k"),
            ("array bias: f32[_, _]; score = s + bias[h, k];", None, ""),
        ] {
            let program = Program::parse(text).unwrap().intern().unwrap();
            let problem = plain.with_score(plain.score.with_program(Some(program)));
            for scheme in [Scheme::Gather, Scheme::Ulysses, Scheme::Ring] {
                let plan = ShardPlan::new(&problem, 2, scheme, Layout::Zigzag).unwrap();
                let plan = extents.map_or(Ok(plan.clone()), |extents| plan.with_arrays(&extents)).unwrap();
                let said = check_arrays(&plan).err().map(|error| error.to_string()).unwrap_or_default();
                assert!(said.contains(part) && said.is_empty() == part.is_empty(), "{said}");
            }
        }
    }
}
