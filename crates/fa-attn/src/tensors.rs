//! Host tensors, and those of one call.

use fa_core::program::Inputs;
use fa_core::{Pass, Problem, TensorLayout};
use fa_cpu::check::{k_shape, lse_len, out_shape, q_shape, v_shape};
use fa_cpu::{Arguments, Element, Extras, KvRef, TensorMut, TensorRef};

use crate::error::Error;

/// A packed tensor in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor<T> {
    /// The elements, in the order of `layout`.
    pub data: Vec<T>,
    /// `[batch, seqlen, heads, dim]`, whatever the layout.
    pub shape: [usize; 4],
    /// The order of the axes in memory.
    pub layout: TensorLayout,
}

impl<T: Clone> Tensor<T> {
    /// A tensor of `data`, `[batch, seqlen, heads, dim]` in memory.
    ///
    /// # Errors
    /// [`Error::Length`] when `data` is not as long as the shape says.
    pub fn new(shape: [usize; 4], data: Vec<T>) -> Result<Tensor<T>, Error> {
        Tensor::with_layout(shape, TensorLayout::Bshd, data)
    }

    /// A tensor of `data`; `shape` is `[batch, seqlen, heads, dim]` whatever the layout.
    ///
    /// # Errors
    /// [`Error::Length`] when `data` is not as long as the shape says.
    pub fn with_layout(shape: [usize; 4], layout: TensorLayout, data: Vec<T>) -> Result<Tensor<T>, Error> {
        let need = elements(shape);
        if need != data.len() {
            return Err(Error::Length { shape, need, have: data.len() });
        }
        Ok(Tensor { data, shape, layout })
    }

    /// A tensor filled with `value`.
    ///
    /// # Panics
    /// Like a `Vec`, when memory does not hold it.
    pub fn filled(shape: [usize; 4], layout: TensorLayout, value: T) -> Tensor<T> {
        Tensor { data: vec![value; elements(shape)], shape, layout }
    }

    /// A view for a call; `name` is for errors.
    ///
    /// # Errors
    /// When `data` was made shorter than the shape.
    pub fn view(&self, name: &'static str) -> Result<TensorRef<'_, T>, Error> {
        Ok(TensorRef::packed(name, &self.data, self.shape, self.layout)?)
    }

    /// A view that is written; `name` is for errors.
    ///
    /// # Errors
    /// When `data` was made shorter than the shape.
    pub fn view_mut(&mut self, name: &'static str) -> Result<TensorMut<'_, T>, Error> {
        Ok(TensorMut::packed(name, &mut self.data, self.shape, self.layout)?)
    }
}

/// Elements of a shape; `usize::MAX` of more, which no memory holds.
pub(crate) fn elements(shape: [usize; 4]) -> usize {
    if shape.contains(&0) {
        return 0;
    }
    shape.iter().try_fold(1usize, |n, &len| n.checked_mul(len)).unwrap_or(usize::MAX)
}

/// The result of a forward: O and LSE.
#[derive(Clone, Debug, PartialEq)]
pub struct Output<T> {
    /// O, `[batch, seqlen_q, heads_q, head_dim_v]`; `[1, total_q, ..]` of packed sequences.
    pub out: Tensor<T>,
    /// LSE, `[batch, heads_q, seqlen_q]`, or `[heads_q, total_q]` of packed sequences, natural logarithm; it
    /// includes the sink. For a row that sees no key it is the sink, or -inf.
    pub lse: Vec<f32>,
}

impl<T: Element> Output<T> {
    /// Room for the output of `problem`, filled with NaN.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn new(problem: &Problem, layout: TensorLayout) -> Result<Output<T>, Error> {
        let out = nan("out", out_shape(problem), layout)?;
        Ok(Output { out, lse: room("lse", lse_len(problem), f32::NAN)? })
    }
}

/// The result of a backward: the gradients.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients<T> {
    /// The gradient of Q, in its shape.
    pub dq: Tensor<T>,
    /// The gradient of K, in its shape.
    pub dk: Tensor<T>,
    /// The gradient of V, in its shape.
    pub dv: Tensor<T>,
    /// The gradient of the sinks, `[heads_q]`; `None` without sinks.
    pub dsinks: Option<Vec<f32>>,
}

impl<T: Element> Gradients<T> {
    /// Room for the gradients of `problem`, filled with NaN.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn new(problem: &Problem, layout: TensorLayout) -> Result<Gradients<T>, Error> {
        let dsinks = problem.score.sinks.then(|| room("dsinks", problem.heads_q, f32::NAN)).transpose()?;
        Ok(Gradients {
            dq: nan("dq", q_shape(problem), layout)?,
            dk: nan("dk", k_shape(problem), layout)?,
            dv: nan("dv", v_shape(problem), layout)?,
            dsinks,
        })
    }
}

/// NaN shows what an implementation forgets to write, and touching the pages keeps that out of timings.
fn nan<T: Element>(
    tensor: &'static str,
    shape: [usize; 4],
    layout: TensorLayout,
) -> Result<Tensor<T>, Error> {
    Ok(Tensor { data: room(tensor, elements(shape), T::from_f32(f32::NAN))?, shape, layout })
}

/// `len` values, where memory holds them: an input may be small, or claim rows of any width and have none,
/// and its result take more than there is.
fn room<T: Clone>(tensor: &'static str, len: usize, value: T) -> Result<Vec<T>, Error> {
    let mut data = Vec::new();
    let bytes = len.saturating_mul(size_of::<T>());
    data.try_reserve_exact(len).map_err(|_| Error::Memory { tensor, bytes })?;
    data.resize(len, value);
    Ok(data)
}

/// The host tensors of a forward, in the shapes that the problem's lengths give ([`fa_core::SideRows`]):
/// padded `[batch, seqlen, heads, dim]`, packed `[1, total, heads, dim]`, a cache in pages `[pages, page,
/// heads_kv, dim]`. Strides are free.
#[derive(Debug)]
pub struct ForwardTensors<'a, T> {
    /// Q: elements of O's type, or for an fp8 problem the bits of codes.
    pub q: KvRef<'a, T>,
    /// K: elements of Q's type, or the bits of codes ([`fa_core::Types::kv`]).
    pub k: KvRef<'a, T>,
    /// V.
    pub v: KvRef<'a, T>,
    /// O; rows that belong to a sequence are written.
    pub out: TensorMut<'a, T>,
    /// LSE, `[batch, heads_q, seqlen_q]` or packed `[heads_q, total_q]`; rows of sequences are written.
    pub lse: &'a mut [f32],
    /// Starts and lengths of sequences, page table, slopes, sinks and descales: those that the problem names.
    pub extras: Extras<'a>,
    /// The arrays and scalars of the problem's program; may be left out for one that reads none.
    pub program: Option<&'a Inputs<'a>>,
}

impl<'a, T> ForwardTensors<'a, T> {
    /// The tensors of a problem that names no others.
    pub const fn new(
        [q, k, v]: [TensorRef<'a, T>; 3],
        out: TensorMut<'a, T>,
        lse: &'a mut [f32],
    ) -> ForwardTensors<'a, T> {
        ForwardTensors::with_kv(KvRef::Same(q), [KvRef::Same(k), KvRef::Same(v)], out, lse)
    }

    /// The same where K and V are the bits of codes.
    pub const fn with_codes(
        q: TensorRef<'a, T>,
        [k, v]: [TensorRef<'a, u8>; 2],
        out: TensorMut<'a, T>,
        lse: &'a mut [f32],
    ) -> ForwardTensors<'a, T> {
        ForwardTensors::with_kv(KvRef::Same(q), [KvRef::Codes(k), KvRef::Codes(v)], out, lse)
    }

    /// The same where Q, too, is the bits of codes, and O of a wider type ([`fa_core::Types::fp8`]).
    pub const fn fp8(
        [q, k, v]: [TensorRef<'a, u8>; 3],
        out: TensorMut<'a, T>,
        lse: &'a mut [f32],
    ) -> ForwardTensors<'a, T> {
        ForwardTensors::with_kv(KvRef::Codes(q), [KvRef::Codes(k), KvRef::Codes(v)], out, lse)
    }

    /// The same where each is either.
    pub const fn with_kv(
        q: KvRef<'a, T>,
        [k, v]: [KvRef<'a, T>; 2],
        out: TensorMut<'a, T>,
        lse: &'a mut [f32],
    ) -> ForwardTensors<'a, T> {
        ForwardTensors { q, k, v, out, lse, extras: Extras::NONE, program: None }
    }

    /// The same with starts and lengths of sequences, page table, slopes and sinks.
    #[must_use]
    pub const fn with_extras(self, extras: Extras<'a>) -> ForwardTensors<'a, T> {
        ForwardTensors { extras, ..self }
    }

    /// The same with the arrays and scalars of the problem's program.
    #[must_use]
    pub fn with_program(self, inputs: &'a Inputs<'a>) -> ForwardTensors<'a, T> {
        ForwardTensors { program: Some(inputs), ..self }
    }

    pub(crate) fn arguments(&self) -> Arguments<'a> {
        Arguments { extras: self.extras, program: self.program, ..Arguments::default() }
    }
}

impl<'a, T> BackwardTensors<'a, T> {
    /// The same with the arrays and scalars of the problem's program, whose gradients go to `darrays`.
    #[must_use]
    pub fn with_program(
        self,
        inputs: &'a Inputs<'a>,
        darrays: Option<&'a mut Vec<Vec<f32>>>,
    ) -> BackwardTensors<'a, T> {
        BackwardTensors { program: Some(inputs), darrays, ..self }
    }

    pub(crate) fn arguments(&self) -> Arguments<'a> {
        Arguments { extras: self.extras, program: self.program, ..Arguments::default() }
    }
}

impl<'a, T: Element> ForwardTensors<'a, T> {
    /// The tensors of a call that reads `inputs` (Q, K and V) and writes `output`.
    ///
    /// # Errors
    /// As [`Tensor::view_mut`].
    pub fn of(
        [q, k, v]: [TensorRef<'a, T>; 3],
        output: &'a mut Output<T>,
        extras: Extras<'a>,
    ) -> Result<ForwardTensors<'a, T>, Error> {
        let out = output.out.view_mut("out")?;
        Ok(ForwardTensors::new([q, k, v], out, &mut output.lse).with_extras(extras))
    }
}

/// The host tensors of a backward, in shapes as those of [`ForwardTensors`]. Strides are free.
#[derive(Debug)]
pub struct BackwardTensors<'a, T> {
    /// Q.
    pub q: TensorRef<'a, T>,
    /// K.
    pub k: TensorRef<'a, T>,
    /// V.
    pub v: TensorRef<'a, T>,
    /// O of the forward.
    pub out: TensorRef<'a, T>,
    /// LSE of the forward.
    pub lse: &'a [f32],
    /// The gradient of O.
    pub dout: TensorRef<'a, T>,
    /// The gradient of Q. Of this and the other gradients, the rows that belong to a sequence are written.
    pub dq: TensorMut<'a, T>,
    /// The gradient of K, written.
    pub dk: TensorMut<'a, T>,
    /// The gradient of V, written.
    pub dv: TensorMut<'a, T>,
    /// The gradient of the sinks, `[heads_q]`, written; `None` where the problem has none, or to leave it
    /// out.
    pub dsinks: Option<&'a mut [f32]>,
    /// The gradients of the arrays that the problem's program reads, each packed, and empty for those that
    /// want none: written. `None` to leave them out.
    pub darrays: Option<&'a mut Vec<Vec<f32>>>,
    /// As the forward's.
    pub extras: Extras<'a>,
    /// As the forward's.
    pub program: Option<&'a Inputs<'a>>,
}

impl<'a, T: Element> BackwardTensors<'a, T> {
    /// The tensors of a call that reads `inputs` (Q, K and V), their `output` and its gradient `dout`, and
    /// writes `gradients`.
    ///
    /// # Errors
    /// As [`Tensor::view`] and [`Tensor::view_mut`].
    pub fn of(
        [q, k, v]: [TensorRef<'a, T>; 3],
        output: &'a Output<T>,
        dout: &'a Tensor<T>,
        gradients: &'a mut Gradients<T>,
        extras: Extras<'a>,
    ) -> Result<BackwardTensors<'a, T>, Error> {
        Ok(BackwardTensors {
            q,
            k,
            v,
            out: output.out.view("out")?,
            lse: &output.lse,
            dout: dout.view("dout")?,
            dq: gradients.dq.view_mut("dq")?,
            dk: gradients.dk.view_mut("dk")?,
            dv: gradients.dv.view_mut("dv")?,
            dsinks: gradients.dsinks.as_deref_mut(),
            darrays: None,
            extras,
            program: None,
        })
    }
}

/// The host tensors of a call.
#[derive(Debug)]
// One exists per call, on the stack; a box would be an allocation.
#[allow(clippy::large_enum_variant)]
pub enum Tensors<'a, T> {
    /// Of a forward.
    Forward(ForwardTensors<'a, T>),
    /// Of a backward.
    Backward(BackwardTensors<'a, T>),
}

impl<'a, T> From<ForwardTensors<'a, T>> for Tensors<'a, T> {
    fn from(tensors: ForwardTensors<'a, T>) -> Self {
        Tensors::Forward(tensors)
    }
}

impl<'a, T> From<BackwardTensors<'a, T>> for Tensors<'a, T> {
    fn from(tensors: BackwardTensors<'a, T>) -> Self {
        Tensors::Backward(tensors)
    }
}

impl<T> Tensors<'_, T> {
    /// The pass that they are of; a backward's choice is the call's.
    pub(crate) fn pass(&self) -> Pass {
        match self {
            Tensors::Forward(_) => Pass::Forward,
            Tensors::Backward(_) => Pass::Backward { deterministic: false },
        }
    }

    /// The same without what a program reads.
    pub(crate) fn without_program(self) -> Self {
        match self {
            Tensors::Forward(tensors) => Tensors::Forward(ForwardTensors { program: None, ..tensors }),
            Tensors::Backward(tensors) => {
                Tensors::Backward(BackwardTensors { program: None, darrays: None, ..tensors })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_tensors_have_no_elements_whatever_their_other_lengths() {
        let shape = [usize::MAX, 2, 0, 64];
        assert_eq!(Tensor::<f32>::filled(shape, TensorLayout::Bshd, 1.0).data.len(), 0);
        assert!(Tensor::<f32>::new(shape, Vec::new()).is_ok());
    }

    /// Not a tensor without elements, as the wrapped product would be.
    #[test]
    #[should_panic(expected = "capacity overflow")]
    fn shapes_of_more_elements_than_a_usize_panic_as_a_vec_does() {
        Tensor::<f32>::filled([1 << 32, 1 << 32, 1, 1], TensorLayout::Bshd, 1.0);
    }
}
