//! Judges today's planner by records of `fa tune`, without a GPU: how far its first choices are behind the
//! best measured kernels.

use std::array::from_fn;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use fa_core::{Arch, Family, KernelSpec, Pass, Problem};
use fa_planner::cost::{CostConstants, predict, rank_correlation};
use fa_planner::kernels::unbound;
use fa_planner::plan::{PlanOptions, plan};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::report::{Distribution, NEAR};
use crate::error::{Error, Result};
use crate::summary;

/// The measurements of a record (`fa tune --json`) or its summary.
#[derive(Debug, Deserialize)]
struct Record {
    arch: Arch,
    seed: Option<u64>,
    problems: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
struct Entry {
    number: usize,
    problem: Problem,
    kind: String,
    #[serde(default)]
    deterministic: bool,
    family: Option<Family>,
    kernels: Vec<Measured>,
}

#[derive(Debug, Deserialize)]
struct Measured {
    spec: KernelSpec,
    ms: Option<f64>,
    again_ms: Option<f64>,
}

/// The planner's first choices for the problems of some records.
#[derive(Debug, Serialize)]
pub struct Judgement {
    /// By problem, in the order of the records.
    pub problems: Vec<Judged>,
    /// By pass and family (`bwd sm90`), then by record, then all together.
    pub groups: Vec<Group>,
}

/// First choices of some problems.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Group {
    /// What they have in common.
    pub name: String,
    /// How many.
    pub problems: usize,
    /// Those of them whose first choice was never measured.
    pub unmeasured: usize,
    /// The first choices that were measured.
    pub measured: Distribution,
    /// All of them, with an unmeasured first choice replaced by the first one in the planner's order that was
    /// measured.
    pub with_stand_ins: Distribution,
    /// Share of problems for which one of the first one, two, three, four tiles is within 3 % of the best.
    pub near_among_first_tiles: [f64; TILES],
}

/// So many of the planner's first tiles are compared, as many as `Tuning::ON_FIRST_USE` tries.
const TILES: usize = 4;

/// The planner's first choice for one problem.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Judged {
    /// The record's file name.
    pub record: String,
    /// Its seed, if its problems were drawn.
    pub seed: Option<u64>,
    /// The problem's number in the record.
    pub number: usize,
    /// The problem.
    pub problem: Problem,
    /// Its pass and family, as in `bwd sm90`.
    pub kernels: String,
    /// The planner's first choice.
    pub first_choice: String,
    /// Its predicted milliseconds.
    pub first_choice_predicted_ms: f64,
    /// Whether this very kernel was measured.
    pub is_measured: bool,
    /// The first choice, or else the first measured one in the planner's order, ignoring launch bounds and
    /// `persistent`; where the planner lists none of them any more, the one predicted to be the fastest.
    pub judged: Tried,
    /// The fastest.
    pub best: Tried,
    /// The time of `judged` over that of the fastest.
    pub over_best: f64,
    /// The least time of the planner's first one, two, three, four tiles, each by its first kernel that was
    /// measured, over that of the fastest.
    pub first_tiles_over_best: [f64; TILES],
    /// Spearman's, of predicted and measured time.
    pub rank_correlation: Option<f64>,
}

/// A kernel that was measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tried {
    /// Its short name.
    pub name: String,
    /// Predicted milliseconds.
    pub predicted_ms: f64,
    /// Measured milliseconds.
    pub ms: f64,
}

/// Plans every problem of the records and compares the first choices with what was measured. Problems none of
/// whose kernels was measured are left out.
///
/// # Errors
/// Files that cannot be read or are no records of `fa tune --json`; problems that no kernel computes any
/// more.
pub fn judge(records: &[PathBuf]) -> Result<Judgement> {
    let mut problems = Vec::new();
    for path in records {
        problems.extend(judged_of(path)?);
    }
    let mut names: Vec<String> = Vec::new();
    for judged in &problems {
        if !names.contains(&judged.kernels) {
            names.push(judged.kernels.clone());
        }
    }
    names.sort();
    let mut groups: Vec<Group> = names
        .into_iter()
        .map(|name| group(&problems, name, |judged, name| judged.kernels == *name))
        .collect();
    let mut files: Vec<String> = problems.iter().map(|judged| judged.record.clone()).collect();
    files.dedup();
    if files.len() > 1 {
        groups.extend(
            files.into_iter().map(|name| group(&problems, name, |judged, name| judged.record == *name)),
        );
    }
    groups.push(group(&problems, "all".to_owned(), |_, _| true));
    Ok(Judgement { problems, groups })
}

fn group(problems: &[Judged], name: String, is_of: impl Fn(&Judged, &String) -> bool) -> Group {
    let own: Vec<&Judged> = problems.iter().filter(|judged| is_of(judged, &name)).collect();
    let distribution = |own: &[&Judged]| {
        let correlations = own.iter().filter_map(|judged| judged.rank_correlation).collect::<Vec<f64>>();
        Distribution::of_ratios(own.iter().map(|judged| judged.over_best).collect(), &correlations)
    };
    let near = |tiles: usize| {
        let within = own.iter().filter(|judged| judged.first_tiles_over_best[tiles] <= NEAR).count();
        within as f64 / own.len().max(1) as f64
    };
    let measured: Vec<&Judged> = own.iter().copied().filter(|judged| judged.is_measured).collect();
    Group {
        name,
        problems: own.len(),
        unmeasured: own.len() - measured.len(),
        measured: distribution(&measured),
        with_stand_ins: distribution(&own),
        near_among_first_tiles: from_fn(near),
    }
}

fn judged_of(path: &Path) -> Result<Vec<Judged>> {
    let record: Record = summary::read(path, "fa tune")?;
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    let judged = |entry: &Entry| entry.judged(record.arch, &name, record.seed);
    let problems: Result<Vec<Option<Judged>>> = record.problems.par_iter().map(judged).collect();
    Ok(problems?.into_iter().flatten().collect())
}

/// A kernel of a record.
struct Timed {
    /// Place in the planner's order, and whether its launch bounds are others.
    place: (usize, bool),
    /// Tile and threads.
    tile: ((u32, u32), u32),
    /// By the first measurement.
    once: Tried,
    again_ms: Option<f64>,
}

impl Timed {
    /// Milliseconds by its last measurement.
    fn ms(&self) -> f64 {
        self.again_ms.unwrap_or(self.once.ms)
    }
}

impl Entry {
    fn judged(&self, arch: Arch, record: &str, seed: Option<u64>) -> Result<Option<Judged>> {
        let Entry { number, problem, kind, deterministic, family, .. } = self;
        let pass = match kind.as_str() {
            "fwd" => Pass::Forward,
            "bwd" => Pass::Backward { deterministic: *deterministic },
            other => return Err(Error::Request(format!("{record}: a pass '{other}': fwd or bwd"))),
        };
        let family = family.unwrap_or(Family::native(arch));
        let damaged = |why: &dyn Display| {
            Error::Request(format!(
                "{record}: problem {number} is damaged: {why}: use a record as it was written"
            ))
        };
        problem.check().map_err(|why| damaged(&why))?;
        let options = PlanOptions::default().with_family(Some(family)).with_pass(pass);
        let plans = plan(problem, arch, &options)?;
        let constants = CostConstants::of(arch);
        let mut timed = Vec::new();
        for Measured { spec, ms, again_ms } in &self.kernels {
            let Some(ms) = *ms else { continue };
            let exact = plans.iter().position(|plan| plan.spec == *spec);
            let alike = || plans.iter().position(|plan| unbound(&plan.spec) == unbound(spec));
            let place = (exact.or_else(alike).unwrap_or(usize::MAX), exact.is_none());
            let predicted_ms = 1e3 * predict(problem, spec, arch, &constants).seconds;
            let once = Tried { name: spec.to_string(), predicted_ms, ms };
            timed.push(Timed { place, tile: (spec.tile(), spec.threads()), once, again_ms: *again_ms });
        }
        timed.sort_by(|a, b| a.place.cmp(&b.place).then(a.once.predicted_ms.total_cmp(&b.once.predicted_ms)));
        let Some(judged) = timed.first() else { return Ok(None) };
        // The least of many measurements is biased by luck, so the second measurement counts.
        let comparable = |own: &Timed| match judged.again_ms {
            Some(_) => own.again_ms,
            None => Some(own.once.ms),
        };
        let times = timed.iter().filter_map(|own| Some((own, comparable(own)?)));
        let Some((best, least)) = times.min_by(|a, b| a.1.total_cmp(&b.1)) else { return Ok(None) };
        let mut tiles = Vec::<&Timed>::new();
        for own in &timed {
            if tiles.iter().all(|known| known.tile != own.tile) {
                tiles.push(own);
            }
        }
        let least_of = |count: usize| tiles.iter().take(count).map(|own| own.ms()).fold(f64::MAX, f64::min);
        let pairs: Vec<(f64, f64)> = timed.iter().map(|own| (own.once.predicted_ms, own.once.ms)).collect();
        Ok(Some(Judged {
            record: record.to_owned(),
            seed,
            number: *number,
            problem: *problem,
            kernels: format!("{kind} {}", family.name()),
            first_choice: plans[0].spec.to_string(),
            first_choice_predicted_ms: 1e3 * plans[0].cost.seconds,
            is_measured: judged.place == (0, false),
            judged: Tried { ms: judged.ms(), ..judged.once.clone() },
            best: Tried { ms: least, ..best.once.clone() },
            over_best: judged.ms() / least,
            first_tiles_over_best: from_fn(|tiles| least_of(tiles + 1) / least),
            rank_correlation: rank_correlation(&pairs),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn committed(seed: &str) -> PathBuf {
        let name = format!("random{seed}-nvidia-h100-80gb-hbm3.json");
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results/tune").join(name)
    }

    #[test]
    fn committed_records_are_judged_by_kernel_by_record_and_together() {
        let records: Vec<PathBuf> = ["", "-2", "-3", "-4", "-6"].map(committed).into();
        let Judgement { problems, groups } = judge(&records).expect("records");
        let names: Vec<&str> = groups.iter().map(|group| group.name.as_str()).collect();
        assert_eq!(names[..4], ["bwd sm80", "bwd sm90", "fwd sm80", "fwd sm90"]);
        let all = groups.last().expect("a group of all");
        assert_eq!((groups.len(), all.name.as_str(), all.problems), (4 + 5 + 1, "all", problems.len()));
        assert_eq!(all.with_stand_ins.problems, all.problems);
        assert_eq!(all.measured.problems + all.unmeasured, all.problems);
        assert!(groups[..4].iter().all(|group| group.problems == 36), "{groups:?}");
        let among = all.near_among_first_tiles;
        assert!(among.is_sorted() && among[1] >= 0.95 && among[3] >= 0.97, "{among:?}");
        for judged in &problems {
            assert!(judged.first_tiles_over_best.is_sorted_by(|few, more| few >= more), "{judged:?}");
            assert!(judged.over_best >= 1.0 || judged.best.ms == judged.judged.ms, "{judged:?}");
            assert!(!judged.is_measured || judged.judged.name == judged.first_choice, "{judged:?}");
        }
        // None of it is held out (NB-107).
        let near = |group: &Group| group.with_stand_ins.within_3_percent.expect("some were measured");
        assert!(near(&groups[1]) >= 0.97 && near(all) >= 0.89, "{groups:?}");
        assert!(all.with_stand_ins.within_8_percent >= Some(0.98), "{all:?}");
    }

    #[test]
    fn what_is_no_record_is_named() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        std::fs::write(file.path(), "{\"rows\": []}").expect("written");
        let error = judge(&[file.path().into()]).expect_err("no record").to_string();
        assert!(error.contains("is not a record of `fa tune`: missing field"), "{error}");
        let error = judge(&["no/such.json".into()]).expect_err("no file").to_string();
        assert!(error.starts_with("cannot read no/such.json"), "{error}");
    }
}
