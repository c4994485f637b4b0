//! Masks, changes of scores and dropout of the caller's own in the forward for wide heads: its steps, with
//! and without overlap, latents, parts of a group's heads, lengths on the device, pages and splits.

use fa_core::{Dtype, KernelSpec, Reads};
use fa_emu::sweep::Trials;

use crate::dropout::WEIGHTS;
use crate::programs::{PROGRAMS, faults, spec_of};

/// Kernels with the extents of their head dims, of which small ones have the same code.
const KERNELS: [((u32, u32), &str); 5] = [
    (
        (64, 128),
        "Sm90Wide((tile_m: 64, tile_n: 64, latent: false, overlap: false, kv_stages: 1, scheduler: PerTile, \
         tile_order: LongestFirst, exp_poly_of_16: 0, rescale_threshold: 8, pack_gqa: false, head_parts: 1))",
    ),
    (
        (128, 128),
        "Sm90Wide((tile_m: 64, tile_n: 64, latent: false, overlap: true, kv_stages: 2, scheduler: Static, \
         tile_order: Natural, exp_poly_of_16: 0, rescale_threshold: 0, pack_gqa: true, head_parts: 1))",
    ),
    (
        (64, 256),
        "Sm90Wide((tile_m: 64, tile_n: 32, latent: false, overlap: true, kv_stages: 2, scheduler: PerTile, \
         tile_order: LongestFirst, exp_poly_of_16: 3, rescale_threshold: 8, pack_gqa: false, head_parts: 1))",
    ),
    (
        (320, 256),
        "Sm90Wide((tile_m: 64, tile_n: 64, latent: true, overlap: false, kv_stages: 2, scheduler: PerTile, \
         tile_order: Natural, exp_poly_of_16: 0, rescale_threshold: 8, pack_gqa: true, head_parts: 2))",
    ),
    (
        (256, 256),
        "Sm90Wide((tile_m: 64, tile_n: 32, latent: true, overlap: true, kv_stages: 3, scheduler: Static, \
         tile_order: LongestFirst, exp_poly_of_16: 0, rescale_threshold: 8, pack_gqa: true, head_parts: 1))",
    ),
];

fn of(kernel: usize, mask: &str, program: &str) -> KernelSpec {
    let (head_dims, kernel) = KERNELS[kernel];
    spec_of(head_dims, kernel, mask, program)
}

fn check(specs: impl IntoIterator<Item = KernelSpec>) {
    let trials = Trials::default();
    let found: Vec<String> = specs.into_iter().flat_map(|spec| faults(&spec, &trials)).collect();
    assert!(found.is_empty(), "{} faults:\n{}", found.len(), found.join("\n\n"));
}

#[test]
#[ignore = "emulation"]
fn programs_are_right_in_wide_heads() {
    for kernel in 0..KERNELS.len() {
        let own = PROGRAMS.iter().enumerate().filter(|(index, _)| (kernel + index) % 4 == 0);
        check(own.map(|(_, (mask, program))| of(kernel, mask, program)));
    }
}

/// A program that differs between K/V heads, of which each is two groups of tiles.
#[test]
#[ignore = "emulation"]
fn parts_of_a_group_have_its_head() {
    let text = "array w: f32[_]; mask = (q + k + hk) % 3 != 0 and k // 40 != 1; score = s * w[hk];";
    check([of(3, "causal", text)]);
}

#[test]
#[ignore = "emulation"]
fn programs_are_right_in_wide_heads_of_varied_lengths() {
    check([(0, 1), (1, 5), (2, 3), (3, 6), (4, 7)].into_iter().enumerate().map(
        |(turn, (kernel, program))| {
            let (mask, program) = PROGRAMS[program];
            let mut own = of(kernel, mask, program);
            own.reads = Reads { varied: true, paged: turn % 2 == 0 };
            own.split = turn > 2;
            own
        },
    ));
}

#[test]
#[ignore = "emulation"]
fn dropout_is_right_in_wide_heads() {
    check((0..KERNELS.len()).map(|kernel| {
        let (mask, weight) = WEIGHTS[kernel % 3];
        of(kernel, mask, weight)
    }));
}

/// Beside K and V in codes, which the producer's warps convert in the tiles of a mask's list.
#[test]
#[ignore = "emulation"]
fn programs_are_right_beside_codes_in_wide_heads() {
    let codes = [Dtype::E4m3, Dtype::Int8, Dtype::Int4, Dtype::E5m2];
    let pairs = [(0, 0), (0, 2), (1, 1), (2, 4), (3, 5), (3, 2), (4, 3), (1, 6)];
    let mut specs: Vec<KernelSpec> = Vec::new();
    for (turn, (kernel, program)) in pairs.into_iter().enumerate() {
        let (mask, program) = PROGRAMS[program];
        let mut own = of(kernel, mask, program);
        own.types.kv = codes[turn % codes.len()];
        own.reads = Reads { varied: turn % 3 == 1, paged: turn % 6 == 1 };
        own.split = turn % 4 == 3;
        specs.push(own);
    }
    let mut dropped = of(3, WEIGHTS[0].0, WEIGHTS[0].1);
    dropped.types.kv = Dtype::E4m3;
    specs.push(dropped);
    check(specs);
}
