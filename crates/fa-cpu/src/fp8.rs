//! Calls of an fp8 Q, K and V: Q's codes are decoded before anything is computed.

use fa_core::{DescaleForm, Dtype, Pass, Problem, TensorLayout, Types};

use crate::batch::{Batch, Span};
use crate::check;
use crate::element::Element;
use crate::error::CpuError;
use crate::extras::{Arguments, Extras, check_extras};
use crate::kv_ref::KvRef;
use crate::real::Real;
use crate::view::TensorRef;

/// The call on Q's numbers that computes what a call on its codes does: K and V keep theirs.
pub(crate) struct Decoded<'a, R> {
    pub problem: Problem,
    pub arguments: Arguments<'a>,
    /// Packed `[batch, seqlen, heads, dim]`; NaN in rows of no sequence.
    queries: Vec<R>,
}

impl<'a, R: Real> Decoded<'a, R> {
    /// Of a call on Q's codes.
    ///
    /// # Errors
    /// [`CpuError::Dtype`] for a problem that is not of fp8, [`CpuError::Shape`], and those of [`Batch::new`]
    /// and [`check_extras`].
    pub(crate) fn of(
        problem: &Problem,
        arguments: &Arguments<'a>,
        q: &TensorRef<'_, u8>,
    ) -> Result<Decoded<'a, R>, CpuError> {
        problem.check()?;
        if !problem.types.is_fp8() {
            return Err(CpuError::Dtype { got: Some(Dtype::E4m3), need: problem.types.q });
        }
        check::check_shape("q", q.shape(), check::q_shape(problem))?;
        check_extras(problem, Pass::Forward, &arguments.extras)?;
        let batch = Batch::new(problem, arguments)?;
        Ok(Decoded {
            problem: problem
                .with_types(Types::same(Dtype::F32).with_kv(problem.types.kv))
                .with_descales(problem.descales.with_q(DescaleForm::None)),
            arguments: Arguments { extras: Extras { q_descale: None, ..arguments.extras }, ..*arguments },
            queries: queries(problem, arguments.extras.q_descale, &batch, q),
        })
    }

    /// Q.
    ///
    /// # Errors
    /// None for what was decoded.
    pub(crate) fn q(&self) -> Result<TensorRef<'_, R>, CpuError> {
        TensorRef::packed("q", &self.queries, check::q_shape(&self.problem), TensorLayout::Bshd)
    }

    /// K or V beside Q's numbers.
    ///
    /// # Errors
    /// [`CpuError::Dtype`] where they are no codes.
    pub(crate) fn beside<'k, T: Element>(&self, tensor: &KvRef<'k, T>) -> Result<KvRef<'k, R>, CpuError> {
        match tensor {
            KvRef::Codes(codes) => Ok(KvRef::Codes(*codes)),
            KvRef::Same(_) => Err(CpuError::Dtype { got: T::DTYPE, need: self.problem.types.kv }),
        }
    }
}

fn queries<R: Real>(
    problem: &Problem,
    descales: Option<&[f32]>,
    batch: &Batch<'_>,
    q: &TensorRef<'_, u8>,
) -> Vec<R> {
    let [_, seqlen, heads, dim] = q.shape();
    let descales = descales.unwrap_or(&[1.0]);
    let [of_sequence, of_head] = match problem.descales.q {
        DescaleForm::None => [0, 0],
        DescaleForm::Head | DescaleForm::TokenHead => [0, 1],
        DescaleForm::SequenceHead => [problem.heads_kv, 1],
    };
    let table = fa_core::quantize::e4m3::TABLE.map(R::from_element);
    let mut numbers = vec![R::NAN; q.shape().iter().product()];
    let mut row = Vec::with_capacity(dim);
    for (index, sequence) in batch.sequences.iter().enumerate() {
        let Span { batch, first, len } = sequence.q;
        for (at, head) in (first..first + len).flat_map(|at| (0..heads).map(move |head| (at, head))) {
            let kv_head = head / problem.group_size();
            let descale = R::from_element(descales[index * of_sequence + kv_head * of_head]);
            row.clear();
            q.row(batch, at, head).append(|code| table[usize::from(code)] * descale, &mut row);
            numbers[((batch * seqlen + at) * heads + head) * dim..][..dim].copy_from_slice(&row);
        }
    }
    numbers
}
