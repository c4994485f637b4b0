//! The guide's search: enumerate, check, rank.

use fa_core::Arch;
use serde::{Deserialize, Serialize};

use crate::head_dims::{HeadDims, HeadDimsError};

use super::mode::Mode;

use super::bwd::BwdConfig;
use super::candidates::{self, BWD_TILES, BwdSpec, FWD_TILE_N, FwdSpec};
use super::fwd::FwdConfig;
use super::reject::{Explain, Reason, Rejected};
use super::{bwd, fwd, rank};

/// The guide counts with head dims rounded up to multiples of this.
pub const HEAD_DIM_GRANULE: u32 = 32;

/// The largest tile side that a search takes.
pub const MAX_TILE: u32 = 1024;

/// The tile sides to enumerate. The forward has no choice of tile_m: it is `64 * num_wg`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Forward tile_n.
    pub fwd_n: Vec<u32>,
    /// Backward tile_m.
    pub bwd_m: Vec<u32>,
    /// Backward tile_n.
    pub bwd_n: Vec<u32>,
}

/// A search that cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SearchError {
    /// A head dim is out of range.
    #[error(transparent)]
    HeadDims(#[from] HeadDimsError),
    /// A tile side is out of range.
    #[error("{name} holds {value}: a tile side is 1 to {MAX_TILE}")]
    Tile {
        /// The list.
        name: &'static str,
        /// The value in it.
        value: u32,
    },
}

/// The candidates of one direction, parted into those that fit, best first, and those that do not, as
/// enumerated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome<C, S> {
    /// Configurations with their account, best first.
    pub feasible: Vec<C>,
    /// Candidates with the first limit that each breaks.
    pub rejected: Vec<Rejected<S>>,
}

/// What `cargo xtask search` prints.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SearchResult {
    /// The architecture searched for.
    pub arch: Arch,
    /// Head dim of Q and K as asked for (the model pads it to a multiple of [`HEAD_DIM_GRANULE`]).
    pub head_dim: u32,
    /// Head dim of V as asked for.
    pub head_dim_v: u32,
    /// Forward configurations, best first; empty when only the backward was searched.
    pub fwd: Vec<FwdConfig>,
    /// Backward configurations, best first; empty when only the forward was searched.
    pub bwd: Vec<BwdConfig>,
    /// What the limits rejected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub explain: Option<SearchExplain>,
}

/// What the limits rejected in each direction; `None` for one that was not searched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SearchExplain {
    /// Forward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fwd: Option<Explain<FwdSpec>>,
    /// Backward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bwd: Option<Explain<BwdSpec>>,
}

impl Default for Tiles {
    /// The guide's choices.
    fn default() -> Self {
        Tiles { fwd_n: FWD_TILE_N.into(), bwd_m: BWD_TILES.into(), bwd_n: BWD_TILES.into() }
    }
}

impl Tiles {
    /// The guide's choices, with a list of tile_m for the backward and of tile_n for both in place of its
    /// own. A value given twice counts once.
    pub fn with_lists(tile_m: Option<&[u32]>, tile_n: Option<&[u32]>) -> Tiles {
        let mut tiles = Tiles::default();
        if let Some(list) = tile_m {
            tiles.bwd_m = without_repeats(list);
        }
        if let Some(list) = tile_n {
            tiles.fwd_n = without_repeats(list);
            tiles.bwd_n = tiles.fwd_n.clone();
        }
        tiles
    }

    /// Checks every side against [`MAX_TILE`].
    ///
    /// # Errors
    /// [`SearchError::Tile`].
    pub fn check(&self) -> Result<(), SearchError> {
        for (name, list) in
            [("fwd tile_n", &self.fwd_n), ("bwd tile_m", &self.bwd_m), ("bwd tile_n", &self.bwd_n)]
        {
            if let Some(&value) = list.iter().find(|side| !(1..=MAX_TILE).contains(*side)) {
                return Err(SearchError::Tile { name, value });
            }
        }
        Ok(())
    }
}

fn without_repeats(list: &[u32]) -> Vec<u32> {
    let mut unique = Vec::with_capacity(list.len());
    for &value in list {
        if !unique.contains(&value) {
            unique.push(value);
        }
    }
    unique
}

impl<C, S: Copy> Outcome<C, S> {
    fn of(specs: Vec<S>, check: impl Fn(&S) -> Result<C, Reason>) -> Outcome<C, S> {
        let mut outcome = Outcome { feasible: Vec::new(), rejected: Vec::with_capacity(specs.len()) };
        for spec in specs {
            match check(&spec) {
                Ok(config) => outcome.feasible.push(config),
                Err(reason) => outcome.rejected.push(Rejected { spec, reason }),
            }
        }
        outcome
    }

    /// Whether there was no candidate at all.
    pub const fn is_empty(&self) -> bool {
        self.feasible.is_empty() && self.rejected.is_empty()
    }

    /// Counts by limit, and the nearest misses.
    pub fn explain(&self) -> Explain<S> {
        Explain::of(self.feasible.len(), &self.rejected)
    }
}

/// The forward candidates that `keep` lets through, checked and ranked.
pub(super) fn fwd_where(
    dims: HeadDims,
    tiles: &Tiles,
    keep: impl Fn(&FwdSpec) -> bool,
) -> Outcome<FwdConfig, FwdSpec> {
    let dims = dims.padded(HEAD_DIM_GRANULE);
    let specs = candidates::fwd(&tiles.fwd_n).into_iter().filter(keep).collect();
    let mut outcome = Outcome::of(specs, |spec| fwd::check(dims, spec));
    rank::fwd(&mut outcome.feasible);
    outcome
}

/// The guide's backward tiles that fit the extents of a kernel's head dims, which are not rounded up, best
/// first.
pub(crate) fn bwd_of_extents(extents: HeadDims) -> Vec<BwdConfig> {
    bwd_of(extents, candidates::bwd(&BWD_TILES, &BWD_TILES)).feasible
}

fn bwd_of(dims: HeadDims, specs: Vec<BwdSpec>) -> Outcome<BwdConfig, BwdSpec> {
    let mut outcome = Outcome::of(specs, |spec| bwd::check(dims, spec));
    rank::bwd(&mut outcome.feasible);
    outcome
}

/// The backward candidates that `keep` lets through, checked and ranked.
pub(super) fn bwd_where(
    dims: HeadDims,
    tiles: &Tiles,
    keep: impl Fn(&BwdSpec) -> bool,
) -> Outcome<BwdConfig, BwdSpec> {
    let specs = candidates::bwd(&tiles.bwd_m, &tiles.bwd_n).into_iter().filter(keep).collect();
    bwd_of(dims.padded(HEAD_DIM_GRANULE), specs)
}

/// Searches the directions that `mode` names. The result always carries its explanation.
///
/// # Errors
/// A head dim or a tile side out of range. Finding nothing is no error.
pub fn search(dims: HeadDims, mode: Mode, tiles: &Tiles) -> Result<SearchResult, SearchError> {
    dims.check()?;
    tiles.check()?;
    let fwd = mode.has_fwd().then(|| fwd_where(dims, tiles, |_| true));
    let bwd = mode.has_bwd().then(|| bwd_where(dims, tiles, |_| true));
    let explain =
        SearchExplain { fwd: fwd.as_ref().map(Outcome::explain), bwd: bwd.as_ref().map(Outcome::explain) };
    Ok(SearchResult {
        arch: Arch::Sm90,
        head_dim: dims.head_dim,
        head_dim_v: dims.head_dim_v,
        fwd: fwd.map(|outcome| outcome.feasible).unwrap_or_default(),
        bwd: bwd.map(|outcome| outcome.feasible).unwrap_or_default(),
        explain: Some(explain),
    })
}
