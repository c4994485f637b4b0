//! The ladders of a family, and what tells whether a record is of them as they are.

use fa_core::{Arch, Family};

use crate::error::{Error, Result};
use crate::ledger::digest as hash;
use crate::record::fingerprint;
use crate::shape::HeadDim;

use super::rungs::Ladder;
use super::{sm80, sm90};

/// The ladders of a family; without lengths and head dims those of the records.
pub(super) fn ladders(
    family: Family,
    arch: Arch,
    head_dims: &[HeadDim],
    seqlens: &[usize],
) -> Result<Vec<Ladder>> {
    match family {
        Family::Sm80 => Ok(sm80::ladders(arch, seqlens)?),
        Family::Sm90 => sm90::ladders(arch, head_dims, seqlens),
        Family::Sm100 => {
            let text = "sm100 kernels have no ladder, since no GPU has run them: use sm80 or sm90";
            Err(Error::Request(text.to_owned()))
        }
    }
}

/// The hash of the sources of every step of a family's ladders on `arch`: a record that has another one is of
/// other steps or of kernels that have changed since.
///
/// # Errors
/// A family without ladders there.
pub fn steps_digest(family: Family, arch: Arch) -> Result<String> {
    digest(&ladders(family, arch, &[], &[])?, arch)
}

/// [`steps_digest`] of these ladders. Steps that choose the fastest of several kernels are left out: that
/// choice is a result.
pub(super) fn digest(ladders: &[Ladder], arch: Arch) -> Result<String> {
    let mut texts = Vec::new();
    for (ladder, step) in ladders.iter().flat_map(|own| own.steps.iter().map(move |step| (own, step))) {
        if let Ok([spec]) = step.specs.as_deref() {
            let Ladder { name, problem, .. } = ladder;
            let length = problem.lengths.max_k();
            texts.push(format!("{name} {length} {} {}", step.name, fingerprint(spec, arch)?));
        }
    }
    Ok(hash(&texts))
}

#[cfg(test)]
mod tests {
    use fa_core::{Kernel, KernelSpec, Sm80Fwd};

    use super::*;

    #[test]
    fn a_digest_is_of_the_kernels_of_the_steps_and_not_of_a_choice() {
        let own = ladders(Family::Sm80, Arch::Sm90, &[], &[1024]).expect("plans");
        let of = |ladders: &[Ladder]| digest(ladders, Arch::Sm90).expect("sources");
        let before = of(&own);
        assert_eq!(before.len(), 16, "{before}");
        let mut other = own.clone();
        let tuned = other[2].steps.last_mut().expect("steps").specs.as_mut().expect("kernels");
        assert!(tuned.len() > 1 && tuned.pop().is_some());
        assert_eq!(of(&other), before);
        let specs = other[0].steps[0].specs.as_mut().expect("a kernel");
        let Kernel::Sm80Fwd(kernel) = &specs[0].kernel else { panic!("{} is no sm80_fwd", specs[0]) };
        let kernel = Kernel::Sm80Fwd(Sm80Fwd { loop_split: false, ..kernel.clone() });
        specs[0] = KernelSpec { kernel, ..specs[0].clone() };
        assert_ne!(of(&other), before);
        let refused = steps_digest(Family::Sm100, Arch::Sm100).expect_err("no ladder").to_string();
        assert!(refused.contains("sm80 or sm90"), "{refused}");
    }
}
