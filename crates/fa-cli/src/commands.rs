//! The commands: one file each, with its flags, and what runs it.

pub mod bench;
pub mod build;
pub mod check;
pub mod doctor;
pub mod emulate;
pub mod ladder;
pub mod manual;
pub mod plan;
pub mod records;
pub mod run;
pub mod tune;
pub mod validate;
pub mod worker;
