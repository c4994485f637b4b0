//! The kind of problem that a choice was measured for.

use fa_core::{Dtype, MaskKind, Problem};
use serde::{Deserialize, Serialize};

/// The most doublings of lengths and heads, taken together, by which a problem may differ from one that was
/// measured.
const FARTHEST: u32 = 3;

/// The key of a measured choice: the head dims, mask and soft cap that a kernel is specialised on, and the
/// problem's size by powers of two. How a kernel finds its rows, and ALiBi and sinks, are in the entry's
/// kernel: one that does not compute a problem is not found for it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TuneKey {
    /// Element type.
    pub dtype: Dtype,
    /// Head dim of Q and K.
    pub head_dim: usize,
    /// Head dim of V.
    pub head_dim_v: usize,
    /// Whether V is the first columns of K.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub latent: bool,
    /// Masking code.
    pub mask: MaskKind,
    /// Whether scores are capped.
    pub softcap: bool,
    /// Query heads per K/V head.
    pub group: usize,
    /// Queries of a sequence, rounded up to a power of two.
    pub seqlen_q: usize,
    /// Keys of a sequence, rounded up to a power of two.
    pub seqlen_k: usize,
    /// Query heads over all sequences, rounded up to a power of two.
    pub heads: usize,
    /// The most keys that a query sees in a window, at least 64 and rounded up to a power of two; 0 without a
    /// window, and in entries of tables from before it was counted, which stand for any.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub window: usize,
}

/// Windows of so many keys or fewer take the same steps: a kernel's narrowest tiles.
const NARROWEST: usize = 64;

#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(n: &usize) -> bool {
    *n == 0
}

impl TuneKey {
    /// The key of `problem`.
    pub fn of(problem: &Problem) -> TuneKey {
        // Lengths are bounded by the problem's check: their next power of two exists.
        let bucket = |n: usize| n.max(1).checked_next_power_of_two().unwrap_or(usize::MAX);
        TuneKey {
            dtype: problem.types.q,
            head_dim: problem.head_dim,
            head_dim_v: problem.head_dim_v,
            latent: problem.latent,
            mask: MaskKind::of(&problem.mask),
            softcap: problem.score.softcap.is_some(),
            group: problem.group_size(),
            seqlen_q: bucket(problem.lengths.max_q()),
            seqlen_k: bucket(problem.lengths.max_k()),
            heads: bucket(problem.lengths.sequences().saturating_mul(problem.heads_q)),
            window: window(problem).map_or(0, |keys| bucket(keys.max(NARROWEST))),
        }
    }

    /// Doublings between two keys; `None` where a kernel for one does not suit the other. The 16-bit types
    /// take the same time, so that they stand in for one another. A window of unknown width is one doubling
    /// from any.
    pub(super) fn distance(&self, other: &TuneKey) -> Option<u32> {
        let same =
            |key: &TuneKey| (key.head_dim, key.head_dim_v, key.latent, key.mask, key.softcap, key.group);
        if same(self) != same(other) {
            return None;
        }
        let apart = |a: usize, b: usize| a.ilog2().abs_diff(b.ilog2());
        let doublings = apart(self.seqlen_q, other.seqlen_q)
            + apart(self.seqlen_k, other.seqlen_k)
            + apart(self.heads, other.heads);
        let wider = match (self.window, other.window) {
            (0, 0) => 0,
            (0, _) | (_, 0) => 1,
            (a, b) => apart(a, b),
        };
        (doublings <= FARTHEST && wider <= FARTHEST).then_some(doublings + wider)
    }
}

/// The most keys that a query of `problem` sees, where its mask is a window.
fn window(problem: &Problem) -> Option<usize> {
    let keys = problem.lengths.max_k();
    let sides = [problem.mask.left, problem.mask.right].map(|side| side.map(|keys| keys as usize));
    (MaskKind::of(&problem.mask) == MaskKind::Window).then(|| match sides {
        [Some(left), Some(right)] => keys.min(left.saturating_add(right).saturating_add(1)),
        _ => keys,
    })
}
