//! Dropout of attention's probabilities, with the bits of FlashAttention-2 for the same seed and offset.
//!
//! A probability is dropped or multiplied by `1 / (1 - p)`, after the softmax: its normalisation and the LSE
//! are those without dropout. What is kept is a function of the seed, the offset and the place alone: Philox
//! 4x32 of 7 rounds, with the seed as its key, makes the 16 bytes of the counter
//!
//! ```text
//! (offset + 32 (sequence * heads_q + head) + lane, query / 16, key / 32)    64, 32 and 32 bits
//! lane = 4 (query % 8) + (key % 8) / 2
//! byte = 4 ((key % 32) / 8) + 2 ((query % 16) / 8) + key % 2
//! ```
//!
//! and a probability is kept if its byte is at most `floor(255 (1 - p))`. The kept share is therefore a
//! multiple of 1/256, 0.8984 for p = 0.1, whereas the factor is `1 / (1 - p)`.

use serde::{Deserialize, Serialize};

use crate::program::{ProgramError, TableFull};

/// Queries and keys whose bits are made together.
const ROWS: usize = 16;
const KEYS: usize = 32;

/// The probability of being dropped, and the generator's state.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Text", into = "Text")]
pub struct Dropout {
    p: f32,
    /// The key of the generator.
    pub seed: u64,
    /// What the counters begin with.
    pub offset: u64,
}

/// As text.
#[derive(Serialize, Deserialize)]
#[serde(rename = "Dropout", deny_unknown_fields)]
struct Text {
    p: f32,
    seed: u64,
    offset: u64,
}

impl TryFrom<Text> for Dropout {
    type Error = DropoutError;

    fn try_from(Text { p, seed, offset }: Text) -> Result<Dropout, DropoutError> {
        Dropout::new(p.into(), seed, offset)
    }
}

impl From<Dropout> for Text {
    fn from(Dropout { p, seed, offset }: Dropout) -> Text {
        Text { p, seed, offset }
    }
}

/// What decides which probabilities are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kept {
    /// The key of the generator.
    pub seed: u64,
    /// What the counters begin with.
    pub offset: u64,
    /// The largest byte that keeps.
    pub threshold: u8,
}

/// Dropout that a problem cannot have.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum DropoutError {
    /// A probability outside `0 <= p < 1`.
    #[error("a dropout of {0:?}: it is a probability, at least 0 and below 1 as an f32")]
    Probability(f64),
    /// The problem's program leaves no room for it.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// The process has too many programs.
    #[error(transparent)]
    Full(#[from] TableFull),
}

impl Dropout {
    /// The array of [`crate::program::Standard::Dropout`].
    pub const BITS: &'static str = "fa_kept";

    /// Its scalar.
    pub const FACTOR: &'static str = "fa_kept_factor";

    /// Dropout with probability `p`.
    ///
    /// # Errors
    /// A `p` that is not a probability below 1.
    pub fn new(p: f64, seed: u64, offset: u64) -> Result<Dropout, DropoutError> {
        let own = p as f32;
        if p >= 0.0 && own < 1.0 {
            Ok(Dropout { p: own, seed, offset })
        } else {
            Err(DropoutError::Probability(p))
        }
    }

    /// The probability of being dropped.
    pub const fn p(&self) -> f32 {
        self.p
    }

    /// What kept probabilities are multiplied by.
    pub fn factor(&self) -> f32 {
        1.0 / (1.0 - self.p)
    }

    /// What is kept.
    pub fn kept(&self) -> Kept {
        let threshold = (f64::from(1.0 - self.p) * 255.0).floor() as u8;
        Kept { seed: self.seed, offset: self.offset, threshold }
    }

    /// How far a call of so many sequences and heads moves a generator's offset.
    pub const fn advance(sequences: usize, heads_q: usize) -> u64 {
        32 * sequences as u64 * heads_q as u64
    }
}

impl Kept {
    /// Whether the probability of a key is kept; heads are counted over the sequences.
    pub fn keeps(&self, head: usize, query: usize, key: usize) -> bool {
        let lane = 4 * (query % 8) + key % 8 / 2;
        let byte = 4 * (key % KEYS / 8) + 2 * (query % ROWS / 8) + key % 2;
        self.bytes(head, lane, query / ROWS, key / KEYS)[byte] <= self.threshold
    }

    fn bytes(&self, head: usize, lane: usize, rows: usize, keys: usize) -> [u8; 16] {
        let low = self.offset.wrapping_add(32 * head as u64 + lane as u64);
        let words = philox([low as u32, (low >> 32) as u32, rows as u32, keys as u32], self.seed);
        let mut bytes = [0; 16];
        for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The bits of heads with `queries` rows of `words` words each.
    pub fn fill(&self, queries: usize, words: usize, to: &mut [u32]) {
        for (head, to) in to.chunks_mut((queries * words).max(1)).enumerate() {
            for (block, to) in to.chunks_mut((ROWS * words).max(1)).enumerate() {
                for keys in 0..words {
                    let rows = self.block(head, block, keys);
                    to[keys..].iter_mut().step_by(words).zip(rows).for_each(|(to, row)| *to = row);
                }
            }
        }
    }

    /// The words of 16 queries and 32 keys.
    fn block(&self, head: usize, block: usize, keys: usize) -> [u32; ROWS] {
        let mut rows = [0; ROWS];
        for lane in 0..32 {
            let bytes = self.bytes(head, lane, block, keys);
            for (first, row) in [(0, 0), (2, 8)] {
                let keeps = |byte: usize| u32::from(bytes[byte + first] <= self.threshold);
                let pair = |i: usize| (keeps(4 * i) | keeps(4 * i + 1) << 1) << (8 * i);
                rows[lane / 4 + row] |= (pair(0) | pair(1) | pair(2) | pair(3)) << (2 * (lane % 4));
            }
        }
        rows
    }
}

/// Philox 4x32 of 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
fn philox([mut a, mut b, mut c, mut d]: [u32; 4], key: u64) -> [u32; 4] {
    let product = |x: u32, by: u32| {
        let wide = u64::from(x) * u64::from(by);
        ((wide >> 32) as u32, wide as u32)
    };
    let (mut first, mut second) = (key as u32, (key >> 32) as u32);
    for _ in 0..7 {
        let (high_a, low_a) = product(a, 0xd251_1f53);
        let (high_c, low_c) = product(c, 0xcd9e_8d57);
        [a, b, c, d] = [high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a];
        first = first.wrapping_add(0x9e37_79b9);
        second = second.wrapping_add(0xbb67_ae85);
    }
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_has_its_published_values() {
        // Random123's known answers for 7 rounds.
        for (counter, key, expected) in [
            ([0; 4], 0, "5f6fb709 0d893f64 4f121f81 4f730a48"),
            ([u32::MAX; 4], u64::MAX, "5207ddc2 45165e59 4d8ee751 8c52f662"),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                0x299f_31d0_a409_3822,
                "4dfccaba 190a87f0 c47362ba b6b5242a",
            ),
        ] {
            let found = philox(counter, key).map(|word| format!("{word:08x}")).join(" ");
            assert_eq!(found, expected);
        }
    }
}
