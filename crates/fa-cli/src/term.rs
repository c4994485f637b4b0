//! What the program says and where it says it: tables, progress, destinations of results, failures.

pub(crate) mod destinations;
pub(crate) mod failure;
pub(crate) mod output;
pub(crate) mod progress;
pub(crate) mod stop;
