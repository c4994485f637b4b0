//! What device code a kernel has: planner and launch both ask.

use fa_core::KernelSpec;

/// The options that a kernel's device code honours, beyond dense tiles of uniform problems.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code {
    pub varied: bool,
    pub paged: bool,
    pub softcap: bool,
    pub alibi: bool,
    pub sinks: bool,
    pub split: bool,
    /// Masks and changes of scores of the caller's own.
    pub programs: bool,
    /// Heads of a group in the rows of a tile.
    pub packs_gqa: bool,
    /// K and V in codes.
    pub codes: bool,
}

impl Code {
    /// Dense tiles, with every change of scores. A kernel turns a switch on with the code that honours it.
    pub(crate) const DENSE: Code = Code {
        varied: false,
        paged: false,
        softcap: true,
        alibi: true,
        sinks: true,
        split: false,
        programs: true,
        packs_gqa: false,
        codes: false,
    };

    /// The first thing that `spec` asks for and this code lacks.
    pub(crate) fn missing(self, spec: &KernelSpec) -> Option<&'static str> {
        let KernelSpec { score, reads, split, .. } = spec;
        [
            (reads.varied && !self.varied, "lengths on the device"),
            (reads.paged && !self.paged, "keys in pages"),
            (score.softcap && !self.softcap, "softcap"),
            (score.alibi && !self.alibi, "alibi"),
            (score.sinks && !self.sinks, "sinks"),
            (score.program.is_some() && !self.programs, "programs"),
            (*split && !self.split, "split"),
            (spec.traits().packs_gqa && !self.packs_gqa, "pack_gqa"),
            (spec.types.kv.is_code() && !self.codes, "K and V in codes"),
        ]
        .into_iter()
        .find_map(|(lacks, what)| lacks.then_some(what))
    }
}
