//! Faults put into the kernels, one at a time: each is found under every schedule, under the name that leads
//! to it.
//!
//! A fault is a change of one statement. When a kernel's text changes and a fault's statement is no longer
//! there, the fault is written again for the new text: its place is said by the test.

use fa_core::{Arch, Dtype, KernelSpec, Mask, Problem};
use fa_emu::{Options, Placement, Trial, source};
use fa_kernels::{Headers, Source};

use crate::{ONLY, emulator};

/// One fault.
struct Fault {
    name: &'static str,
    kernel: &'static str,
    /// Fields of the kernel that differ from [`BASES`].
    fields: &'static [(&'static str, &'static str)],
    seqlen: usize,
    file: &'static str,
    /// The fault is at the first `old` after this text.
    after: &'static str,
    old: &'static str,
    new: &'static str,
    /// Parts of the finding's text, its kind first; one of these alternatives.
    found: &'static [&'static str],
}

/// A configuration of each kernel in which most of its code runs.
const BASES: [(&str, &str); 5] = [
    (
        "sm80_fwd",
        "Sm80Fwd((tile_m: 128, tile_n: 96, num_warps: 4, stages: 2, q_in_regs: false, blocks_per_sm: 1, \
         swizzle: true, ldmatrix: true, exp2: true, fast_math: true, loop_split: true, reverse_blocks: \
         true))",
    ),
    (
        "sm90_fwd",
        "Sm90Fwd((tile_m: 128, tile_n: 128, num_wg: 2, pv_is_rs: true, overlap_wg: true, q_stages: 1, \
         kv_stages: 2, ping_pong: true, scheduler: Dynamic, tile_order: LongestFirst, cluster_m: 1, \
         exp_poly_of_16: 4, rescale_threshold: 8, pack_gqa: false))",
    ),
    (
        "sm80_bwd",
        "Sm80Bwd((tile_m: 64, tile_n: 128, num_warps: 8, q_stages: 2, do_stages: 2, atom_layout_m_sdp: 2, \
         atom_layout_n_dkv: 4, atom_layout_m_dq: 2, dq_first: 0, blocks_per_sm: 1, tile_order: LongestFirst, \
         deterministic: false))",
    ),
    (
        "sm90_bwd",
        "Sm90Bwd((tile_m: 128, tile_n: 128, num_wg: 2, q_stages: 2, do_stages: 2, pds_stages: 2, \
         sdp_swap_ab: true, dkv_swap_ab: false, dq_swap_ab: false, atom_layout_m_sdp: 1, atom_layout_n_dkv: \
         2, atom_layout_m_dq: 2, mma_dkv_is_rs: true, dq_via_smem: true, dq_slices: 1, tile_order: \
         LongestFirst, deterministic: false))",
    ),
    (
        "sm100_fwd",
        "Sm100Fwd((tile_m: 256, tile_n: 128, q_tiles: 2, kv_stages: 4, scheduler: PerTile, tile_order: \
         LongestFirst, exp_poly_of_16: 2, rescale_threshold: 0))",
    ),
];

/// Warps that divide the keys.
const DIVIDED: &[(&str, &str)] =
    &[("tile_m", "16"), ("tile_n", "128"), ("reverse_blocks", "true, divide_keys: true")];
/// P through shared memory, no lazy maximum.
const THROUGH_SMEM: &[(&str, &str)] =
    &[("pv_is_rs", "false"), ("exp_poly_of_16", "0"), ("rescale_threshold", "0")];
const SM80: &str = "sm80/fwd.cuh";
const SM90: &str = "sm90/fwd.cuh";
const SM90_CONSUMER: &str = "sm90/fwd_consumer.cuh";
const SM90_PRODUCER: &str = "sm90/fwd_producer.cuh";
const SM90_TILES: &str = "sm90/fwd_tiles.cuh";
const SM80_GROUP: &str = "sm80/bwd_group.cuh";
const SM80_P_WARPS: &str = "sm80/bwd_p_warps.cuh";
const SM80_DS_WARPS: &str = "sm80/bwd_ds_warps.cuh";
const SM90_DQ: &str = "sm90/bwd_dq.cuh";
const SM90_BWD: &str = "sm90/bwd_consumer.cuh";
const SM100: &str = "sm100/fwd.cuh";
const SM100_LOAD: &str = "sm100/fwd_load.cuh";
const SM100_PRODUCTS: &str = "sm100/fwd_products.cuh";
const SM100_SOFTMAX: &str = "sm100/fwd_softmax.cuh";
const SM100_CORRECTION: &str = "sm100/fwd_correction.cuh";
const PIPELINE: &str = "tile/pipeline.cuh";

macro_rules! faults {
    ($($name:literal: $kernel:literal $fields:expr, $seqlen:literal, $file:expr, $after:literal,
       $old:literal => $new:literal, $found:expr;)+) => {
        const FAULTS: &[Fault] = &[$(Fault {
            name: $name,
            kernel: $kernel,
            fields: $fields,
            seqlen: $seqlen,
            file: $file,
            after: $after,
            old: $old,
            new: $new,
            found: &$found,
        }),+];
    };
}

faults! {
    // ---- SM80 forward ----
    "no barrier after cp.async.wait": "sm80_fwd" &[], 300, SM80, "the previous stage is free",
        "cta_sync();" => "", ["data race"];
    "one group too few is waited for": "sm80_fwd" &[], 300, SM80, "the previous stage is free",
        "cp_async_wait<C.stages - 2>" => "cp_async_wait<C.stages - 1>", ["data race"];
    "copies go to the stage in use": "sm80_fwd" &[], 300, SM80, "ahead >= range.begin",
        "stage == 0 ? C.stages - 1 : stage - 1" => "stage", ["data race"];
    "copies are not committed": "sm80_fwd" &[("stages", "3"), ("tile_n", "64")], 400, SM80, "auto load_ahead",
        "cp_async_commit();" => "", ["data race"];
    "no barrier of a warp after its copies": "sm80_fwd" DIVIDED, 300, SM80, "with the warp's copies alone",
        "warp_sync();" => "", ["data race"];
    "copies go to the stage in use by the warp": "sm80_fwd" DIVIDED, 300, SM80, "auto load_ahead",
        "stage == 0 ? C.stages - 1 : stage - 1" => "stage", ["data race"];
    "no barrier before the warps' results": "sm80_fwd" DIVIDED, 300, "sm80/fwd_divided.cuh",
        "float* const sums = maxima",
        "cta_sync();" => "", ["data race"];
    "no barrier before K overwrites Q": "sm80_fwd" &[("q_in_regs", "true")], 300, SM80,
        "cp_async_wait<kClear ? 1 : 0>",
        "q_operand.read_all(" => "if (false) q_operand.read_all(", ["data race", "wrong values"];
    "the tail of K is read beyond the tensor": "sm80_fwd" &[], 300, "tile/copy_tile.cuh", "",
        "!Ragged || row + tile_row < end" => "true", ["out of bounds"];

    // ---- SM90 forward ----
    "no proxy fence for P": "sm90_fwd" THROUGH_SMEM, 300, SM90_CONSUMER, "auto pack_p",
        "fence_async_shared();" => "", ["missing proxy fence"];
    "the swizzle of P is off by a bit": "sm90_fwd" THROUGH_SMEM, 300, "tile/stmatrix_tile.cuh", "",
        "(offset >> 7) % kChunks" => "(offset >> 8) % kChunks", ["wrong values"];
    "S is read before its product is waited for": "sm90_fwd" &[], 300, SM90_CONSUMER, "while (--",
        "wgmma::wait<1>" => "wgmma::wait<2>", ["register hazard"];
    "K is released before its product is done": "sm90_fwd" &[], 600, SM90_CONSUMER, "while (--",
        "wgmma::wait<1>();" => "release_k(); wgmma::wait<1>(); auto release_k = [] {};", ["data race"];
    "V is not waited for": "sm90_fwd" &[], 300, SM90_CONSUMER, "while (--",
        "smem.v_bars.wait_full(v_state);" => "", ["data race"];
    "no wgmma.fence before P V": "sm90_fwd" &[], 300, SM90_CONSUMER, "auto issue_pv",
        "wgmma::fence();" => "", ["missing wgmma.fence"];
    "no fence after mbarrier.init": "sm90_fwd" &[], 300, SM90, "",
        "mbarrier_init_fence();" => "", ["missing proxy fence", "mbarrier"];
    "no barrier after mbarrier.init": "sm90_fwd" &[], 300, SM90, "mbarrier_init_fence();",
        "cta_sync();" => "", ["mbarrier"];
    "the producer starts with the wrong phase": "sm90_fwd" &[], 300, PIPELINE, "acquire(",
        "state.phase ^ 1" => "state.phase", ["deadlock"];
    "the producer does not wait for an empty stage": "sm90_fwd" &[], 600, PIPELINE, "acquire(",
        "mbarrier_wait(empty[state.stage], state.phase ^ 1);" => "", ["data race", "over-arrival"];
    "half the bytes are expected": "sm90_fwd" &[], 300, SM90_PRODUCER, "auto load_k",
        "T::K::kBytes" => "T::K::kBytes / 2", ["deadlock"];
    "all lanes arrive": "sm90_fwd" &[], 600, PIPELINE, "",
        "if (!elected) return;" => "", ["over-arrival", "data race", "deadlock"];
    "one arrival too few is expected": "sm90_fwd" &[], 600, PIPELINE, "",
        "consumer_warps * Ctas" => "consumer_warps * Ctas - 1", ["data race", "over-arrival", "deadlock"];
    "Q is never released": "sm90_fwd" &[], 600, SM90_CONSUMER, "constexpr (C.overlap_wg)",
        "smem.q_bars.release(q_state, elected);" => "", ["deadlock"];
    "setmaxnreg asks for too much": "sm90_fwd" &[], 300, "sm90/fwd_layout.cuh", "",
        "C.num_wg == 2 ? 240" => "C.num_wg == 2 ? 248", ["deadlock"];
    "a turn is not passed on": "sm90_fwd" &[], 600, SM90_CONSUMER, "while (--",
        "signal_next();" => "", ["deadlock"];
    "a ticket is written before all have read the last one": "sm90_fwd" &[], 900, SM90_TILES, "",
        "mbarrier_wait(smem.ticket.bars.empty[0], state.phase ^ 1);" => "", ["data race"];
    "one lane releases the ticket for its warp": "sm90_fwd" &[], 900, SM90_TILES, "int next(",
        "mbarrier_arrive(smem.ticket.bars.empty[0]);" => "if (lane_index() == 0) \
            mbarrier_arrive(smem.ticket.bars.empty[0]);", ["deadlock"];
    "a skipped tile is released before all lanes have seen it": "sm90_fwd" &[("tile_n", "64")], 600,
        SM90_CONSUMER, "auto skip_k", "warp_sync();" => "", ["phase overrun"];
    "the counters are not reset": "sm90_fwd" &[], 300, SM90_TILES, "",
        "params.tile_counter[0] = 0;" => "", ["leaked state"];

    // ---- SM90 backward ----
    "no fence before dQ is added": "sm90_bwd" &[], 300, SM90_BWD, "void announce_dq()",
        "fence_async_shared();" => "", ["missing proxy fence"];
    "a turn is passed on before dQ is added": "sm90_bwd" &[("deterministic", "true")], 600, SM90_DQ,
        "else if ((C.deterministic", "bulk_wait();" => "", ["unordered addition"];
    "dQ's buffer is written while it is read": "sm90_bwd" &[], 600, SM90_DQ, "",
        "bulk_wait_read();" => "", ["data race"];
    "dS is exchanged without a barrier": "sm90_bwd" &[], 300, SM90_BWD, "void exchange()",
        "named_barrier_sync(kPdsReady, T::kConsumers);" => "", ["data race"];
    "dS is exchanged without a proxy fence": "sm90_bwd" &[], 300, SM90_BWD, "void exchange()",
        "fence_async_shared();" => "", ["missing proxy fence"];
    "dO is released before dV is done": "sm90_bwd" &[("do_stages", "1")], 600, SM90_BWD, "void step(",
        "if constexpr (!C.mma_dkv_is_rs) issue_dv();" => "release_do(); auto release_do = [] {};",
        ["data race"];

    // ---- SM80 backward ----
    "P is overwritten while it is read": "sm80_bwd" &[], 300, SM80_P_WARPS, "probabilities(s, next);",
        "named_barrier_sync(kBarrierPRead, L::kThreads);" => "named_barrier_arrive(kBarrierPRead, \
            L::kThreads);", ["data race"];
    "dS is not waited for": "sm80_bwd" &[], 300, SM80_DS_WARPS, "differentiate(dp, step());",
        "named_barrier_sync(kBarrierDs, C.do_stages == 1 ? L::kThreads : L::kGroupThreads);" => "",
        ["data race"];
    "a turn is taken without waiting": "sm80_bwd" &[("deterministic", "true")], 600, SM80_GROUP,
        "void await_turn(",
        "if constexpr (C.deterministic) {" => "if constexpr (false) {", ["unordered addition"];

    // ---- SM100 forward ----
    "S overwrites P before P V is done": "sm100_fwd" &[], 600, SM100_PRODUCTS, "",
        "if (pv_runs[t]) o_full[t].wait(smem.o_full[t]);" => "", ["data race"];
    "no fence after P": "sm100_fwd" &[], 600, SM100_PRODUCTS, "p_full[t].wait(smem.p_full[t]);",
        "tcgen05::fence_after();" => "", ["missing tcgen05.fence"];
    "P V is added to what nobody has written": "sm100_fwd" &[], 600, SM100_PRODUCTS, "",
        "const bool accumulate = !work.is_first(t, block);" => "const bool accumulate = true;",
        ["uninitialised read"];
    "a slot is released before its products are done": "sm100_fwd" &[("kv_stages", "2")], 600, SM100_PRODUCTS,
        "scores(work, t, work.end - 1, keys);", "tcgen05::commit(" => "mbarrier_arrive(", ["data race"];
    "Q is released before its last S is done": "sm100_fwd" &[("scheduler", "Static")], 1100, SM100_PRODUCTS,
        "", "tcgen05::commit(smem.q_empty[t]);" => "mbarrier_arrive(smem.q_empty[t]);", ["data race"];
    "S is read before it is done": "sm100_fwd" &[], 600, SM100_SOFTMAX, "",
        "s_full.wait(smem.s_full[t]);" => "", ["data race", "uninitialised read"];
    "scores are used before they are loaded": "sm100_fwd" &[], 600, SM100_SOFTMAX, "",
        "tcgen05::wait_load();" => "", ["register hazard"];
    "P is signalled before it is stored": "sm100_fwd" &[], 600, SM100_SOFTMAX, "",
        "tcgen05::wait_store();" => "", ["data race"];
    "P is signalled without a fence": "sm100_fwd" &[], 600, SM100_SOFTMAX, "tcgen05::wait_store();",
        "tcgen05::fence_before();" => "", ["data race"];
    "the scale is written before it was read": "sm100_fwd" &[], 900, SM100_SOFTMAX, "",
        "scale_empty.wait_free(smem.scale_empty[t]);" => "", ["data race"];
    "the scale is signalled before all lanes have written it": "sm100_fwd" &[], 600, SM100_SOFTMAX,
        "smem.scale[t][own_row] = scale;", "warp_sync();" => "", ["data race"];
    "O is stored before the last product": "sm100_fwd" &[], 600, SM100_CORRECTION, "",
        "mbarrier_wait(smem.o_full[t], (outputs[t] - 1) & 1);" => "", ["data race", "missing tcgen05.fence"];
    "O is signalled before it is stored": "sm100_fwd" &[], 600, SM100_CORRECTION, "",
        "tcgen05::wait_store();" => "", ["data race"];
    "no fence before O is rescaled": "sm100_fwd" &[], 600, SM100_CORRECTION,
        "const float scale = receive(t);", "tcgen05::fence_after();" => "", ["missing tcgen05.fence"];
    "O is not rescaled": "sm100_fwd" &[], 600, SM100_CORRECTION, "",
        "if (warp_any(scale != 1.f))" => "if (false)", ["wrong values"];
    "half of Q is expected": "sm100_fwd" &[], 300, SM100_LOAD, "mbarrier_arrive_expect(",
        "T::Q::kBytes" => "T::Q::kBytes / 2", ["deadlock"];
    "tensor memory is not freed": "sm100_fwd" &[], 300, SM100, "",
        "tcgen05::dealloc(base, T::kColumns);" => "{}", ["leaked tensor memory"];
    "tensor memory is freed while others use it": "sm100_fwd" &[], 600, SM100, "tcgen05::fence_before();",
        "cta_sync();" => "", ["data race", "missing tcgen05.fence"];
    "more registers than there are": "sm100_fwd" &[], 300, "sm100/fwd_layout.cuh", "",
        "kSoftmaxRegs = 184" => "kSoftmaxRegs = 192", ["deadlock"];

    // ---- Tried once to see where the message leads, and kept ----
    "a row beyond the end is stored": "sm90_fwd" &[], 300, "attn/epilogue.cuh", "",
        "inside = row < end;" => "inside = row <= end;", ["out of bounds"];
    "lanes part at a shuffle": "sm80_fwd" &[], 300, "attn/softmax.cuh", "quad_max(",
        "shuffle_xor(x, 1)" => "thread_index() % 4 < 2 ? shuffle_xor(x, 1) : x", ["divergence"];
    "a barrier counts half of its threads": "sm80_bwd" &[], 300, SM80_DS_WARPS, "differentiate(dp, step());",
        "named_barrier_arrive(kBarrierPRead, L::kThreads);" => "named_barrier_arrive(kBarrierPRead, \
            L::kGroupThreads);", ["named barrier", "128 of 256 threads have arrived"];
    "statistics of the other stage are read": "sm90_bwd" &[], 600, SM90_BWD, "",
        "load_stats(smem.lse[places.dout.stage], b, i, lse);" => "load_stats(smem.lse[places.dout.stage ^ \
            1], b, i, lse);",
        ["uninitialised read", "data race"];
    "the next turn is given to another tile": "sm90_bwd" &[("deterministic", "true")], 600, SM90_DQ,
        "bulk_wait();",
        "signal_next(params, tile, head, m_block);" => "signal_next(params, tile, head, m_block + 1);",
        ["deadlock", "out of bounds", "unordered addition"];
    "a product reads V sixteen rows further": "sm90_fwd" &[], 300, SM90_CONSUMER, "auto issue_pv",
        "T::V::row_offset(k)" => "T::V::row_offset(k + 16)",
        ["bad descriptor", "data race", "uninitialised read", "wrong values"];
}

/// A configuration of `kernel` with other values of some fields.
pub(crate) fn spec(kernel: &str, fields: &[(&str, &str)]) -> KernelSpec {
    let (_, base) = BASES.iter().find(|(name, _)| *name == kernel).expect("a kernel's name");
    let mut kernel = (*base).to_owned();
    for (field, value) in fields {
        let at = kernel.find(&format!("{field}: ")).expect("a field of the kernel") + field.len() + 2;
        let end = at + kernel[at..].find([',', ')']).expect("fields end");
        kernel.replace_range(at..end, value);
    }
    let text = format!(
        "(dtype: bf16, head_dim: 64, head_dim_v: 64, mask: causal, softcap: false, kernel: {kernel})"
    );
    KernelSpec::from_ron(&text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Puts `new` for the first `old` after `after` in a header; `Err` where there is none.
pub(crate) fn inject(source: &mut Source, [file, after, old, new]: [&str; 4]) -> Result<(), String> {
    let found = source.headers.iter_mut().find(|(name, _)| name == file);
    let (_, text) = found.ok_or(format!("{file} is no header of the kernel"))?;
    let from = text.find(after).ok_or(format!("no `{after}` in {file}"))? + after.len();
    let at = text[from..].find(old).ok_or(format!("no `{old}` after `{after}`"))? + from;
    text.replace_range(at..at + old.len(), new);
    Ok(())
}

/// What is found in a kernel with the fault, under three seeds; `Err` when its statement is not there.
fn find(fault: &Fault) -> Result<Vec<String>, String> {
    let emulator = emulator();
    let spec = spec(fault.kernel, fault.fields);
    let arch = if fault.kernel == "sm100_fwd" { Arch::Sm100 } else { Arch::Sm90 };
    let mut source = source(&spec, arch, &Headers::embedded()).unwrap();
    inject(&mut source, [fault.file, fault.after, fault.old, fault.new])?;
    let unit = emulator.unit_of(&spec, arch, &source).map_err(|error| error.to_string())?;
    let problem = Problem::square(1, fault.seqlen, 1, 64, Mask::CAUSAL, Dtype::Bf16);
    let trial = Trial::new(&problem, spec.kernel.pass(), Placement::PACKED);
    let mut all = Vec::new();
    for seed in 0..3 {
        let proof = trial.run(&unit, &Options { step_limit: 20_000_000, ..Options::seed(seed) }).unwrap();
        all.push(proof.faults().join("\n"));
    }
    Ok(all)
}

fn check(kernel: &str) {
    let only = std::env::var(ONLY).unwrap_or_default();
    let mut missed = Vec::new();
    for fault in FAULTS.iter().filter(|fault| fault.kernel == kernel && fault.name.contains(&only)) {
        match find(fault) {
            Err(error) => missed.push(format!("{}: {error}", fault.name)),
            Ok(found) => {
                for (seed, text) in found.iter().enumerate() {
                    if !fault.found.iter().any(|kind| text.contains(kind)) {
                        missed.push(format!(
                            "{}, seed {seed}: found {text:?}, not {:?}",
                            fault.name, fault.found
                        ));
                    }
                }
                eprintln!("---- {}\n{}", fault.name, found[2].lines().take(7).collect::<Vec<_>>().join("\n"));
            }
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n\n"));
}

#[test]
#[ignore = "emulation"]
fn faults_of_the_sm80_forward_are_found() {
    check("sm80_fwd");
}

#[test]
#[ignore = "emulation"]
fn faults_of_the_sm90_forward_are_found() {
    check("sm90_fwd");
}

#[test]
#[ignore = "emulation"]
fn faults_of_the_sm80_backward_are_found() {
    check("sm80_bwd");
}

#[test]
#[ignore = "emulation"]
fn faults_of_the_sm90_backward_are_found() {
    check("sm90_bwd");
}

#[test]
#[ignore = "emulation"]
fn faults_of_the_sm100_forward_are_found() {
    check("sm100_fwd");
}
