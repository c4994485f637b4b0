//! Tests of plans, programs and ranks in memory.

mod cases;
mod faults;
mod laws;
mod oracle;
mod train;
