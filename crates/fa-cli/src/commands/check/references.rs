//! What outputs should be on given inputs, and what they may be off by.

use std::collections::BTreeMap;

use fa_attn::Element;
use fa_cpu::KvRef;
use fa_cpu::reference::{self, low_precision};
use fa_lab::judge::codes;

use crate::attention::Inputs;
use crate::safetensors::Stored;

/// By name of the output.
pub(crate) type References = BTreeMap<&'static str, Reference>;

/// The f64 result and the same in the inputs' precision, packed BSHD (LSE: `[batch, heads, seqlen_q]`, a
/// batch of 1 for packed sequences).
pub(crate) struct Reference {
    pub exact: Vec<f64>,
    pub low: Vec<f64>,
    /// What f32 arithmetic may leave whatever the rule says.
    pub noise: f64,
}

/// Computes the outputs, and gradients where the inputs have dO.
///
/// # Errors
/// Inputs that do not fit their problem.
pub(crate) fn references<T: Element + Stored>(inputs: &Inputs<T>) -> Result<References, fa_attn::Error> {
    let program = inputs.program();
    let (problem, extras) = (&inputs.problem, &inputs.arguments(program.as_ref()));
    let [q, k, v] = inputs.views()?;
    let (exact, low) = match [q, k, v] {
        [KvRef::Codes(_), KvRef::Codes(k), KvRef::Codes(v)] => codes::expected(problem, *extras, q, [k, v])?,
        _ => (
            reference::forward_extras(problem, extras, q, k, v)?,
            low_precision::forward_extras(problem, extras, q, k, v)?,
        ),
    };
    let mut references = BTreeMap::from([
        ("out", Reference { exact: exact.out, low: widen(&low.out), noise: exact.out_noise }),
        ("lse", Reference { exact: exact.lse, low: widen(&low.lse), noise: exact.lse_noise }),
    ]);
    if let Some(dout) = inputs.dout_view()? {
        let [q, k, v] = inputs.differentiable()?;
        let exact = reference::backward_extras(problem, extras, &q, &k, &v, &dout)?;
        let low = low_precision::backward_extras(problem, extras, &q, &k, &v, &dout)?;
        references.insert("dq", Reference { exact: exact.dq, low: widen(&low.dq), noise: exact.dq_noise });
        references.insert("dk", Reference { exact: exact.dk, low: widen(&low.dk), noise: exact.dk_noise });
        references.insert("dv", Reference { exact: exact.dv, low: widen(&low.dv), noise: exact.dv_noise });
        if problem.score.sinks {
            let (low, noise) = (widen(&low.dsinks), exact.dsinks_noise);
            references.insert("dsinks", Reference { exact: exact.dsinks, low, noise });
        }
    }
    Ok(references)
}

/// Gradients by the worst of the rule's low-precision computations instead of the first.
///
/// # Errors
/// As [`references`].
pub(crate) fn hold_to_worst<T: Element + Stored>(
    inputs: &Inputs<T>,
    references: &mut References,
) -> Result<(), fa_attn::Error> {
    let Some(dout) = inputs.dout_view()? else { return Ok(()) };
    let program = inputs.program();
    let (problem, extras) = (&inputs.problem, &inputs.arguments(program.as_ref()));
    let [q, k, v] = inputs.differentiable()?;
    let exact = reference::backward_extras(problem, extras, &q, &k, &v, &dout)?;
    let low = low_precision::backward_worst(problem, extras, &q, &k, &v, &dout, &exact)?;
    let tensors = [("dq", widen(&low.dq)), ("dk", widen(&low.dk)), ("dv", widen(&low.dv))];
    for (name, low) in tensors.into_iter().chain([("dsinks", widen(&low.dsinks))]) {
        if let Some(reference) = references.get_mut(name) {
            reference.low = low;
        }
    }
    Ok(())
}

fn widen<T: Stored>(values: &[T]) -> Vec<f64> {
    values.iter().map(|&value| value.to_f64()).collect()
}
