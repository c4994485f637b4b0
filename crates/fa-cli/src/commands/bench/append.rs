//! `fa bench --append`: new keys and values for a cache, with rotary embedding.

use std::time::Duration;

use fa_attn::machine;
use fa_core::Dtype;
use fa_lab::bench::append::{self, AppendReport, AppendRow};
use fa_lab::record::COMMIT;
use serde::Serialize;

use super::args::BenchArgs;
use crate::flags::Backend;
use crate::term::destinations::Destinations;
use crate::term::failure::{InputError, Verdict};
use crate::term::output::{self, si};
use crate::term::progress;

/// What is printed of the CPU.
#[derive(Debug, Serialize)]
struct CpuReport {
    cpu: String,
    commit: &'static str,
    rows: Vec<AppendRow>,
}

/// Least time for a row where the caller does not say.
const SECONDS: f64 = 0.2;

/// Runs the command: on the GPU where that is asked for, or there.
///
/// # Errors
/// Bad input, an unwritable target, no usable GPU where one is asked for.
pub(crate) fn command(args: &BenchArgs) -> anyhow::Result<Verdict> {
    let usage = |message: &str| anyhow::Error::from(InputError::Usage(message.to_owned()));
    if args.shapes.dtype.is_some_and(|dtype| dtype != Dtype::Bf16) {
        return Err(usage("--append measures a fixed list in bf16: leave out --dtype"));
    }
    let on_gpu = match args.backend {
        Backend::Cuda => true,
        Backend::Cpu => false,
        Backend::Reference => {
            return Err(usage("appending has one implementation on the CPU: use --backend cpu or cuda"));
        }
        Backend::Auto => args.seconds.is_none() && fa_kernels::driver::probe().is_ok(),
    };
    if on_gpu && args.seconds.is_some() {
        return Err(usage("--seconds is the CPU's; on the GPU give --reps"));
    }
    if let Some(flag) = args.gpu.given().filter(|_| !on_gpu) {
        return Err(usage(&format!("{flag} is for GPUs: use --backend cuda")));
    }
    let destinations = Destinations::probe(args.json.as_deref(), None, &[])?;
    let (marks, no_page) = (append::marks(), || Ok(String::new()));
    if on_gpu {
        let report = append::on_gpu(&marks, args.gpu.turns(), &mut progress::steps())?;
        destinations.write(&report, no_page, || of_gpu(&report))?;
        let passed = report.rows.iter().all(|row| row.error.is_none());
        return Ok(if passed { Verdict::Good } else { Verdict::Bad });
    }
    let least = Duration::from_secs_f64(args.seconds.unwrap_or(SECONDS));
    let rows = append::on_cpu(&marks, least, &mut progress::steps())?;
    let report = CpuReport { cpu: machine::cpu().name, commit: COMMIT, rows };
    let threads = fa_cpu::threads::current();
    let text = || format!("{}, threads: {threads}\n{}", report.cpu, table(&report.rows));
    destinations.write(&report, no_page, text)?;
    Ok(Verdict::Good)
}

fn of_gpu(report: &AppendReport) -> String {
    let device = &report.provenance.device;
    format!(
        "{}, CUDA {}, commit {}; replays of {} appends\n{}",
        device.gpu,
        device.cuda,
        report.provenance.commit,
        report.graph,
        table(&report.rows)
    )
}

fn table(rows: &[AppendRow]) -> String {
    let mut table = output::table(&["append", "batch", "rows", "page", "turned", "time", "rate", "runs"]);
    let or_none = |value: Option<usize>| value.map_or("-".to_owned(), |value| value.to_string());
    for row in rows {
        table.add_row([
            row.name.to_owned(),
            row.batch.to_string(),
            row.rows.to_string(),
            or_none(row.page),
            or_none(row.rotary_dim),
            si(row.ms_median * 1e-3, "s"),
            row.error.clone().unwrap_or_else(|| format!("{:.1} GB/s", row.gb_per_s)),
            row.runs.to_string(),
        ]);
    }
    output::table_text(&table)
}
