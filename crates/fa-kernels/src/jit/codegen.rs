//! Writes the headers of kernels' configs and of launches' parameters from the Rust types.

use std::fmt::Write;

use fa_core::KernelSpec;

use crate::jit::append_params::{self, AppendParams};
use crate::jit::cache_params;
use crate::jit::config::{self, ConfigField};
use crate::jit::declare::ParamStruct;
use crate::jit::dropout_params::DropoutParams;
use crate::jit::merge_params;
use crate::jit::params::{self, BwdParams, FwdParams};
use crate::jit::program_params;

/// A generated header.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// Where it belongs under the crate's `cuda` folder.
    pub path: &'static str,
    /// Its text.
    pub text: String,
}

/// The headers that are generated; `cargo xtask codegen` writes them, and a test finds files that differ.
pub fn generated() -> Vec<Generated> {
    vec![
        Generated { path: "config.cuh", text: config_cuh() },
        Generated { path: "params.cuh", text: params_cuh() },
        Generated {
            path: "fwd_params.cuh",
            text: launch_params_cuh("a forward", vec![FwdParams::declaration()]),
        },
        Generated {
            path: "bwd_params.cuh",
            text: launch_params_cuh("a backward", vec![BwdParams::declaration()]),
        },
        Generated {
            path: PROGRAM_PARAMS,
            text: launch_params_cuh("programs", program_params::declarations()),
        },
        Generated {
            path: "cache_params.cuh",
            text: launch_params_cuh("an 8-bit cache", cache_params::declarations()),
        },
        Generated {
            path: "append/append_params.cuh",
            text: launch_params_cuh("the append kernel", vec![AppendParams::declaration()]),
        },
        Generated {
            path: "append/append_codes_params.cuh",
            text: launch_params_cuh("appends of codes", append_params::codes_declarations()),
        },
        Generated {
            path: "merge/merge_params.cuh",
            text: launch_params_cuh("the merge kernel", merge_params::declarations()),
        },
        Generated {
            path: "dropout/dropout_params.cuh",
            text: launch_params_cuh("the dropout kernel", vec![DropoutParams::declaration()]),
        },
    ]
}

/// The header of the parameters of programs.
pub(crate) const PROGRAM_PARAMS: &str = "program_params.cuh";

/// Its text in kernels whose programs read more arrays than most.
pub(crate) fn params_of_many_arrays() -> String {
    launch_params_cuh("programs", program_params::declarations_of_many())
}

const NOTE: &str = "// Written by `cargo xtask codegen` from the Rust types; do not edit.";

/// NVRTC declares no `offsetof`, and its front end's own operator is unknown to host compilers.
const OFFSETOF: &str = "
#ifdef __CUDACC_RTC__
#define FA_OFFSETOF(type, field) __INTADDR__(&((type*)0)->field)
#else
#define FA_OFFSETOF(type, field) __builtin_offsetof(type, field)
#endif
";

fn config_cuh() -> String {
    let mut text = format!(
        "{NOTE}\n// A kernel's compile-time parameters: the template argument of its kernel.\n#pragma \
         once\n\nnamespace fa {{\n"
    );
    for item in config::ENUMS {
        let _ = write!(text, "\nenum class {} {{ {} }};\n", item.name, item.variants.join(", "));
    }
    for spec in config::samples() {
        config_struct(&mut text, &spec);
    }
    text + "\n}  // namespace fa\n"
}

fn config_struct(text: &mut String, spec: &KernelSpec) {
    text.push('\n');
    comment(text, "", spec.kernel.doc());
    let _ = writeln!(text, "struct {} {{", config::struct_name(&spec.kernel));
    for ConfigField { name, cuda_type, doc, .. } in config::fields_of(spec) {
        comment(text, "    ", doc);
        let _ = writeln!(text, "    {cuda_type} {name};");
    }
    text.push_str("};\n");
}

/// Structs of the launch parameters.
fn params_cuh() -> String {
    let mut text =
        format!("{NOTE}\n// Structs of the launch parameters.\n#pragma once\n{OFFSETOF}\nnamespace fa {{\n");
    structs(&mut text, params::declarations());
    text.push_str(
        "\n// A tensor map of the tensor memory accelerator, encoded by the host; opaque to the kernel.\n\
         struct alignas(64) TensorMap {\n    unsigned long long opaque[16];\n};\n\n\
         }  // namespace fa\n\n#undef FA_OFFSETOF\n",
    );
    text
}

/// The parameters of one kind of launch, in a header of their own: the other kernels do not depend on them.
fn launch_params_cuh(of: &str, declarations: Vec<ParamStruct>) -> String {
    let mut text = format!(
        "{NOTE}\n// The parameters of {of}.\n#pragma once\n#include \"params.cuh\"\n{OFFSETOF}\n\
         namespace fa {{\n"
    );
    structs(&mut text, declarations);
    text + "\n}  // namespace fa\n\n#undef FA_OFFSETOF\n"
}

fn structs(text: &mut String, declarations: Vec<ParamStruct>) {
    for ParamStruct { name, size, align, doc, fields } in declarations {
        text.push('\n');
        comment(text, "", doc);
        let _ = writeln!(text, "struct {name} {{");
        for field in &fields {
            comment(text, "    ", field.doc);
            let count = field.count.map_or_else(String::new, |count| format!("[{count}]"));
            let _ = writeln!(text, "    {} {}{count};", field.cuda_type, field.name);
        }
        text.push_str("};\n");
        let _ = writeln!(text, "static_assert(sizeof({name}) == {size} && alignof({name}) == {align});");
        for field in &fields {
            let _ = writeln!(text, "static_assert(FA_OFFSETOF({name}, {}) == {});", field.name, field.offset);
        }
    }
}

fn comment(text: &mut String, indent: &str, lines: &[&str]) {
    for line in lines {
        let _ = writeln!(text, "{indent}//{line}");
    }
}
