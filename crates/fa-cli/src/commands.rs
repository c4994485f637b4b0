//! The commands: one file each, with its flags, and what runs it.

pub mod bench;
pub mod build;
pub mod check;
pub mod doctor;
pub mod manual;
pub mod plan;
pub mod run;
