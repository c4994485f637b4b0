//! Schedule and checks of a run.

use fa_core::KernelSpec;

/// Called with the number of finished CTAs, and of all.
pub type Progress<'a> = &'a (dyn Fn(u32, u32) + 'a);

/// When asynchronous operations finish and who runs next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Pace {
    /// Operations complete at once, warps take turns.
    Eager = 0,
    /// Operations complete only when no thread can go on.
    Lazy = 1,
    /// Random, from the seed.
    Random = 2,
    /// Operations take about as long as on a GPU, for a realistic timeline.
    Paced = 3,
}

/// Schedule and checks of a run.
#[derive(Clone, Copy)]
pub struct Options<'a> {
    /// The seed of all random choices.
    pub seed: u64,
    /// The schedule.
    pub pace: Pace,
    /// SMs of the emulated GPU: CTAs of a persistent kernel.
    pub sms: u32,
    /// CTAs that run at a time.
    pub resident: u32,
    /// Parts of the keys of a forward's tile; `None` for those that the planner takes.
    pub splits: Option<usize>,
    /// Whether order is checked: races, proxy fences, reads of uninitialised memory.
    pub order: bool,
    /// Whether the destination of a copy in flight is NaN until it completes.
    pub poison: bool,
    /// Whether registers of products in flight are checked for hazards.
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
    /// [`Options::seed`] with the default number of SMs for a kernel of `spec`: keys are divided where SMs
    /// would be idle.
    pub fn of(spec: &KernelSpec, seed: u64) -> Options<'static> {
        Options { sms: Options::sms_of(spec), ..Options::seed(seed) }
    }

    /// Default number of SMs for a kernel of `spec`.
    pub fn sms_of(spec: &KernelSpec) -> u32 {
        fa_lab::ledger::emulated_sms(spec)
    }

    /// All checks, two SMs, two CTAs at a time. Seed 0 is eager, 1 lazy, all others are random.
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
            splits: None,
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
