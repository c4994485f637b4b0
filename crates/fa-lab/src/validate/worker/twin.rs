//! The same rows for the same kernel, read in a simpler way: the bits must be equal.

use fa_attn::device::{Half, Placement};
use fa_core::{KernelSpec, Lengths, Reads, TensorLayout};
use fa_kernels::{Backward, Forward};

use super::choose;
use super::session::Session;
use crate::error::{Error, Result};
use crate::grid::{Action, Case};
use crate::sequences::Sequences;
use crate::tensors::Inputs;

/// The same rows in another layout.
pub(super) struct Twin<T> {
    pub inputs: Inputs<T>,
    what: &'static str,
    reads: Reads,
}

/// The twin of a case.
///
/// # Errors
/// A case of several sequences that has no dense twin.
pub(super) fn of<T: Half>(case: &Case, inputs: &Inputs<T>) -> Result<Twin<T>> {
    let Sequences { q, k } = &inputs.sequences;
    let (what, sequences) = if case.action != Action::AsDense {
        ("contiguous", Sequences { q: q.clone(), k: k.contiguous() })
    } else if inputs.sequences.count() == 1 {
        ("dense", Sequences::uniform(&Lengths::uniform(1, q.len(0), k.len(0))))
    } else {
        return Err(Error::NotTried("several sequences have no dense twin".to_owned()));
    };
    let problem = case.problem.with_lengths(sequences.lengths());
    let packed = |shape| Placement::packed(shape, TensorLayout::Bshd);
    let twin =
        Inputs { problem, placements: sequences.shapes(&problem).map(packed), sequences, ..inputs.clone() };
    Ok(Twin { inputs: twin, what, reads: Reads::of(&problem) })
}

impl<T: Half> Twin<T> {
    /// The error where the bits differ.
    pub(super) fn fault(&self) -> String {
        format!("not the bits of the {} run", self.what)
    }

    fn spec(&self, of: &KernelSpec) -> KernelSpec {
        choose::with_reads(of, self.reads)
    }

    /// The kernel for the twin.
    ///
    /// # Errors
    /// Those of compiling and loading.
    pub(super) fn bind_forward(self, session: &Session, forward: &Forward) -> Result<(Twin<T>, Forward)> {
        let spec = self.spec(&forward.kernel().spec);
        let plan = session.gpu.launch_plan(&self.inputs.problem, &spec, None);
        let forward = session.gpu.kernels.forward(&self.inputs.problem, &plan)?;
        Ok((self, forward))
    }

    /// Both kernels for the twin.
    ///
    /// # Errors
    /// Those of compiling and loading.
    pub(super) fn bind(
        self,
        session: &Session,
        forward: &Forward,
        backward: &Backward,
    ) -> Result<(Twin<T>, Forward, Backward)> {
        let (twin, forward) = self.bind_forward(session, forward)?;
        let spec = twin.spec(&backward.kernel().spec);
        let plan = session.gpu.launch_plan(&twin.inputs.problem, &spec, None);
        let backward = session.gpu.kernels.backward(&twin.inputs.problem, &plan)?;
        Ok((twin, forward, backward))
    }
}
