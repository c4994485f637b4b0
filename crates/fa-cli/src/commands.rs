//! The commands: one file each, with its flags, and what runs it.

pub(crate) mod bench;
pub(crate) mod build;
pub(crate) mod check;
pub(crate) mod check_mod;
pub(crate) mod dist;
pub(crate) mod doctor;
pub(crate) mod emulate;
pub(crate) mod ladder;
pub(crate) mod manual;
pub(crate) mod plan;
pub(crate) mod prove;
pub(crate) mod records;
pub(crate) mod run;
pub(crate) mod tune;
pub(crate) mod validate;
pub(crate) mod worker;
