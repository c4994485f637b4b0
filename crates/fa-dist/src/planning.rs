//! Plans of problems: checked, dealt, and in as many stages as the cost model chooses.

use fa_core::Problem;

use crate::cost::{self, Machine};
use crate::error::Error;
use crate::plan::{Scheme, ShardPlan};
use crate::shard::Layout;

/// The most ranks that are simulated to choose stages: more get the choice for so many.
const MAX_SIMULATED: usize = 64;

impl ShardPlan {
    /// The plan of `problem`, which is the whole one, for `world` ranks, with as many stages as the cost
    /// model chooses for a training step on GPUs with NVLink ([`cost::staged`] chooses for other machines).
    ///
    /// # Errors
    /// [`Error::Problem`], [`Error::Ranks`], and [`Error::Refused`] for what the scheme does not compute.
    pub fn new(problem: &Problem, world: usize, scheme: Scheme, layout: Layout) -> Result<ShardPlan, Error> {
        ShardPlan::in_one_stage(problem, None, world, scheme, layout)?.with_chosen_stages()
    }

    /// The plan of packed sequences of queries and keys alike, which begin at `starts`: `[batch + 1]`, as
    /// `cu_seqlens`. Their rows are dealt as those of one sequence; calls take no `cu_seqlens`.
    ///
    /// # Errors
    /// As [`ShardPlan::new`], and [`Error::Tensor`] for starts that do not fit the problem.
    pub fn packed(
        problem: &Problem,
        starts: &[i32],
        world: usize,
        scheme: Scheme,
        layout: Layout,
    ) -> Result<ShardPlan, Error> {
        let Problem { lengths, .. } = *problem;
        let refuse = |got: String, need: String| Err(Error::Tensor { tensor: "starts", got, need });
        if !lengths.q().is_packed() || lengths.q() != lengths.k() {
            let got = format!("given for {:?} and {:?}", lengths.q().rows, lengths.k().rows);
            return refuse(got, "packed queries and keys of the same lengths".to_owned());
        }
        let (sequences, total, most) = (lengths.sequences(), lengths.total_q(), lengths.max_q());
        let ends = starts.first() == Some(&0) && starts.last().is_some_and(|end| *end as usize == total);
        let fits = |pair: &[i32]| (0..=most as i64).contains(&(i64::from(pair[1]) - i64::from(pair[0])));
        if starts.len() != sequences + 1 || !ends || !starts.windows(2).all(fits) {
            let need =
                format!("{} values that ascend from 0 to the {total} rows, by at most {most}", sequences + 1);
            return refuse(format!("{starts:?}"), need);
        }
        let starts = Some(starts.to_vec());
        ShardPlan::in_one_stage(problem, starts, world, scheme, layout)?.with_chosen_stages()
    }

    /// The same plan with the stages that the cost model chooses for a training step over NVLink; those that
    /// know better name them, or the machine ([`cost::staged`]).
    fn with_chosen_stages(self) -> Result<ShardPlan, Error> {
        let stages = match self.scheme() {
            Scheme::Gather | Scheme::Ulysses if self.world() > MAX_SIMULATED => {
                // All ranks are simulated, each with all others.
                let (starts, layout) = (self.starts().map(<[i32]>::to_vec), self.queries().layout());
                let fewer =
                    ShardPlan::in_one_stage(self.problem(), starts, MAX_SIMULATED, self.scheme(), layout);
                fewer.ok().and_then(|fewer| cost::stages(&fewer, Machine::DEFAULT))
            }
            Scheme::Gather | Scheme::Ulysses => cost::stages(&self, Machine::DEFAULT),
            Scheme::Ring | Scheme::Decode => Some(1),
        };
        let stages = stages.filter(|stages| self.clone().with_stages(*stages).is_ok());
        // No GPU computes the problem: heads one by one, so that the next are on their way.
        let most = || match self.scheme() {
            Scheme::Gather => stages_of(self.problem().heads_kv, 8),
            Scheme::Ulysses => stages_of(self.own_kv_heads(), 2),
            Scheme::Ring | Scheme::Decode => 1,
        };
        let stages = stages.unwrap_or_else(most);
        self.with_stages(stages)
    }
}

/// The most stages, up to `most`, that divide `heads`.
fn stages_of(heads: usize, most: usize) -> usize {
    (1..=most.min(heads.max(1))).rev().find(|stages| heads.is_multiple_of(*stages)).unwrap_or(1)
}
