//! The planner as a whole. One program, since each costs seconds to compile and to link;
//! `cargo test -p fa-planner MODULE` runs one module's tests.

mod banks;
mod bwd_rates;
mod codes;
mod cost_peers;
mod decode;
mod guide;
mod measured;
mod plan;
mod plan_backward;
#[path = "../../../fa-core/tests/strategies/problems.rs"]
mod problems;
mod sm80_order;
mod sm80_rates;
mod splits;
mod sweep;
