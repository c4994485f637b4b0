//! What scores cost the softmax pipes, with the changes of scores that a problem asks for.

use fa_core::program::{Binary, Deps, Node, Unary};
use fa_core::{ArchLimits, ScoreKind};

use super::constants::CostConstants;

/// Clocks per score on the softmax pipes of an SM: special-function results and f32 instructions.
pub(crate) fn softmax_clocks(limits: &ArchLimits, mufu: f64, ops: f64) -> f64 {
    mufu / limits.mufu + ops / f32_lanes(limits)
}

/// f32 instructions per element of ALiBi: the distance from the diagonal, and slope times it.
const ALIBI_OPS: f64 = 2.0;

/// Special-function results and f32 instructions per element that the changes of scores add to a forward.
pub(crate) fn score_costs(score: ScoreKind, c: &CostConstants) -> (f64, f64) {
    let (mufu, ops) = if score.softcap { (1.0, c.softcap_ops) } else { (0.0, 0.0) };
    let (own_mufu, own_ops) = program_costs(score);
    (mufu + own_mufu, ops + own_ops + if score.alibi { ALIBI_OPS } else { 0.0 })
}

/// The same of a backward, which computes the changes and their slopes.
pub(crate) fn slope_costs(score: ScoreKind, c: &CostConstants) -> (f64, f64) {
    let (mufu, ops) = if score.softcap { (2.0, c.softcap_ops + 3.0) } else { (0.0, 0.0) };
    let (own_mufu, own_ops) = program_costs(score);
    (mufu + 2.0 * own_mufu, ops + 2.0 * own_ops)
}

/// Issue slots of a load of one value a lane: 32 lanes a clock are served.
const LOAD_OPS: f64 = 4.0;

/// What of a node is computed once a row or a column falls to each score.
const SHARED: f64 = 0.1;

/// Special results and f32 instructions of a score by a program of the caller's own: its nodes, by what they
/// depend on.
fn program_costs(score: ScoreKind) -> (f64, f64) {
    let Some(program) = score.program else { return (0.0, 0.0) };
    let mut costs = (0.0, 0.0);
    for (id, node) in program.own() {
        let deps = program.deps(id);
        let is_pair = deps.has(Deps::SCORE) || (deps.has(Deps::QUERY) && deps.has(Deps::KEY));
        let is_shared = deps.has(Deps::QUERY) || deps.has(Deps::KEY);
        let share = if is_pair {
            1.0
        } else if is_shared {
            SHARED
        } else {
            0.0
        };
        let (mufu, ops) = match node {
            Node::Const(_) | Node::Var(_) | Node::Scalar(_) => (0.0, 0.0),
            Node::Load(..) => (0.0, LOAD_OPS),
            Node::Unary(Unary::Tanh | Unary::Sigmoid, _) => (2.0, 3.0),
            Node::Unary(
                Unary::Exp
                | Unary::Exp2
                | Unary::Log
                | Unary::Log2
                | Unary::Sqrt
                | Unary::Rsqrt
                | Unary::Sin
                | Unary::Cos,
                _,
            ) => (1.0, 1.0),
            Node::Unary(..) | Node::Select(..) => (0.0, 1.0),
            Node::Binary(Binary::FloorDiv | Binary::FloorMod, ..) => (0.0, 12.0),
            Node::Binary(..) => (0.0, 1.0),
        };
        costs = (costs.0 + share * mufu, costs.1 + share * ops);
    }
    costs
}

/// f32 instructions per clock of an SM.
pub(crate) fn f32_lanes(limits: &ArchLimits) -> f64 {
    limits.fp32_flops / 2.0
}
