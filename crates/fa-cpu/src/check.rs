//! Whether tensors fit their problem: checked once at the entry of every implementation, before a write.

use fa_core::{Dtype, Problem, Side, SideRows};

use crate::element::Element;
use crate::error::CpuError;
use crate::kv_ref::KvRef;

/// First two lengths of a side's tensors: sequences and rows, 1 and the rows of all packed sequences, or
/// pages and rows of a page.
const fn outer(problem: &Problem, side: Side) -> [usize; 2] {
    match side.rows {
        SideRows::Padded { len } => [problem.lengths.sequences(), len],
        SideRows::Packed { total, .. } => [1, total],
        SideRows::Paged { page, pages, .. } => [pages, page],
    }
}

/// Shape of Q and dQ: `[batch, seqlen_q, heads_q, head_dim]`, or `[1, total_q, ..]` packed.
pub const fn q_shape(problem: &Problem) -> [usize; 4] {
    let [batch, seqlen] = outer(problem, problem.lengths.q());
    [batch, seqlen, problem.heads_q, problem.head_dim]
}

/// Shape of K and dK, in elements of K's type: `[batch, seqlen_k, heads_kv, head_dim]`, `[1, total_k, ..]`
/// packed, or `[pages, page, ..]`; with rows of [`Problem::head_dim_k`] where V has the other columns. Rows
/// of int4 have `head_dim / 2` bytes.
pub const fn k_shape(problem: &Problem) -> [usize; 4] {
    let [batch, seqlen] = outer(problem, problem.lengths.k());
    [batch, seqlen, problem.heads_kv, problem.types.kv.elements(problem.head_dim_k())]
}

/// Shape of V and dV: as [`k_shape`], with rows of `head_dim_v`.
pub const fn v_shape(problem: &Problem) -> [usize; 4] {
    let [batch, seqlen] = outer(problem, problem.lengths.k());
    [batch, seqlen, problem.heads_kv, problem.types.kv.elements(problem.head_dim_v)]
}

/// Shape of O and dO: as [`q_shape`], with rows of `head_dim_v`.
pub const fn out_shape(problem: &Problem) -> [usize; 4] {
    let [batch, seqlen] = outer(problem, problem.lengths.q());
    [batch, seqlen, problem.heads_q, problem.head_dim_v]
}

/// Number of LSE values: `[batch, heads_q, seqlen_q]`, or `[heads_q, total_q]` packed.
pub const fn lse_len(problem: &Problem) -> usize {
    let [batch, seqlen] = outer(problem, problem.lengths.q());
    batch.saturating_mul(problem.heads_q).saturating_mul(seqlen)
}

/// The problem is valid, the elements are of its types (or f64, which stands for any but codes), and Q, K and
/// V have its shapes.
///
/// # Errors
/// [`CpuError::Problem`], [`CpuError::Dtype`], [`CpuError::Codes`] or [`CpuError::Shape`].
pub fn check_forward<'a, T: Element>(
    problem: &Problem,
    q: impl Into<KvRef<'a, T>>,
    k: impl Into<KvRef<'a, T>>,
    v: impl Into<KvRef<'a, T>>,
) -> Result<(), CpuError> {
    check_inputs(problem, &q.into(), &k.into(), &v.into())
}

fn check_inputs<T: Element>(
    problem: &Problem,
    q: &KvRef<'_, T>,
    k: &KvRef<'_, T>,
    v: &KvRef<'_, T>,
) -> Result<(), CpuError> {
    problem.check()?;
    let types = problem.types;
    let (got, need) = match q {
        KvRef::Same(_) => (T::DTYPE.or((!types.is_fp8()).then_some(types.q)), types.q),
        KvRef::Codes(_) if types.is_fp8() => (T::DTYPE.or(Some(types.out)), types.out),
        KvRef::Codes(_) => (Some(Dtype::E4m3), types.q),
    };
    if got != Some(need) {
        return Err(CpuError::Dtype { got, need });
    }
    k.check(problem.types.kv)?;
    v.check(problem.types.kv)?;
    check_shape("q", q.shape(), q_shape(problem))?;
    check_shape("k", k.shape(), k_shape(problem))?;
    check_shape("v", v.shape(), v_shape(problem))
}

/// The tensor called `tensor` (O or dO) has the shape of the problem's output.
///
/// # Errors
/// [`CpuError::Shape`].
pub fn check_out(problem: &Problem, tensor: &'static str, shape: [usize; 4]) -> Result<(), CpuError> {
    check_shape(tensor, shape, out_shape(problem))
}

/// The LSE buffer has one value per query row.
///
/// # Errors
/// [`CpuError::Length`].
pub fn check_lse(problem: &Problem, len: usize) -> Result<(), CpuError> {
    check_len("lse", len, lse_len(problem))
}

/// The problem has gradients: keys that are also values, and keys in pages, have none.
///
/// # Errors
/// [`CpuError::LatentBackward`] or [`CpuError::PagedBackward`].
pub fn check_backward(problem: &Problem) -> Result<(), CpuError> {
    match (problem.latent, problem.lengths.page()) {
        (true, _) => Err(CpuError::LatentBackward),
        (false, Some(_)) => Err(CpuError::PagedBackward),
        (false, None) => Ok(()),
    }
}

/// dQ, dK and dV have the shapes of Q, K and V.
///
/// # Errors
/// [`CpuError::Shape`].
pub fn check_gradients(
    problem: &Problem,
    dq: [usize; 4],
    dk: [usize; 4],
    dv: [usize; 4],
) -> Result<(), CpuError> {
    check_shape("dq", dq, q_shape(problem))?;
    check_shape("dk", dk, k_shape(problem))?;
    check_shape("dv", dv, v_shape(problem))
}

/// `tensor` has the shape `need`.
///
/// # Errors
/// [`CpuError::Shape`].
pub fn check_shape(tensor: &'static str, got: [usize; 4], need: [usize; 4]) -> Result<(), CpuError> {
    if got == need { Ok(()) } else { Err(CpuError::Shape { tensor, got, need }) }
}

/// `buffer` holds `need` values.
///
/// # Errors
/// [`CpuError::Length`].
pub fn check_len(buffer: &'static str, got: usize, need: usize) -> Result<(), CpuError> {
    if got == need { Ok(()) } else { Err(CpuError::Length { buffer, got, need }) }
}

#[cfg(test)]
mod tests {
    use fa_core::{Mask, ProblemError, TensorLayout, Types};

    use super::*;
    use crate::view::TensorRef;

    #[test]
    fn what_does_not_fit_is_named() {
        let problem = Problem::square(1, 3, 2, 4, Mask::FULL, Dtype::F32).with_heads_kv(1).with_head_dim_v(2);
        let data = [0f32; 24];
        let view = |name, shape| TensorRef::packed(name, &data, shape, TensorLayout::Bshd).unwrap();
        let (q, k, v) = (view("q", [1, 3, 2, 4]), view("k", [1, 3, 1, 4]), view("v", [1, 3, 1, 2]));
        assert_eq!(check_forward(&problem, &q, &k, &v), Ok(()));
        assert_eq!(
            check_forward(&problem, &q, &v, &v),
            Err(CpuError::Shape { tensor: "k", got: [1, 3, 1, 2], need: [1, 3, 1, 4] })
        );
        let sixteen = problem.with_types(Types::same(Dtype::F16));
        assert_eq!(
            check_forward(&sixteen, &q, &k, &v),
            Err(CpuError::Dtype { got: Some(Dtype::F32), need: Dtype::F16 })
        );
        let headless = problem.with_heads_kv(0);
        assert_eq!(
            check_forward(&headless, &q, &k, &v),
            Err(CpuError::Problem(ProblemError::Zero { name: "heads_kv" }))
        );
        assert_eq!(check_out(&problem, "dout", [1, 3, 2, 2]), Ok(()));
        assert!(check_out(&problem, "dout", [1, 3, 2, 4]).is_err());
        assert_eq!(check_lse(&problem, 5), Err(CpuError::Length { buffer: "lse", got: 5, need: 6 }));
        assert!(check_gradients(&problem, q.shape(), k.shape(), v.shape()).is_ok());
        assert!(check_gradients(&problem, q.shape(), v.shape(), v.shape()).is_err());
    }
}
