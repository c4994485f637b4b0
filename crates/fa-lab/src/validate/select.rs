//! The selection of cases.

use std::collections::HashSet;

use fa_core::{Arch, Family, Pass, ShippedSpec};
use fa_kernels::specs;
use fa_planner::account::account;

use super::options::{Cases, Options};
use super::{configs, sanitize};
use crate::error::{Error, Result};
use crate::grid::{self, Action, Case, Extent, knobs};
use crate::ledger::{Unit, units};

/// Runs of each repeated case of the whole grid.
const REPEAT: usize = 1000;

/// The cases of `options` for kernels of `family` on `arch`; none for a soak, which draws its own.
///
/// # Errors
/// A shipped spec that is not valid, and configurations of head dims that the family has no kernels for.
pub(super) fn select(options: &Options, arch: Arch, family: Family) -> Result<Vec<Case>> {
    let mut chosen = match &options.cases {
        Cases::Grid { extent, repeat } => of_grid(options.pass, *extent, *repeat, arch, family)?,
        Cases::Spec { spec, repeat } => {
            let mut cases = grid::of_spec("spec", &spec.to_string(), spec, Extent::Full);
            let repeated = cases.iter().max_by_key(|case| case.problem.lengths.max_q().min(1024)).cloned();
            cases.extend(repeated.map(|case| Case { action: Action::Repeat(*repeat), ..case }));
            cases
        }
        Cases::Units { keys, extent, library } => {
            let own = |unit: &Unit| keys.contains(&unit.key());
            let mut cases: Vec<Case> =
                units()?.iter().filter(|unit| own(unit)).flat_map(|unit| unit.cases(*extent)).collect();
            if *library {
                let mut seen: HashSet<String> = cases.iter().map(Case::name).collect();
                let others = of_grid(options.pass, *extent, REPEAT, arch, family)?;
                cases.extend(others.into_iter().filter(|case| seen.insert(case.name())));
            }
            cases
        }
        Cases::Sanitize => sanitize::cases(options.pass),
        Cases::Configs { head_dims } => {
            configs::cases(&crate::configs::list(head_dims, options.pass, family, arch)?)
        }
        Cases::Soak { .. } => Vec::new(),
    };
    if !options.groups.is_empty() {
        chosen.retain(|case| options.groups.iter().any(|group| group == case.group));
    }
    chosen.retain(|case| options.kind.has(case));
    if let Some(filter) = &options.filter {
        chosen.retain(|case| case.name().contains(filter.as_str()));
    }
    Ok(chosen)
}

fn of_grid(pass: Pass, extent: Extent, repeat: usize, arch: Arch, family: Family) -> Result<Vec<Case>> {
    let library = if pass.is_backward() { grid::gradients } else { grid::library };
    let mut cases = library(extent, repeat);
    let serving = if pass.is_backward() { grid::serving_gradients } else { grid::serving };
    cases.extend(serving(extent, repeat));
    let files = specs::shipped();
    for file in files.map_err(|(path, error)| Error::Record(format!("specs/{path}: {error}")))? {
        let (name, ShippedSpec { archs, spec }) = (file.path, file.shipped);
        let of_the_pass = spec.kernel.is_backward() == pass.is_backward();
        // Records know a kernel by its sources, whatever the target: one that ships for other architectures
        // is validated where it runs.
        let runs = archs.contains(&arch) || account(&spec, arch).is_ok();
        if runs && spec.kernel.family() == family && of_the_pass {
            cases.extend(grid::of_spec("shipped", name, &spec, extent));
        }
    }
    // The switches of a backward are covered by the planner's configurations: [`Cases::Configs`].
    let knobs = if pass.is_backward() { Vec::new() } else { knobs::specs(family, arch) };
    for knob in knobs {
        cases.extend(grid::of_spec("knobs", &knob.name, &knob.spec, Extent::Quick));
    }
    Ok(cases)
}

#[cfg(test)]
mod tests {
    use fa_core::{DescaleForm, Dtype};

    use super::super::options::Kind;
    use super::*;

    #[test]
    fn groups_and_filters_choose_cases() {
        let chosen = |groups: &[&str], filter: Option<&str>, pass| {
            let options = Options {
                family: Some(Family::Sm90),
                pass,
                cases: Cases::Grid { extent: Extent::Quick, repeat: 100 },
                groups: groups.iter().map(|&group| group.to_owned()).collect(),
                kind: Kind::default(),
                filter: filter.map(str::to_owned),
                watchdog: 60,
            };
            select(&options, Arch::Sm90, Family::Sm90).expect("cases")
        };
        let some = chosen(&["packed", "known"], None, Pass::Forward);
        assert!(some.iter().any(|case| case.group == "known") && some.len() > 40);
        assert!(some.iter().all(|case| ["packed", "known"].contains(&case.group)));
        let bugs = chosen(&["known"], Some("1619"), Pass::BACKWARD);
        assert_eq!(bugs.len(), 1);
        assert!(bugs[0].pass.is_backward());
    }

    #[test]
    fn kinds_choose_8_bit_caches_fp8_and_latents() {
        let count = |kind| {
            let options = Options {
                family: Some(Family::Sm90),
                pass: Pass::Forward,
                cases: Cases::Grid { extent: Extent::Quick, repeat: 100 },
                groups: Vec::new(),
                kind,
                filter: None,
                watchdog: 60,
            };
            let cases = select(&options, Arch::Sm90, Family::Sm90).expect("cases");
            assert!(cases.iter().all(|case| kind.has(case)));
            let appends = cases.iter().filter(|case| case.append.is_some()).count();
            (cases.len() > 20, appends > 0)
        };
        let fp8 = Kind { dtype: Some(Dtype::E4m3), ..Kind::default() };
        let int8 = Kind { kv_dtype: Some(Dtype::Int8), ..Kind::default() };
        let of_rows = Kind { kv_descale: Some(DescaleForm::TokenHead), ..int8 };
        let latent = Kind { latent: true, ..Kind::default() };
        assert_eq!([fp8, int8, of_rows].map(count), [(true, false), (true, true), (true, true)]);
        assert!(!count(latent).1);
        assert!(!count(Kind { dtype: Some(Dtype::F32), ..Kind::default() }).0);
    }

    #[test]
    fn kernels_that_ship_for_other_architectures_are_validated_where_they_run() {
        let options = Options {
            family: Some(Family::Sm80),
            pass: Pass::BACKWARD,
            cases: Cases::Grid { extent: Extent::Quick, repeat: 100 },
            groups: Vec::new(),
            kind: Kind::default(),
            filter: None,
            watchdog: 60,
        };
        let validated = |arch, file: &str| {
            let cases = select(&options, arch, Family::Sm80).expect("cases");
            cases.iter().any(|case| case.name().ends_with(&format!(" by {file}")))
        };
        let (small, large) = ("sm80/hd64-causal-bf16-99kb-bwd.ron", "sm80/hd64-causal-bf16-bwd.ron");
        assert!(validated(Arch::Sm90, small) && validated(Arch::Sm90, large));
        assert!(validated(Arch::Sm86, small) && !validated(Arch::Sm86, large), "163 KB do not fit");
    }
}
