//! The GPU that kernels are chosen for, as far as the choice needs it.

use fa_core::{Arch, ArchLimits, KernelSpec, Problem};
use fa_kernels::Kernels;
use fa_planner::divide;

use crate::device::Bound;
use crate::error::Error;
use crate::tune::Code;

/// The GPU that kernels are chosen for.
pub(crate) trait Seat {
    /// A kernel bound to a problem.
    type Bound;

    /// Its architecture.
    fn arch(&self) -> Arch;

    /// The limits and rates of its board, where they rank kernels in place of the architecture's.
    fn board(&self) -> Option<ArchLimits>;

    /// Its name, the key of tables of tuned kernels.
    ///
    /// # Errors
    /// What the driver reports.
    fn name(&self) -> Result<String, Error>;

    /// What the kernel of `spec` is compiled by and from; `None` where nothing compiles.
    fn code(&self, spec: &KernelSpec) -> Option<Code>;

    /// Compiles the kernel of `spec` and binds it to `problem`, with the keys of a forward's tile in `splits`
    /// parts, or in as many as the planner takes.
    ///
    /// # Errors
    /// [`fa_kernels::Error::Refused`] for a kernel that does not compile cleanly, and what else compiling and
    /// loading report.
    fn bind(
        &self,
        problem: &Problem,
        spec: &KernelSpec,
        splits: Option<usize>,
    ) -> Result<Self::Bound, fa_kernels::Error>;
}

impl Seat for Kernels {
    type Bound = Bound;

    fn arch(&self) -> Arch {
        Kernels::arch(self)
    }

    /// A board with as many SMs as the architecture's own is chosen for by the rates of that: the choices on
    /// H100 and H200 were measured so.
    fn board(&self) -> Option<ArchLimits> {
        let board = *Kernels::board(self);
        (board.sms != Kernels::arch(self).limits().sms).then_some(board)
    }

    fn name(&self) -> Result<String, Error> {
        self.context().name().map_err(Error::driver("asking the GPU's name"))
    }

    fn code(&self, spec: &KernelSpec) -> Option<Code> {
        let (compiler, key) = self.identity(spec).ok()?;
        Some(Code { compiler, key })
    }

    fn bind(
        &self,
        problem: &Problem,
        spec: &KernelSpec,
        splits: Option<usize>,
    ) -> Result<Bound, fa_kernels::Error> {
        Bound::of(self, problem, &divide(problem, spec, Kernels::arch(self), self.sms(), splits))
    }
}
