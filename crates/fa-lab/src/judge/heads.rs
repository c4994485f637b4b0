//! The problem of some heads.

use fa_core::{Lengths, Problem};

use super::rows::per_head;

/// The problem of one K/V head with its query heads, for sequences of equal lengths: gradients of K and V sum
/// over the group.
pub(super) fn part(problem: &Problem) -> Problem {
    part_of(problem, problem.lengths.max_q(), problem.lengths.max_k())
}

/// The same of a sequence of `q` queries and `k` keys.
pub(super) fn part_of(problem: &Problem, q: usize, k: usize) -> Problem {
    problem
        .with_lengths(Lengths::uniform(1, q, k))
        .with_heads(problem.group_size(), 1)
        .with_score(per_head(problem.score))
}
