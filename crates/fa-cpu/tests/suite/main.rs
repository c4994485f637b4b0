//! The proof of this crate: golden vectors, real layers, laws, gradients against finite differences, and the
//! cases that attention implementations get wrong.

/// An expression with the element type of a [`fa_core::Dtype`] bound to a name.
macro_rules! in_dtype {
    ($dtype:expr, $type:ident => $result:expr) => {
        match $dtype {
            fa_core::Dtype::F32 => {
                type $type = f32;
                $result
            }
            fa_core::Dtype::F16 => {
                type $type = half::f16;
                $result
            }
            fa_core::Dtype::Bf16 => {
                type $type = half::bf16;
                $result
            }
            dtype @ (fa_core::Dtype::E4m3
            | fa_core::Dtype::E5m2
            | fa_core::Dtype::Int8
            | fa_core::Dtype::Int4) => {
                panic!("nothing computes in {dtype}")
            }
        }
    };
}

mod append;
mod cases;
mod codes;
mod dropout;
mod extremes;
mod files;
mod fp8;
mod golden;
mod gradients;
mod inputs;
mod latent;
mod laws;
mod layers;
mod millions;
mod parts;
mod pitfalls;
mod programs;
mod strides;
mod tiled;
mod varied;
mod varied_laws;
