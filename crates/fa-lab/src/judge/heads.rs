//! The problem of some heads.

use fa_core::{Lengths, Problem};

/// One K/V head with its query heads by itself: gradients of K and V sum over the group.
pub(super) fn part(problem: &Problem) -> Problem {
    Problem {
        lengths: Lengths::uniform(1, problem.lengths.max_q(), problem.lengths.max_k()),
        heads_q: problem.group_size(),
        heads_kv: 1,
        ..*problem
    }
}
