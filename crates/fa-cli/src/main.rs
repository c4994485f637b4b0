//! The program `fa`.
fn main() {}
