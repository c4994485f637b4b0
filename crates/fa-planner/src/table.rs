//! A text table with right-aligned columns.

use std::fmt;

/// Column names and rows of the same length.
pub(crate) struct Table<const N: usize> {
    /// Column names.
    pub header: [&'static str; N],
    /// Cells.
    pub rows: Vec<[String; N]>,
}

impl<const N: usize> fmt::Display for Table<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut widths = self.header.map(str::len);
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let line = |cells: [&str; N]| {
            let padded: Vec<String> =
                cells.iter().zip(widths).map(|(cell, w)| format!("{cell:>w$}")).collect();
            padded.join("  ")
        };
        let header = line(self.header);
        writeln!(f, "{header}\n{}", "-".repeat(header.len()))?;
        for row in &self.rows {
            writeln!(f, "{}", line(row.each_ref().map(String::as_str)))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_on_the_right() {
        let rows = vec![["1".into(), "long cell".into()], ["200".into(), "x".into()]];
        let table = Table { header: ["n", "name"], rows };
        assert_eq!(table.to_string(), "  n       name\n--------------\n  1  long cell\n200          x\n");
    }
}
