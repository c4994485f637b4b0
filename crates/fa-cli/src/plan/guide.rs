//! `fa plan --guide`: the feasible tiles for a pair of head dims, without a problem; `cargo xtask search`
//! lists the same.

use clap::{Args, Id};
use fa_core::Arch;
use fa_lab::shape::HeadDim;
use fa_planner::guide::report::{Query, Report};
use fa_planner::{HeadDims, Mode};

use crate::flags::{ProblemArgs, flags_of};
use crate::term::failure::InputError;

/// What plans a problem, but for its head dims. Flags of the search name these too: clap asks for no flag
/// that another rules out.
fn of_problems() -> impl Iterator<Item = Id> {
    let others = ["board", "problem_file", "family", "spec", "deterministic", "why", "report", "records"]
        .map(Id::from);
    flags_of::<ProblemArgs>().into_iter().filter(|flag| flag != "headdim").chain(others)
}

/// Flags of the search.
#[derive(Debug, Args)]
pub(crate) struct GuideArgs {
    /// List the feasible tiles for the head dims instead of planning a problem: on sm90 by the model of the
    /// block size tuning guide, elsewhere by the planner's own
    #[arg(long, conflicts_with_all = of_problems())]
    pub guide: bool,
    /// With --guide: backward tile_m to try instead of 64,80,96,112,128; on architectures other than sm90
    /// only tiles with one of these
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    #[arg(requires = "guide", conflicts_with_all = of_problems())]
    pub tile_m: Option<Vec<u32>>,
    /// With --guide: tile_n to try instead of 64 to 192 (forward) and 64 to 128 (backward) in steps of 16; on
    /// architectures other than sm90 only tiles with one of these
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    #[arg(requires = "guide", conflicts_with_all = of_problems())]
    pub tile_n: Option<Vec<u32>>,
    /// With --guide: add how many candidates each limit rejected and the nearest miss of each kind; in the
    /// table also the exact account of the best
    #[arg(long, requires = "guide", conflicts_with_all = of_problems())]
    pub explain: bool,
}

impl GuideArgs {
    /// Searches.
    ///
    /// # Errors
    /// [`InputError::Usage`] for head dims, tile sides and a limit out of range, and a tile_m that nothing
    /// reads.
    pub(crate) fn search(
        &self,
        head_dim: HeadDim,
        mode: Mode,
        arch: Arch,
        limit: Option<usize>,
    ) -> Result<Report, InputError> {
        if limit == Some(0) {
            return Err(InputError::Usage("-n 0 lists nothing: with --guide it is at least 1".to_owned()));
        }
        let query = Query {
            head_dims: head_dims(head_dim)?,
            mode,
            arch,
            tile_m: self.tile_m.clone(),
            tile_n: self.tile_n.clone(),
            limit,
            explain: self.explain,
        };
        query.run().map_err(|error| InputError::Usage(error.to_string()))
    }
}

fn head_dims(HeadDim { qk, v }: HeadDim) -> Result<HeadDims, InputError> {
    let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let dims = HeadDims { head_dim: narrow(qk), head_dim_v: narrow(v) };
    dims.check().map_err(|error| InputError::Usage(error.to_string()))?;
    Ok(dims)
}
