//! What the ledger says, as a table of a page.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::{Ledger, Run, Tier};

/// The name of the block in a page: between `<!-- begin: proof -->` and `<!-- end: proof -->`.
pub const BLOCK: &str = "proof";

const KERNELS: [(&str, &str, &str); 6] = [
    ("SM90 forward", "sm90/", ""),
    ("SM90 backward", "sm90/", "-bwd"),
    ("SM80-class forward", "sm80/", ""),
    ("SM80-class backward", "sm80/", "-bwd"),
    ("SM100 forward", "sm100/", ""),
    ("append, merge", "", ""),
];

/// Entries of a kernel by what has judged them.
#[derive(Default)]
struct Count<'a> {
    entries: usize,
    of: BTreeMap<Tier, usize>,
    runs: BTreeSet<&'a String>,
}

/// The table: for each kernel how many of its entries have been judged, how and when.
pub fn block(ledger: &Ledger) -> String {
    let mut counts: Vec<Count<'_>> = KERNELS.iter().map(|_| Count::default()).collect();
    for (key, row) in &ledger.units {
        let file = key.split(' ').next().unwrap_or_default();
        let is_backward = file.ends_with("-bwd.ron");
        let own = KERNELS.iter().position(|(_, folder, suffix)| {
            file.starts_with(folder) && (folder.is_empty() || suffix.is_empty() != is_backward)
        });
        let Some(count) = own.map(|at| &mut counts[at]) else { continue };
        for entry in row.entries.values() {
            count.entries += 1;
            count.runs.extend(&entry.by);
            // An entry that the grid has judged is not counted under quick.
            let tiers: BTreeSet<Tier> = ledger.tiers(entry).collect();
            let of_gpu = tiers.iter().copied().filter(|tier| tier.is_on_gpu()).max();
            let emulated = tiers.iter().any(|tier| tier.is_emulated()).then_some(Tier::Emulated);
            let waived = of_gpu.is_none().then_some(Tier::Waived);
            for tier in [of_gpu, emulated, waived].into_iter().flatten() {
                *count.of.entry(tier).or_default() += 1;
            }
        }
    }
    let heads = ["kernel", "entries", "emulated", "whole grid", "quick grid", "no GPU yet", "last on a GPU"];
    let mut text = format!("| {} |\n|{}\n", heads.join(" | "), "---|".repeat(heads.len()));
    for ((name, ..), count) in KERNELS.iter().zip(counts).filter(|(_, count)| count.entries > 0) {
        let of = |tier| count.of.get(&tier).copied().unwrap_or(0);
        let runs = count.runs.iter().map(|id| &ledger.runs[*id]);
        let mut last: Vec<&Run> =
            runs.filter(|run| !run.tier.is_emulated() && run.tier != Tier::Waived).collect();
        last.sort_by_key(|run| std::cmp::Reverse((&run.date, run.tier)));
        let mut seen = BTreeSet::new();
        last.retain(|run| seen.insert(run.tier));
        let last: Vec<String> = last
            .iter()
            .map(|run| {
                let gpu = run.on.split(',').next().unwrap_or_default();
                format!("{} {}, {}, {} cases", run.tier, run.date, gpu, run.cases)
            })
            .collect();
        let _ = writeln!(
            text,
            "| {name} | {} | {} | {} | {} | {} | {} |",
            count.entries,
            of(Tier::Emulated),
            of(Tier::Grid),
            of(Tier::Quick),
            of(Tier::Waived),
            last.join("; ")
        );
    }
    text
}

/// A page with its block of that name as given; `None` for a page without one.
pub fn filled(page: &str, name: &str, block: &str) -> Option<String> {
    let (begin, end) = (format!("<!-- begin: {name} -->\n"), format!("<!-- end: {name} -->"));
    let (before, rest) = page.split_once(&begin)?;
    let (_, after) = rest.split_once(&end)?;
    Some(format!("{before}{begin}{block}{end}{after}"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn pages_say_what_the_ledger_says() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let ledger = Ledger::read(&root.join("docs/results/proof.ron")).unwrap();
        for name in ["README.md", "docs/results/README.md"] {
            let page = std::fs::read_to_string(root.join(name)).unwrap();
            if let Some(filled) = filled(&page, BLOCK, &block(&ledger)) {
                assert!(page == filled, "{name} is not as `fa prove` writes it");
            } else {
                assert_ne!(name, "README.md", "it has no block of the ledger");
            }
        }
        assert_eq!(filled("no block", BLOCK, ""), None);
    }
}
