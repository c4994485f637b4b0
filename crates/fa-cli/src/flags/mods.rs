//! Flags of a mask and of changes of scores of the caller's own.

use clap::Args;
use fa_core::program::{Interned, Program};
use fa_core::{Dropout, ScoreMod};
use fa_lab::shape::whole;

/// Programs by their texts, and those that have a flag of their own. Their arrays hold random values.
#[derive(Clone, Debug, Default, PartialEq, Args)]
pub(crate) struct ModArgs {
    /// A mask of your own, as an expression of b, h, q, k, sq, sk, off and arrays that hold random values, as
    /// in "k <= q + off"; see docs/programs.md
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub mask_mod: Option<String>,
    /// A change of the scores of your own, likewise, of s, as in "20 * tanh(s / 20)"
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub score_mod: Option<String>,
    /// A bias of random values is added to the scores
    #[arg(long)]
    pub bias: bool,
    /// The bias's axes of their own, of b, h, q and k; the others share its elements
    #[arg(long, value_name = "AXES", default_value = "b,h,q,k", requires = "bias")]
    pub bias_shape: String,
    /// The bias's type: bf16, f16 or f32; the gradient of a bias is f32
    #[arg(long, value_name = "TYPE", default_value = "bf16", requires = "bias")]
    pub bias_dtype: String,
    /// A backward computes the gradient of the bias as well
    #[arg(long, requires = "bias")]
    pub bias_grad: bool,
    /// Queries see the keys of their own chunk of N only (Llama 4)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub chunk: Option<u32>,
    #[command(flatten)]
    pub dropout: DropoutArgs,
}

/// Dropout of probabilities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Args)]
pub(crate) struct DropoutArgs {
    /// Probabilities are dropped with probability P after the softmax, as FlashAttention-2 drops them for the
    /// same seed and offset
    #[arg(long, value_name = "P")]
    pub dropout: Option<f64>,
    /// The seed of dropout
    #[arg(long, value_name = "N", default_value_t = 0, requires = "dropout", value_parser = whole::<u64>)]
    pub dropout_seed: u64,
    /// The offset of dropout
    #[arg(long, value_name = "N", default_value_t = 0, requires = "dropout", value_parser = whole::<u64>)]
    pub dropout_offset: u64,
}

impl DropoutArgs {
    /// Scores with dropout, where it is asked for.
    ///
    /// # Errors
    /// A probability that is none.
    pub(crate) fn of(self, score: ScoreMod) -> Result<ScoreMod, String> {
        let Some(p) = self.dropout else { return Ok(score) };
        let dropout = Dropout::new(p, self.dropout_seed, self.dropout_offset);
        dropout.and_then(|dropout| dropout.of(score)).map_err(|error| format!("--dropout: {error}"))
    }
}

/// Programs by their texts, whose arrays are tensors of a file.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct ProgramArgs {
    /// A mask of your own, as an expression of b, h, q, k, sq, sk, off and of arrays and scalars, which are
    /// the file's tensors of their names, as in `array last: i32[_]; k < last[q]`; see docs/programs.md
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub mask_mod: Option<String>,
    /// A change of the scores of your own, likewise, of s, as in
    /// `array bias: f32[_, _] grad; s + bias[q, k]`; --backward writes the gradient as dbias
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub score_mod: Option<String>,
    #[command(flatten)]
    pub dropout: DropoutArgs,
}

impl ProgramArgs {
    /// Scores with all of them.
    ///
    /// # Errors
    /// Texts that are no programs.
    pub(crate) fn of(&self, score: ScoreMod) -> Result<ScoreMod, String> {
        let Self { mask_mod, score_mod, dropout } = self.clone();
        ModArgs { mask_mod, score_mod, dropout, ..ModArgs::default() }.of(score)
    }
}

impl ModArgs {
    /// Scores with all of the flags.
    ///
    /// # Errors
    /// Texts that are no programs, masks that change scores, and flags that name no axis.
    pub(crate) fn of(&self, score: ScoreMod) -> Result<ScoreMod, String> {
        self.dropout.of(score.with_program(self.program()?))
    }

    /// The programs of the flags as one.
    ///
    /// # Errors
    /// Texts that are no programs, masks that change scores, and flags that name no axis.
    pub(crate) fn program(&self) -> Result<Option<Interned>, String> {
        let mut texts = Vec::new();
        texts.extend(self.mask_mod.as_ref().map(|text| ("--mask-mod", text.clone())));
        texts.extend(self.chunk.map(|n| ("--chunk", format!("mask = (q + off) // {n} == k // {n};"))));
        if self.bias {
            let axes: Vec<&str> = self.bias_shape.split(',').map(str::trim).collect();
            if let Some(other) = axes.iter().find(|axis| !["b", "h", "q", "k"].contains(axis)) {
                return Err(format!("--bias-shape {}: '{other}' is none of b, h, q and k", self.bias_shape));
            }
            if let Some(twice) = axes.iter().enumerate().find(|(at, axis)| axes[..*at].contains(axis)) {
                return Err(format!("--bias-shape {}: {} is there twice", self.bias_shape, twice.1));
            }
            let blanks = vec!["_"; axes.len()].join(", ");
            let (dtype, indices) = (&self.bias_dtype, axes.join(", "));
            let grad = if self.bias_grad { " grad" } else { "" };
            let text = format!("array bias: {dtype}[{blanks}]{grad}; score = s + bias[{indices}];");
            texts.push(("--bias", text));
        }
        texts.extend(self.score_mod.as_ref().map(|text| ("--score-mod", text.clone())));
        let mut all: Option<Program> = None;
        for (flag, text) in texts {
            let own = Program::parse(&text).map_err(|error| format!("{flag}: {error}"))?;
            if flag == "--mask-mod" && (own.mask().is_none() || own.score().is_some()) {
                return Err(format!("{flag} {text}: this is no mask alone, a bool, as in k <= q"));
            }
            all = Some(match all {
                Some(before) => before.with(&own).map_err(|error| format!("{flag}: {error}"))?,
                None => own,
            });
        }
        all.map(|program| program.intern().map_err(|error| error.to_string())).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_join_to_one_program() {
        assert_eq!(ModArgs::default().program(), Ok(None));
        let all = ModArgs {
            mask_mod: Some("k % 3 != 1".into()),
            score_mod: Some("scalar c: f32; score = c * tanh(s / c);".into()),
            bias: true,
            bias_shape: "h, k".into(),
            bias_dtype: "f32".into(),
            bias_grad: true,
            chunk: Some(64),
            dropout: DropoutArgs { dropout: Some(0.1), ..DropoutArgs::default() },
        };
        let program = all.program().unwrap().unwrap();
        assert!(program.mask().is_some() && program.score().is_some());
        assert_eq!((program.arrays()[0].rank, program.arrays()[0].gradient), (2, true));
        assert_eq!(program.scalars().len(), 1);
        let score = all.of(ScoreMod::NONE).unwrap();
        assert_eq!(score.dropout.map(|dropout| dropout.p()), Some(0.1));
        assert!(score.program.is_some_and(|program| program.weight().is_some() && program.mask().is_some()));
        let wrong =
            ModArgs { dropout: DropoutArgs { dropout: Some(1.0), ..DropoutArgs::default() }, ..all.clone() };
        assert!(wrong.of(ScoreMod::NONE).is_err_and(|error| error.starts_with("--dropout: ")));
        let wrong = ModArgs { bias_shape: "h,x".into(), ..all.clone() };
        assert!(wrong.program().is_err_and(|error| error.contains("'x' is none of b, h, q and k")));
        let wrong = ModArgs { bias_shape: "h,h".into(), ..all.clone() };
        assert!(wrong.program().is_err_and(|error| error.contains("h is there twice")));
    }

    #[test]
    fn errors_have_their_places_and_masks_change_no_scores() {
        let mask = |text: &str| ModArgs { mask_mod: Some(text.into()), ..ModArgs::default() }.program();
        let score = |text: &str| ModArgs { score_mod: Some(text.into()), ..ModArgs::default() }.program();
        for (error, parts) in [
            (mask("k +"), ["--mask-mod: ", "column 4"]),
            (mask("k <= x"), ["--mask-mod: ", "column 6: `x`"]),
            (mask("2 * s"), ["--mask-mod 2 * s: ", "no mask alone"]),
            (mask("scalar c: f32; c * s"), ["--mask-mod ", "no mask alone"]),
            (mask("mask = k <= q; score = 2 * s;"), ["--mask-mod ", "no mask alone"]),
            (score("2 * t"), ["--score-mod: ", "column 5: `t`"]),
        ] {
            let error = error.unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
        for whole in ["mask = k <= q; score = 2 * s;", "select(k <= q, s, -inf)"] {
            assert!(score(whole).is_ok(), "{whole}");
        }
    }
}
