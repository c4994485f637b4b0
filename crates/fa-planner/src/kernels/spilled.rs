//! Kernels that the compiler was seen to spill, one by one, where no rule in their parameters says so: what
//! `fa build --best` found with NVRTC 13.0, beside what each kernel's `spills` has as rules.

use std::collections::HashMap;
use std::sync::OnceLock;

use fa_core::{Arch, KernelSpec};

use super::planned;

/// A line each: architecture, and the kernel's name, without its type unless the other one was compiled and
/// does not spill, as with some SM80-class backwards.
const SPILLED: &str = include_str!("spilled.txt");

/// What most kernels that are not listed differ from all listed ones in, without forming their names.
type Key = (Arch, &'static str, u32, u32, u32, u32);

/// Whether the compiler spills the kernel on `arch`, by a rule or by the list.
pub(crate) fn is_known_to_spill(spec: &KernelSpec, arch: Arch) -> bool {
    planned::of(&spec.kernel).is_known_to_spill(spec, arch) || spilled(spec, arch)
}

/// Whether the compiler was seen to spill the kernel on `arch`, or one that differs in the type alone.
fn spilled(spec: &KernelSpec, arch: Arch) -> bool {
    static LISTED: OnceLock<HashMap<Key, Vec<&'static str>>> = OnceLock::new();
    let listed = LISTED.get_or_init(|| {
        let mut listed: HashMap<Key, Vec<&'static str>> = HashMap::new();
        for (key, name) in SPILLED.lines().filter_map(line) {
            listed.entry(key).or_default().push(name);
        }
        listed
    });
    let (tile_m, tile_n) = spec.tile();
    let key = (arch, spec.kernel.name(), spec.head_dim, spec.head_dim_v, tile_m, tile_n);
    listed.get(&key).is_some_and(|names| {
        let typed = spec.to_string();
        let untyped = untyped(&typed);
        names.iter().any(|name| **name == *typed || **name == *untyped)
    })
}

/// A kernel's name without its type: `sm80_fwd-hd64-full-..` of `sm80_fwd-bf16-hd64-full-..`.
fn untyped(name: &str) -> String {
    let mut parts = name.splitn(3, '-');
    match (parts.next(), parts.next(), parts.next()) {
        (Some(kernel), Some(_), Some(rest)) => format!("{kernel}-{rest}"),
        _ => name.to_owned(),
    }
}

/// A line's key and name; `None` for a comment.
fn line(line: &'static str) -> Option<(Key, &'static str)> {
    let (arch, name) = line.split_once(' ')?;
    let mut parts = name.split('-');
    let kernel = parts.next()?;
    let is_type = |part: &&str| matches!(*part, "bf16" | "f16");
    let head_dim = parts.by_ref().find(|part| !is_type(part))?.strip_prefix("hd")?.parse().ok()?;
    let next = parts.next()?;
    let head_dim_v = next.parse().unwrap_or(head_dim);
    let tile = parts.find_map(|part| {
        let (m, n) = part.split_once('x')?;
        Some((m.parse().ok()?, n.parse().ok()?))
    });
    let (tile_m, tile_n) = tile?;
    Some(((arch.parse().ok()?, kernel, head_dim, head_dim_v, tile_m, tile_n), name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_read_and_none_is_there_twice() {
        let lines: Vec<&str> = SPILLED.lines().filter(|line| !line.starts_with('#')).collect();
        let read: Vec<_> = lines.iter().filter_map(|own| line(own)).collect();
        assert!(lines.len() > 10 && read.len() == lines.len(), "{} of {}", read.len(), lines.len());
        let names: std::collections::BTreeSet<&&str> = lines.iter().collect();
        assert_eq!(names.len(), lines.len());
    }

    #[test]
    fn a_kernel_is_found_whatever_its_type() {
        assert_eq!(untyped("sm80_fwd-bf16-hd64-full-128x112-w4"), "sm80_fwd-hd64-full-128x112-w4");
        let (key, name) = line("sm90 sm90_bwd-hd64-128-full-112x128-wg2").expect("a line");
        assert_eq!(key, (Arch::Sm90, "sm90_bwd", 64, 128, 112, 128));
        assert_eq!(name, "sm90_bwd-hd64-128-full-112x128-wg2");
        assert_eq!(line("# a comment"), None);
    }

    #[test]
    fn a_kernel_whose_type_matters_is_listed_with_it() {
        let kernel = "sm80_bwd-f16-hd64-full-128x128-w8-s31-a244-q32-b1";
        let listed = format!("sm80 {kernel}");
        assert!(SPILLED.lines().any(|line| line == listed));
        let (key, name) = SPILLED.lines().filter_map(line).find(|(_, name)| *name == kernel).expect("a line");
        assert_eq!((key, name), ((Arch::Sm80, "sm80_bwd", 64, 64, 128, 128), kernel));
        assert!(!SPILLED.contains(&format!("sm80 {}\n", untyped(kernel))));
    }
}
