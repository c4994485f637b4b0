//! The groups that cases are chosen by.

/// Every group of the grid: the first parts of cases' names.
pub const GROUPS: [&str; 31] = [
    "shapes",
    "padded",
    "heads",
    "windows",
    "softcap",
    "scale",
    "values",
    "strides",
    "empty",
    "sizes",
    "repeat",
    "launch",
    "head splits",
    "packed",
    "used",
    "paged",
    "split",
    "alibi",
    "sinks",
    "edges",
    "mixed",
    "known",
    "programs",
    "wide programs",
    "dropout",
    "fp8",
    "codes",
    "append",
    "merge",
    "shipped",
    "knobs",
];

/// Whether the cases of a group are those of attention as models are served.
pub fn is_serving(group: &str) -> bool {
    ["packed", "used", "paged", "split", "alibi", "sinks", "edges", "mixed", "known"].contains(&group)
}

/// The group of that name.
///
/// # Errors
/// A name that no group has, with those that there are.
pub fn check_group(name: &str) -> Result<String, String> {
    match GROUPS.contains(&name) {
        true => Ok(name.to_owned()),
        false => Err(format!("there is no group '{name}': use {}", GROUPS.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::{Extent, gradients, library, serving, serving_gradients};
    use super::*;

    #[test]
    fn the_groups_are_those_of_the_cases() {
        let full = Extent::Full;
        let cases = [library(full, 2), gradients(full, 2), serving(full, 2), serving_gradients(full, 2)];
        let found: HashSet<&str> = cases.iter().flatten().map(|case| case.group).collect();
        for group in &found {
            assert!(check_group(group).is_ok(), "{group}");
        }
        for group in GROUPS {
            // Groups of named kernels need a GPU.
            assert!(found.contains(group) || ["shipped", "knobs"].contains(&group), "{group}");
        }
        assert!(check_group("pages").is_err_and(|why| why.contains("paged, split")));
    }
}
