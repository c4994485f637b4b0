//! `fa_attn._core`, the extension module of the Python package. Arrays are exchanged by DLPack without
//! copies; [`fa_attn`] computes.
//!
//! - `dlpack`: arrays of other libraries as views.
//! - `given`: arrays and options as a problem.
//! - `host`, `gpu`: a pass on the CPU and on a GPU.
//! - `overlap`: whether two arrays have elements in common.
//! - `devices`, `raw`: the GPUs of the process, and arrays as a launch takes them.
//! - `calls`, `merging`, `planning`, `programs`: the functions of the module.
//! - `plain`: the short way of what most calls are.
//! - `codes`: the quantisers of K and V.
//! - `call_program`: a call's own mask and change of scores.
//! - `dropout`: the bits that dropout keeps.
//! - `doctor`: what works on this machine.
//! - `xla`: calls from programs that XLA compiles.
//! - `shards`: the rows of a sequence that ranks hold.
//! - `threads`: work without the interpreter's lock.
//! - `error`: the library's errors as exceptions.

mod call_program;
mod calls;
mod codes;
mod devices;
mod dlpack;
mod doctor;
mod dropout;
mod error;
mod given;
mod gpu;
mod host;
mod merging;
mod overlap;
mod plain;
mod planning;
mod programs;
mod raw;
mod shards;
mod slices;
mod threads;
mod xla;

#[pyo3::pymodule]
mod _core {
    #[pymodule_export]
    use super::calls::{append, backward, check_forward, forward, report};
    #[pymodule_export]
    use super::codes::encode;
    #[pymodule_export]
    use super::doctor::doctor;
    #[pymodule_export]
    use super::dropout::dropout_bits;
    #[pymodule_export]
    use super::error::{DeviceError, InputError, UnsupportedError};
    #[pymodule_export]
    use super::merging::merge;
    #[pymodule_export]
    use super::plain::Plain;
    #[pymodule_export]
    use super::programs::{
        program, program_direct, program_eval, program_nodes, program_tiles, program_with,
    };
    #[pymodule_export]
    use super::shards::{bounds, chunks};
    #[pymodule_export]
    use super::xla::xla_handlers;

    #[pymodule_init]
    fn init(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
        use super::given::{argument, arguments};
        use fa_core::latent_rows::LatentRows;
        use pyo3::types::{PyModuleMethods, PyTuple};
        let beside: Vec<&str> = arguments().map(argument).collect();
        module.add("BESIDE", PyTuple::new(module.py(), beside)?)?;
        let forms = LatentRows::ALL.map(|form| {
            let (group, scale_bytes) = form.group();
            (form.bytes(), (form.columns(), form.codes(), group, scale_bytes))
        });
        module.add("LATENT_ROWS", forms.to_vec())?;
        module.add("InputTypeError", super::error::input_type_error(module.py())?)
    }

    #[pymodule_export]
    use super::planning::{bind, explain, finish_tuning, needs, plan, problem, spec_name, tune, version};
}
