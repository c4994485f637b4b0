//! Problems whose programs are what kernels have built in.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

use crate::program::{Interned, Program, Value};
use crate::{Mask, Problem};

/// What is left of programs without their mask's band, their score or both.
type Left = HashMap<(Interned, bool, bool), Option<Interned>>;
static LEFT: LazyLock<Mutex<Left>> = LazyLock::new(Mutex::default);

impl Problem {
    /// The same problem with as little of its program as it needs, with these values of the program's
    /// scalars: a mask that is a band (comparisons of `k - q`, or of `k - q - off`, with numbers, joined by
    /// `and`) and a score that is a soft cap (`c * tanh(s / c)`) become [`Problem::mask`] and
    /// [`crate::ScoreMod::softcap`], which kernels have built in. Of a band within chunks of keys
    /// (`q // c == k // c`), as Llama 4 has them, the chunks stay a program, as that of `attention_chunk`
    /// is. A scalar without a value is none of the numbers. What is left of the program, if anything, reads
    /// the same arrays and scalars.
    ///
    /// ```
    /// use fa_core::program::Program;
    /// use fa_core::{Dtype, Mask, Problem, ScoreMod};
    ///
    /// let own = Program::parse("mask = k <= q + off; score = 20.0 * tanh(s / 20.0);")?.intern()?;
    /// let problem = Problem::square(1, 128, 4, 64, Mask::FULL, Dtype::Bf16)
    ///     .with_score(ScoreMod::NONE.with_program(Some(own)));
    /// let same = problem.with_mods_built_in(&[]);
    /// assert_eq!((same.mask, same.score), (Mask::CAUSAL, ScoreMod::softcap(20.0)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn with_mods_built_in(&self, scalars: &[Value]) -> Problem {
        let Some(program) = self.score.program else { return *self };
        let (band, cap) = (self.band(&program, scalars), self.cap(&program, scalars));
        if band.is_none() && cap.is_none() {
            return *self;
        }
        let Some(left) = without(program, band.is_some(), cap.is_some()) else { return *self };
        // A gradient is asked of a program, if it is of zeros.
        if left.is_none() && program.arrays().iter().any(|array| array.gradient) {
            return *self;
        }
        let score = self.score.with_softcap(cap.or(self.score.softcap)).with_program(left);
        self.with_mask(band.unwrap_or(self.mask)).with_score(score)
    }

    fn cap(&self, program: &Program, scalars: &[Value]) -> Option<f64> {
        let is_plain = self.score.softcap.is_none() && self.score.alibi.is_none();
        if is_plain { program.softcap(scalars) } else { None }
    }

    /// The band that the program's mask is. One that counts keys from query 0 is placed by the lengths of all
    /// sequences.
    fn band(&self, program: &Program, scalars: &[Value]) -> Option<Mask> {
        if !self.mask.is_full() {
            return None;
        }
        let band = program.band(scalars)?;
        let start = if band.aligned {
            self.mask.offset
        } else if self.lengths.is_uniform() {
            self.lengths.max_q() as i64 - self.lengths.max_k() as i64
        } else {
            return None;
        };
        // Others no kernel has: causal from query 0 where there are more keys, a diagonal that is hidden.
        let mask = band.mask(start).filter(Mask::holds_offset)?;
        // ALiBi and `off` count from the diagonal that the call has.
        let stays = mask.offset == self.mask.offset;
        (stays || self.score.alibi.is_none() && !program.counts_from_diagonal()).then_some(mask)
    }
}

/// What is left of a program, if anything; `None` where the process has no room for it.
fn without(program: Interned, mask: bool, score: bool) -> Option<Option<Interned>> {
    let mut kept = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(left) = kept.get(&(program, mask, score)) {
        return Some(*left);
    }
    let left = match program.without(mask, score).ok()? {
        Some(left) => Some(left.intern().ok()?),
        None => None,
    };
    kept.insert((program, mask, score), left);
    Some(left)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Alibi, Dtype, Lengths, ScoreMod, Side};

    fn problem(text: &str) -> Problem {
        let program = Program::parse(text).unwrap().intern().unwrap();
        Problem::square(2, 40, 4, 64, Mask::FULL, Dtype::Bf16)
            .with_lengths(Lengths::uniform(2, 100, 40))
            .with_score(ScoreMod::NONE.with_program(Some(program)))
    }

    #[test]
    fn bands_and_caps_are_built_in_and_the_rest_is_left() {
        let both = problem("mask = k <= q; score = 8.0 * tanh(s / 8.0);").with_mods_built_in(&[]);
        assert_eq!((both.mask, both.score), (Mask::CAUSAL.with_offset(60), ScoreMod::softcap(8.0)));
        let window =
            "scalar w: i32; array bias: f32[_] grad; mask = 0 <= q + off - k < w; score = s + bias[k];";
        let whole = problem(window);
        let posed = whole.with_mods_built_in(&[Value::I32(8)]);
        assert_eq!(posed.mask, Mask::causal_window(7));
        let left = posed.score.program.unwrap();
        assert!(left.mask().is_none() && left.arrays()[0].gradient && left.scalars().len() == 1);
        let ahead = problem("k <= q + off + 2").with_mods_built_in(&[]);
        assert_eq!((ahead.mask.limits(), ahead.score), ([None, Some(2)], ScoreMod::NONE));
        let all = problem("k >= 0").with_mods_built_in(&[]);
        assert_eq!((all.mask, all.score), (Mask::FULL, ScoreMod::NONE));
        let chunk = problem("k <= q and q - q % 8 <= k").with_lengths(Lengths::uniform(2, 40, 40));
        let posed = chunk.with_mods_built_in(&[]);
        assert_eq!((posed.mask, posed.score), (Mask::CAUSAL, problem("q - q % 8 <= k").score));
        // The value of a scalar decides.
        assert_eq!(whole.with_mods_built_in(&[]), whole);
        let alone = problem("array unused: f32[_] grad; mask = k <= q + off and 0.0 * unused[k] == 0.0;");
        assert_eq!(alone.with_mods_built_in(&[]), alone);
    }

    #[test]
    fn what_would_move_with_the_mask_stays_a_program() {
        let early = problem("k <= q");
        assert_ne!(early.with_mods_built_in(&[]), early);
        let alibi = early.with_score(early.score.with_alibi(Some(Alibi::PerHead)));
        let varied = early.with_lengths(Lengths::of(2, Side::padded(100), Side::padded(40).with_used()));
        let off = problem("mask = k <= q; score = s + f32(off);");
        let narrowed = early.with_mask(Mask::CAUSAL);
        let hidden_diagonal = problem("k < q + off");
        let more_keys = early.with_lengths(Lengths::uniform(2, 40, 100));
        let chunks = problem("k <= q and (q + off) // 8 == k // 8");
        for own in [chunks, alibi, varied, off, narrowed, hidden_diagonal, more_keys] {
            assert_eq!(own.with_mods_built_in(&[]), own);
        }
        let capped = problem("8.0 * tanh(s / 8.0)");
        let twice = capped.with_score(capped.score.with_softcap(Some(2.0)));
        assert_eq!(twice.with_mods_built_in(&[]), twice);
    }
}
