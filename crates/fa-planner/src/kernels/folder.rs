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
            clocks: &crate::cost::predicted::StepClocks,
        ) -> crate::timeline::lanes::Timeline {
            timeline::timeline(spec, self, copy, clocks)
        }
    };
}

/// The methods of [`super::planned::PlannedKernel`] that forwards whose keys may be divided have in common.
macro_rules! functions_of_a_forward {
    () => {
        fn candidates<'a>(
            &self,
            wanted: crate::kernels::planned::Wanted<'a>,
        ) -> Box<dyn Iterator<Item = fa_core::KernelSpec> + 'a> {
            let crate::kernels::planned::Wanted { problem, head_dim, head_dim_v, division, .. } = wanted;
            Box::new(candidates::candidates(problem, head_dim, head_dim_v, division))
        }

        fn time(&self) -> crate::kernels::planned::Time<'_> {
            crate::kernels::planned::Time::Forward(self)
        }
    };
}

/// The methods of [`super::planned::ForwardTime`] by the launch that the kernel's folder predicts.
macro_rules! functions_of_the_forwards_cost {
    () => {
        fn best_split(
            &self,
            forward: &crate::kernels::planned::Forward<'_>,
            below: f64,
        ) -> Option<crate::cost::predicted::Cost> {
            crate::cost::kv_splits::best_of(&cost::launch(self, forward), forward.spec.split, below)
        }

        fn least_seconds(&self, forward: &crate::kernels::planned::Forward<'_>) -> f64 {
            cost::launch(self, forward).at_least(1)
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
        ) -> crate::cost::predicted::Cost {
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

pub(crate) use {
    functions_of_a_forward, functions_of_the_backwards_cost, functions_of_the_folder,
    functions_of_the_forwards_cost,
};
