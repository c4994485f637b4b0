//! The order of a steady step: who loads, multiplies, computes the softmax and waits for what.
//!
//! Every part of a step takes the clocks of the cost model ([`StepClocks`](crate::cost::StepClocks)) and runs
//! as soon as what it needs is there and its unit is free: the tensor cores and the softmax pipes of an SM do
//! one thing at a time. That is the ideal of the kernel's order. The model's own step
//! ([`Timeline::predicted`]) is calibrated by measurement and mostly longer.

mod kernels;
mod lanes;
mod schedule;

pub use kernels::{of_kernel, of_sm100};
pub use lanes::{Activity, Lane, Span, Timeline};
