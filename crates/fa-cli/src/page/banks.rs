//! Bank conflicts of what a kernel reads from and writes to shared memory, without and with the swizzle.

use std::fmt::Write;

use fa_core::KernelSpec;
use fa_planner::banks::{self, Access, BANK_BYTES, BANKS, Conflicts, SmemLayout};

use crate::draw::diagram::escape;
use crate::plan::kernels::{self, Issued};

/// What the section shows.
pub(crate) const ABOUT: &str = "Shared memory has 32 banks of 4 bytes; lanes that want different words of \
    one bank wait for each other. Counted over whole tiles for what this kernel issues, as plain rows and \
    with the swizzle. Copies by TMA and cp.async of whole rows have no conflicts of their own.";

/// Bytes of an element: GPU kernels hold 16-bit types.
const ELEMENT: u64 = 2;

/// The section's content for a kernel.
///
/// # Errors
/// When a tile has no layout, which a plan has ruled out.
pub(crate) fn of_kernel(spec: &KernelSpec) -> anyhow::Result<String> {
    let mut table = String::new();
    let kernel = kernels::of(&spec.kernel);
    for Issued { what, tile, access } in kernel.accesses(spec) {
        let (rows, columns) = (u64::from(tile.0), u64::from(tile.1));
        let plain = banks::conflicts(&SmemLayout::row_major(rows, columns, ELEMENT)?, access);
        let swizzled = SmemLayout::swizzled(rows, columns, ELEMENT).map(|own| banks::conflicts(&own, access));
        // An access that the tile does not allow has nothing to count.
        let (Ok(before), Ok(Ok(after))) = (plain, swizzled) else { continue };
        writeln!(
            table,
            "<tr><td class=\"about\">{}</td><td class=\"n\">{rows} x {columns}</td>{}{}</tr>",
            escape(&what),
            count(&before),
            count(&after)
        )?;
    }
    let used =
        if kernel.swizzles() { "This kernel uses the swizzle." } else { "This kernel keeps plain rows." };
    let (rows, columns) = (u64::from(spec.tile().1), u64::from(spec.head_dim));
    let plain = picture("plain rows", &SmemLayout::row_major(rows, columns, ELEMENT)?)?;
    let swizzled = picture("swizzled", &SmemLayout::swizzled(rows, columns, ELEMENT)?)?;
    Ok(format!(
        "<p>{used} The worst access of each, and how much longer all of them take:</p>\n<div \
         class=\"scroll\" tabindex=\"0\"><table class=\"sorts stacks\">\n<tr><th>Access</th><th \
         class=\"n\">Tile</th><th>Plain rows</th><th>Swizzled</th></tr>\n{table}</table></div>\n\
         <details><summary>Banks that 8 rows of K lie in</summary>\n{plain}{swizzled}</details>\n"
    ))
}

fn count(found: &Conflicts) -> String {
    if found.is_free() {
        return "<td>free</td>".to_owned();
    }
    format!("<td><b>{}-way</b>, {:.1}x</td>", found.ways, found.slowdown())
}

/// Which banks the 16 bytes of each of 8 rows lie in, at the tile's first columns.
fn picture(name: &str, layout: &SmemLayout) -> anyhow::Result<String> {
    const ROWS: u64 = 8;
    const ROW_BYTES: u64 = 16;
    let found = banks::conflicts(layout, Access::Ldmatrix)?;
    let ways = found.phases.first().map_or(1, |phase| phase.wavefronts);
    let verdict = if ways == 1 { "no conflict".to_owned() } else { format!("{ways} rows share a bank") };
    let (mut readers, mut touched) = ([0u64; BANKS as usize], Vec::new());
    for row in 0..ROWS {
        for byte in (0..ROW_BYTES).step_by(BANK_BYTES as usize) {
            let bank = layout.bank_of(row, byte / ELEMENT)?;
            readers[bank as usize] += 1;
            touched.push((row, bank));
        }
    }
    let mut html = format!("<p class=\"note\" style=\"margin:8px 0 2px\"><b>{name}</b>: {verdict}</p>\n");
    html += "<table class=\"bits\">\n";
    for row in 0..ROWS {
        write!(html, "<tr><th>row {row}</th>")?;
        for bank in 0..BANKS {
            let class = match (touched.contains(&(row, bank)), readers[bank as usize]) {
                (false, _) => "",
                (true, 1) => " class=\"on\"",
                (true, _) => " class=\"hot\"",
            };
            write!(html, "<td{class}></td>")?;
        }
        html += "</tr>\n";
    }
    Ok(html + "</table>\n")
}
