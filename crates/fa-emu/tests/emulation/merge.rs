//! The merge kernel against the CPU's merge: parts of each type into results of each, empty parts that hold
//! NaN, sinks, rows longer than a warp reads at once.

use fa_core::{Arch, Dtype, Merge, TensorLayout};
use fa_cpu::merge::{add_sink_to_row, merge_row};
use fa_emu::Options;
use fa_emu::merge::MergeCall;
use fa_kernels::{Headers, MergeLaunch};
use half::{bf16, f16};

use crate::emulator;

fn bytes_of(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    let two = |bits: u16| bits.to_ne_bytes();
    match dtype {
        Dtype::F32 => values.iter().flat_map(|value| value.to_ne_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|value| two(f16::from_f32(*value).to_bits())).collect(),
        Dtype::Bf16 => values.iter().flat_map(|value| two(bf16::from_f32(*value).to_bits())).collect(),
        dtype @ (Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2) => {
            panic!("nothing is merged in {dtype}")
        }
    }
}

fn values_of(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let two = |pair: &[u8]| u16::from_ne_bytes([pair[0], pair[1]]);
    match dtype {
        Dtype::F32 => bytes
            .chunks_exact(4)
            .map(|four| f32::from_ne_bytes([four[0], four[1], four[2], four[3]]))
            .collect(),
        Dtype::F16 => bytes.chunks_exact(2).map(|pair| f16::from_bits(two(pair)).to_f32()).collect(),
        Dtype::Bf16 => bytes.chunks_exact(2).map(|pair| bf16::from_bits(two(pair)).to_f32()).collect(),
        dtype @ (Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2) => {
            panic!("nothing is merged in {dtype}")
        }
    }
}

fn check(merge: &Merge, layout: TensorLayout, sms: u32) {
    let emulator = emulator();
    let unit = emulator.merge_unit(Arch::Sm80, &Headers::embedded()).unwrap();
    let [batch, seqlen, heads, dim] = merge.shape();
    let strides = layout.strides(seqlen, heads, dim);
    // Rows in the order of the LSE; every seventh is empty in all parts, and of the others some parts are.
    let lse_of = |part: usize, row: usize| match (row + part) % 5 {
        _ if row % 7 == 3 => f32::NEG_INFINITY,
        4 if row.is_multiple_of(2) => f32::INFINITY,
        4 => f32::NEG_INFINITY,
        turn => turn as f32 * 3.5 - part as f32 * 0.75 - 4.0,
    };
    let at = |row: usize| {
        let (b, h, s) = (row / (heads * seqlen), row / seqlen % heads, row % seqlen);
        strides.offset(b, s, h, 0) as usize
    };
    let mut parts = Vec::new();
    for part in 0..merge.parts {
        let lse: Vec<f32> = (0..merge.rows()).map(|row| lse_of(part, row)).collect();
        let mut out = vec![0.0f32; merge.rows() * dim];
        for (row, lse) in lse.iter().enumerate() {
            for column in 0..dim {
                let value = ((row * 31 + column * 7 + part * 13) % 97) as f32 / 16.0 - 3.0;
                out[at(row) + column] = if lse.is_finite() { value } else { f32::NAN };
            }
        }
        parts.push((bytes_of(merge.part, &out), lse));
    }
    let sinks: Option<Vec<f32>> = merge.sinks.then(|| (0..heads).map(|head| head as f32 - 1.5).collect());
    let count = batch * seqlen * heads * dim;
    let mut call = MergeCall {
        parts,
        layout,
        sinks,
        out: bytes_of(merge.out, &vec![f32::NAN; count]),
        lse: vec![f32::NAN; merge.rows()],
    };
    let launch = MergeLaunch::new(merge, sms).unwrap();
    let faults = unit.run(&launch, &mut call, &Options::seed(3)).unwrap();
    assert!(faults.is_empty(), "{merge:?}:\n{}", faults.join("\n"));

    let parts: Vec<(Vec<f32>, &Vec<f32>)> =
        call.parts.iter().map(|(out, lse)| (values_of(merge.part, out), lse)).collect();
    let found = values_of(merge.out, &call.out);
    let tolerance = match merge.out {
        Dtype::F32 => 2e-6,
        Dtype::F16 => 1e-3,
        Dtype::Bf16 => 8e-3,
        dtype @ (Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2) => {
            panic!("nothing is merged in {dtype}")
        }
    };
    for row in 0..merge.rows() {
        let (mut want, mut lse) = (vec![0.0f32; dim], f32::NEG_INFINITY);
        for (out, of_part) in &parts {
            merge_row(&mut want, &mut lse, &out[at(row)..][..dim], of_part[row]);
        }
        if let Some(sinks) = &call.sinks {
            add_sink_to_row(&mut want, &mut lse, sinks[row / seqlen % heads]);
        }
        let same = lse == call.lse[row] || (lse - call.lse[row]).abs() < 1e-5;
        assert!(same, "{merge:?}: LSE of row {row} is {}, not {lse}", call.lse[row]);
        for (column, (have, need)) in found[at(row)..][..dim].iter().zip(&want).enumerate() {
            let near = (have - need).abs() <= tolerance * (1.0 + need.abs());
            assert!(near, "{merge:?}: row {row}, column {column}: {have}, not {need}");
        }
    }
}

const TWO: Merge = Merge {
    parts: 2,
    batch: 2,
    seqlen: 5,
    heads: 3,
    dim: 64,
    part: Dtype::Bf16,
    out: Dtype::Bf16,
    sinks: false,
};

#[test]
#[ignore = "emulation"]
fn parts_of_every_type_are_merged_into_results_of_every_type() {
    for part in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for out in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            check(&Merge { part, out, ..TWO }, TensorLayout::Bshd, 2);
        }
    }
}

#[test]
#[ignore = "emulation"]
fn many_parts_sinks_and_rows_of_any_width_are_merged() {
    let f32_out = Merge { out: Dtype::F32, ..TWO };
    check(&Merge { parts: 16, sinks: true, ..f32_out }, TensorLayout::Bhsd, 1);
    check(&Merge { parts: 3, dim: 512, part: Dtype::F32, ..f32_out }, TensorLayout::Bshd, 1);
    check(&Merge { parts: 5, dim: 40, batch: 1, seqlen: 37, sinks: true, ..TWO }, TensorLayout::Bhsd, 132);
    check(&Merge { parts: 1, dim: 8, sinks: true, ..f32_out }, TensorLayout::Bshd, 1);
    check(&Merge { seqlen: 0, ..TWO }, TensorLayout::Bshd, 1);
}

/// Parts without LSEs are added up in their order and rounded once: exactly what f32 gives.
#[test]
#[ignore = "emulation"]
fn parts_without_lse_are_added_up() {
    let unit = emulator().merge_unit(Arch::Sm80, &Headers::embedded()).unwrap();
    for (parts, part, out) in
        [(1, Dtype::Bf16, Dtype::Bf16), (3, Dtype::F32, Dtype::Bf16), (2, Dtype::F16, Dtype::F32)]
    {
        let merge = Merge { parts, part, out, ..TWO };
        let count = merge.rows() * merge.dim;
        let value = |part: usize, at: usize| ((at * 29 + part * 17) % 101) as f32 / 8.0 - 6.0;
        let values: Vec<Vec<f32>> = (0..parts).map(|p| (0..count).map(|at| value(p, at)).collect()).collect();
        let mut call = MergeCall {
            parts: values.iter().map(|values| (bytes_of(part, values), vec![f32::NAN])).collect(),
            layout: TensorLayout::Bshd,
            sinks: None,
            out: bytes_of(out, &vec![f32::NAN; count]),
            lse: Vec::new(),
        };
        let launch = MergeLaunch::new(&merge, 4).unwrap();
        let faults = unit.run(&launch, &mut call, &Options::seed(5)).unwrap();
        assert!(faults.is_empty(), "{merge:?}:\n{}", faults.join("\n"));
        let rounded: Vec<Vec<f32>> = values.iter().map(|v| values_of(part, &bytes_of(part, v))).collect();
        let sum = |at: usize| rounded.iter().map(|values| values[at]).sum::<f32>();
        let want: Vec<f32> = (0..count).map(sum).collect();
        assert_eq!(call.out, bytes_of(out, &want), "{merge:?}");
    }
}
