//! The formula over checked tensors of any element type, whose heads it reads one at a time.

use fa_core::{Pass, Problem};

use super::formula::{Rows, Tensors};
use super::heads::{gather_keys, gather_queries};
use crate::batch::Batch;
use crate::check::{check_backward, check_forward, check_out};
use crate::codes::{Of, Values};
use crate::element::Element;
use crate::error::CpuError;
use crate::extras::{Arguments, check_extras};
use crate::fp8::Decoded;
use crate::keys::Keys;
use crate::kv_ref::KvRef;
use crate::real::Real;
use crate::view::TensorRef;

/// The forward `pass` over Q, K and V.
///
/// # Errors
/// As [`super::forward_extras`].
pub(super) fn forward<R: Real, T: Element, A>(
    problem: &Problem,
    arguments: &Arguments<'_>,
    [q, k, v]: [&KvRef<'_, T>; 3],
    round: fn(R) -> R,
    pass: impl FnOnce(&Tensors<'_, R>) -> A,
) -> Result<A, CpuError> {
    match q {
        KvRef::Same(q) => of_numbers(problem, arguments, q, [*k, *v], round, pass),
        KvRef::Codes(q) => {
            let own = Decoded::<R>::of(problem, arguments, q)?;
            let kv = [own.beside(k)?, own.beside(v)?];
            of_numbers(&own.problem, &own.arguments, &own.q()?, kv, round, pass)
        }
    }
}

fn of_numbers<R: Real, T: Element, A>(
    problem: &Problem,
    arguments: &Arguments<'_>,
    q: &TensorRef<'_, T>,
    [k, v]: [KvRef<'_, T>; 2],
    round: fn(R) -> R,
    pass: impl FnOnce(&Tensors<'_, R>) -> A,
) -> Result<A, CpuError> {
    check_forward(problem, q, k, v)?;
    check_extras(problem, Pass::Forward, &arguments.extras)?;
    let batch = Batch::new(problem, arguments)?;
    let extras = &arguments.extras;
    let k = Values::new(problem, extras, Of::K, &k);
    let v = Values::new(problem, extras, Of::V, &v);
    Ok(read(&batch, q, [Keys::of(problem, k, v), v.into()], round, pass))
}

/// The backward `pass` over Q, K, V and dO.
///
/// # Errors
/// As [`super::backward_extras`].
pub(super) fn backward<R: Real, T: Element, A>(
    problem: &Problem,
    arguments: &Arguments<'_>,
    [q, k, v, dout]: [&TensorRef<'_, T>; 4],
    round: fn(R) -> R,
    pass: impl FnOnce(&Tensors<'_, R>, Rows<'_, R>) -> A,
) -> Result<A, CpuError> {
    problem.check_pass(Pass::BACKWARD)?;
    check_forward(problem, q, k, v)?;
    check_out(problem, "dout", dout.shape())?;
    let batch = Batch::new(problem, arguments)?;
    check_backward(problem)?;
    let dout = |s: usize, h: usize| gather_queries(dout, &batch, s, h);
    Ok(read(&batch, q, [k, v].map(|tensor| Keys::from(*tensor)), round, |tensors| pass(tensors, &dout)))
}

fn read<R: Real, T: Element, A>(
    batch: &Batch<'_>,
    q: &TensorRef<'_, T>,
    [k, v]: [Keys<'_, T>; 2],
    round: fn(R) -> R,
    pass: impl FnOnce(&Tensors<'_, R>) -> A,
) -> A {
    pass(&Tensors {
        batch,
        q: &|s, h| gather_queries(q, batch, s, h),
        k: &|s, h| gather_keys(&k, batch, s, h),
        v: &|s, h| gather_keys(&v, batch, s, h),
        round,
    })
}
