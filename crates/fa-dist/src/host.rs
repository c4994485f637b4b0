//! Passes on the CPU: a rank's shard in host memory, computed by fa-cpu.

mod engine;

use fa_core::Pass;
use fa_core::program::Inputs;
use fa_cpu::tiled::BackwardInputs;
use fa_cpu::{Arguments, CpuError, KvRef, TensorMut, TensorRef};

use crate::error::Error;
use crate::plan::ShardPlan;
use crate::program::{Buffer, Program, Shape};
use crate::run::{Order, run};
use crate::transport::HostTransport;

pub use self::engine::Wire;
use self::engine::{HostEngine, HostMemory, Slot, slot};

/// One rank's part of a sharded problem, on the CPU.
///
/// ```
/// use fa_core::{Dtype, Mask, Problem, TensorLayout};
/// use fa_cpu::{Extras, TensorMut, TensorRef};
/// use fa_dist::{HostAttention, Layout, MemoryOptions, MemoryTransport, Scheme, ShardPlan};
///
/// let problem = Problem::square(1, 64, 4, 16, Mask::CAUSAL, Dtype::F32);
/// let plan = ShardPlan::new(&problem, 2, Scheme::Gather, Layout::Zigzag)?;
/// let whole: Vec<f32> = (0..64 * 4 * 16).map(|i| (i as f32 * 0.37).sin()).collect();
/// let sums = MemoryTransport::run(2, &MemoryOptions::default(), |transport| {
///     let mut rank = HostAttention::new(&plan, transport)?;
///     let own = plan.queries().scatter(rank.rank(), &whole, 4 * 16);
///     let shape = [1, own.len() / (4 * 16), 4, 16];
///     let q = TensorRef::packed("q", &own, shape, TensorLayout::Bshd)?;
///     let (mut out, mut lse) = (vec![0.0; own.len()], vec![0.0; 4 * shape[1]]);
///     let mut to = TensorMut::packed("out", &mut out, shape, TensorLayout::Bshd)?;
///     rank.forward([q, q, q], &mut to, &mut lse, &Extras::NONE)?;
///     Ok::<f32, fa_dist::Error>(out.iter().sum())
/// });
/// assert!(sums.into_iter().all(|sum| sum.is_ok_and(f32::is_finite)));
/// # Ok::<(), fa_dist::Error>(())
/// ```
pub struct HostAttention<X> {
    plan: ShardPlan,
    transport: X,
    rank: usize,
    order: Order,
}

impl<X: HostTransport> HostAttention<X> {
    /// Agrees with the other ranks on the plan.
    ///
    /// # Errors
    /// [`Error::Mismatch`] where a rank has another plan, and those of the transport.
    pub fn new(plan: &ShardPlan, mut transport: X) -> Result<HostAttention<X>, Error> {
        if transport.world() != plan.world() {
            let need = format!("the {} ranks of the plan", plan.world());
            return Err(Error::Ranks { name: "world", value: transport.world(), need });
        }
        transport.agree(&plan.descriptor()).inspect_err(|error| transport.fail(&error.to_string()))?;
        let rank = transport.rank();
        Ok(HostAttention { plan: plan.clone(), transport, rank, order: Order::Listed })
    }

    /// Takes the steps in another order that two streams might take them in.
    pub fn with_order(self, order: Order) -> HostAttention<X> {
        HostAttention { order, ..self }
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The plan.
    pub fn plan(&self) -> &ShardPlan {
        &self.plan
    }

    /// The transport, for what ranks exchange besides.
    pub fn transport(&mut self) -> &mut X {
        &mut self.transport
    }

    /// The transport, given back.
    pub fn into_transport(self) -> X {
        self.transport
    }

    /// O and LSE (`[batch, heads_q, rows]`) of the rank's queries, from the shards of Q, K and V. Of a decode
    /// every rank has all queries and gets all of O and LSE. The arrays of a program are those of the whole,
    /// on every rank. Every rank calls it, in the same order; of an error the others learn at once.
    ///
    /// # Errors
    /// [`Error::Tensor`] and those of the transport and of fa-cpu.
    pub fn forward<'e, T: Wire>(
        &mut self,
        [q, k, v]: [TensorRef<'_, T>; 3],
        out: &mut TensorMut<'_, T>,
        lse: &mut [f32],
        extras: impl Into<Arguments<'e>>,
    ) -> Result<(), Error> {
        let done = self.forward_of(q, [KvRef::Same(k), KvRef::Same(v)], out, lse, extras.into());
        self.told(done)
    }

    /// [`HostAttention::forward`] of a decode on the rank's cache of codes.
    ///
    /// # Errors
    /// As [`HostAttention::forward`].
    pub fn forward_on_codes<'e, T: Wire>(
        &mut self,
        q: TensorRef<'_, T>,
        [k, v]: [TensorRef<'_, u8>; 2],
        out: &mut TensorMut<'_, T>,
        lse: &mut [f32],
        extras: impl Into<Arguments<'e>>,
    ) -> Result<(), Error> {
        let done = self.forward_of(q, [KvRef::Codes(k), KvRef::Codes(v)], out, lse, extras.into());
        self.told(done)
    }

    fn forward_of<T: Wire>(
        &mut self,
        q: TensorRef<'_, T>,
        [k, v]: [KvRef<'_, T>; 2],
        out: &mut TensorMut<'_, T>,
        lse: &mut [f32],
        extras: Arguments<'_>,
    ) -> Result<(), Error> {
        let types = self.plan.problem().types;
        for (tensor, kv) in [("k", &k), ("v", &v)] {
            if kv.codes().is_some() != types.kv.is_code() {
                let got = if kv.codes().is_some() { "codes" } else { "no codes" };
                return Err(Error::Tensor { tensor, got: got.to_owned(), need: types.kv.to_string() });
            }
        }
        let program = self.plan.program(self.rank, Pass::Forward)?;
        let given = [("q", Buffer::Q, q.shape()), ("k", Buffer::K, k.shape()), ("v", Buffer::V, v.shape())];
        self.check(&given)?;
        self.check(&[("out", Buffer::Out, out.shape())])?;
        self.check_lse("lse", lse.len())?;
        let slots = vec![
            (Buffer::Q, Slot::Read(q)),
            (Buffer::K, slot(k)),
            (Buffer::V, slot(v)),
            (Buffer::Out, Slot::Write(out.reborrow())),
            (Buffer::Lse, Slot::WriteF32(lse)),
        ];
        self.run((&program, false), slots, extras)
    }

    /// Gradients of the rank's queries, keys and values, from its shards of the forward's tensors and of dO.
    /// The gradient of the sinks (`[heads_q]`) goes to `dsinks` when asked for: over what this rank computes,
    /// its rows or its heads, so that the whole is the sum over ranks, as for weights. Every rank calls it,
    /// in the same order.
    ///
    /// # Errors
    /// As [`HostAttention::forward`].
    pub fn backward<'e, T: Wire>(
        &mut self,
        inputs: &BackwardInputs<'_, T>,
        [dq, dk, dv]: [&mut TensorMut<'_, T>; 3],
        dsinks: Option<&mut [f32]>,
        extras: impl Into<Arguments<'e>>,
    ) -> Result<(), Error> {
        self.backward_program(inputs, [dq, dk, dv], dsinks, None, extras)
    }

    /// [`HostAttention::backward`] with the gradients of the arrays that the problem's program reads, of a
    /// plan that has them ([`ShardPlan::with_arrays`]): `darrays` takes a packed array for each, which is
    /// empty where the program wants none. Every rank gets those of the whole.
    ///
    /// # Errors
    /// As [`HostAttention::backward`].
    pub fn backward_program<'e, T: Wire>(
        &mut self,
        inputs: &BackwardInputs<'_, T>,
        [dq, dk, dv]: [&mut TensorMut<'_, T>; 3],
        dsinks: Option<&mut [f32]>,
        darrays: Option<&mut Vec<Vec<f32>>>,
        extras: impl Into<Arguments<'e>>,
    ) -> Result<(), Error> {
        let done = self.backward_of(inputs, [dq, dk, dv], dsinks, darrays, extras.into());
        self.told(done)
    }

    fn backward_of<T: Wire>(
        &mut self,
        inputs: &BackwardInputs<'_, T>,
        [dq, dk, dv]: [&mut TensorMut<'_, T>; 3],
        dsinks: Option<&mut [f32]>,
        darrays: Option<&mut Vec<Vec<f32>>>,
        given: Arguments<'_>,
    ) -> Result<(), Error> {
        let program = self.plan.program(self.rank, Pass::BACKWARD)?;
        if darrays.is_some() {
            self.wants_arrays()?;
        }
        let mut own = Vec::new();
        let darrays = self.room_for_arrays(darrays.unwrap_or(&mut own));
        let (has_sinks, heads) = (self.plan.problem().score.sinks, self.plan.problem().heads_q);
        if let Some(got) = dsinks.as_ref().map(|dsinks| dsinks.len())
            && (!has_sinks || got != heads)
        {
            let need = if has_sinks { format!("{heads}") } else { "none: it has no sinks".to_owned() };
            return Err(Error::Tensor { tensor: "dsinks", got: format!("{got} elements"), need });
        }
        let BackwardInputs { q, k, v, out, lse, dout } = *inputs;
        self.check(&[
            ("q", Buffer::Q, q.shape()),
            ("k", Buffer::K, k.shape()),
            ("v", Buffer::V, v.shape()),
            ("out", Buffer::Out, out.shape()),
            ("dout", Buffer::Dout, dout.shape()),
            ("dq", Buffer::Dq, dq.shape()),
            ("dk", Buffer::Dk, dk.shape()),
            ("dv", Buffer::Dv, dv.shape()),
        ])?;
        self.check_lse("lse", lse.len())?;
        let dsinks = dsinks.map_or_else(|| Slot::OwnF32(vec![0.0; heads]), Slot::WriteF32);
        let slots = vec![
            (Buffer::Q, Slot::Read(q)),
            (Buffer::K, Slot::Read(k)),
            (Buffer::V, Slot::Read(v)),
            (Buffer::Out, Slot::Read(out)),
            (Buffer::Lse, Slot::ReadF32(lse)),
            (Buffer::Dout, Slot::Read(dout)),
            (Buffer::Dq, Slot::Write(dq.reborrow())),
            (Buffer::Dk, Slot::Write(dk.reborrow())),
            (Buffer::Dv, Slot::Write(dv.reborrow())),
        ];
        let dsinks = has_sinks.then_some((Buffer::Dsinks, dsinks));
        let dlse = given.extras.dlse.map(|dlse| (Buffer::Dlse, Slot::ReadF32(dlse)));
        if let Some(dlse) = given.extras.dlse {
            self.check_lse("dlse", dlse.len())?;
        }
        let darrays = darrays.into_iter().map(|(array, sums)| (Buffer::Darray(array), Slot::WriteF32(sums)));
        let slots = slots.into_iter().chain(dsinks).chain(dlse).chain(darrays).collect();
        self.run((&program, true), slots, given)
    }

    /// Room for the gradients of the arrays that the plan has.
    fn room_for_arrays<'d>(&self, darrays: &'d mut Vec<Vec<f32>>) -> Vec<(usize, &'d mut [f32])> {
        let program = self.plan.problem().score.program;
        let decls = program.as_deref().map_or(&[][..], |program| program.arrays());
        darrays.clear();
        darrays.resize_with(decls.len(), Vec::new);
        for own in self.plan.arrays() {
            darrays[own.array] = vec![0.0; own.extents.iter().product()];
        }
        let rooms = darrays.iter_mut().enumerate().filter(|(_, sums)| !sums.is_empty());
        rooms.map(|(array, sums)| (array, sums.as_mut_slice())).collect()
    }

    /// Whether the plan has the gradients of the program's arrays.
    fn wants_arrays(&self) -> Result<(), Error> {
        let Some(whole) = self.plan.problem().score.program else {
            return Err(CpuError::Extra { name: "darrays", asked: false }.into());
        };
        match whole.arrays().iter().find(|array| array.gradient) {
            Some(array) if self.plan.arrays().is_empty() => Err(self.plan.without_extents(&array.name)),
            Some(_) | None => Ok(()),
        }
    }

    /// What a call has done: of an error the other ranks, which may wait for this one, learn at once.
    fn told(&mut self, done: Result<(), Error>) -> Result<(), Error> {
        done.inspect_err(|error| self.transport.fail(&error.to_string()))
    }

    fn run<'a, T: Wire>(
        &'a mut self,
        (program, is_backward): (&Program, bool),
        slots: Vec<(Buffer, Slot<'a, T>)>,
        given: Arguments<'a>,
    ) -> Result<(), Error> {
        self.plan.check_extras(&given.extras, if is_backward { Pass::BACKWARD } else { Pass::Forward })?;
        let arrays = given.program.map_or(&[][..], Inputs::arrays);
        self.plan.check_arrays(&arrays.iter().map(|view| view.extents).collect::<Vec<_>>())?;
        let memory = HostMemory::new(program, slots);
        let program_of_all = self.plan.problem().score.program;
        let transport = &mut self.transport;
        let mut engine = HostEngine { memory, given, program: program_of_all, transport };
        run(program, self.order, &mut engine)
    }

    fn check(&self, tensors: &[(&'static str, Buffer, [usize; 4])]) -> Result<(), Error> {
        for (tensor, buffer, got) in tensors {
            let Shape { batch, rows, heads, dim, .. } = self.plan.shape(self.rank, *buffer);
            let need = [batch, rows, heads, dim];
            if *got != need {
                let (got, need) = (format!("{got:?}"), format!("{need:?}"));
                return Err(Error::Tensor { tensor, got, need });
            }
        }
        Ok(())
    }

    fn check_lse(&self, tensor: &'static str, got: usize) -> Result<(), Error> {
        let need = self.plan.shape(self.rank, Buffer::Lse).elements();
        if got == need {
            return Ok(());
        }
        let (got, need) = (format!("{got} elements"), format!("{need}"));
        Err(Error::Tensor { tensor, got, need })
    }
}
