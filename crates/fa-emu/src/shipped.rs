//! The kernels that CI runs: shipped ones, and forms of them with variable lengths, pages, splits, slopes and
//! sinks.

use fa_core::{KernelSpec, Reads, SpecError};
use fa_planner::account::missing_code;

use crate::record::Candidate;
use crate::sweep::distinct;

/// Shipped files whose forms are run as well: every kernel, all masks, deterministic ones.
const BASES: [&str; 10] = [
    "sm100/hd128-causal-bf16.ron",
    "sm90/hd64-causal-bf16.ron",
    "sm90/hd128-full-f16.ron",
    "sm90/hd128-window-bf16.ron",
    "sm80/hd64-causal-bf16.ron",
    "sm80/hd128-window-bf16.ron",
    "sm90/hd64-causal-bf16-bwd.ron",
    "sm90/hd128-causal-deterministic-bf16-bwd.ron",
    "sm80/hd64-causal-bf16-bwd.ron",
    "sm80/hd128-causal-deterministic-bf16-bwd.ron",
];

/// Shipped kernels by their files, with the architectures for which their units differ; then the forms.
///
/// # Errors
/// A file that is not a spec, with its path.
pub fn shipped() -> Result<Vec<Candidate>, (&'static str, SpecError)> {
    let (mut all, mut of_bases) = (Vec::new(), Vec::new());
    for file in fa_kernels::specs::shipped()? {
        let spec = file.shipped.spec;
        let archs = distinct(&spec, &file.shipped.archs);
        if BASES.contains(&file.path) {
            for (form, spec) in forms(&spec) {
                of_bases.push(Candidate { name: format!("{} {form}", file.path), spec, arch: archs[0] });
            }
        }
        for arch in archs {
            all.push(Candidate { name: file.path.to_owned(), spec: spec.clone(), arch });
        }
    }
    all.extend(of_bases);
    Ok(all)
}

/// The forms of a kernel that have device code, by name.
pub(crate) fn forms(spec: &KernelSpec) -> Vec<(&'static str, KernelSpec)> {
    // varied, paged, split, slopes and sinks
    let all = [
        ("varlen", [true, false, false, false]),
        ("paged", [true, true, false, false]),
        ("split", [false, false, true, false]),
        ("alibi sinks", [false, false, false, true]),
        ("varlen alibi sinks", [true, false, false, true]),
        ("paged split alibi sinks", [true, true, true, true]),
    ];
    let is_backward = spec.kernel.is_backward();
    let form = |(name, [varied, paged, split, mods]): (&'static str, [bool; 4])| {
        // The last form of a forward covers slopes and sinks with varied lengths.
        let is_extra = varied && mods && paged == is_backward;
        let mut spec = spec.clone();
        spec.reads = Reads { varied, paged };
        spec.split = split;
        spec.score.alibi = mods;
        spec.score.sinks = mods;
        let exists = spec.check().is_ok() && missing_code(&spec).is_none();
        (exists && !is_extra).then_some((name, spec))
    };
    all.into_iter().filter_map(form).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_of_every_base_and_their_names_differ() {
        let all = shipped().unwrap();
        let mut names: Vec<_> = all.iter().map(|own| (&own.name, own.arch)).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
        for base in BASES {
            let forms = all.iter().filter(|own| own.name.starts_with(base)).count();
            assert!(forms > 1, "{base}: {forms}");
        }
    }
}
