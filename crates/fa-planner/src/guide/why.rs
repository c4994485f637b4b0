//! "Why not?": the candidates that match what is asked about, each with its account or the limit that it
//! breaks.

use std::fmt;
use std::str::FromStr;

use crate::head_dims::HeadDims;

use super::mode::Mode;

use super::bwd::BwdConfig;
use super::candidates::{BwdSpec, FwdSpec};
use super::fwd::FwdConfig;
use super::search::{Outcome, SearchError, Tiles, bwd_where, fwd_where};

/// One field of a candidate and the value it is to have; switches are 0 and 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Constraint {
    /// A field of [`FwdSpec`] or [`BwdSpec`].
    pub field: String,
    /// Its value.
    pub value: u32,
}

/// A question that has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WhyError {
    /// The text is not `field=value`.
    #[error("'{0}' is no question: write field=value, as in tile_n=192 or pv_is_rs=false")]
    Text(String),
    /// No direction that was asked about has such a field.
    #[error(
        "unknown field '{field}': the forward has {}; the backward has {}",
        FwdSpec::FIELDS.join(", "),
        BwdSpec::FIELDS.join(", ")
    )]
    Field {
        /// The name.
        field: String,
    },
    /// Nothing that the guide enumerates has these values.
    #[error(
        "no candidate has {0}: num_wg is 2 or 3, the forward's tile_m is 64 * num_wg, an atom layout is 1 or \
         num_wg, and a switch is true or false"
    )]
    NoCandidate(String),
    /// The search itself cannot be made.
    #[error(transparent)]
    Search(#[from] SearchError),
}

/// The matching candidates of each direction; `None` where the direction was not asked about or lacks a
/// field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Why {
    /// Forward.
    pub fwd: Option<Outcome<FwdConfig, FwdSpec>>,
    /// Backward.
    pub bwd: Option<Outcome<BwdConfig, BwdSpec>>,
}

impl FwdSpec {
    /// The names that [`FwdSpec::field`] knows.
    pub const FIELDS: [&str; 5] = ["tile_m", "tile_n", "num_wg", "pv_is_rs", "overlap_wg"];

    /// The value of a field by name, a switch as 0 or 1.
    pub fn field(&self, name: &str) -> Option<u32> {
        let values = [self.tile_m, self.tile_n, self.num_wg, self.pv_is_rs.into(), self.overlap_wg.into()];
        value_of(&Self::FIELDS, &values, name)
    }
}

impl BwdSpec {
    /// The names that [`BwdSpec::field`] knows.
    pub const FIELDS: [&str; 10] = [
        "tile_m",
        "tile_n",
        "num_wg",
        "sdp_swap_ab",
        "dkv_swap_ab",
        "dq_swap_ab",
        "atom_layout_m_sdp",
        "atom_layout_n_dkv",
        "atom_layout_m_dq",
        "mma_dkv_is_rs",
    ];

    /// The value of a field by name, a switch as 0 or 1.
    pub fn field(&self, name: &str) -> Option<u32> {
        let values = [
            self.tile_m,
            self.tile_n,
            self.num_wg,
            self.sdp_swap_ab.into(),
            self.dkv_swap_ab.into(),
            self.dq_swap_ab.into(),
            self.atom_layout_m_sdp,
            self.atom_layout_n_dkv,
            self.atom_layout_m_dq,
            self.mma_dkv_is_rs().into(),
        ];
        value_of(&Self::FIELDS, &values, name)
    }
}

fn value_of(names: &[&str], values: &[u32], name: &str) -> Option<u32> {
    names.iter().zip(values).find(|(known, _)| **known == name).map(|(_, &value)| value)
}

impl FromStr for Constraint {
    type Err = WhyError;

    /// Reads `tile_n=192`, `pv_is_rs=false`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = text.split_once('=').map(|(field, value)| (field.trim(), value.trim()));
        let parsed = parts.and_then(|(field, value)| {
            let value = match value {
                "true" => 1,
                "false" => 0,
                number => number.parse().ok()?,
            };
            (!field.is_empty()).then(|| Constraint { field: field.to_owned(), value })
        });
        parsed.ok_or_else(|| WhyError::Text(text.to_owned()))
    }
}

impl fmt::Display for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.field, self.value)
    }
}

/// Answers for all candidates that meet every constraint. Tile sides that the guide does not enumerate are
/// tried as well.
///
/// # Errors
/// [`WhyError::Field`] when no direction asked about has all the fields, [`WhyError::NoCandidate`] when
/// nothing matches, [`WhyError::Search`] for head dims and tile sides out of range.
pub fn why(dims: HeadDims, mode: Mode, constraints: &[Constraint]) -> Result<Why, WhyError> {
    dims.check().map_err(SearchError::from)?;
    let side = |name: &str| constraints.iter().find(|c| c.field == name).map(|c| [c.value]);
    let (tile_m, tile_n) = (side("tile_m"), side("tile_n"));
    let tiles = Tiles::with_lists(tile_m.as_ref().map(|s| &s[..]), tile_n.as_ref().map(|s| &s[..]));
    tiles.check()?;

    let unknown = |fields: &[&str]| constraints.iter().find(|c| !fields.contains(&c.field.as_str()));
    let (no_fwd, no_bwd) = (unknown(&FwdSpec::FIELDS), unknown(&BwdSpec::FIELDS));
    let fwd = mode.has_fwd() && no_fwd.is_none();
    let bwd = mode.has_bwd() && no_bwd.is_none();
    if !fwd && !bwd {
        let stranger = if mode.has_fwd() { no_fwd } else { no_bwd };
        let field = stranger.map(|c| c.field.clone()).unwrap_or_default();
        return Err(WhyError::Field { field });
    }
    let answer = Why {
        fwd: fwd.then(|| {
            fwd_where(dims, &tiles, |spec| constraints.iter().all(|c| spec.field(&c.field) == Some(c.value)))
        }),
        bwd: bwd.then(|| {
            bwd_where(dims, &tiles, |spec| constraints.iter().all(|c| spec.field(&c.field) == Some(c.value)))
        }),
    };
    let matched = answer.fwd.as_ref().is_some_and(|o| !o.is_empty())
        || answer.bwd.as_ref().is_some_and(|o| !o.is_empty());
    if !matched {
        let asked: Vec<String> = constraints.iter().map(Constraint::to_string).collect();
        return Err(WhyError::NoCandidate(asked.join(", ")));
    }
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::super::reject::Reason;
    use super::*;

    fn ask(dims: &str, mode: Mode, asked: &[&str]) -> Result<Why, WhyError> {
        let constraints: Result<Vec<Constraint>, WhyError> = asked.iter().map(|text| text.parse()).collect();
        why(dims.parse().expect("good head dims"), mode, &constraints?)
    }

    #[test]
    fn a_tile_that_does_not_fit_names_its_limit() {
        let answer =
            ask("256", Mode::Fwd, &["tile_n=192", "num_wg=2", "overlap_wg=false"]).expect("candidates");
        let outcome = answer.fwd.expect("forward was asked about");
        assert!(outcome.feasible.is_empty() && answer.bwd.is_none());
        assert_eq!(outcome.rejected.len(), 2);
        for miss in &outcome.rejected {
            assert_eq!(miss.reason, Reason::RegOverflow { need: 96 + 128, have: 216 });
        }
    }

    #[test]
    fn sides_outside_the_enumeration_are_tried() {
        let answer = ask("64", Mode::Both, &["tile_n=200"]).expect("candidates");
        assert!(answer.fwd.is_some_and(|o| o.feasible.iter().all(|c| c.tile_n == 200)));
        let bwd = answer.bwd.expect("the backward has tile_n");
        assert!(bwd.feasible.is_empty() && bwd.rejected.len() == 2 * 5 * 64);
    }

    #[test]
    fn a_field_of_one_direction_asks_about_that_direction() {
        let answer = ask("128", Mode::Both, &["mma_dkv_is_rs=true"]).expect("candidates");
        assert!(answer.fwd.is_none());
        assert!(answer.bwd.is_some_and(|o| o.feasible.iter().all(|c| c.mma_dkv_is_rs)));
    }

    #[test]
    fn questions_without_an_answer_say_why() {
        let refused = |asked: &[&str], part: &str| {
            let error = ask("128", Mode::Both, asked).expect_err("must be refused").to_string();
            assert!(error.contains(part), "{error} does not name {part}");
        };
        refused(&["tile_n"], "field=value");
        refused(&["tile_n=-1"], "field=value");
        refused(&["=3"], "field=value");
        refused(&["stages=3"], "unknown field 'stages'");
        refused(&["num_wg=4"], "num_wg is 2 or 3");
        refused(&["tile_n=0"], "1 to 1024");
        refused(&["pv_is_rs=true", "dq_swap_ab=true"], "unknown field");
    }
}
