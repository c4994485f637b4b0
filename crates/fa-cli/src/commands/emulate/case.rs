//! The kernel and the problem that were asked for.

use std::path::Path;

use fa_core::program::{Interned, OwnedInputs};
use fa_core::{Arch, Dtype, Kernel, KernelSpec, Lengths, Problem, ScoreMod, Types};
use fa_cpu::OwnedExtras;
use fa_emu::sweep::Case;
use fa_emu::{Batch, Lie, Placement, with_mods};
use fa_lab::grid::problem_of;

use super::args::{EmulateArgs, Rows};
use crate::attention::check_memory;
use crate::flags::Seqlen;
use crate::flags::mods::{DropoutArgs, ModArgs};
use crate::programs;
use crate::safetensors::TensorFile;
use crate::term::failure::InputError;

/// Queries and keys where nothing is said.
const LENGTH: Seqlen = Seqlen { q: 300, k: 300 };

/// Elements between rows, at most.
const MAX_GAP: usize = 1 << 16;

/// The most sequences whose lengths are listed.
const MAX_BATCH: usize = 1 << 20;

/// Rows that belong to no sequence, behind sequences of different lengths.
const SLACK: usize = 5;

pub(super) fn read(args: &EmulateArgs, path: &Path) -> anyhow::Result<(KernelSpec, Arch)> {
    let mut spec = fa_lab::spec_file::read_spec(path)?;
    spec.reads.paged |= args.page.is_some();
    spec.reads.varied |= spec.reads.paged || !args.lengths.is_empty();
    spec.score.alibi |= args.alibi.is_some();
    spec.score.sinks |= args.sinks;
    let own = own_program(args, spec.score.program)?;
    spec.score.program = dropout(args).of(own).map_err(InputError::Usage)?.program;
    spec.split |= args.split;
    if let Some(dtype) = args.dtype {
        let fp8 = || Types::fp8(args.kv.out_dtype.unwrap_or(Dtype::Bf16));
        spec.types = if dtype == Dtype::E4m3 { fp8() } else { Types::same(dtype) };
    }
    if let Some(codes) = args.kv.kv_dtype {
        spec.types = spec.types.with_kv(codes.dtype());
    }
    if args.latent {
        let Kernel::Sm90Wide(kernel) = &mut spec.kernel else {
            let name = spec.kernel.name();
            let message = format!("--latent: {name} has no form for latents; use a spec of sm90_wide");
            return Err(InputError::Usage(message).into());
        };
        kernel.latent = true;
    }
    spec.check()?;
    let shipped =
        std::fs::read_to_string(path).ok().and_then(|text| fa_core::ShippedSpec::from_ron(&text).ok());
    let named = shipped.and_then(|shipped| shipped.archs.first().copied());
    let arch = args.arch.or(named).unwrap_or(spec.kernel.family().archs()[0]);
    Ok((spec, arch))
}

/// The program of the spec, or of the flags.
fn own_program(args: &EmulateArgs, of_spec: Option<Interned>) -> Result<ScoreMod, InputError> {
    let (mask_mod, score_mod) = (args.mask_mod.clone(), args.score_mod.clone());
    let given = ModArgs { mask_mod, score_mod, ..ModArgs::default() }.program().map_err(InputError::Usage)?;
    if of_spec.is_some() && given.is_some() {
        let message = "--mask-mod, --score-mod: SPEC has a program of its own, leave them out";
        return Err(InputError::Usage(message.to_owned()));
    }
    Ok(ScoreMod::NONE.with_program(of_spec.or(given)))
}

/// What the problem's program reads: the file's tensors, or drawn.
pub(super) fn inputs(args: &EmulateArgs, problem: &Problem) -> Result<Option<OwnedInputs>, InputError> {
    match (&args.inputs, problem.score.program) {
        (None, _) => Ok(OwnedInputs::drawn(problem, 1)),
        (Some(path), Some(program)) => {
            Ok(Some(programs::read(&TensorFile::open(path)?, program, problem, &[])?))
        }
        (Some(path), None) => {
            let message = format!("--inputs {}: the kernel has no program that reads it", path.display());
            Err(InputError::Usage(message))
        }
    }
}

/// The dropout that was asked for.
fn dropout(args: &EmulateArgs) -> DropoutArgs {
    let &EmulateArgs { dropout, dropout_seed, dropout_offset, .. } = args;
    DropoutArgs { dropout, dropout_seed, dropout_offset }
}

/// The problem that was asked for, its layout, and lengths, slopes and sinks where it has them.
pub(super) fn case(args: &EmulateArgs, spec: &KernelSpec) -> anyhow::Result<Case> {
    let batch = batch(args, spec)?;
    let lengths = match &batch {
        Some(batch) => batch.lengths(),
        None => {
            let one = args.seqlen.unwrap_or(LENGTH);
            Lengths::uniform(args.batch.unwrap_or(1), one.q, one.k)
        }
    };
    let problem = problem(args, spec, lengths)?;
    let placement = Placement::of(args.layout, args.gap);
    let extras = batch.map_or_else(|| with_mods(OwnedExtras::NONE, &problem), |batch| batch.extras(&problem));
    Ok(Case { problem, placement, extras })
}

/// The sequences that were asked for, for a kernel that reads their lengths.
fn batch(args: &EmulateArgs, spec: &KernelSpec) -> Result<Option<Batch>, InputError> {
    if !spec.reads.varied {
        let given = [
            ("--rows-q", args.rows_q.is_some()),
            ("--rows-k", args.rows_k.is_some()),
            ("--slack", args.slack.is_some()),
        ];
        return match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) => {
                let message = format!("{flag} is for sequences of different lengths: give --lengths too");
                Err(InputError::Usage(message))
            }
            None => Ok(None),
        };
    }
    let sequences = match (args.lengths.as_slice(), args.seqlen, args.batch) {
        ([], None, None) => fa_lab::grid::LENGTHS.to_vec(),
        ([], one, batch) => {
            let (one, batch) = (one.unwrap_or(LENGTH), batch.unwrap_or(1));
            if batch > MAX_BATCH {
                let message = format!("--batch {batch}: at most {MAX_BATCH} sequences are emulated");
                return Err(InputError::Usage(message));
            }
            vec![(one.q, one.k); batch]
        }
        (lengths, ..) => lengths.iter().map(|own| (own.q, own.k)).collect(),
    };
    let lie = |rows: Option<Rows>| rows.map_or(Lie::Packed, Rows::lie);
    let page = args.page.unwrap_or(16) as usize;
    let k = if spec.reads.paged { Lie::Paged(page) } else { lie(args.rows_k) };
    Ok(Some(Batch { sequences, q: lie(args.rows_q), k, slack: args.slack.unwrap_or(SLACK) }))
}

fn problem(args: &EmulateArgs, spec: &KernelSpec, lengths: Lengths) -> anyhow::Result<Problem> {
    let of_spec = problem_of(spec, lengths, (args.heads.q, args.heads.kv));
    let given = args.mask.mask();
    let mask = if given.is_full() { of_spec.mask.with_offset(given.offset) } else { given };
    let (head_dim, head_dim_v) =
        args.headdim.map_or((of_spec.head_dim, of_spec.head_dim_v), |dims| (dims.qk, dims.v));
    let score = of_spec
        .score
        .with_softcap(args.softcap.or(of_spec.score.softcap))
        .with_alibi(of_spec.score.alibi.map(|default| args.alibi.unwrap_or(default)));
    let values = dropout(args).of(ScoreMod::NONE).map_err(InputError::Usage)?.dropout;
    let score = score.with_dropout(values);
    let heads_kv = args.heads.kv;
    let problem = of_spec
        .with_heads_kv(heads_kv)
        .with_head_dims(head_dim, head_dim_v)
        .with_mask(mask)
        .with_softmax_scale(args.scale.or(of_spec.softmax_scale))
        .with_score(score);
    let has_own = args.kv.kv_descale.is_some() || args.kv.out_dtype.is_some();
    let problem = if has_own { args.kv.of(problem)? } else { problem };
    problem.check()?;
    // What takes seconds of emulation takes a GPU microseconds.
    const LIMIT: f64 = 4e11;
    if problem.flops_forward() > LIMIT {
        let message = format!(
            "{:.1e} operations would be emulated for hours, the limit is {LIMIT:.0e}: use shorter sequences \
             or fewer heads",
            problem.flops_forward()
        );
        return Err(InputError::Usage(message).into());
    }
    if !args.gap.is_multiple_of(8) || args.gap > MAX_GAP {
        let message = format!("--gap {}: it must be a multiple of 8 of at most {MAX_GAP}", args.gap);
        return Err(InputError::Usage(message).into());
    }
    let spread = problem.with_head_dims(head_dim + args.gap, head_dim_v + args.gap);
    check_memory(&spread, spec.kernel.is_backward())?;
    Ok(problem)
}
