//! The SM80-class forward on sequences of their own lengths, keys in pages of any size, and keys divided
//! among CTAs.

use fa_core::{Arch, KernelSpec};
use fa_emu::sweep::{Trials, cases, sweep};
use fa_kernels::Headers;

use crate::emulator;

const TWO_STAGES: &str = "Sm80Fwd((tile_m: 64, tile_n: 64, num_warps: 4, stages: 2, q_in_regs: false, \
                          blocks_per_sm: 1, swizzle: true, ldmatrix: true, exp2: true, fast_math: true, \
                          loop_split: true, reverse_blocks: true))";
const ONE_STAGE: &str = "Sm80Fwd((tile_m: 128, tile_n: 48, num_warps: 4, stages: 1, q_in_regs: true, \
                         blocks_per_sm: 1, swizzle: true, ldmatrix: true, exp2: false, fast_math: false, \
                         loop_split: false, reverse_blocks: false))";

fn check(kinds: &[(&str, &str, &str)]) {
    let emulator = emulator();
    let trials = Trials::default();
    let mut faults = Vec::new();
    for &(kernel, mask, flags) in kinds {
        let text =
            format!("(dtype: f16, head_dim: 64, head_dim_v: 64, mask: {mask}, {flags} kernel: {kernel})");
        let spec = KernelSpec::from_ron(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
        let unit = emulator.unit(&spec, Arch::Sm80, &Headers::embedded()).unwrap();
        // Eager and by chance in turn: each case of a kernel under one of them.
        for (case, seed) in cases(&spec).iter().zip([0, 2].into_iter().cycle()) {
            let verdict = sweep(&unit, std::slice::from_ref(case), &[seed], &trials).unwrap();
            faults.extend(verdict.faults.into_iter().map(|fault| format!("{spec}\n{fault}")));
        }
    }
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n\n"));
}

#[test]
#[ignore = "emulation"]
fn sm80_forwards_read_packed_sequences() {
    let kinds = [
        (TWO_STAGES, "causal", "varied: true,"),
        (ONE_STAGE, "window", "varied: true, softcap: true, alibi: true, sinks: true,"),
    ];
    check(&kinds);
}

#[test]
#[ignore = "emulation"]
fn sm80_forwards_read_pages_of_any_size() {
    let kinds = [
        (TWO_STAGES, "full", "varied: true, paged: true, sinks: true,"),
        (ONE_STAGE, "causal", "varied: true, paged: true, alibi: true,"),
    ];
    check(&kinds);
}

#[test]
#[ignore = "emulation"]
fn sm80_forwards_divide_keys() {
    let kinds = [
        (TWO_STAGES, "causal", "split: true, sinks: true,"),
        (ONE_STAGE, "full", "split: true,"),
        (TWO_STAGES, "window", "varied: true, split: true, alibi: true,"),
        (TWO_STAGES, "causal", "varied: true, paged: true, split: true, sinks: true,"),
    ];
    check(&kinds);
}

#[test]
#[ignore = "emulation"]
fn sm80_forwards_pack_heads() {
    const PACKED: &str = "Sm80Fwd((tile_m: 64, tile_n: 64, num_warps: 4, stages: 2, q_in_regs: true, \
                          blocks_per_sm: 1, swizzle: true, ldmatrix: true, exp2: true, fast_math: true, \
                          loop_split: true, reverse_blocks: true, pack_gqa: true))";
    let kinds = [
        (PACKED, "causal", "alibi: true, sinks: true,"),
        (PACKED, "window", "varied: true, softcap: true, sinks: true,"),
        (PACKED, "causal", "varied: true, paged: true, split: true, sinks: true,"),
    ];
    check(&kinds);
}
