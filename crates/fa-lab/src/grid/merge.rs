//! Partial results over different keys of the same queries, merged.

use fa_core::{Dtype, Merge, Types};

use super::case::{BASE, Case, case};

/// Merges of few and many parts, of every type into every type.
pub(super) fn merge() -> Vec<Case> {
    let types = [Dtype::Bf16, Dtype::F16, Dtype::F32];
    let shapes = [(1, 1, 32, 128), (3, 77, 5, 64), (2, 500, 4, 256), (64, 1, 8, 512), (1, 1300, 3, 40)];
    let mut cases = Vec::new();
    for (turn, &(batch, seqlen, heads, dim)) in shapes.iter().enumerate() {
        for (of, &parts) in [1, 2, 3, 16].iter().enumerate() {
            let (part, out) = (types[(turn + of) % 3], types[(turn + of / 2) % 3]);
            let merge = Merge { parts, batch, seqlen, heads, dim, part, out, sinks: (turn + of) % 2 == 1 };
            // The problem's type does not matter: the parts are f32 on the host.
            let problem = BASE.with_heads(heads, heads);
            let problem = problem.with_types(Types::same(Dtype::Bf16));
            cases.push(Case { merge: Some(merge), ..case("merge", problem) });
        }
    }
    cases
}
