//! Bank conflicts of the K and V tiles, without and with the swizzle.

use std::fmt::Write;

use fa_planner::banks::{self, Access, BANK_BYTES, BANKS, Conflicts, SmemLayout};
use svg::Node;
use svg::node::element::Text;

use crate::draw::diagram::{MUTED, RULE, centered, diagram, ending, escape, rect, text, tip};

/// What the section shows.
pub const ABOUT: &str = "Shared memory has 32 banks of 4 bytes; lanes that want different words of one bank \
                         wait for each other. Counted over the whole K (or V) tile of the best kernel for \
                         every way of reading and writing it, as plain rows and with the swizzle that the \
                         kernels use. Below, the 8 rows that one phase of ldmatrix reads.";

/// Bytes of an element: GPU kernels hold 16-bit types.
const ELEMENT: u64 = 2;

/// The section's content for a kernel with K tiles of `tile_n` keys and `head_dim` elements.
///
/// # Errors
/// When the tile has no layout, which a plan has ruled out.
pub fn of_best(tile_n: u32, head_dim: u32) -> anyhow::Result<String> {
    let (rows, columns) = (u64::from(tile_n), u64::from(head_dim));
    let plain = SmemLayout::row_major(rows, columns, ELEMENT)?;
    let swizzled = SmemLayout::swizzled(rows, columns, ELEMENT)?;
    let mut table = String::new();
    for ((access, before), (_, after)) in banks::survey(&plain).into_iter().zip(banks::survey(&swizzled)) {
        // An access that the tile does not allow has nothing to count.
        let (Ok(before), Ok(after)) = (before, after) else { continue };
        writeln!(
            table,
            "<tr><td>{}</td>{}{}</tr>",
            escape(&access.to_string()),
            count(&before),
            count(&after)
        )?;
    }
    let pictures = picture("plain rows", &plain)? + &picture("swizzled", &swizzled)?;
    Ok(format!(
        "<p>Tile of {rows} x {columns} 16-bit elements, rows of {} bytes.</p>\n<table>\n\
         <tr><th rowspan=\"2\">Access</th><th colspan=\"3\">Plain rows</th><th \
         colspan=\"3\">Swizzled</th></tr>\n\
         <tr><th class=\"n\">worst</th><th class=\"n\">wavefronts</th><th class=\"n\">slowdown</th>\
         <th class=\"n\">worst</th><th class=\"n\">wavefronts</th><th \
         class=\"n\">slowdown</th></tr>\n{table}</table>\n\
         <div class=\"pair\" style=\"margin-top:16px\">\n{pictures}</div>\n",
        columns * ELEMENT
    ))
}

fn count(found: &Conflicts) -> String {
    let ways = if found.is_free() { "free".to_owned() } else { format!("<b>{}-way</b>", found.ways) };
    format!(
        "<td class=\"n\">{ways}</td><td class=\"n\">{}</td><td class=\"n\">{:.1}x</td>",
        found.wavefronts,
        found.slowdown()
    )
}

/// Which banks the 16 bytes of each of 8 rows lie in, at the tile's first columns.
fn picture(name: &str, layout: &SmemLayout) -> anyhow::Result<String> {
    const CELL: (f64, f64) = (13.0, 18.0);
    const LEFT: f64 = 44.0;
    const TOP: f64 = 44.0;
    const ROWS: u64 = 8;
    const ROW_BYTES: u64 = 16;
    let found = banks::conflicts(layout, Access::Ldmatrix)?;
    let ways = found.phases.first().map_or(1, |phase| phase.wavefronts);
    let verdict = if ways == 1 { "no conflict".to_owned() } else { format!("{ways} rows share a bank") };
    let width = LEFT + CELL.0 * BANKS as f64 + 12.0;
    let mut drawing =
        diagram(width, TOP + CELL.1 * ROWS as f64 + 30.0, &format!("Banks read by ldmatrix, {name}"));
    drawing.append(text((LEFT, 16.0), format!("{name}: {verdict}")).set("font-weight", 600));
    let label = |text: Text| text.set("fill", MUTED).set("font-size", 11);
    for bank in (0..BANKS).step_by(4) {
        let x = LEFT + CELL.0 * (bank as f64 + 0.5);
        drawing.append(label(centered((x, TOP - 6.0), bank.to_string())));
    }
    let mut readers = [0u64; BANKS as usize];
    let mut touched = Vec::new();
    for row in 0..ROWS {
        for byte in (0..ROW_BYTES).step_by(BANK_BYTES as usize) {
            let bank = layout.bank_of(row, byte / ELEMENT)?;
            readers[bank as usize] += 1;
            touched.push((row, bank));
        }
    }
    for row in 0..ROWS {
        let y = TOP + CELL.1 * row as f64;
        drawing.append(label(ending((LEFT - 8.0, y + 13.0), format!("row {row}"))));
        for bank in 0..BANKS {
            let place = [LEFT + CELL.0 * bank as f64, y, CELL.0, CELL.1];
            let hit = touched.contains(&(row, bank));
            let shared = readers[bank as usize];
            let cell = rect(place).set("stroke", RULE);
            drawing.append(match (hit, shared) {
                (false, _) => cell.set("fill", "#ffffff"),
                (true, 1) => cell.set("fill", "#5b9fd3").add(tip(format!("row {row} alone in bank {bank}"))),
                (true, n) => {
                    cell.set("fill", "#e07b39").add(tip(format!("row {row}, one of {n} in bank {bank}")))
                }
            });
        }
    }
    let x = LEFT + CELL.0 * BANKS as f64 / 2.0;
    drawing.append(label(centered((x, TOP + CELL.1 * ROWS as f64 + 18.0), "bank")));
    Ok(drawing.to_string())
}
