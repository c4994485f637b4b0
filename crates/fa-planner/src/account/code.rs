//! What the kernels' device code has: one list, which planner and launch both ask.

use fa_core::{Kernel, KernelSpec};

/// What a kernel can be compiled with beyond dense tiles of uniform problems.
struct Code {
    varied: bool,
    paged: bool,
    alibi: bool,
    sinks: bool,
    split: bool,
    /// Heads of a group in the rows of a tile.
    packs_gqa: bool,
}

/// Dense tiles, with every change of scores.
const DENSE: Code =
    Code { varied: false, paged: false, alibi: true, sinks: true, split: false, packs_gqa: false };

/// What the device code of a kernel has. A switch is turned on with the code that honours it.
const fn code_of(kernel: &Kernel) -> Code {
    match kernel {
        Kernel::Sm80Fwd(_) => Code { varied: true, paged: true, split: true, packs_gqa: true, ..DENSE },
        Kernel::Sm90Fwd(_) => Code { varied: true, paged: true, split: true, packs_gqa: true, ..DENSE },
        Kernel::Sm80Bwd(_) | Kernel::Sm90Bwd(_) => Code { varied: true, ..DENSE },
    }
}

/// The first thing that `spec` asks for and its kernel has no device code for; `None` where it has all.
pub fn missing_code(spec: &KernelSpec) -> Option<&'static str> {
    let KernelSpec { score, reads, split, .. } = spec;
    let code = code_of(&spec.kernel);
    [
        (reads.varied && !code.varied, "lengths on the device"),
        (reads.paged && !code.paged, "keys in pages"),
        (score.alibi && !code.alibi, "alibi"),
        (score.sinks && !code.sinks, "sinks"),
        (*split && !code.split, "split"),
        (spec.traits().packs_gqa && !code.packs_gqa, "pack_gqa"),
    ]
    .into_iter()
    .find_map(|(lacks, what)| lacks.then_some(what))
}
