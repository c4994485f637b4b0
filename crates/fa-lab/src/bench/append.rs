//! Appending to a cache, timed: bytes read and written per second.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use fa_attn::device::{DeviceAppend, Gpu, capture};
use fa_core::{Append, Dtype, QueryPositions, Rotary, RotaryPairs, RotaryQueries, Side};
use fa_kernels::Error;
use half::bf16;
use serde::Serialize;

use crate::append::AppendInputs;
use crate::device::{median, time_each};
use crate::error::Result;
use crate::progress::{Progress, Step};
use crate::record::Provenance;
use crate::runner::Turns;

/// Launches in a CUDA graph.
const GRAPH: usize = 16;

/// Warm-up replays, which do not count.
const LEAD: usize = 3;

/// An append to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AppendMark {
    /// What it is, for tables.
    pub name: &'static str,
    /// The append.
    pub append: Append,
}

impl AppendMark {
    /// Bytes of new keys, values and queries, each read and written once. Tables and lengths do not count.
    pub fn bytes(&self) -> f64 {
        let Append { sequences, new, heads_kv, head_dim, head_dim_v, dtype, .. } = self.append;
        let keys = new.total(sequences) * heads_kv * (head_dim + head_dim_v);
        let queries = self.append.queries();
        let queries = queries.map_or(0, |queries| queries.rows.total(sequences) * queries.heads * head_dim);
        (2 * (keys + queries) * dtype.bytes()) as f64
    }
}

/// The appends of a decoding step and of prefill: bf16, 32 query heads on 8 K/V heads, head dim 128, with
/// rotary embedding (Llama's halves, f32 tables) and without.
pub fn marks() -> Vec<AppendMark> {
    let of = |name, sequences: usize, new: Side, page: Option<usize>, room: usize, rotary: bool| {
        let queries = RotaryQueries { rows: new, heads: 32, positions: QueryPositions::Following };
        let turned = Rotary {
            dim: 128,
            pairs: RotaryPairs::Halves,
            positions: room,
            table: Dtype::F32,
            queries: Some(queries),
        };
        let cache =
            page.map_or(Side::padded(room), |page| Side::paged(page, sequences * room.div_ceil(page), room));
        let append = Append {
            sequences,
            new,
            cache: Side { used: false, ..cache },
            heads_kv: 8,
            head_dim: 128,
            head_dim_v: 128,
            dtype: Dtype::Bf16,
            codes: None,
            rotary: rotary.then_some(turned),
        };
        AppendMark { name, append }
    };
    vec![
        of("32 tokens, pages of 16", 32, Side::padded(1), Some(16), 128, true),
        of("32 tokens, one piece", 32, Side::padded(1), None, 128, true),
        of("256 tokens, pages of 16", 256, Side::padded(1), Some(16), 32, true),
        of("256 tokens, pages of 1", 256, Side::padded(1), Some(1), 32, true),
        of("2 x 512 packed, pages of 16", 2, Side::packed(1024, 512), Some(16), 1024, true),
        of("2 x 512, one piece", 2, Side::padded(512), None, 1024, true),
        of("2 x 512, one piece, not turned", 2, Side::padded(512), None, 1024, false),
    ]
}

/// One measurement.
#[derive(Clone, Debug, Serialize)]
pub struct AppendRow {
    /// What was appended.
    pub name: &'static str,
    /// Sequences.
    pub batch: usize,
    /// New rows of all sequences.
    pub rows: usize,
    /// Keys of a page, where the cache lies in pages.
    pub page: Option<usize>,
    /// Elements of a row that were rotated.
    pub rotary_dim: Option<usize>,
    /// Runs that counted.
    pub runs: usize,
    /// Median milliseconds of an append.
    pub ms_median: f64,
    /// Of the fastest.
    pub ms_min: f64,
    /// 10^9 bytes of [`AppendMark::bytes`] a second, at the median.
    pub gb_per_s: f64,
    /// Why the row does not count: what the GPU wrote is not what the CPU writes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl AppendRow {
    fn new(mark: &AppendMark, mut ms: Vec<f64>, error: Option<String>) -> AppendRow {
        ms.sort_by(f64::total_cmp);
        let Append { sequences, new, cache, rotary, .. } = mark.append;
        let middle = median(&ms);
        AppendRow {
            name: mark.name,
            batch: sequences,
            rows: new.total(sequences),
            page: fa_core::Lengths::of(sequences, new, cache).page(),
            rotary_dim: rotary.map(|rotary| rotary.dim),
            runs: ms.len(),
            ms_median: middle,
            ms_min: ms.first().copied().unwrap_or(0.0),
            gb_per_s: if middle > 0.0 { mark.bytes() / middle / 1e6 } else { 0.0 },
            error,
        }
    }
}

/// What was measured on the GPU.
#[derive(Debug, Serialize)]
pub struct AppendReport {
    /// The machine, the program and the compiler.
    #[serde(flatten)]
    pub provenance: Provenance,
    /// Appends in each CUDA graph, whose replays were timed.
    pub graph: usize,
    /// The rows.
    pub rows: Vec<AppendRow>,
}

/// Times `marks` on the CPU by the current rayon pool, for `least` each and at least once, after a warm-up
/// run.
///
/// # Errors
/// None: the inputs are those of the marks.
pub fn on_cpu(marks: &[AppendMark], least: Duration, progress: &mut Progress<'_>) -> Result<Vec<AppendRow>> {
    progress(Step::Total(marks.len()));
    let mut rows = Vec::new();
    for mark in marks {
        progress(Step::Begin(mark.name.to_owned()));
        let mut inputs = AppendInputs::<bf16>::fitting(&mark.append, 1);
        inputs.on_cpu()?;
        let (start, mut ms) = (Instant::now(), Vec::new());
        while ms.is_empty() || start.elapsed() < least {
            let one = Instant::now();
            inputs.on_cpu()?;
            ms.push(one.elapsed().as_secs_f64() * 1e3);
        }
        rows.push(AppendRow::new(mark, ms, None));
        progress(Step::Done);
    }
    Ok(rows)
}

/// Times `marks` on the GPU, as replays of a CUDA graph, after one run has been compared with the CPU's bits.
///
/// # Errors
/// No usable GPU, and what it reports.
pub fn on_gpu(marks: &[AppendMark], turns: Turns, progress: &mut Progress<'_>) -> Result<AppendReport> {
    let gpu = Gpu::open()?;
    let provenance = Provenance::new(&gpu)?;
    progress(Step::Total(marks.len()));
    let mut rows = Vec::new();
    for mark in marks {
        progress(Step::Begin(mark.name.to_owned()));
        rows.push(measure(&gpu, mark, turns)?);
        progress(Step::Done);
    }
    Ok(AppendReport { provenance, graph: GRAPH, rows })
}

fn measure(gpu: &Gpu, mark: &AppendMark, turns: Turns) -> Result<AppendRow> {
    let bound = gpu.append(&mark.append)?;
    let mut inputs = AppendInputs::<bf16>::fitting(&mark.append, 1);
    let mut want = inputs.clone();
    want.on_cpu()?;
    let stream = gpu.context().new_stream()?;
    let mut ms = Vec::new();
    inputs.with(|extras, tensors| {
        let mut device = DeviceAppend::upload(&stream, extras, tensors)?;
        device.run(&bound, &stream)?;
        let dropped = device.download(&stream, extras, tensors)?;
        let args = device.raw(&stream);
        // SAFETY: the addresses are those of `device`, which lives until the replays have been timed.
        let graph =
            unsafe { capture(&stream, || (0..GRAPH).try_for_each(|_| bound.run_raw(&stream, &args))) }?;
        let launched = |source| Error::Driver { doing: "launching a graph", source };
        for _ in 0..turns.rounds {
            let times = time_each(&stream, LEAD, turns.reps, || graph.launch().map_err(launched))?;
            ms.extend(times.into_iter().map(|ms| ms / GRAPH as f64));
        }
        stream.synchronize()?;
        Ok(dropped)
    })?;
    Ok(AppendRow::new(mark, ms, want.difference(&inputs)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mark_has_a_place_for_every_row_and_counts_its_bytes() {
        let marks = marks();
        let paged = marks.iter().filter(|mark| mark.append.table_columns() > 0).count();
        assert!(paged >= 4 && marks.iter().any(|mark| mark.append.rotary.is_none()));
        // 32 rows of 8 heads of keys and values and 32 of queries, 128 elements of 2 bytes, in and out.
        assert_eq!(marks[0].bytes(), (2 * 32 * (8 + 8 + 32) * 128 * 2) as f64);
        assert_eq!(marks[6].bytes(), (2 * 1024 * 16 * 128 * 2) as f64);
        for mark in &marks {
            mark.append.check().expect("a valid append");
            let small = Append { heads_kv: 1, ..mark.append };
            let small = Append {
                rotary: small.rotary.map(|rotary| Rotary {
                    queries: rotary.queries.map(|queries| RotaryQueries { heads: 1, ..queries }),
                    ..rotary
                }),
                ..small
            };
            let mut inputs = AppendInputs::<bf16>::fitting(&small, 3);
            let before = inputs.seqused_k.iter().sum::<i32>() as usize;
            inputs.on_cpu().expect("it fits");
            let after = inputs.used_out.iter().sum::<i32>() as usize;
            let rows = mark.append.new.total(mark.append.sequences);
            assert_eq!((inputs.dropped, after - before), (0, rows), "{}", mark.name);
        }
    }

    #[test]
    fn rows_are_of_the_median() {
        let row = AppendRow::new(&marks()[0], vec![3.0, 1.0, 2.0], None);
        assert_eq!((row.ms_median, row.ms_min, row.runs, row.page), (2.0, 1.0, 3, Some(16)));
        assert!((row.gb_per_s - marks()[0].bytes() / 2e6).abs() < 1e-12);
        assert_eq!(AppendRow::new(&marks()[1], Vec::new(), None).gb_per_s, 0.0);
    }
}
