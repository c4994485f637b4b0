//! The bits that dropout keeps, and dropout in all kernels.

use fa_core::program::Program;
use fa_core::{Arch, Kept, KernelSpec, Reads};
use fa_emu::Options;
use fa_emu::sweep::Trials;
use fa_kernels::{DropoutLaunch, Headers};

use crate::emulator;
use crate::mods::KERNELS;
use crate::programs::faults;

#[test]
#[ignore = "emulation"]
fn the_bits_are_those_of_the_cpu() {
    let unit = emulator().dropout_unit(Arch::Sm80, &Headers::embedded()).unwrap();
    for (turn, (heads, queries, words)) in
        [(1, 1, 1), (3, 37, 4), (2, 64, 3), (5, 16, 1)].into_iter().enumerate()
    {
        let kept = Kept {
            seed: 0xfedc_ba98_7654_3210 + turn as u64,
            offset: u64::MAX - 40 * turn as u64,
            threshold: [229, 127, 255, 0][turn],
        };
        let launch = DropoutLaunch::new(heads, queries, words, 2).unwrap();
        let mut expected = vec![0; heads * queries * words];
        kept.fill(queries, words, &mut expected);
        for in_memory in [false, true] {
            let (bits, faults) = unit.run(&launch, kept, in_memory, &Options::seed(3)).unwrap();
            assert!(faults.is_empty(), "{}", faults.join("\n"));
            assert_eq!(bits, expected, "{heads} heads of {queries} queries");
        }
    }
}

/// Dropout alone, whose bits are read by eights, beside a mask and a bias with a gradient, and beside a
/// change that has a slope.
pub(crate) const WEIGHTS: [(&str, &str); 3] = [
    ("full", "array fa_kept: bits[_, _, _, _]; weight = select(fa_kept[b, h, q, k], 1.25, 0.0);"),
    (
        "causal",
        "array kept: bits[_, _, _, _]; array bias: bf16[_, _, _, _] grad; mask = (q + k) % 5 != 0; \
         score = s + bias[b, h, q, k]; weight = select(kept[b, h, q, k], 2.0, 0.0);",
    ),
    (
        "window",
        "array fa_kept: bits[_, _, _, _]; scalar cap: f32; score = cap * tanh(s / cap); \
         weight = select(fa_kept[b, h, q, k], 1.5, 0.0);",
    ),
];

fn spec(kernel: usize, (mask, weight): (&str, &str), softcap: bool) -> KernelSpec {
    let kernel = KERNELS[kernel];
    let text = format!(
        "(dtype: bf16, head_dim: 64, head_dim_v: 64, mask: {mask}, softcap: {softcap}, alibi: {softcap}, \
         kernel: {kernel})"
    );
    let mut spec = KernelSpec::from_ron(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
    let program = Program::parse(weight).unwrap();
    spec.score.program = Some(program.intern().unwrap());
    spec
}

/// Kernels with dropout alone, with the weights of `WEIGHTS` in turn, beside a soft cap and ALiBi, and with
/// lengths on the device.
fn check(kernels: &[usize]) {
    let mut found = Vec::new();
    for (turn, &kernel) in kernels.iter().enumerate() {
        let mut varied = spec(kernel, WEIGHTS[0], false);
        varied.reads = Reads { varied: true, paged: false };
        let capped = ("causal", WEIGHTS[0].1);
        let specs = [
            spec(kernel, WEIGHTS[0], false),
            spec(kernel, WEIGHTS[1 + turn % 2], false),
            spec(kernel, capped, true),
            varied,
        ];
        found.extend(specs.iter().flat_map(|spec| faults(spec, &Trials::default())));
    }
    assert!(found.is_empty(), "{} faults:\n{}", found.len(), found.join("\n\n"));
}

#[test]
#[ignore = "emulation"]
fn dropout_is_right_in_sm90_forwards() {
    check(&[0, 1, 2, 9]);
}

#[test]
#[ignore = "emulation"]
fn dropout_is_right_in_sm80_forwards() {
    check(&[3, 4]);
}

#[test]
#[ignore = "emulation"]
fn dropout_is_right_in_sm90_backwards() {
    check(&[5, 6]);
}

#[test]
#[ignore = "emulation"]
fn dropout_is_right_in_sm80_backwards() {
    check(&[7, 8]);
}
