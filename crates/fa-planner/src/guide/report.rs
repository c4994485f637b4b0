//! The report of a search for feasible tiles: on SM90 by the tuning guide's model, elsewhere by the planner's
//! own.

use std::fmt::Write;

use fa_core::Arch;
use serde::{Serialize, Serializer};

use crate::head_dims::HeadDims;
use crate::plan::PlanError;

use super::mode::Mode;
use super::other_archs::{self, Found};
use super::search::{SearchError, SearchResult, Tiles, search};
use super::text;

/// Configurations of each direction that the table lists unless a limit is given.
pub const TABLE_ROWS: usize = 10;

/// What to search for, and how much of the result to list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Query {
    /// Head dims, 1 to 576.
    pub head_dims: HeadDims,
    /// The directions.
    pub mode: Mode,
    /// The architecture.
    pub arch: Arch,
    /// tile_m of the backward in place of the guide's, each 1 to 1024; on architectures other than sm90 only
    /// tiles with one of these are listed, in both directions.
    pub tile_m: Option<Vec<u32>>,
    /// tile_n in place of the guide's, each 1 to 1024; on architectures other than sm90 as `tile_m`.
    pub tile_n: Option<Vec<u32>>,
    /// At most so many configurations of each direction; `None` for all, in the table [`TABLE_ROWS`].
    pub limit: Option<usize>,
    /// Whether to list what each limit rejected.
    pub explain: bool,
}

/// A search that cannot be made.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum QueryError {
    /// By the guide's model.
    #[error(transparent)]
    Guide(#[from] SearchError),
    /// By the planner's own.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A list of tile_m for forwards alone, which the guide's model does not read.
    #[error(
        "tile_m {0:?} is the backward's; a forward has 64 rows per MMA warpgroup on sm90: leave tile_m out, \
         or search for backwards too"
    )]
    ForwardTileM(Vec<u32>),
}

/// The result. It serializes as a [`SearchResult`] on sm90 and as a [`Found`] elsewhere, cut to what the
/// query lists.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    query: Query,
    result: Searched,
}

#[derive(Clone, Debug, PartialEq)]
enum Searched {
    Guide(Box<SearchResult>),
    Planned(Found),
}

impl Query {
    /// Searches.
    ///
    /// # Errors
    /// [`QueryError`] for head dims and tile sides out of range, and for a tile_m that nothing reads. Finding
    /// nothing is no error.
    pub fn run(self) -> Result<Report, QueryError> {
        if let (Arch::Sm90, Mode::Fwd, Some(tile_m)) = (self.arch, self.mode, &self.tile_m) {
            return Err(QueryError::ForwardTileM(tile_m.clone()));
        }
        let (tile_m, tile_n) = (self.tile_m.as_deref(), self.tile_n.as_deref());
        let result = if self.arch == Arch::Sm90 {
            Searched::Guide(Box::new(search(self.head_dims, self.mode, &Tiles::with_lists(tile_m, tile_n))?))
        } else {
            Searched::Planned(other_archs::search(self.head_dims, self.mode, self.arch, tile_m, tile_n)?)
        };
        Ok(Report { query: self, result })
    }
}

impl Report {
    /// As text: a table of each direction, with the nearest misses where nothing fits or the query asks for
    /// them.
    pub fn text(&self) -> String {
        let (n, explain) = (self.query.limit.unwrap_or(TABLE_ROWS), self.query.explain);
        match &self.result {
            Searched::Guide(result) => text::table(result, n, explain),
            Searched::Planned(found) => found.table(self.query.mode, n, explain),
        }
    }

    /// The nearest misses of each direction in which nothing fits, for people who read the report in another
    /// form; empty where something does.
    pub fn nothing_found(&self) -> String {
        let found = match &self.result {
            Searched::Guide(result) => return text::nothing_found(result),
            Searched::Planned(found) => found,
        };
        let mut text = String::new();
        for (mode, nothing) in [(Mode::Fwd, found.fwd.is_empty()), (Mode::Bwd, found.bwd.is_empty())] {
            if nothing && (self.query.mode == mode || self.query.mode == Mode::Both) {
                text.write_str(&found.table(mode, 0, true)).expect("writing to a string cannot fail");
            }
        }
        text
    }
}

impl Serialize for Report {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (n, explain) = (self.query.limit.unwrap_or(usize::MAX), self.query.explain);
        match &self.result {
            Searched::Guide(result) => {
                let mut listed = SearchResult::clone(result);
                listed.fwd.truncate(n);
                listed.bwd.truncate(n);
                listed.explain = listed.explain.filter(|_| explain);
                listed.serialize(serializer)
            }
            Searched::Planned(found) => {
                let mut listed = found.clone();
                listed.fwd.truncate(n);
                listed.bwd.truncate(n);
                listed.explain = listed.explain.filter(|_| explain);
                listed.serialize(serializer)
            }
        }
    }
}
