//! The report of a run: findings, values next to the oracle's, work next to the plan's.

use fa_core::{Arch, KernelSpec, Problem};
use fa_emu::{Counters, Finding, Planned, Proof, Unit};
use serde::Serialize;

use crate::term::output;

/// One run.
#[derive(Debug, Serialize)]
pub(super) struct Run {
    pub(super) seed: u64,
    pub(super) passed: bool,
    pub(super) findings: Vec<Finding>,
    pub(super) faults: Vec<String>,
    pub(super) values: Vec<Value>,
    pub(super) counters: Counters,
    pub(super) touched: Vec<(u32, u32)>,
}

#[derive(Debug, Serialize)]
pub(super) struct Value {
    tensor: &'static str,
    #[serde(flatten)]
    found: fa_cpu::compare::Comparison,
}

/// What is printed of a kernel.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) kernel: String,
    pub(super) arch: Arch,
    pub(super) fingerprint: String,
    pub(super) machine: String,
    pub(super) problem: Problem,
    pub(super) runs: Vec<Run>,
    pub(super) passed: bool,
}

pub(super) fn summary(unit: &Unit, problem: &Problem, sms: u32, seed: u64, proof: Proof) -> Run {
    let mut faults = proof.faults();
    let main = proof.outcome.launches.iter().find(|launch| launch.entry == fa_kernels::ENTRY);
    if faults.is_empty()
        && let (Some(planned), Some(main)) = (Planned::of(unit.spec(), problem, unit.arch(), sms), main)
    {
        faults.extend(planned.faults(unit.spec(), &main.counters));
    }
    Run {
        seed,
        passed: faults.is_empty(),
        touched: main.map_or_else(Vec::new, |main| main.touched.clone()),
        counters: proof.outcome.counters(),
        findings: proof.outcome.findings,
        faults,
        values: proof.values.into_iter().map(|(tensor, found)| Value { tensor, found }).collect(),
    }
}

pub(super) fn text(report: &Report, sms: u32, spec: &KernelSpec) -> String {
    let mut out = format!("kernel   {} on {}\n", report.kernel, report.arch);
    out += &format!("problem  {}\n", crate::attention::describe(&report.problem));
    for run in &report.runs {
        let verdict = if run.passed { "nothing found" } else { "FOUND" };
        out += &format!("seed {:<4}{verdict}\n", run.seed);
        for fault in &run.faults {
            out += &format!("  {}\n", fault.replace('\n', "\n  "));
        }
        for Value { tensor, found } in run.values.iter().filter(|_| run.passed) {
            out += &format!("  {tensor:<7}{found}\n");
        }
    }
    if let Some(run) = report.runs.iter().find(|run| run.passed) {
        let c = &run.counters;
        out += &format!(
            "work     {} in products, {} by TMA and bulk copies, {} by cp.async, {} added to global memory\n",
            output::si(c.flops as f64, "FLOP"),
            output::si((c.tma_bytes + c.bulk_bytes) as f64, "B"),
            output::si(c.cp_async_bytes as f64, "B"),
            output::si(c.red_bytes as f64, "B")
        );
        if let Some(planned) = Planned::of(spec, &report.problem, report.arch, sms) {
            out += &format!(
                "planner  {} in whole tiles ({} that the mask leaves), {} of tiles\n",
                output::si(planned.tile_flops, "FLOP"),
                output::si(planned.problem_flops, "FLOP"),
                output::si(planned.tile_bytes + planned.stat_bytes, "B")
            );
        }
        out += &match c.load_phases + c.store_phases {
            0 => "banks    no ldmatrix or stmatrix\n".to_owned(),
            phases => format!(
                "banks    {} wavefronts for {phases} phases of ldmatrix and stmatrix\n",
                c.load_wavefronts + c.store_wavefronts
            ),
        };
    }
    out
}
