//! The element types of calls.

use fa_core::Dtype;
use half::{bf16, f16};

/// An element type of calls: f16, bf16, and f32, which only the CPU computes in.
pub trait Element: fa_cpu::Element + Default + PartialEq + std::fmt::Debug + private::OnGpu {
    /// Its name in problems.
    fn dtype() -> Dtype;
}

impl Element for f32 {
    fn dtype() -> Dtype {
        Dtype::F32
    }
}

impl Element for f16 {
    fn dtype() -> Dtype {
        Dtype::F16
    }
}

impl Element for bf16 {
    fn dtype() -> Dtype {
        Dtype::Bf16
    }
}

mod private {
    //! How a type's tensors get to the GPU: of the types of [`super::Element`] alone.

    use std::time::Duration;

    use fa_planner::plan::PlanError;

    use super::{Element, bf16, f16};
    use crate::device::{Bound, Gpu};
    use crate::error::Error;
    use crate::host;
    use crate::tensors::Tensors;

    /// Runs host tensors through a kernel.
    pub trait OnGpu: Sized {
        /// Copies the inputs, launches `launches` times and copies the results back; the time of the last
        /// launch.
        fn run(
            gpu: &Gpu,
            bound: &Bound,
            tensors: Tensors<'_, Self>,
            launches: usize,
        ) -> Result<Duration, Error>;
    }

    impl OnGpu for f32 {
        fn run(_: &Gpu, _: &Bound, _: Tensors<'_, f32>, _: usize) -> Result<Duration, Error> {
            Err(PlanError::Dtype(f32::dtype()).into())
        }
    }

    impl OnGpu for f16 {
        fn run(gpu: &Gpu, bound: &Bound, tensors: Tensors<'_, f16>, n: usize) -> Result<Duration, Error> {
            host::run(gpu, bound, tensors, n)
        }
    }

    impl OnGpu for bf16 {
        fn run(gpu: &Gpu, bound: &Bound, tensors: Tensors<'_, bf16>, n: usize) -> Result<Duration, Error> {
            host::run(gpu, bound, tensors, n)
        }
    }
}
