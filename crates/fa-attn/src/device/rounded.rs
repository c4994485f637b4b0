//! One representative for problems of similar lengths, so that they share a choice of kernel.

use fa_core::{Lengths, Problem, Side, SideRows};

/// The most queries of a sequence in a decoding step, where keys grow from step to step.
const DECODE: usize = 16;

/// Lengths are rounded up to these.
const KEYS: usize = 128;
const ROWS: usize = 1024;

/// The problem with its lengths rounded up: a kernel chosen for it serves this one as well.
pub(super) fn rounded(problem: &Problem) -> Problem {
    let lengths = &problem.lengths;
    let side = |side: Side, grows: bool| {
        let up = |len: usize| if grows { len.next_multiple_of(KEYS) } else { len };
        let rows = match side.rows {
            SideRows::Padded { len } => SideRows::Padded { len: up(len) },
            SideRows::Packed { total, max } => {
                SideRows::Packed { total: total.next_multiple_of(ROWS), max: up(max) }
            }
            SideRows::Paged { page, pages, max } => SideRows::Paged { page, pages, max: up(max) },
        };
        Side { rows, used: side.used }
    };
    let keys = side(lengths.k(), lengths.max_q() <= DECODE);
    problem.with_lengths(Lengths::of(lengths.sequences(), side(lengths.q(), false), keys))
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Mask};

    use super::*;

    #[test]
    fn steps_of_decoding_and_packed_batches_share_a_choice() {
        let square = Problem::square(2, 1, 8, 64, Mask::FULL, Dtype::F16);
        let of = |lengths| rounded(&square.with_lengths(lengths)).lengths;
        assert_eq!(of(Lengths::uniform(2, 1, 129)), Lengths::uniform(2, 1, 256));
        assert_eq!(of(Lengths::uniform(2, 1, 256)), Lengths::uniform(2, 1, 256));
        assert_eq!(of(Lengths::uniform(2, 100, 129)), Lengths::uniform(2, 100, 129));
        let packed = of(Lengths::packed(3, 1000, 1025, 500, 500));
        assert_eq!(packed, Lengths::packed(3, 1024, 2048, 500, 500));
    }

    /// Whatever is chosen for the rounded lengths is offered to all that they stand for.
    #[test]
    fn the_kernel_of_rounded_lengths_serves_the_others() {
        use fa_core::{Arch, Pass};
        use fa_planner::plan::{PlanOptions, best};

        let base = Problem::square(1, 1, 8, 128, Mask::CAUSAL, Dtype::Bf16);
        for arch in [Arch::Sm80, Arch::Sm90] {
            for (queries, keys) in [(1, 1), (1, 500), (3, 4097), (16, 70_001), (0, 0), (16, 127), (5, 0)] {
                for pass in [Pass::Forward, Pass::BACKWARD] {
                    let lengths = Lengths::uniform(2, queries, keys);
                    let problem = base.with_lengths(lengths).with_heads_kv(2);
                    let options = PlanOptions::default().with_pass(pass);
                    let chosen = best(&rounded(&problem), arch, &options).expect("a plan").spec;
                    assert_eq!(chosen.serves(&problem), Ok(()), "{arch} {queries} x {keys}: {chosen}");
                }
            }
        }
    }
}
