//! Plans of problems: checked, dealt, and in as many stages as the cost model chooses.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

use fa_core::lengths::{Side, SideRows};
use fa_core::{Lengths, Problem};

use crate::cost::{self, Machine};
use crate::error::Error;
use crate::plan::{Scheme, ShardPlan};
use crate::shard::Layout;

/// The most ranks that are simulated to choose stages: more get the choice for so many.
const MAX_SIMULATED: usize = 16;

/// Choices of stages by what they are made for ([`ShardPlan::alike`]), and the most that are kept.
static CHOSEN: LazyLock<Mutex<HashMap<String, Option<usize>>>> = LazyLock::new(Mutex::default);
const MAX_CHOSEN: usize = 1024;

impl ShardPlan {
    /// The plan of `problem`, which is the whole one, for `world` ranks, with as many stages as the cost
    /// model chooses for a training step on GPUs with NVLink ([`cost::staged`] chooses for other machines).
    /// Keys of a decode that are in pages or have lengths in use are those of each rank: its cache, as large
    /// as that of any other.
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

    /// The plan that stands for this one and its like where stages are chosen, the same on every rank: of
    /// rounded lengths, evenly packed, over the ranks that are simulated.
    fn alike(&self) -> Result<ShardPlan, Error> {
        let lengths = self.problem().lengths;
        let side = |side: Side| {
            let rows = match side.rows {
                SideRows::Padded { len } => SideRows::Padded { len: rounded(len) },
                SideRows::Packed { total, max } => {
                    SideRows::Packed { total: rounded(total), max: rounded(max) }
                }
                SideRows::Paged { page, pages, max } => SideRows::Paged { page, pages, max },
            };
            Side { rows, used: side.used }
        };
        let mut alike = Lengths::of(lengths.sequences(), side(lengths.q()), side(lengths.k()));
        let starts = self.starts().map(|_| {
            let (count, total) = (lengths.sequences().next_power_of_two(), rounded(lengths.total_q()));
            let each = total.div_ceil(count);
            alike = Lengths::packed(count, total, total, each, each);
            (0..=count).map(|sequence| (sequence * each).min(total) as i32).collect()
        });
        let (problem, world) = (self.problem().with_lengths(alike), self.world().min(MAX_SIMULATED));
        ShardPlan::in_one_stage(&problem, starts, world, self.scheme(), self.queries().layout())
    }

    /// The same plan with the stages that the cost model chooses for a training step over NVLink; those that
    /// know better name them, or the machine ([`cost::staged`]).
    fn with_chosen_stages(self) -> Result<ShardPlan, Error> {
        let stages = match self.scheme() {
            Scheme::Gather | Scheme::Ulysses => self.alike().ok().and_then(|alike| chosen(&alike)),
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

/// The choice for a plan, which is known where it was made before: a simulation of all ranks takes
/// milliseconds, and a packed batch has a plan of its own at each step.
fn chosen(plan: &ShardPlan) -> Option<usize> {
    let key = plan.descriptor();
    let known = || CHOSEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(stages) = known().get(&key) {
        return *stages;
    }
    let stages = cost::stages(plan, Machine::DEFAULT);
    let mut all = known();
    if all.len() >= MAX_CHOSEN {
        all.clear();
    }
    all.insert(key, stages);
    stages
}

/// The length, up to a quarter longer, that others near it are taken for: of four between powers of two.
fn rounded(len: usize) -> usize {
    len.next_multiple_of((len.checked_next_power_of_two().unwrap_or(len) / 8).max(1))
}

/// The most stages, up to `most`, that divide `heads`.
fn stages_of(heads: usize, most: usize) -> usize {
    (1..=most.min(heads.max(1))).rev().find(|stages| heads.is_multiple_of(*stages)).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use fa_core::{Dtype, Mask};

    use super::*;

    /// Of every batch the starts differ; what is planned anew is the shards alone.
    #[test]
    fn a_packed_batch_of_known_shape_is_planned_in_less_than_a_millisecond() {
        let total = 65_536;
        let one = Problem::square(1, total, 64, 128, Mask::CAUSAL, Dtype::Bf16).with_heads_kv(8);
        let plan = |step: usize, scheme| {
            let starts: Vec<i32> =
                (0..=20).map(|at| if at == 20 { total } else { at * (3000 + step) } as i32).collect();
            let problem = one.with_lengths(Lengths::packed(20, total, total, 20_000, 20_000));
            let begun = Instant::now();
            let plan = ShardPlan::packed(&problem, &starts, 8, scheme, Layout::Zigzag).unwrap();
            (begun.elapsed(), plan.stages())
        };
        for scheme in [Scheme::Gather, Scheme::Ulysses, Scheme::Ring] {
            let (_, stages) = plan(0, scheme);
            let later: Vec<(Duration, usize)> = (1..20).map(|step| plan(step, scheme)).collect();
            assert!(later.iter().all(|(_, other)| *other == stages), "{later:?}");
            let least = later.iter().map(|(time, _)| *time).min().unwrap();
            assert!(least < Duration::from_millis(1), "{}: {least:?}", scheme.name());
        }
    }

    #[test]
    fn usual_lengths_are_not_rounded() {
        for len in [0, 1, 2, 3, 5, 7, 1024, 8192, 10_240, 12_288, 131_072] {
            assert_eq!(rounded(len), len);
        }
        assert_eq!((rounded(8193), rounded(100_000), rounded(9)), (10_240, 114_688, 10));
    }
}
