//! What others publish of the steps of the ladders.

/// Shared-memory access step by step, B = 2, 8 heads, N = 1024, f16, no mask: a CuTe DSL kernel on an A10G,
/// in TFLOP/s. Its pipelined version has no ldmatrix: a step of its own before the swizzle alone.
pub(super) const MEMORY: [Option<f64>; 5] = [Some(20.61), Some(24.41), Some(27.93), Some(32.01), None];

/// The peer beside these steps, by its name among the peers, and its published rate.
pub(super) const SDPA: &str = "fa2";
pub(super) const SDPA_PUBLISHED: f64 = 41.55;

/// Arithmetic, loads and occupancy, B = 4, 32 heads, N = 2048, f16, causal: cuTile on a DGX Spark. The step
/// without load order is not published.
pub(super) const ARITHMETIC: [Option<f64>; 7] =
    [Some(62.8), Some(66.5), None, Some(66.3), Some(66.5), Some(79.5), Some(81.1)];

/// Tiles and arithmetic, B = 4, 32 heads, f16, causal: cuTile on a B200, by sequence length and step.
pub(super) const TILES: [(usize, [f64; 6]); 5] = [
    (1024, [330.0, 187.0, 322.0, 373.0, 377.0, 548.0]),
    (2048, [441.0, 268.0, 436.0, 552.0, 560.0, 708.0]),
    (4096, [511.0, 347.0, 524.0, 684.0, 696.0, 817.0]),
    (8192, [546.0, 415.0, 585.0, 770.0, 781.0, 887.0]),
    (16384, [566.0, 463.0, 620.0, 813.0, 835.0, 918.0]),
];
