//! What the program says and where it says it: tables, progress, destinations of results, failures.

pub mod destinations;
pub mod failure;
pub mod output;
pub mod progress;
pub mod stop;
