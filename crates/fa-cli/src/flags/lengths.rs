//! Flags of a problem whose lengths are on the device, and of what joins its scores.

use std::str::FromStr;

use clap::Args;
use fa_core::{Alibi, Lengths, ScoreMod, Side};
use fa_lab::shape::parse_pair;

use crate::flags::mods::ModArgs;

/// How the sequences of a batch lie in memory. The lengths that other flags give are then upper bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Args)]
pub(crate) struct LengthsArgs {
    /// Sequences lie end to end (cu_seqlens), this many queries and keys in all, as in 16384 or 64,16384;
    /// --seqlen is then the most that a sequence has
    #[arg(long, value_name = "Q[,K]")]
    pub packed: Option<Packed>,
    /// Keys lie in pages of N keys [of a cache of this many pages; default: as many as the batch can fill]
    #[arg(long, value_name = "N[,PAGES]")]
    pub page: Option<Page>,
    /// Each sequence uses a part of its queries; how many is read on the device (seqused_q)
    #[arg(long)]
    pub used_q: bool,
    /// Each sequence uses a part of its keys; how many is read on the device (seqused_k, cache_seqlens)
    #[arg(long)]
    pub used_k: bool,
}

/// What joins the scores beside mask and soft cap.
#[derive(Clone, Debug, Default, PartialEq, Args)]
pub(crate) struct ScoreArgs {
    /// ALiBi: slope * |distance| is subtracted from the scores; a slope per query head, or with
    /// --alibi=per_sequence_head one per sequence and query head
    #[arg(long, value_name = "SLOPES", num_args = 0..=1, require_equals = true,
          default_missing_value = Alibi::PerHead.name(), value_parser = parse_alibi)]
    pub alibi: Option<Alibi>,
    /// Attention sinks: one more logit per query head joins the softmax denominator
    #[arg(long)]
    pub sinks: bool,
    #[command(flatten)]
    pub mods: ModArgs,
}

/// Rows of packed tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packed {
    /// Queries of all sequences.
    pub q: usize,
    /// Keys of all sequences; `None` for as many as queries.
    pub k: Option<usize>,
}

/// A cache in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Page {
    /// Keys of a page.
    pub page: usize,
    /// Pages; `None` for as many as the batch can fill.
    pub pages: Option<usize>,
}

impl FromStr for Packed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (q, k) = one_or_two(text, "TOTAL or TOTAL_Q,TOTAL_K, as in 64,16384")?;
        Ok(Packed { q, k })
    }
}

impl FromStr for Page {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (page, pages) = one_or_two(text, "PAGE or PAGE,PAGES, as in 16,4096")?;
        if page == 0 {
            return Err("a page of 0 keys: use 1 or more".to_owned());
        }
        Ok(Page { page, pages })
    }
}

fn one_or_two(text: &str, form: &str) -> Result<(usize, Option<usize>), String> {
    let (first, second) = parse_pair(text, ',', form)?;
    Ok((first, text.contains(',').then_some(second)))
}

/// The slopes that `--alibi` names, as RON, JSON and Python do.
pub(crate) fn parse_alibi(text: &str) -> Result<Alibi, String> {
    let all = [Alibi::PerHead, Alibi::PerSequenceHead];
    all.into_iter().find(|alibi| alibi.name() == text).ok_or_else(|| {
        let names = all.map(Alibi::name).join(" or ");
        format!("unknown ALiBi slopes '{text}': use {names}")
    })
}

impl LengthsArgs {
    /// The lengths of a batch of `batch` sequences of (at most) `q` queries and `k` keys.
    ///
    /// # Errors
    /// Flags that contradict each other.
    pub(crate) fn lengths(&self, batch: usize, q: usize, k: usize) -> Result<Lengths, String> {
        if let (Some(Page { page, .. }), true) = (self.page, self.used_k) {
            return Err(format!(
                "--used-k with pages of {page} keys: how many keys of its pages a sequence uses is always \
                 read on the device; leave out --used-k"
            ));
        }
        let side_q = self.packed.map_or(Side::padded(q), |packed| Side::packed(packed.q, q));
        let side_k = match (self.page, self.packed) {
            (Some(_), Some(Packed { k: Some(total), .. })) => {
                return Err(format!(
                    "--page and {total} packed keys: keys lie in pages or end to end; with --page give \
                     --packed the queries only"
                ));
            }
            (Some(Page { page, pages }), _) => {
                let fill = || batch.saturating_mul(k.div_ceil(page)).max(1);
                Side::paged(page, pages.unwrap_or_else(fill), k)
            }
            (None, Some(packed)) => Side::packed(packed.k.unwrap_or(packed.q), k),
            (None, None) => Side::padded(k),
        };
        let with_used = |side: Side, used| if used { side.with_used() } else { side };
        Ok(Lengths::of(batch, with_used(side_q, self.used_q), with_used(side_k, self.used_k)))
    }
}

impl ScoreArgs {
    /// The changes of scores, with a soft cap or without.
    ///
    /// # Errors
    /// Programs that are none.
    pub(crate) fn score(&self, softcap: Option<f64>) -> Result<ScoreMod, String> {
        let score = ScoreMod::NONE.with_softcap(softcap).with_alibi(self.alibi).with_sinks(self.sinks);
        self.mods.of(score)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_give_the_sides_that_they_name() {
        let none = LengthsArgs::default();
        assert_eq!(none.lengths(2, 3, 4), Ok(Lengths::uniform(2, 3, 4)));
        let packed = LengthsArgs { packed: "10,20".parse().ok(), ..none };
        assert_eq!(packed.lengths(2, 8, 16), Ok(Lengths::packed(2, 10, 20, 8, 16)));
        let same = LengthsArgs { packed: "10".parse().ok(), used_q: true, ..none };
        let q = Side::packed(10, 8).with_used();
        assert_eq!(same.lengths(2, 8, 8), Ok(Lengths::of(2, q, Side::packed(10, 8))));
        let paged = LengthsArgs { page: "16".parse().ok(), packed: "2".parse().ok(), ..none };
        let lengths = Lengths::of(2, Side::packed(2, 1), Side::paged(16, 14, 100));
        assert_eq!(paged.lengths(2, 1, 100), Ok(lengths));
        let fixed = LengthsArgs { page: "16,99".parse().ok(), ..none };
        assert_eq!(fixed.lengths(2, 1, 100), Ok(Lengths::of(2, Side::padded(1), Side::paged(16, 99, 100))));
        let both = LengthsArgs { packed: packed.packed, ..fixed };
        assert!(both.lengths(2, 1, 100).is_err_and(|e| e.contains("--page and 20 packed keys")));
        let used = LengthsArgs { used_k: true, ..fixed };
        assert!(used.lengths(2, 1, 100).is_err_and(|e| e.contains("--used-k with pages of 16 keys")));
        assert!("0".parse::<Page>().is_err() && "x".parse::<Packed>().is_err());
        assert_eq!(parse_alibi("per_sequence_head"), Ok(Alibi::PerSequenceHead));
    }
}
