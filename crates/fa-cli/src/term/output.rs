//! Standard output: whole texts, and numbers as people read them.

use std::io::Write;

use serde::Serialize;

use crate::term::failure::StdoutError;

/// Prints a text as it is.
///
/// # Errors
/// When standard output is closed or full.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    Ok(stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).map_err(StdoutError)?)
}

/// Prints a note on standard error; ignores that it may be closed.
pub(crate) fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "note: {text}");
}

/// Prints a value as indented JSON and a newline.
///
/// # Errors
/// As [`print()`].
pub(crate) fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    print(&json_text(value)?)
}

/// A value as indented JSON and a newline.
///
/// # Errors
/// When the value has no JSON form.
pub(crate) fn json_text(value: &impl Serialize) -> serde_json::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

/// A borderless table whose cells keep their natural width.
pub(crate) fn table(header: &[&str]) -> comfy_table::Table {
    let mut table = comfy_table::Table::new();
    table.load_preset(comfy_table::presets::NOTHING);
    table.set_header(header.iter().map(comfy_table::Cell::new));
    table
}

/// A table as text without trailing blanks.
pub(crate) fn table_text(table: &comfy_table::Table) -> String {
    table.trim_fmt() + "\n"
}

/// `1234567890.0` as `1.23 G`, with `unit` behind the prefix; three significant digits.
pub(crate) fn si(value: f64, unit: &str) -> String {
    const PREFIXES: [(f64, &str); 7] =
        [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ")];
    if value == 0.0 {
        // Not -0, which sums of nothing are.
        return format!("0 {unit}");
    }
    if !value.is_finite() {
        return format!("{value} {unit}");
    }
    let (factor, prefix) =
        PREFIXES.into_iter().find(|(factor, _)| value.abs() >= 0.9995 * factor).unwrap_or((1e-9, "n"));
    let scaled = value / factor;
    let digits = match scaled.abs() {
        x if x >= 99.95 => 0,
        x if x >= 9.995 => 1,
        _ => 2,
    };
    format!("{scaled:.digits$} {prefix}{unit}")
}

/// A number without fraction, but small ones with two significant digits: `694`, `8.2`, `0.018`, `2e-6`.
pub(crate) fn plain(value: f64) -> String {
    // What rounds to two digits before the point has no fraction.
    match value.abs() {
        0.0 => "0".to_owned(),
        x if x >= 9.95 || !x.is_finite() => format!("{value:.0}"),
        x if x < 0.000_995 => format!("{value:.0e}"),
        x => {
            let digits = if x >= 0.995 { 1.0 } else { 1.0 - (x * 1.005).log10().floor() };
            let text = format!("{value:.*}", digits as usize);
            text.strip_suffix(".0").unwrap_or(&text).to_owned()
        }
    }
}

/// A number with one digit after the point, but small ones as [`plain`] has them: `693.9`, `0.018`.
pub(crate) fn tenths(value: f64) -> String {
    if value.abs() >= 0.995 { format!("{value:.1}") } else { plain(value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_numbers_are_short_and_never_zero_by_rounding() {
        for (value, text) in [
            (0.0, "0"),
            (-0.0, "0"),
            (694.4, "694"),
            (9.96, "10"),
            (8.0, "8"),
            (8.24, "8.2"),
            (0.999, "1"),
            (0.5, "0.50"),
            (0.0181, "0.018"),
            (8.1e-6, "8e-6"),
            (-3.21, "-3.2"),
            (f64::INFINITY, "inf"),
        ] {
            assert_eq!(plain(value), text, "{value}");
        }
        for (value, text) in
            [(693.94, "693.9"), (1.0, "1.0"), (0.0181, "0.018"), (0.0, "0"), (8e-12, "8e-12")]
        {
            assert_eq!(tenths(value), text, "{value}");
        }
    }

    #[test]
    fn numbers_have_three_digits_and_a_prefix() {
        for (value, text) in [
            (0.0, "0 s"),
            (-0.0, "0 s"),
            (1.0, "1.00 s"),
            (999.6, "1.00 ks"),
            (123.4, "123 s"),
            (0.0123, "12.3 ms"),
            (4.5e-8, "45.0 ns"),
            (6.6e14, "660 Ts"),
            (f64::INFINITY, "inf s"),
        ] {
            assert_eq!(si(value, "s"), text);
        }
    }
}
