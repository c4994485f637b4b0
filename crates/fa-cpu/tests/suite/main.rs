//! The proof of this crate: golden vectors, real layers, laws, gradients against finite differences, and the
//! cases that attention implementations get wrong.

mod append;
mod cases;
mod extremes;
mod files;
mod golden;
mod gradients;
mod inputs;
mod laws;
mod layers;
mod millions;
mod parts;
mod pitfalls;
mod strides;
mod tiled;
mod varied;
mod varied_laws;
