//! The guide's order of preference.

use std::cmp::Ordering;

use super::bwd::BwdConfig;
use super::fwd::FwdConfig;

/// Forward: larger tile_n, then less traffic per element of S; equals stay as they were enumerated.
pub fn fwd(configs: &mut [FwdConfig]) {
    configs.sort_by(|a, b| {
        let traffic = |c: &FwdConfig| (c.smem_traffic, c.tile_m * c.tile_n);
        b.tile_n.cmp(&a.tile_n).then_with(|| compare_ratios(traffic(a), traffic(b)))
    });
}

/// Backward: larger tile_n, larger tile_m, then less traffic per element of S; equals stay as they were
/// enumerated.
pub fn bwd(configs: &mut [BwdConfig]) {
    configs.sort_by(|a, b| {
        let traffic = |c: &BwdConfig| (c.smem_traffic, c.tile_m * c.tile_n);
        (b.tile_n, b.tile_m).cmp(&(a.tile_n, a.tile_m)).then_with(|| compare_ratios(traffic(a), traffic(b)))
    });
}

/// Compares the exact quotients, so that equal ones are ties whatever their numerators.
fn compare_ratios((a, a_by): (u32, u32), (b, b_by): (u32, u32)) -> Ordering {
    (u64::from(a) * u64::from(b_by)).cmp(&(u64::from(b) * u64::from(a_by)))
}
