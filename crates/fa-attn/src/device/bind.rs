//! What a caller decides of the kernel that is bound to a problem.

use fa_core::{Division, Family, KernelSpec, Pass, Problem, with_methods};

use crate::error::Error;

/// What a caller decides of the kernel that [`Gpu::bind`](super::Gpu::bind) takes; by default nothing.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct BindOptions {
    /// The family of the kernel, whether or not it is the fastest here; `None` for the fastest.
    pub family: Option<Family>,
    /// How a forward's work is divided among CTAs. What is not left to the planner is not tuned.
    pub division: Division,
    /// Whether the kernel is chosen for rounded-up lengths: keys to multiples of 128 for up to 16 queries,
    /// rows of packed batches to multiples of 1,024. Meant for lengths that change with every call, as with a
    /// growing cache: choosing takes longer than a launch, and tuning would measure every length. Without
    /// effect where `spec` leaves nothing to choose.
    pub rounded: bool,
    /// Whether results keep their bits from run to run: the kernel is the planner's, or that of a table that
    /// ships with the library, and no measurement on this machine changes it. Deterministic gradients are
    /// never measured by [`crate::Tuning`]; this is for the forward beside them.
    pub pinned: bool,
    /// The kernel.
    pub spec: Option<KernelSpec>,
}

impl BindOptions {
    with_methods! {
        with_family(family: Option<Family>),
        with_division(division: Division),
        with_rounded(rounded: bool),
        with_pinned(pinned: bool),
        with_spec(spec: Option<KernelSpec>),
    }

    /// Checks that the options go together and with the pass, and that the caller's kernel is what they ask
    /// for.
    ///
    /// # Errors
    /// [`Error::BindOption`], and [`fa_kernels::Error::Mismatch`] for a kernel of another pass.
    pub(super) fn check(&self, problem: &Problem, pass: Pass) -> Result<(), Error> {
        let BindOptions { family, division, rounded: _, pinned: _, spec } = self;
        let refuse = |option, reason| Err(Error::BindOption { option, reason });
        if pass.is_backward() && *division != Division::PLANNED {
            return refuse("division", "a backward is divided as planned: leave it out".to_owned());
        }
        let Some(spec) = spec else { return Ok(()) };
        let own = spec.kernel.pass();
        if own.is_backward() != pass.is_backward() {
            let name = |pass: Pass| format!("the {}", pass.name());
            let (kernel, problem) = (name(own), name(pass));
            return Err(fa_kernels::Error::Mismatch { what: "pass", kernel, problem }.into());
        }
        if pass.deterministic() && !own.deterministic() {
            return refuse("spec", format!("{spec} is not deterministic: use a kernel that is"));
        }
        if let Some(family) = family.filter(|family| *family != spec.kernel.family()) {
            return refuse("family", format!("{spec} is not of {family}: leave one of both out"));
        }
        // A kernel that can divide keys may leave them in one part.
        let parts = division.splits.filter(|parts| *parts > 1);
        if !(Division { splits: parts, ..*division }).admits(spec, problem) {
            let Division { splits, pack_gqa } = division;
            let asked = format!("splits {splits:?} and pack_gqa {pack_gqa:?}");
            return refuse("division", format!("{spec} does not have {asked}: leave one of both out"));
        }
        Ok(())
    }
}
