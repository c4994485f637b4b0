//! What the timelines of several kernels share: how a step's products are divided.

use fa_core::KernelSpec;

use crate::cost::predicted::StepClocks;

/// Most lanes of warps that are drawn; more take turns as these do.
pub(crate) const MOST_LANES: f64 = 4.0;

/// Shares of a forward's products: S, and P V.
pub(crate) fn shares(head_dim: u32, head_dim_v: u32) -> (f64, f64) {
    let all = f64::from(head_dim + head_dim_v);
    (f64::from(head_dim) / all, f64::from(head_dim_v) / all)
}

/// Clocks of the products of a step, with the shared memory that feeds them.
pub(crate) fn products(clocks: &StepClocks) -> f64 {
    clocks.tensor.max(clocks.smem)
}

/// Clocks of a backward's five products, each over head_dim or head_dim_v: (S, dK and dQ; dP and dV).
pub(crate) fn five(spec: &KernelSpec, clocks: &StepClocks) -> (f64, f64) {
    let [hd, hdv] = [spec.head_dim, spec.head_dim_v].map(f64::from);
    let all = 3.0 * hd + 2.0 * hdv;
    (products(clocks) * hd / all, products(clocks) * hdv / all)
}
