//! The laws of layouts and swizzles.

mod layout_laws;
mod swizzle_laws;
