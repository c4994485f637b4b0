//! What kernels' folders implement in the same way: the traits of [`super::planned`] by functions of the
//! folder, which have the same names in each.

/// The methods of [`super::planned::PlannedKernel`] that are functions of the kernel's folder, with the same
/// names in each.
macro_rules! functions_of_the_folder {
    () => {
        fn smem(&self, spec: &fa_core::KernelSpec) -> crate::smem::SmemPlan {
            account::smem(spec, self)
        }

        fn timeline(
            &self,
            spec: &fa_core::KernelSpec,
            copy: &dyn Fn(u32) -> f64,
            clocks: &crate::cost::core::StepClocks,
        ) -> crate::timeline::lanes::Timeline {
            timeline::timeline(spec, self, copy, clocks)
        }
    };
}

/// The methods of [`super::planned::BackwardTime`] that are functions of the kernel's folder, with the same
/// names in each.
macro_rules! functions_of_the_backwards_cost {
    () => {
        fn predict(
            &self,
            problem: &fa_core::Problem,
            spec: &fa_core::KernelSpec,
            gpu: crate::cost::gpu::Gpu<'_>,
            cuts: &mut crate::cost::cuts::Cuts,
        ) -> crate::cost::core::Cost {
            cost::predict(problem, spec, self, gpu, cuts)
        }

        fn rates(
            &self,
            limits: &fa_core::ArchLimits,
            constants: &crate::cost::constants::CostConstants,
        ) -> crate::cost::head_splits::BackwardRates {
            cost::rates(limits, constants)
        }
    };
}

pub(crate) use {functions_of_the_backwards_cost, functions_of_the_folder};
