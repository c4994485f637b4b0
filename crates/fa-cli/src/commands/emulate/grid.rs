//! The cases of the GPU's grid.

use fa_attn::device::Half;
use fa_core::{Arch, Dtype, KernelSpec, Problem};
use fa_cpu::OwnedExtras;
use fa_emu::sweep::SEEDS;
use fa_emu::{Emulator, Options, Trial};
use fa_lab::grid::{Case, Extent};
use fa_lab::sequences::{Ragged, Sequences};
use fa_lab::tensors::Inputs;
use serde::Serialize;

use super::args::EmulateArgs;
use super::report::{Run, summary};
use crate::term::failure::{InputError, Verdict};
use crate::term::output;
use crate::term::progress::{self, Steps};

/// The cases of the GPU's grid for this kernel, each under every seed.
pub(super) fn grid(
    args: &EmulateArgs,
    emulator: &Emulator,
    spec: &KernelSpec,
    arch: Arch,
) -> anyhow::Result<Verdict> {
    let headers = args.headers()?;
    let unit = progress::spinner("compiling the kernel", || emulator.unit(spec, arch, &headers))?;
    let cases = fa_lab::grid::of_spec("emulated", &spec.to_string(), spec, Extent::Quick);
    let seeds = if args.seeds.is_empty() { &SEEDS[..] } else { &args.seeds };
    let mut steps = Steps::new(cases.len());
    let mut runs = Vec::new();
    for case in &cases {
        steps.begin(case.problem_name());
        let trial = trial_of(case)?;
        for &seed in seeds {
            let options = Options { sms: args.sms_for(spec), step_limit: args.steps, ..Options::seed(seed) };
            let proof = trial.run(&unit, &options)?;
            runs.push((case.name(), summary(&unit, &case.problem, args.sms_for(spec), seed, proof)));
        }
        steps.advance();
    }
    drop(steps);
    let passed = runs.iter().all(|(_, run)| run.passed);
    if args.json {
        let report: Vec<_> = runs.iter().map(|(case, run)| CaseRun { case, run }).collect();
        output::print_json(&report)?;
    } else {
        let mut out = format!("kernel   {spec} on {arch}\n");
        for (case, run) in &runs {
            out += &format!(
                "{case}, seed {}: {}\n",
                run.seed,
                if run.passed { "nothing found" } else { "FOUND" }
            );
            for fault in &run.faults {
                out += &format!("  {}\n", fault.replace('\n', "\n  "));
            }
        }
        output::print(&out)?;
    }
    Ok(if passed { Verdict::Good } else { Verdict::Bad })
}

#[derive(Debug, Serialize)]
struct CaseRun<'a> {
    case: &'a str,
    #[serde(flatten)]
    run: &'a Run,
}

/// A case of the GPU's grid for the emulation: the same values in the same places.
fn trial_of(case: &Case) -> anyhow::Result<Trial> {
    let Some(fa_emu::Case { placing, .. }) = fa_emu::Case::of_grid(case) else {
        let message = format!("{} lies as no case of a configuration does", case.name());
        return Err(InputError::Usage(message).into());
    };
    let (values, extras) = match case.problem.types.qkv {
        Dtype::F16 => values_of::<half::f16>(case),
        Dtype::Bf16 => values_of::<half::bf16>(case),
        dtype @ (Dtype::F32 | Dtype::E4m3) => {
            return Err(
                InputError::Usage(format!("{dtype} is the type of no kernel: use f16 or bf16")).into()
            );
        }
    };
    Ok(Trial::of_values(&case.problem, case.pass, placing, &extras, &values))
}

/// Q, K, V and dO as they lie in their tensors, rows of no sequence zero, and what comes beside them.
fn values_of<T: Half>(case: &Case) -> ([Vec<u16>; 4], OwnedExtras) {
    let inputs = case.inputs::<T>();
    let dout = fa_lab::tensors::random_dout(&inputs, case.seed());
    let extras = inputs.arrays();
    let Inputs { values: [q, k, v], sequences: Sequences { q: of_q, k: of_k }, .. } = inputs;
    let Problem { heads_q, heads_kv, head_dim, head_dim_v, .. } = case.problem;
    let spread = |values: &[T], rows: &Ragged, heads: usize, dim: usize| {
        let [outer, inner, ..] = rows.shape(heads, dim);
        let (bits, row) = (T::bits(values), heads * dim);
        let mut all = vec![0u16; outer * inner * row];
        for sequence in 0..rows.sequences() {
            for at in 0..rows.len(sequence) {
                let [n, s] = rows.place(sequence, at);
                let from = (rows.start(sequence) + at) * row;
                all[(n * inner + s) * row..][..row].copy_from_slice(&bits[from..from + row]);
            }
        }
        all
    };
    let values = [
        spread(&q, &of_q, heads_q, head_dim),
        spread(&k, &of_k, heads_kv, head_dim),
        spread(&v, &of_k, heads_kv, head_dim_v),
        spread(&dout, &of_q, heads_q, head_dim_v),
    ];
    (values, extras)
}
