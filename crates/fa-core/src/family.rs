//! The families of kernels, by the instructions that they use.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Arch;

/// Kernels that share their instructions, and so the architectures that they run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// mma.sync and cp.async: every architecture from 8.0 on.
    Sm80,
    /// wgmma, TMA and setmaxnreg: 9.0 only.
    Sm90,
    /// tcgen05, tensor memory and TMA: 10.0 and 10.3. Its kernels were assembled and emulated, never run on a
    /// GPU.
    Sm100,
}

impl Family {
    /// Every family, oldest first.
    pub const ALL: [Family; 3] = [Family::Sm80, Family::Sm90, Family::Sm100];

    /// The name on the command line and in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Family::Sm80 => "sm80",
            Family::Sm90 => "sm90",
            Family::Sm100 => "sm100",
        }
    }

    /// The family that is chosen for `arch` where none is named: the fastest whose kernels have been run on a
    /// GPU. (Those of [`Family::Sm100`] have not: until then SM100 runs those of [`Family::Sm80`].)
    pub fn native(arch: Arch) -> Family {
        if Family::Sm90.runs_on(arch) { Family::Sm90 } else { Family::Sm80 }
    }

    /// The architectures that have the family's instructions.
    pub const fn archs(self) -> &'static [Arch] {
        match self {
            Family::Sm80 => &Arch::ALL,
            Family::Sm90 => &[Arch::Sm90],
            Family::Sm100 => &[Arch::Sm100, Arch::Sm103],
        }
    }

    /// The suffix of the target that the family's code is compiled for: `a` where it runs on that one
    /// architecture (`sm_90a`), `f` where it also runs on later ones of the same major number (`sm_100f`).
    pub const fn target_suffix(self) -> &'static str {
        match self {
            Family::Sm80 => "",
            Family::Sm90 => "a",
            Family::Sm100 => "f",
        }
    }

    /// Whether `arch` has the family's instructions.
    pub fn runs_on(self, arch: Arch) -> bool {
        self.archs().contains(&arch)
    }

    /// The instructions that the family's kernels need, and which architectures have them, as error messages
    /// say it.
    pub const fn needs(self) -> &'static str {
        match self {
            Family::Sm80 => "mma.sync and cp.async, which sm80 and later have",
            Family::Sm90 => "wgmma, which only sm90 has",
            Family::Sm100 => "tcgen05, which sm100 and sm103 have",
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A text that is not the name of a [`Family`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown kernel family '{0}': use sm80, sm90 or sm100")]
pub struct ParseFamilyError(pub String);

impl FromStr for Family {
    type Err = ParseFamilyError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = Family::ALL.into_iter().find(|family| family.name() == text);
        known.ok_or_else(|| ParseFamilyError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for family in Family::ALL {
            assert_eq!(family.name().parse(), Ok(family));
            assert_eq!(serde_json::to_string(&family).unwrap(), format!("\"{family}\""));
        }
        assert_eq!("sm120".parse::<Family>(), Err(ParseFamilyError("sm120".into())));
    }

    #[test]
    fn the_native_family_runs_there() {
        for arch in Arch::ALL {
            assert!(Family::native(arch).runs_on(arch));
            assert_eq!(Family::Sm90.runs_on(arch), arch.has_wgmma());
            assert_eq!(Family::Sm100.runs_on(arch), arch.has_tcgen05());
            assert_eq!(Family::native(arch) == Family::Sm90, arch == Arch::Sm90);
        }
    }
}
