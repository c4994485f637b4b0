//! The entry functions of units: their names, threads and shared memory, and which of them a spec has.

use fa_core::quantize::Codes;
use fa_core::spec::{TileOrder, WHOLE_ROW_HEAD_DIM};
use fa_core::{Family, Kernel, KernelSpec};

use crate::jit::array_gradients::ArrayGradient;
use crate::jit::program_params::MAX_ARRAYS;

/// The name of every unit's main entry function.
pub const ENTRY: &str = "fa_kernel";

/// A backward's entry before the main one: statistics of the rows, and accumulators set to zero.
pub(crate) const PREPROCESS: &str = "fa_preprocess";

/// A backward's entry after the main one: dQ from its accumulators.
pub(crate) const POSTPROCESS: &str = "fa_postprocess";

/// The last entry where several CTAs share a tile of dK and dV: both from their accumulators.
pub(crate) const POSTPROCESS_KV: &str = "fa_postprocess_kv";

/// The entry of a backward with sinks: their gradient from the statistics of the rows.
pub(crate) const DSINKS: &str = "fa_dsinks";

/// Threads of a CTA of [`DSINKS`].
pub(crate) const DSINKS_THREADS: u32 = 1024;

/// The entry of the append kernel's unit.
pub const APPEND: &str = "fa_append";

/// The entry of the same for caches of 8-bit codes.
pub const APPEND_CODES: &str = "fa_append_codes";

/// The entry of the same for caches of int4 codes.
pub const APPEND_INT4: &str = "fa_append_int4";

/// The entry of the append kernel's unit for a cache of codes, or of elements.
pub const fn append_entry(codes: Option<Codes>) -> &'static str {
    match codes {
        None => APPEND,
        Some(Codes::E4m3 | Codes::Int8 | Codes::E5m2) => APPEND_CODES,
        Some(Codes::Int4) => APPEND_INT4,
    }
}

/// Threads of a CTA of [`APPEND`].
pub(crate) const APPEND_THREADS: u32 = 256;

/// Bytes of shared memory of a CTA of [`APPEND`]: where each of its rows goes.
pub(crate) const APPEND_SMEM: u32 = 32 * 20;

/// The entry of the merge kernel's unit.
pub const MERGE: &str = "fa_merge";

/// Threads of a CTA of [`MERGE`]: a warp a row.
pub(crate) const MERGE_THREADS: u32 = 128;

/// The entry of the dropout kernel's unit.
pub const DROPOUT: &str = "fa_dropout";

/// Threads of a CTA of [`DROPOUT`].
pub(crate) const DROPOUT_THREADS: u32 = 256;

/// Threads of a CTA of the entries before and after the main one.
pub(crate) const PROCESS_THREADS: u32 = 256;

/// The entry of kernels that read lengths on the device: the work plan.
pub(crate) const PLAN: &str = "fa_plan";

/// Threads of a CTA of [`PLAN`], and its shared memory in bytes.
pub(crate) const PLAN_THREADS: u32 = 1024;
pub(crate) const PLAN_SMEM: u32 = 20760 + 9 * 1024 * 8;

/// The most CTAs of [`PLAN`], which are one cluster.
pub(crate) const PLAN_CTAS: u32 = 8;

/// The entry of kernels with a mask of the caller's own: the tiles that it leaves to be visited. Of a
/// backward, their states.
pub(crate) const MAP: &str = "fa_map";

/// Threads of a CTA of [`MAP`].
pub(crate) const MAP_THREADS: u32 = 512;

/// The entry after [`MAP`] of a backward: the tiles of queries that each tile of keys visits.
pub(crate) const LISTS: &str = "fa_lists";

/// Threads of a CTA of [`LISTS`]: a warp a tile of keys.
pub(crate) const LISTS_THREADS: u32 = 128;

/// The entry after [`LISTS`] of a backward whose tiles of keys come in the order of their lists.
pub(crate) const ORDER: &str = "fa_order";

/// Threads of a CTA of [`ORDER`]: one a tile of keys.
pub(crate) const ORDER_THREADS: u32 = 128;

/// Whether a backward has [`ORDER`]: not one that is deterministic, whose tiles take turns in a fixed order.
pub(crate) fn orders_lists(spec: &KernelSpec) -> bool {
    let traits = spec.traits();
    let is_ordered = traits.tile_order == TileOrder::LongestFirst && !traits.pass.deterministic();
    spec.kernel.is_backward() && spec.score.masks() && is_ordered
}

/// The entry after these of kernels that read the pairs which a mask leaves as bits (`attn/mask_bits.cuh`).
pub(crate) const MASK_BITS: &str = "fa_mask_bits";

/// Threads of a CTA of [`MASK_BITS`]: the kernel's consumers. `None` for kernels that evaluate the mask
/// themselves.
pub(crate) fn mask_bits_threads(spec: &KernelSpec) -> Option<u32> {
    if !spec.score.masks() {
        return None;
    }
    match spec.kernel {
        Kernel::Sm90Fwd(_) | Kernel::Sm90Bwd(_) => Some(spec.threads() - 128),
        // Of its consumers one has the scores.
        Kernel::Sm90Wide(_) => Some(128),
        Kernel::Sm80Fwd(_) | Kernel::Sm80Bwd(_) | Kernel::Sm90FwdFp8(_) | Kernel::Sm100Fwd(_) => None,
    }
}

/// The entries of a backward whose program reads arrays that want gradients, one for each of
/// [`program::Program::gradients`].
pub(crate) const ARRAY_GRADIENTS: [&str; MAX_ARRAYS] = [
    "fa_array_gradient_0",
    "fa_array_gradient_1",
    "fa_array_gradient_2",
    "fa_array_gradient_3",
    "fa_array_gradient_4",
    "fa_array_gradient_5",
    "fa_array_gradient_6",
    "fa_array_gradient_7",
    "fa_array_gradient_8",
    "fa_array_gradient_9",
    "fa_array_gradient_10",
    "fa_array_gradient_11",
    "fa_array_gradient_12",
    "fa_array_gradient_13",
    "fa_array_gradient_14",
    "fa_array_gradient_15",
];

/// Threads of a CTA of [`ARRAY_GRADIENTS`].
pub(crate) const ARRAY_GRADIENT_THREADS: u32 = 256;

/// The entry of a backward that may store dS: sums of it, which are the gradient of an array that several
/// sequences or heads share.
pub(crate) const ARRAY_SUM: &str = "fa_array_sum";

/// Threads of a CTA of [`ARRAY_SUM`].
pub(crate) const ARRAY_SUM_THREADS: u32 = 256;

/// Whether several CTAs of [`PLAN`] may divide the sequences: where GPUs have clusters.
pub(crate) fn plans_in_clusters(spec: &KernelSpec) -> bool {
    spec.kernel.family() == Family::Sm90
}

/// The entry of a forward that divides keys among CTAs: O and LSE from the parts' results.
pub(crate) const COMBINE: &str = "fa_combine";

/// Threads of a CTA of [`COMBINE`], and its shared memory in bytes for rows of [`COMBINE_COLUMNS`].
pub(crate) const COMBINE_THREADS: u32 = 128;
const COMBINE_SMEM: u32 = 4096;

/// The most columns of O of most kernels, for which its code is (`kMaxHeadDim`).
pub(crate) const COMBINE_COLUMNS: u32 = WHOLE_ROW_HEAD_DIM;

/// Shared memory of a CTA of [`COMBINE`] in bytes.
pub(crate) fn combine_smem(spec: &KernelSpec) -> u32 {
    if combines_wide_rows(spec) { 2 * COMBINE_SMEM } else { COMBINE_SMEM }
}

/// Whether rows of O may have more than [`COMBINE_COLUMNS`].
pub(crate) fn combines_wide_rows(spec: &KernelSpec) -> bool {
    spec.head_dim_v > COMBINE_COLUMNS
}

/// The entry that holds the place of [`PLAN`] in the program of the main one. Entries of a program share the
/// alignment of shared memory, which the last of them sets: without it addresses would be computed
/// differently, and the code would not be that of the unit whole.
pub(crate) const PLACE: &str = "fa_place";

/// The entries of each of [`Source::programs`](crate::Source::programs), the main one first.
pub(crate) fn entries_of_programs(spec: &KernelSpec) -> Vec<Vec<&'static str>> {
    let (shared, own): (Vec<_>, Vec<_>) = entries(spec).into_iter().partition(|entry| has_own_program(entry));
    std::iter::once(own).chain(shared.into_iter().map(|entry| vec![entry])).collect()
}

/// Whether an entry depends on so little of its spec that many specs share its code.
fn has_own_program(entry: &str) -> bool {
    entry == PLAN || entry == COMBINE
}

/// The entry functions of a spec's unit, the main one first.
pub(crate) fn entries(spec: &KernelSpec) -> Vec<&'static str> {
    let is_backward = spec.kernel.is_backward();
    let all = [
        (ENTRY, true),
        (PREPROCESS, is_backward),
        (POSTPROCESS, sums_dq(spec)),
        (POSTPROCESS_KV, is_backward),
        (DSINKS, is_backward && spec.score.sinks),
        (PLAN, spec.reads.varied),
        (COMBINE, spec.split),
        (MAP, spec.score.masks()),
        (LISTS, spec.score.masks() && is_backward),
        (ORDER, orders_lists(spec)),
        (MASK_BITS, mask_bits_threads(spec).is_some()),
        (ARRAY_SUM, spec.stored_gradient().is_some()),
    ];
    let mut all: Vec<&str> = all.into_iter().filter_map(|(name, has)| has.then_some(name)).collect();
    all.extend(array_gradients(spec).iter().map(|gradient| ARRAY_GRADIENTS[gradient.index]));
    all
}

/// Whether a backward has f32 accumulators of dQ, which a launch converts.
pub(crate) fn sums_dq(spec: &KernelSpec) -> bool {
    spec.backward().is_some_and(|own| !own.whole_keys)
}

/// The arrays whose gradients a kernel computes; none where it refuses to, which a launch reports.
pub(crate) fn array_gradients(spec: &KernelSpec) -> Vec<ArrayGradient> {
    ArrayGradient::all(spec).unwrap_or_default()
}
