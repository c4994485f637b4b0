//! What a kernel is chosen for.

use fa_core::{Division, Family, Pass, Problem};

/// A problem and what the caller decides of its kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Asked<'a> {
    pub problem: &'a Problem,
    /// `None` for the fastest that the GPU has.
    pub family: Option<Family>,
    pub pass: Pass,
    /// What the caller decides of a forward.
    pub division: Division,
}

impl<'a> Asked<'a> {
    pub(crate) fn of(problem: &'a Problem, pass: Pass) -> Asked<'a> {
        Asked { problem, family: None, pass, division: Division::PLANNED }
    }

    /// Everything that a choice depends on, as text; looked up when a problem is bound, never in a launch.
    pub(super) fn key(&self) -> String {
        let Asked { problem, family, pass, division: Division { splits, pack_gqa } } = *self;
        // Of how many parts there are only the launch takes notice.
        let split = splits.map(|parts| parts > 1);
        format!("{:?}", (problem, family, pass, split, pack_gqa))
    }
}
