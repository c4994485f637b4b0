//! What a kernel is chosen for.

use fa_core::{Division, Family, Pass, Problem, ProblemKey};

/// A problem and what the caller decides of its kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Asked<'a> {
    /// What the kernel is bound to.
    pub problem: &'a Problem,
    /// What it is chosen for: the problem, or one like it that stands for several.
    pub like: &'a Problem,
    /// `None` for the fastest that the GPU has.
    pub family: Option<Family>,
    pub pass: Pass,
    /// What the caller decides of a forward.
    pub division: Division,
    /// Whether nothing that is measured on this machine may change the kernel.
    pub pinned: bool,
}

impl<'a> Asked<'a> {
    pub(crate) fn of(problem: &'a Problem, pass: Pass) -> Asked<'a> {
        Asked { problem, like: problem, family: None, pass, division: Division::PLANNED, pinned: false }
    }

    /// Everything that a choice depends on; looked up when a problem is bound, never in a launch.
    pub(super) fn key(&self) -> ChoiceKey {
        let Asked { problem: _, like, family, pass, division: Division { splits, pack_gqa }, pinned } = *self;
        // Of how many parts there are only the launch takes notice.
        let split = splits.map(|parts| parts > 1);
        ChoiceKey { problem: ProblemKey::from(like), family, pass, split, pack_gqa, pinned }
    }
}

/// The key of a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ChoiceKey {
    problem: ProblemKey,
    family: Option<Family>,
    pass: Pass,
    /// Whether the caller divides keys.
    split: Option<bool>,
    pack_gqa: Option<bool>,
    pinned: bool,
}
