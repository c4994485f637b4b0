//! Packed batches drawn at random: no kernel, constant or rule was fitted to them.
//!
//! The same seed and number give the same batch. The kinds of lengths take turns, so that the summary of a
//! run says how each fares.

use fa_core::{Dtype, Mask, Problem};

use crate::marks::Wanted;
use crate::random::Random;
use crate::sequences::Sequences;

/// How the lengths of a batch are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spread {
    /// Around a mean, by a quarter of it: rollouts of one prompt.
    Normal,
    /// Mostly short with a long tail: chats, documents.
    Lognormal,
    /// One sequence of half of the tokens or more, among short ones.
    OneLong,
    /// All alike.
    Equal,
}

impl Spread {
    const ALL: [Spread; 4] = [Spread::Normal, Spread::Lognormal, Spread::OneLong, Spread::Equal];

    const fn name(self) -> &'static str {
        match self {
            Spread::Normal => "drawn packed, normal",
            Spread::Lognormal => "drawn packed, lognormal",
            Spread::OneLong => "drawn packed, one long and many short",
            Spread::Equal => "drawn packed, equal",
        }
    }

    /// Lengths of about `tokens` positions in all, `mean` each.
    fn lengths(self, random: &mut Random, tokens: usize, mean: usize) -> Vec<usize> {
        let count = (tokens / mean).max(2);
        let of_mean = |factor: f64| ((mean as f64 * factor) as usize).clamp(SHORTEST, tokens);
        match self {
            Spread::Normal => (0..count).map(|_| of_mean(1.0 + 0.25 * f64::from(random.normal()))).collect(),
            // exp(N(0, 0.8)) has the mean exp(0.32).
            Spread::Lognormal => {
                (0..count).map(|_| of_mean((0.8 * f64::from(random.normal()) - 0.32).exp())).collect()
            }
            Spread::OneLong => {
                let long = tokens / 2 + random.below(tokens / 4);
                let short = |_| of_mean(0.5 + random.below(1000) as f64 / 1000.0);
                let mut lens: Vec<usize> = (0..((tokens - long) / mean).max(2)).map(short).collect();
                lens.insert(random.below(lens.len() + 1), long);
                lens
            }
            Spread::Equal => vec![mean; count],
        }
    }
}

/// The shortest sequence that is drawn.
const SHORTEST: usize = 16;

const HEAD_DIMS: [(usize, usize); 8] =
    [(128, 128), (128, 128), (64, 64), (64, 64), (128, 128), (96, 96), (256, 256), (192, 128)];

/// Query and K/V heads of released models: no groups, and groups of 4, 7, 8 and 16.
const HEADS: [(usize, usize); 9] =
    [(32, 8), (28, 4), (64, 8), (16, 16), (12, 12), (32, 4), (16, 2), (14, 2), (16, 1)];

/// `count` batches; a longer list begins with the shorter one.
pub fn batches(count: usize, seed: u64) -> Vec<Wanted> {
    let draw = |number: usize| {
        let mut random = Random::new(seed.wrapping_mul(0x9e37_79b9) ^ number as u64);
        // The first bits of neighbouring seeds depend on one another.
        random.bits();
        let spread = Spread::ALL[number % Spread::ALL.len()];
        let (head_dim, head_dim_v) = random.of(&HEAD_DIMS);
        let (heads_q, heads_kv) = random.of(&HEADS);
        // 2^13 to 2^16 positions, and 2^6.5 to 2^11 of a sequence.
        let between = |random: &mut Random, from: f64, to: f64| {
            (from + (to - from) * random.below(1 << 20) as f64 / f64::from(1 << 20)).exp2() as usize
        };
        let (tokens, mean) = (between(&mut random, 13.0, 16.0), between(&mut random, 6.5, 11.0));
        let lens = spread.lengths(&mut random, tokens, mean);
        let mask = match random.below(4) {
            0 => Mask::FULL,
            1 => Mask::causal_window(random.of(&[127, 511, 1023])),
            _ => Mask::CAUSAL,
        };
        let dtype = if random.below(4) == 0 { Dtype::F16 } else { Dtype::Bf16 };
        let square = Problem::square(1, 1, heads_q, head_dim, mask, dtype);
        let problem = square.with_heads(heads_q, heads_kv).with_head_dims(head_dim, head_dim_v);
        Wanted::of(problem, Sequences::packed(&lens), spread.name())
    };
    (0..count).map(draw).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_batches_and_another_seed_others() {
        let (first, longer, other) = (batches(12, 7), batches(20, 7), batches(12, 8));
        assert_eq!(first, longer[..12]);
        assert!(first.iter().zip(&other).all(|(a, b)| a != b));
    }

    #[test]
    fn batches_are_valid_and_of_all_kinds() {
        let drawn = batches(80, 1);
        for row in &drawn {
            row.problem.check().unwrap_or_else(|error| panic!("{}: {error}", row.label()));
            assert!(!row.problem.lengths.is_uniform() && row.problem.lengths.max_q() <= 1 << 16);
        }
        for spread in Spread::ALL {
            assert_eq!(drawn.iter().filter(|row| row.group == spread.name()).count(), 20);
        }
        let mean = |row: &Wanted| row.problem.lengths.mean_q();
        assert!(drawn.iter().any(|row| mean(row) < 256) && drawn.iter().any(|row| mean(row) > 1024));
        assert!(drawn.iter().any(|row| row.problem.group_size() == 7));
    }

    #[test]
    fn one_long_sequence_has_at_least_half_of_the_positions() {
        let mut random = Random::new(3);
        for _ in 0..20 {
            let lens = Spread::OneLong.lengths(&mut random, 16384, 300);
            let longest = lens.iter().max().copied().unwrap_or(0);
            assert!(longest >= 8192 && lens.iter().filter(|&&len| len < 500).count() + 1 == lens.len());
        }
    }
}
