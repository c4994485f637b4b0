//! Tests of plans, programs and ranks in memory.

mod cases;
mod decode;
mod faults;
mod forms;
mod laws;
mod oracle;
mod packed;
mod pulls;
mod train;
