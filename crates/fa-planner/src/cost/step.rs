//! A step of a server as it is planned: packed queries on cached keys, of which some sequences bring chunks
//! of a prompt and the others decode.

use fa_core::lengths::SideRows;
use fa_core::{Lengths, Problem, Side};

/// The most queries of a decoding sequence: a token and what was guessed.
pub const MOST_DECODED: usize = 16;

/// `problem` as what a server's step does one after the other: long tiles, those of chunks, come first and
/// compute, then those of decoding sequences read (NB-167). `None` for all other problems.
///
/// The host knows the most queries and their sum: as many sequences as can have the most, and the rest is
/// shared by the others. The bound on the keys is what the server has room for, so that each sequence has the
/// mean, and the longest that decodes what exponentially distributed lengths lead to expect.
pub fn phases(problem: &Problem) -> Option<Vec<Problem>> {
    let lengths = &problem.lengths;
    let (all, most) = (lengths.sequences(), lengths.max_q());
    if !lengths.q().is_packed() || lengths.k().is_packed() || most <= MOST_DECODED || all == 0 {
        return None;
    }
    let (total, keys) = (lengths.reach_q(), lengths.mean_k());
    let chunks = (total.saturating_sub(all) / (most - 1)).min(all);
    let others = all - chunks;
    if chunks == 0 || others == 0 {
        return Some(vec![of(problem, (all, total), (most, keys, keys))]);
    }
    let left_q = total.saturating_sub(chunks.saturating_mul(most)).max(others);
    let longest = ((keys as f64 * harmonic(others)) as usize).min(lengths.max_k());
    Some(vec![
        of(problem, (chunks, chunks.saturating_mul(most)), (most, keys, keys)),
        of(problem, (others, left_q), (left_q.div_ceil(others), keys, longest)),
    ])
}

/// `sequences` with so many queries in all and at most, and keys in the mean and at most.
fn of(
    problem: &Problem,
    (sequences, total): (usize, usize),
    (most, keys, longest): (usize, usize, usize),
) -> Problem {
    let k = match problem.lengths.k().rows {
        SideRows::Paged { page, .. } => {
            Side::paged(page, sequences.saturating_mul(keys.div_ceil(page.max(1))), longest)
        }
        SideRows::Padded { .. } | SideRows::Packed { .. } => Side::padded(longest).with_used(),
    };
    problem.with_lengths(Lengths::of(sequences, Side::packed(total, most), k))
}

/// The mean of the longest of `n` exponentially distributed lengths, as a multiple of their mean: the sum of
/// `1 / i` up to `n`, by its asymptote (Euler's constant) above 1.
fn harmonic(n: usize) -> f64 {
    if n <= 1 { 1.0 } else { (n as f64).ln() + 0.577 + 0.5 / n as f64 }
}

#[cfg(test)]
mod tests {
    use fa_core::{Dtype, Mask};

    use super::*;

    #[test]
    fn a_step_has_chunks_and_decoding_sequences() {
        let step = |sequences, total, max, k| {
            let lengths = Lengths::of(sequences, Side::packed(total, max), k);
            let problem = Problem::square(1, 1, 8, 128, Mask::CAUSAL, Dtype::Bf16).with_lengths(lengths);
            let of = |phase: &Problem| {
                let own = phase.lengths;
                (own.sequences(), own.total_q(), own.max_q(), own.mean_k(), own.max_k())
            };
            phases(&problem).map(|phases| phases.iter().map(of).collect::<Vec<_>>())
        };
        let cache = |pages| Side::paged(16, pages, 8192);
        let steps = step(32, 543, 512, cache(4000)).expect("a step");
        assert_eq!(steps, [(1, 512, 512, 2000, 2000), (31, 31, 1, 2000, 8054)]);
        assert_eq!(step(10, 1100, 512, cache(100_000)).unwrap()[1], (8, 76, 10, 8192, 8192));
        let padded = Side::padded(8192).with_used();
        assert_eq!(step(32, 543, 512, padded).unwrap(), [(1, 512, 512, 8192, 8192), (31, 31, 1, 8192, 8192)]);
        // Only chunks.
        assert_eq!(step(4, 2048, 512, cache(1000)).unwrap(), [(4, 2048, 512, 4000, 4000)]);
        // Only decoding, a few tokens each, keys that are packed as well, and nothing.
        for none in [step(64, 64, 1, cache(9)), step(64, 90, 8, cache(9)), step(0, 0, 512, cache(9))] {
            assert_eq!(none, None);
        }
        assert_eq!(step(32, 543, 512, Side::packed(543, 512)), None);
    }
}
