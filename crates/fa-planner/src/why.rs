//! "Why not?": what became of the candidates with given values, as in `fa plan --why tile_n=192,num_wg=2`.

use fa_core::KernelSpec;
use serde::Serialize;

use crate::plan::{Plan, PlanSet, RejectedSpec};

/// The candidates that a query selects.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Why {
    /// The query.
    pub query: String,
    /// Those that fit, with their rank (1 is the best of all) and their time as a multiple of the best's.
    pub feasible: Vec<Ranked>,
    /// Those that do not, with the reason.
    pub rejected: Vec<RejectedSpec>,
}

/// A plan with its rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ranked {
    /// 1 for the best of all.
    pub rank: usize,
    /// Predicted time as a multiple of the best's.
    pub slowdown: f64,
    /// The plan.
    pub plan: Plan,
}

/// What is wrong with a query.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WhyError {
    /// Not of the form `field=value`.
    #[error("'{0}' is not of the form field=value[,field=value...]: for example tile_n=192,num_wg=2")]
    Syntax(String),
    /// No kernel that was tried has the field.
    #[error("no kernel has a field '{name}': use {known}")]
    Field {
        /// The field.
        name: String,
        /// Those that there are.
        known: String,
    },
    /// No kernel that was tried has the value.
    #[error("no kernel with {name} = {value} is tried: there are {tried}")]
    Value {
        /// The field.
        name: String,
        /// The value.
        value: String,
        /// Those that are tried.
        tried: String,
    },
    /// Every value is tried, but never together.
    #[error("no kernel with {0} is tried: these values do not go together")]
    Combination(String),
}

/// What became of the candidates for which every `field=value` of `query` holds.
///
/// # Errors
/// [`WhyError`] where the query cannot be read or selects nothing.
pub fn why(set: &PlanSet, query: &str) -> Result<Why, WhyError> {
    let conditions = query
        .split(',')
        .map(|part| match part.split_once('=') {
            Some((name, value)) if !name.trim().is_empty() && !value.trim().is_empty() => {
                Ok((name.trim().replace('-', "_"), value.trim()))
            }
            _ => Err(WhyError::Syntax(part.to_owned())),
        })
        .collect::<Result<Vec<_>, _>>()?;
    for (name, value) in &conditions {
        let values = tried(set, name);
        if values.is_empty() {
            return Err(WhyError::Field { name: name.clone(), known: known(set).join(", ") });
        }
        if !values.iter().any(|tried| tried == value) {
            return Err(WhyError::Value {
                name: name.clone(),
                value: (*value).into(),
                tried: values.join(", "),
            });
        }
    }
    let selects =
        |spec: &KernelSpec| conditions.iter().all(|(name, v)| field(spec, name).as_deref() == Some(*v));
    let best = set.plans.first().map_or(0.0, |plan| plan.cost.seconds);
    let feasible: Vec<Ranked> = set
        .plans
        .iter()
        .enumerate()
        .filter(|(_, plan)| selects(&plan.spec))
        .map(|(i, plan)| Ranked { rank: i + 1, slowdown: plan.cost.seconds / best, plan: plan.clone() })
        .collect();
    let rejected: Vec<RejectedSpec> = set.rejected.iter().filter(|r| selects(&r.spec)).cloned().collect();
    if feasible.is_empty() && rejected.is_empty() {
        return Err(WhyError::Combination(query.to_owned()));
    }
    Ok(Why { query: query.to_owned(), feasible, rejected })
}

fn specs(set: &PlanSet) -> impl Iterator<Item = &KernelSpec> {
    set.plans.iter().map(|p| &p.spec).chain(set.rejected.iter().map(|r| &r.spec))
}

/// The parameter of all kernels that candidates for one problem differ in.
const SPLIT: &str = "split";

/// A parameter of a spec's kernel, or whether it splits keys, as its text form writes it.
fn field(spec: &KernelSpec, name: &str) -> Option<String> {
    let own = spec.kernel.param(name).map(|value| value.to_string());
    own.or_else(|| (name == SPLIT).then(|| spec.split.to_string()))
}

/// The parameters that a query may name: those of the kernels that were tried.
fn known(set: &PlanSet) -> Vec<&'static str> {
    let mut names: Vec<&'static str> = Vec::new();
    for param in specs(set).flat_map(|spec| spec.kernel.params()) {
        if !names.contains(&param.name) {
            names.push(param.name);
        }
    }
    names.extend((!names.is_empty()).then_some(SPLIT));
    names
}

/// The values of a field over all that was tried, in ascending order of numbers.
fn tried(set: &PlanSet, name: &str) -> Vec<String> {
    let mut values: Vec<String> = specs(set).filter_map(|spec| field(spec, name)).collect();
    values.sort_by_key(|value| (value.parse::<u32>().unwrap_or(0), value.clone()));
    values.dedup();
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{PlanOptions, explore};
    use fa_core::{Arch, Dtype, Mask, Problem};

    #[test]
    fn queries_select_and_say_what_else_there_is() {
        let problem = Problem::square(4, 4096, 16, 256, Mask::CAUSAL, Dtype::Bf16);
        let set = explore(&problem, Arch::Sm90, &PlanOptions::default()).expect("candidates");
        let found = why(&set, "tile_n=192").expect("tried");
        assert!(found.feasible.is_empty() && found.rejected.len() == 12, "{found:?}");
        let found = why(&set, "tile-n=64, num_wg=2").expect("tried");
        assert!(found.feasible.iter().all(|r| r.slowdown >= 1.0 && r.plan.spec.tile() == (128, 64)));
        for (query, part) in [
            ("tile_n", "form"),
            ("tile_n=", "form"),
            ("tile_o=3", "tile_m, tile_n, num_wg"),
            ("tile_n=72", "64, 80, 96"),
            ("scheduler=Static", "there are Dynamic"),
            ("num_wg=2,tile_m=192", "together"),
        ] {
            let error = why(&set, query).expect_err(query).to_string();
            assert!(error.contains(part), "{query}: {error}");
        }
    }
}
