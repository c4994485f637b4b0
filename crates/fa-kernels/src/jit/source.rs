//! From a spec to a translation unit: an include, the config, and the entry.

use std::fmt::Write;
use std::path::Path;

use fa_core::quantize::Codes;
use fa_core::{Arch, Kernel, KernelSpec, Traits, program};

use crate::jit::array_gradients::array_gradient_smem;
use crate::jit::code;
use crate::jit::codegen::{PROGRAM_PARAMS, params_of_many_arrays};
use crate::jit::config;
use crate::jit::entries::{
    APPEND_SMEM, APPEND_THREADS, ARRAY_GRADIENT_THREADS, ARRAY_GRADIENTS, ARRAY_SUM, ARRAY_SUM_THREADS,
    COMBINE, COMBINE_COLUMNS, COMBINE_THREADS, DROPOUT, DROPOUT_THREADS, DSINKS, DSINKS_THREADS, ENTRY,
    LISTS, LISTS_THREADS, MAP, MAP_THREADS, MASK_BITS, MERGE, MERGE_THREADS, ORDER, ORDER_THREADS, PLACE,
    PLAN, PLAN_CTAS, PLAN_SMEM, PLAN_THREADS, POSTPROCESS, POSTPROCESS_KV, PREPROCESS, PROCESS_THREADS,
    append_entry, array_gradients, combine_smem, combines_wide_rows, mask_bits_threads, orders_lists,
    plans_in_clusters, sums_dq,
};
use crate::jit::hash::hash;
use crate::jit::headers::Includes;
use crate::jit::program_params::FEW_ARRAYS;
use crate::{Error, Headers};

/// All that a compiler is given, except its flags.
#[derive(Clone, Debug, PartialEq)]
pub struct Source {
    /// The translation unit.
    pub unit: String,
    /// The headers that it reaches, `(name, text)`, ordered by name.
    pub headers: Vec<(String, String)>,
    /// The target, as in `--gpu-architecture=`: `sm_90a`, `sm_86`, ...
    pub target: String,
}

/// Bytes that a kernel with a program of the caller's may store, and load, by spills: no list knows what its
/// registers hold, and a few words in the L1 cost less than a smaller tile or none.
const SPILLS_OF_PROGRAMS: u32 = 64;

/// The same where probabilities have weights, which are read while P is held.
const SPILLS_OF_WEIGHTS: u32 = 128;

impl Source {
    /// Bytes that the kernel may store, and load, by spills.
    pub(crate) fn spills_allowed(&self) -> u32 {
        match self.headers.iter().find(|(name, _)| name == program::HEADER) {
            Some((_, text)) if text.contains(program::WEIGHTS) => SPILLS_OF_WEIGHTS,
            Some(_) => SPILLS_OF_PROGRAMS,
            None => 0,
        }
    }

    /// The source of `spec` for `arch`. With `smem_bytes`, the unit asserts that the kernel's shared storage
    /// has that size, so that a plan that accounts differently from the kernel does not compile.
    ///
    /// # Errors
    /// What [`KernelSpec::check`] and [`KernelSpec::check_arch`] find, and [`Error::MissingHeader`].
    pub fn new(
        spec: &KernelSpec,
        arch: Arch,
        smem_bytes: Option<u32>,
        headers: &Headers,
    ) -> Result<Source, Error> {
        spec.check()?;
        spec.check_arch(arch)?;
        Ok(Source::all([unit(spec, smem_bytes, true)], spec, arch, headers)?.remove(0))
    }

    /// The same as what is compiled: the program of the main entry and those beside it, then a program for
    /// the plan and one for the combination, whose text is the same for many specs.
    ///
    /// # Errors
    /// As [`Source::new`].
    pub fn programs(
        spec: &KernelSpec,
        arch: Arch,
        smem_bytes: Option<u32>,
        headers: &Headers,
    ) -> Result<Vec<Source>, Error> {
        spec.check()?;
        spec.check_arch(arch)?;
        let shared = [
            spec.reads
                .varied
                .then(|| shared_program(spec, plan_header(spec), &[plan_rules(spec), plan(spec)])),
            spec.split.then(|| shared_program(spec, "split", &[combine(spec)])),
        ];
        let units = std::iter::once(unit(spec, smem_bytes, false)).chain(shared.into_iter().flatten());
        Source::all(units, spec, arch, headers)
    }

    /// The sources of units of a spec.
    fn all(
        units: impl IntoIterator<Item = String>,
        spec: &KernelSpec,
        arch: Arch,
        headers: &Headers,
    ) -> Result<Vec<Source>, Error> {
        let mut own = spec.score.program.map(|program| headers.with(program::HEADER, program.cuda()));
        if spec.score.program.is_some_and(|program| program.arrays().len() > FEW_ARRAYS) {
            own = own.map(|own| own.with(PROGRAM_PARAMS, params_of_many_arrays()));
        }
        let headers = own.as_ref().unwrap_or(headers);
        let mut known = Includes::new();
        let source = |unit: String| -> Result<Source, Error> {
            let reached = headers.reachable_by(&unit, &mut known)?.into_iter();
            let headers = reached.map(|(name, text)| (name.to_owned(), text.to_owned())).collect();
            Ok(Source { unit, headers, target: target(spec, arch) })
        };
        units.into_iter().map(source).collect()
    }

    /// The source of the append kernel for a cache of codes, or of elements, which all problems share.
    ///
    /// # Errors
    /// [`Error::MissingHeader`].
    pub fn append(codes: Option<Codes>, arch: Arch, headers: &Headers) -> Result<Source, Error> {
        let (what, header, params) = match codes {
            None => ("append", "append", "AppendParams"),
            Some(Codes::E4m3 | Codes::Int8 | Codes::E5m2) => {
                ("append of codes", "append_codes", "AppendCodesParams")
            }
            Some(Codes::Int4) => ("append of int4 codes", "append_codes", "AppendInt4Params"),
        };
        let entry = append_entry(codes);
        let unit = format!(
            "// {what}\n#include \"append/{header}.cuh\"\n\nusing namespace fa;\n\n\
             static_assert(append_smem_bytes == {APPEND_SMEM});\n\n\
             extern \"C\" __global__ void __launch_bounds__({APPEND_THREADS})\n\
             {entry}(const __grid_constant__ {params} params) {{\n    append(params);\n}}\n"
        );
        Source::of(unit, arch, headers)
    }

    /// The source of the merge kernel, which all problems share.
    ///
    /// # Errors
    /// [`Error::MissingHeader`].
    pub fn merge(arch: Arch, headers: &Headers) -> Result<Source, Error> {
        let unit = format!(
            "// merge\n#include \"merge/merge.cuh\"\n\nusing namespace fa;\n\n\
             extern \"C\" __global__ void __launch_bounds__({MERGE_THREADS})\n\
             {MERGE}(const __grid_constant__ MergeParams params) {{\n    merge(params);\n}}\n"
        );
        Source::of(unit, arch, headers)
    }

    /// The source of the dropout kernel, which all problems share.
    ///
    /// # Errors
    /// [`Error::MissingHeader`].
    pub fn dropout(arch: Arch, headers: &Headers) -> Result<Source, Error> {
        let unit = format!(
            "// dropout\n#include \"dropout/dropout.cuh\"\n\nusing namespace fa;\n\n\
             extern \"C\" __global__ void __launch_bounds__({DROPOUT_THREADS})\n\
             {DROPOUT}(const __grid_constant__ DropoutParams params) {{\n    dropout(params);\n}}\n"
        );
        Source::of(unit, arch, headers)
    }

    /// A unit without a spec, for any GPU of `arch`.
    fn of(unit: String, arch: Arch, headers: &Headers) -> Result<Source, Error> {
        let headers = headers
            .reachable(&unit)?
            .into_iter()
            .map(|(name, text)| (name.to_owned(), text.to_owned()))
            .collect();
        let (major, minor) = arch.compute_capability();
        Ok(Source { unit, headers, target: format!("sm_{major}{minor}") })
    }

    /// A hash (SHA-256 in hex) of the code of the unit and of every header that it reaches, by which records
    /// of validations and measurements show whether a kernel has changed since. Comments, white space and the
    /// target do not count; the headers' names do.
    pub fn fingerprint(&self) -> String {
        let unit = code::canonical(&self.unit);
        let headers: Vec<_> = self.headers.iter().map(|(name, text)| (name, code::of_header(text))).collect();
        let mut parts = vec![unit.as_bytes()];
        headers.iter().for_each(|(name, code)| parts.extend([name.as_bytes(), code.as_bytes()]));
        hash(&parts)
    }

    /// Writes the unit as `kernel.cu` and the headers beside it, as nvcc needs them.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&self, folder: &Path) -> Result<(), Error> {
        let unit = [("kernel.cu".to_owned(), self.unit.clone())];
        for (name, text) in self.headers.iter().chain(&unit) {
            let path = folder.join(name);
            let parent = path.parent().unwrap_or(folder);
            std::fs::create_dir_all(parent).map_err(|e| Error::io(parent, e))?;
            std::fs::write(&path, text).map_err(|e| Error::io(&path, e))?;
        }
        Ok(())
    }
}

/// The architecture-specific target (`a`) only where the kernel needs it: its code runs on no other
/// architecture.
fn target(spec: &KernelSpec, arch: Arch) -> String {
    let (major, minor) = arch.compute_capability();
    let suffix = spec.kernel.family().target_suffix();
    format!("sm_{major}{minor}{suffix}")
}

/// A program of its own for an entry of `parts`, with what they name of the config written out: its text is
/// that of every spec in which these values are the same.
fn shared_program(spec: &KernelSpec, header: &str, parts: &[String]) -> String {
    let fields = config::fields_of(spec);
    let literal = |name: &str| {
        let field = fields.iter().find(|field| field.name == name);
        &field.unwrap_or_else(|| panic!("no field {name} of the config of {spec}")).literal
    };
    let mut text = String::new();
    // The order in which a backward adds to dQ is told by its tiles.
    if spec.kernel.is_backward() {
        text.push_str("#include \"attn/bwd_tile.cuh\"\n");
    }
    let _ = writeln!(text, "#include \"attn/{header}.cuh\"\n\nusing namespace fa;\n");
    let all = parts.concat();
    let mut named = all.split("config.");
    text.push_str(named.next().unwrap_or_default());
    for part in named {
        let end = part.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(part.len());
        text.push_str(literal(&part[..end]));
        text.push_str(&part[end..]);
    }
    text
}

/// Whether two warpgroups share the columns of O.
fn is_wide(spec: &KernelSpec) -> bool {
    matches!(spec.kernel, Kernel::Sm90Wide(_))
}

/// The header of [`PLAN`].
fn plan_header(spec: &KernelSpec) -> &'static str {
    if spec.kernel.is_backward() { "plan" } else { "plan_few" }
}

/// The parameters that all kernels of a pass have.
fn pass_params(spec: &KernelSpec) -> &'static str {
    if spec.kernel.is_backward() { "BwdParams" } else { "FwdParams" }
}

/// What plans go by.
fn plan_rules(spec: &KernelSpec) -> String {
    format!(
        "constexpr PlanRules plan_rules{{config.mask, config.tile_m, config.tile_n, {}, config.split, {}, \
         {}}};\nstatic_assert(plan_smem_bytes == {PLAN_SMEM} && kPlanThreads == {PLAN_THREADS} && kPlanCtas \
         == {PLAN_CTAS});\n\n",
        spec.traits().packs_gqa,
        plans_in_clusters(spec),
        is_wide(spec)
    )
}

/// The text of [`PLAN`].
fn plan(spec: &KernelSpec) -> String {
    let function = if spec.kernel.is_backward() {
        "plan_backward<plan_rules, last_keys_first<config.mask, config.deterministic>()>"
    } else {
        "plan_tiles<plan_rules>"
    };
    entry(spec, PLAN, PLAN_THREADS, pass_params(spec), &format!("{function}(params)"))
}

/// The text of [`COMBINE`].
fn combine(spec: &KernelSpec) -> String {
    let (bytes, columns) = if combines_wide_rows(spec) {
        let columns = 2 * COMBINE_COLUMNS;
        (format!("sizeof(CombineStorage<{columns}>)"), format!(", {columns}"))
    } else {
        ("combine_smem_bytes".to_owned(), String::new())
    };
    let asserted = format!(
        "\nstatic_assert({bytes} == {} && kCombineThreads == {COMBINE_THREADS});\n",
        combine_smem(spec)
    );
    let dtype = if spec.kernel.computes_in_8_bits() { "config.out_dtype" } else { "config.dtype" };
    let packs = spec.traits().packs_gqa;
    let call =
        format!("combine<{dtype}, config.tile_m, {packs}, config.varied, config.sinks{columns}>(params)");
    asserted + &entry(spec, COMBINE, COMBINE_THREADS, pass_params(spec), &call)
}

/// The text of an entry other than the main one.
fn entry(spec: &KernelSpec, entry: &str, threads: u32, params: &str, call: &str) -> String {
    // Registers would be halved for a second CTA; combining wide rows would spill at that.
    let alone =
        entry == PLAN || ARRAY_GRADIENTS.contains(&entry) || (entry == COMBINE && combines_wide_rows(spec));
    let threads = if alone { format!("{threads}, 1") } else { threads.to_string() };
    format!(
        "\nextern \"C\" __global__ void __launch_bounds__({threads})\n\
         {entry}(const __grid_constant__ {params} params) {{\n    {call};\n}}\n"
    )
}

/// The text of a spec's unit: `whole`, or without the entries that have programs of their own.
fn unit(spec: &KernelSpec, smem_bytes: Option<u32>, whole: bool) -> String {
    let name = spec.kernel.name();
    // As in the folders: `sm90_fwd` is `sm90/fwd.cuh`.
    let header = format!("{}.cuh", name.replacen('_', "/", 1));
    let Traits { blocks_per_sm, cluster, tensor_maps, head_parts, .. } = spec.traits();
    let mut maps: Vec<String> = tensor_maps.iter().map(|tensor| format!("tma_{tensor}")).collect();
    let mut arguments: String = maps.iter().map(|map| format!(", {map}")).collect();
    let stores_ds = spec.stored_gradient().is_some();
    if stores_ds {
        maps.push("tma_ds".to_owned());
        arguments.push_str(", &tma_ds");
    }
    let params = pass_params(spec);
    let all_params = if spec.reads_codes() || spec.kernel.computes_in_8_bits() {
        "WithCache".to_owned()
    } else if spec.score.program.is_some() {
        let with = if spec.kernel.is_backward() { "WithStored" } else { "WithPrograms" };
        format!("{with}<{params}>")
    } else {
        params.to_owned()
    };
    let packs = spec.traits().packs_gqa;
    let mut text = format!("// {spec}\n");
    if spec.score.program.is_some() {
        text.push_str("#define FA_PROGRAMS\n");
        if stores_ds {
            text.push_str("#define FA_STORES_GRADIENT\n");
        }
        let _ = writeln!(text, "#include \"{}\"", program::HEADER);
    }
    let _ = writeln!(text, "#include \"{header}\"");
    if spec.score.masks() {
        text.push_str("#include \"attn/block_map.cuh\"\n");
    }
    if orders_lists(spec) {
        text.push_str("#include \"attn/block_order.cuh\"\n");
    }
    let gradients = array_gradients(spec);
    if !gradients.is_empty() {
        text.push_str("#include \"attn/array_gradient.cuh\"\n");
    }
    if stores_ds {
        text.push_str("#include \"attn/array_sum.cuh\"\n");
    }
    if spec.reads.varied {
        let _ = writeln!(text, "#include \"attn/{}.cuh\"", plan_header(spec));
    }
    if spec.split && whole {
        text.push_str("#include \"attn/split.cuh\"\n");
    }
    text.push_str("\nusing namespace fa;\n\n");
    let _ = writeln!(text, "constexpr {} config{{", config::struct_name(&spec.kernel));
    for field in config::fields_of(spec) {
        let _ = writeln!(text, "    .{} = {},", field.name, field.literal);
    }
    text.push_str("};\n\n");
    if let Some(bytes) = smem_bytes {
        let _ = writeln!(
            text,
            "template <int kernel_bytes, int planned_bytes>\nconstexpr bool same_smem = kernel_bytes == \
             planned_bytes;\n\
             static_assert(same_smem<{name}_smem_bytes<config>, {bytes}>, \"shared memory differs from the \
             plan\");\n"
        );
    }
    if spec.reads.varied {
        text.push_str(&plan_rules(spec));
    }
    let cluster = if cluster > 1 { format!(" __cluster_dims__({cluster}, 1, 1)") } else { String::new() };
    // setmaxnreg is ignored unless the bound of one CTA per SM is written out.
    let bounds = format!("__launch_bounds__({}, {blocks_per_sm})", spec.threads());
    let _ = write!(
        text,
        "extern \"C\" __global__ void {bounds}{cluster}\n{ENTRY}(const __grid_constant__ {all_params} params"
    );
    for map in &maps {
        let _ = write!(text, ",\n          const __grid_constant__ TensorMap {map}");
    }
    let rules = if spec.plans_for_itself() { ", plan_rules" } else { "" };
    let _ = write!(text, ") {{\n    {name}<config{rules}>(params{arguments});\n}}\n");
    let call =
        |name: &str, threads: u32, params: &str, call: String| entry(spec, name, threads, params, &call);
    let body = |name: &str, threads: u32, function: String| {
        entry(spec, name, threads, params, &format!("{function}(params)"))
    };
    if spec.reads.varied {
        text.push_str(&if whole {
            plan(spec)
        } else {
            format!(
                "\nextern \"C\" __global__ void {PLACE}() {{\n    \
                 shared_memory<PlanStorage>().slots = 0;\n}}\n"
            )
        });
    }
    if spec.score.masks() {
        let backward = spec.kernel.is_backward();
        let (queries, last_first) = if backward {
            ("config.tile_m".to_owned(), "last_keys_first<config.mask, config.deterministic>()")
        } else {
            (format!("tile_queries<{packs}, config.tile_m>(params)"), "false")
        };
        let parts = if head_parts > 1 { format!(", {head_parts}") } else { String::new() };
        let _ = writeln!(
            text,
            "\nconstexpr MapRules map_rules{{config.mask, config.tile_n, config.varied, {backward}, \
             {last_first}, mask_tile_words<config>(){parts}}};"
        );
        let of_params = format!("static_cast<const {params}&>(params)");
        let map = format!("map_blocks<map_rules>({of_params}, {queries})");
        text.push_str(&call(MAP, MAP_THREADS, &all_params, map));
        if backward {
            text.push_str(&call(
                LISTS,
                LISTS_THREADS,
                &all_params,
                format!("list_queries<map_rules>({of_params})"),
            ));
        }
        if orders_lists(spec) {
            let function = format!("order_lists<map_rules>({of_params})");
            text.push_str(&call(ORDER, ORDER_THREADS, &all_params, function));
        }
        if let Some(threads) = mask_bits_threads(spec) {
            let folder = if is_wide(spec) { "wide" } else { "sm90" };
            let function = format!("{folder}::keep_mask_bits<config>({of_params})");
            text.push_str(&call(MASK_BITS, threads, &all_params, function));
        }
    }
    if !gradients.is_empty() {
        let _ = writeln!(
            text,
            "\nstatic_assert(array_gradient_smem_bytes<config> == {} && kArrayThreads == \
             {ARRAY_GRADIENT_THREADS});",
            array_gradient_smem(spec)
        );
    }
    for gradient in &gradients {
        let (index, rules) = (gradient.index, gradient.rules());
        let _ = write!(
            text,
            "\nstruct Slope{index} {{\n    template <class Row, class Column>\n    __device__ \
             __forceinline__ static float of(const Mods& mods, float s, const Row& row, \
             const Column& column) {{\n        return mods.gradient_{index}(s, row, column);\n    }}\n}};\n"
        );
        let of_params = format!("static_cast<const {params}&>(params)");
        let function = format!("array_gradient<config, ArrayRules{rules}, Slope{index}>({of_params})");
        text.push_str(&call(ARRAY_GRADIENTS[index], ARRAY_GRADIENT_THREADS, &all_params, function));
        if gradient.may_be_stored {
            let _ = write!(text, "\nstatic_assert(kSumThreads == {ARRAY_SUM_THREADS});");
            let function = format!("array_sum<config.dtype, ArrayRules{rules}>({of_params})");
            text.push_str(&call(ARRAY_SUM, ARRAY_SUM_THREADS, &all_params, function));
        }
    }
    if spec.split && whole {
        text.push_str(&combine(spec));
    }
    if spec.kernel.is_backward() {
        let layout = format!("{}::BwdLayout<config>", spec.kernel.family());
        text.push_str(&body(PREPROCESS, PROCESS_THREADS, "bwd_preprocess<config>".into()));
        if sums_dq(spec) {
            text.push_str(&body(POSTPROCESS, PROCESS_THREADS, format!("bwd_postprocess<config, {layout}>")));
        }
        text.push_str(&body(
            POSTPROCESS_KV,
            PROCESS_THREADS,
            format!("bwd_postprocess_kv<config, {layout}>"),
        ));
        if spec.score.sinks {
            text.push_str(&body(DSINKS, DSINKS_THREADS, "bwd_dsinks<config>".into()));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_is_of_the_code_alone() {
        let source = |unit: &str, header: &str| Source {
            unit: unit.to_owned(),
            headers: vec![("a.cuh".to_owned(), header.to_owned())],
            target: "sm_90a".to_owned(),
        };
        let unit = "// spec\n#include \"a.cuh\"\nvoid f() { g(1); }\n";
        let header = "#pragma once\n// Adds.\nvoid g(int a);\n";
        let fingerprint = source(unit, header).fingerprint();
        let same = source(
            "#include \"a.cuh\"\n\nvoid f() {\n    g(1);  // one\n}",
            "#pragma once\nvoid g( int a );",
        );
        assert_eq!(fingerprint, same.fingerprint());
        assert_eq!(
            fingerprint,
            Source { target: "sm_100a".to_owned(), ..source(unit, header) }.fingerprint()
        );
        for other in [
            source(&unit.replace('1', "2"), header),
            source(unit, &header.replace("int", "long")),
            source(unit, &header.replace("#pragma once\n// Adds.\n", "#pragma once ")),
            Source { headers: vec![("b.cuh".to_owned(), header.to_owned())], ..source(unit, header) },
        ] {
            assert_ne!(fingerprint, other.fingerprint(), "{other:?}");
        }
    }
}
