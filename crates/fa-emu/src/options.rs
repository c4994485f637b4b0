//! How a pass is scheduled and what is checked.

use fa_core::KernelSpec;

/// Called with the number of CTAs that are done, and of all.
pub type Progress<'a> = &'a (dyn Fn(u32, u32) + 'a);

/// When asynchronous operations finish and who runs next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Pace {
    /// Operations finish at once, warps take turns.
    Eager = 0,
    /// Operations finish only when no thread can go on.
    Lazy = 1,
    /// By chance, from the seed.
    Random = 2,
    /// Operations take a time of the size that they take on a GPU: for a timeline that looks like one.
    Paced = 3,
}

/// How a pass is run and what is checked.
#[derive(Clone, Copy)]
pub struct Options<'a> {
    /// The seed of all that is left to chance.
    pub seed: u64,
    /// The schedule.
    pub pace: Pace,
    /// SMs of the emulated GPU: CTAs of a persistent kernel.
    pub sms: u32,
    /// CTAs that run at a time.
    pub resident: u32,
    /// Whether order is checked: races, proxy fences, reads of what was never written.
    pub order: bool,
    /// Whether what is on its way is NaN until it is there.
    pub poison: bool,
    /// Whether registers of products in flight are watched.
    pub hazards: bool,
    /// Whether the products of a thread in tensor memory run in the order of their issue, as the matrix pipe
    /// is built. Without it those alone do that have one accumulator, as the PTX ISA promises: what is right
    /// so is right either way.
    pub products_in_order: bool,
    /// A CTA whose timeline is recorded.
    pub trace_cta: Option<u32>,
    /// Steps after which a launch is given up; 0 for none.
    pub step_limit: u64,
    /// Called with the progress of a launch.
    pub progress: Option<Progress<'a>>,
}

impl Options<'_> {
    /// [`Options::seed`] with the SMs that a kernel of `spec` is tried on: keys are divided where there are
    /// SMs without work.
    pub fn of(spec: &KernelSpec, seed: u64) -> Options<'static> {
        Options { sms: Options::sms_of(spec), ..Options::seed(seed) }
    }

    /// SMs that a kernel of `spec` is tried on.
    pub fn sms_of(spec: &KernelSpec) -> u32 {
        if spec.split { 64 } else { 2 }
    }

    /// All checks, two SMs, two CTAs at a time. Seed 0 is eager, 1 lazy, all others draw.
    pub fn seed(seed: u64) -> Options<'static> {
        let pace = match seed {
            0 => Pace::Eager,
            1 => Pace::Lazy,
            _ => Pace::Random,
        };
        Options {
            seed,
            pace,
            sms: 2,
            resident: 2,
            order: true,
            poison: true,
            hazards: true,
            products_in_order: false,
            trace_cta: None,
            step_limit: 0,
            progress: None,
        }
    }
}
