//! What a GPU has to judge, and what it has judged.

use std::collections::HashMap;

use fa_core::{Arch, Family, Pass};

use super::code::launched;
use super::{Ledger, Standing, Tier};
use crate::error::Result;
use crate::grid::Extent;
use crate::validate::{CaseResult, Status};

/// Units that one worker judges: a family's kernels of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// The family.
    pub family: Family,
    /// The pass.
    pub pass: Pass,
}

impl Group {
    /// Those that a GPU of `arch` runs. The kernels that are for every GPU come first: append and merge are
    /// among them.
    pub fn on(arch: Arch) -> Vec<Group> {
        let families = [Family::Sm80, Family::Sm90, Family::Sm100].into_iter();
        let of = |family| [Pass::Forward, Pass::BACKWARD].map(|pass| Group { family, pass });
        let runs = |group: &Group| {
            group.family.runs_on(arch) && !(group.family == Family::Sm100 && group.pass.is_backward())
        };
        families.flat_map(of).filter(runs).collect()
    }

    /// The kernel's name.
    pub fn name(self) -> String {
        format!("{}_{}", self.family.name(), self.pass.short_name())
    }

    fn has(self, standing: &Standing) -> bool {
        match standing.unit.spec() {
            Some(spec) => {
                (spec.kernel.family(), spec.kernel.is_backward()) == (self.family, self.pass.is_backward())
            }
            None => self == Group { family: Family::Sm80, pass: Pass::Forward },
        }
    }
}

/// The units of a group that a GPU of `arch` has to judge for a tier; with `again` also those that it has.
pub fn due<'a>(
    ledger: &Ledger,
    standings: &'a [Standing],
    group: Group,
    (tier, arch): (Tier, Arch),
    again: bool,
) -> Vec<&'a Standing> {
    let enough = |own: Tier| own == tier || (tier == Tier::Quick && own == Tier::Grid);
    let is_due = |own: &&Standing| {
        let runs = own.unit.is_proven && group.has(own) && own.unit.runs_on(arch);
        runs && own.is_known() && (again || own.without(ledger, enough).next().is_some())
    };
    standings.iter().filter(is_due).collect()
}

/// Of units all of whose cases are right, the entries that these cases have launched.
///
/// # Errors
/// Those of the library for a problem that a kernel does not compute.
pub fn judged<'a>(
    units: &[&'a Standing],
    results: &[CaseResult],
    extent: Extent,
    sms: u32,
) -> Result<Vec<(&'a Standing, Vec<&'static str>)>> {
    let by_name: HashMap<&str, Status> =
        results.iter().map(|result| (result.name.as_str(), result.status)).collect();
    let is_right = |own: &&&Standing| {
        let cases = own.unit.cases(extent);
        let passed = |name: String| by_name.get(name.as_str()) == Some(&Status::Passed);
        !cases.is_empty() && cases.iter().all(|case| passed(case.name()))
    };
    let entries =
        |own: &&'a Standing| Ok((*own, launched(&own.unit, extent, sms)?.into_iter().collect::<Vec<_>>()));
    units.iter().filter(is_right).map(entries).collect()
}
