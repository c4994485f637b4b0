//! Every configuration that the planner lists for a few head dims, compiled: predicted and actual registers,
//! spills and shared memory.

use std::sync::Mutex;

use fa_core::{Arch, Dtype, Family, KernelSpec, Mask, Pass, Problem};
use fa_kernels::{Cache, Compiler, Error, Headers, Report, Source, smem_bytes};
use fa_planner::account::Reason;
use fa_planner::cost::{CostConstants, predict};
use fa_planner::plan::{PlanOptions, explore};
use rayon::prelude::*;
use serde::Serialize;

use crate::error::Result;
use crate::progress::{Progress, Step};
use crate::shape::{HeadDim, head_dims};

/// Candidates that miss the register limit by more than this share are not compiled: the compiler cannot help
/// them.
pub const NEAR_MISS: f64 = 0.15;

/// Keys and queries of the problems; with them, 16,384 tokens and a width of 2,048.
pub const SEQLEN: usize = 8192;

/// The head dims that are tried where none are named.
pub const HEAD_DIMS: &str = "32,64,80,96,128,192,256,192-128,128-64,64-128";

/// A configuration for a problem.
#[derive(Clone, Debug)]
pub struct Config {
    /// The problem that it is ranked by and measured on.
    pub problem: Problem,
    /// The kernel.
    pub spec: KernelSpec,
    /// What the planner says.
    pub planned: Planned,
}

/// The planner's figures for a configuration.
#[derive(Clone, Copy, Debug)]
pub struct Planned {
    /// Whether it fits.
    pub fits: bool,
    /// Registers of a computing thread.
    pub registers: u32,
    /// The limit on them.
    pub limit: u32,
    /// 10^12 operations per second.
    pub tflops: f64,
}

/// A configuration as planned and as compiled.
#[derive(Clone, Debug, Serialize)]
pub struct Built {
    /// Head dims and mask of the problem.
    pub problem: String,
    /// The kernel.
    pub kernel: String,
    /// Whether the planner says that it fits.
    pub fits: bool,
    /// Registers that the planner predicts for a computing thread, and what one may have.
    pub registers_planned: u32,
    /// See above.
    pub register_limit: u32,
    /// Registers at launch, as compiled; setmaxnreg redistributes them.
    pub registers: Option<u32>,
    /// Bytes spilled, stores and loads.
    pub spills: Option<u32>,
    /// Another fault that the compiler reports.
    pub fault: Option<String>,
    /// Bytes of shared memory: the unit asserts that plan and kernel agree.
    pub smem: u32,
}

/// Every configuration of `pass` for the problems of `head_dims`: those that fit, and those that exceed the
/// register limit by little.
///
/// # Errors
/// Head dims or a family that `arch` has no kernels for.
pub fn list(head_dims: &[HeadDim], pass: Pass, family: Family, arch: Arch) -> Result<Vec<Config>> {
    let options = PlanOptions::default().with_family(Some(family)).with_pass(pass);
    let mut configs = Vec::new();
    for &HeadDim { qk, v } in head_dims {
        for mask in [Mask::FULL, Mask::CAUSAL] {
            let heads = (2048 / qk).max(1);
            let square = Problem::square(16_384 / SEQLEN, SEQLEN, heads, qk, mask, Dtype::Bf16);
            let problem = square.with_head_dim_v(v);
            let set = explore(&problem, arch, &options)?;
            configs.extend(set.plans.into_iter().map(|plan| Config {
                problem,
                spec: plan.spec,
                planned: Planned {
                    fits: true,
                    registers: plan.regs.total,
                    limit: plan.regs.limit,
                    tflops: plan.cost.tflops,
                },
            }));
            for miss in set.rejected {
                let (Reason::Registers { need, have } | Reason::Spills { need, have, .. }) = miss.reason
                else {
                    continue;
                };
                let fits_otherwise = smem_bytes(&miss.spec) <= arch.limits().smem_per_block;
                let near = f64::from(need) <= (1.0 + NEAR_MISS) * f64::from(have);
                if near && fits_otherwise {
                    let constants = CostConstants::of(arch);
                    let tflops = predict(&problem, &miss.spec, arch, &constants).tflops;
                    let planned = Planned { fits: false, registers: need, limit: have, tflops };
                    configs.push(Config { problem, spec: miss.spec, planned });
                }
            }
        }
    }
    Ok(configs)
}

impl Config {
    /// `hd128 causal`.
    pub fn problem_name(&self) -> String {
        format!("hd{} {}", head_dims(&self.problem), self.problem.mask)
    }

    /// The configuration with the compiler's report.
    pub fn built(&self, report: &Result<Report, String>) -> Built {
        let spills = |report: &Report| report.spill_stores + report.spill_loads;
        Built {
            problem: self.problem_name(),
            kernel: self.spec.to_string(),
            fits: self.planned.fits,
            registers_planned: self.planned.registers,
            register_limit: self.planned.limit,
            registers: report.as_ref().ok().map(|report| report.registers),
            spills: report.as_ref().ok().map(spills),
            fault: match report {
                Ok(report) => report.fault().map(|fault| fault.to_string()),
                Err(reason) => Some(reason.clone()),
            },
            smem: smem_bytes(&self.spec),
        }
    }
}

impl Built {
    /// Why it cannot be used, in a few words; empty where it is clean.
    pub fn verdict(&self) -> String {
        match (&self.fault, self.spills) {
            (None, _) => String::new(),
            (Some(_), Some(spills)) if spills > 0 => format!("{spills} B of spills"),
            (Some(fault), _) => fault.chars().take(60).collect(),
        }
    }
}

/// Compiles every configuration, on all cores; `Err` holds why there is no report.
pub fn compile(
    configs: &[Config],
    arch: Arch,
    compiler: &Compiler,
    progress: &mut Progress<'_>,
) -> Vec<Result<Report, String>> {
    let headers = match Headers::current() {
        Ok(headers) => headers,
        Err(error) => return configs.iter().map(|_| Err(error.to_string())).collect(),
    };
    let cache = Cache::open_default();
    progress(Step::Total(configs.len()));
    let progress = Mutex::new(progress);
    let compile = |config: &Config| {
        if let Ok(mut progress) = progress.lock() {
            progress(Step::Begin(format!("compiling {}", config.spec)));
            progress(Step::Done);
        }
        let compiled = Source::new(&config.spec, arch, Some(smem_bytes(&config.spec)), &headers)
            .and_then(|source| cache.get(compiler, &config.spec, &source));
        match compiled {
            Ok(compiled) => Ok(compiled.report.clone()),
            Err(Error::Refused { fault, log_file, .. }) => {
                let log = log_file.and_then(|path| std::fs::read_to_string(path).ok());
                log.as_deref().and_then(Report::parse).ok_or_else(|| fault.to_string())
            }
            Err(Error::Compile { log, .. }) => {
                let line = log.lines().find(|line| line.contains("error")).or(log.lines().next());
                Err(line.unwrap_or("it does not compile").trim().to_owned())
            }
            Err(error) => Err(error.to_string().lines().next().unwrap_or_default().to_owned()),
        }
    };
    configs.par_iter().with_max_len(1).map(compile).collect()
}
