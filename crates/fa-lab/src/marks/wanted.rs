//! One shape of a list.

use std::collections::BTreeMap;

use fa_core::Problem;

/// A shape to measure.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// The model that it is of, for tables.
    pub name: Option<&'static str>,
    /// The problem.
    pub problem: Problem,
    /// Rows are summed up by this.
    pub group: &'static str,
    /// Rates that others published or measured for this shape on an H100, in TFLOP/s.
    pub recorded: BTreeMap<String, f64>,
}

impl Wanted {
    /// A shape with nothing to go with it.
    pub fn new(problem: Problem, group: &'static str) -> Wanted {
        Wanted { name: None, problem, group, recorded: BTreeMap::new() }
    }
}
