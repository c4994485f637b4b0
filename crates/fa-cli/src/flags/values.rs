//! Values of flags, parsed from their texts.

use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::{PathBufValueParser, TypedValueParser};
use fa_core::TensorLayout;
use fa_lab::shape::parse_pair;

/// Visible keys before and after a query's own; `None` is no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    /// Before.
    pub left: Option<u32>,
    /// After.
    pub right: Option<u32>,
}

impl FromStr for Window {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let side = |text: &str| match text.trim() {
            "inf" | "-1" => Ok(None),
            number => number.parse().map(Some).map_err(|_| {
                format!("'{number}' is not a number of keys: use a whole number up to {}, or 'inf'", u32::MAX)
            }),
        };
        let (left, right) = text.split_once(',').ok_or("needs two sides, as in 256,0")?;
        Ok(Window { left: side(left)?, right: side(right)? })
    }
}

/// Queries and keys per sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seqlen {
    /// Queries.
    pub q: usize,
    /// Keys.
    pub k: usize,
}

/// Query heads and key/value heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Heads {
    /// Query heads.
    pub q: usize,
    /// Key/value heads.
    pub kv: usize,
}

impl FromStr for Seqlen {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        parse_pair(text, 'x', "N or QxK, as in 1x4096").map(|(q, k)| Seqlen { q, k })
    }
}

impl FromStr for Heads {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        parse_pair(text, ':', "Q or Q:KV, as in 32:8").map(|(q, kv)| Heads { q, kv })
    }
}

/// Parses `bshd` or `bhsd`.
///
/// # Errors
/// Any other text.
pub(crate) fn parse_layout(text: &str) -> Result<TensorLayout, String> {
    match text.to_ascii_lowercase().as_str() {
        "bshd" => Ok(TensorLayout::Bshd),
        "bhsd" => Ok(TensorLayout::Bhsd),
        _ => Err(format!("unknown layout '{text}': use bshd or bhsd")),
    }
}

/// A file for a page.
///
/// # Errors
/// `-`, and a name of another kind of file.
pub(crate) fn page_file(text: &str) -> Result<PathBuf, String> {
    match text {
        "-" => Err("a page goes to a file, not to standard output: name a file, as in x.html".to_owned()),
        _ => file_of("a page", &["html", "htm"], text),
    }
}

/// Parses a file for results: any path but `-`, which would be a file of that name.
pub(crate) fn results() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| match path.to_str() {
        Some("-") => Err("results go to a file, not to standard output: name a file (./- is one called -)"),
        _ => Ok(path),
    })
}

/// Parses a date.
///
/// # Errors
/// Any text but the `YYYY-MM-DD` of an existing day.
pub(crate) fn day(text: &str) -> Result<String, String> {
    let number = |range: std::ops::Range<usize>| text.get(range)?.parse::<u32>().ok();
    let dashes = text.bytes().enumerate().all(|(at, byte)| match at {
        4 | 7 => byte == b'-',
        _ => byte.is_ascii_digit(),
    });
    let there_is = || {
        let (year, month, day) = (number(0..4)?, number(5..7)?, number(8..10)?);
        let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let days = match month {
            2 => 28 + u32::from(leap),
            4 | 6 | 9 | 11 => 30,
            1..=12 => 31,
            _ => 0,
        };
        (1..=days).contains(&day).then_some(())
    };
    if dashes && text.len() == 10 && there_is().is_some() {
        return Ok(text.to_owned());
    }
    Err("no day: use YYYY-MM-DD, as in 2026-02-28".to_owned())
}

/// A file for a drawing.
///
/// # Errors
/// A name of another kind of file.
pub(crate) fn plot_file(text: &str) -> Result<PathBuf, String> {
    file_of("a plot", &["svg"], text)
}

/// A file for a report of text.
///
/// # Errors
/// A name of another kind of file.
pub(crate) fn markdown_file(text: &str) -> Result<PathBuf, String> {
    file_of("a report", &["md", "markdown"], text)
}

/// Accepts a path with this extension, or with none.
fn file_of(what: &str, kinds: &[&str], text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    let extension = path.extension().map(|own| own.to_string_lossy().to_ascii_lowercase());
    match extension {
        Some(other) if !kinds.contains(&&*other) => {
            Err(format!("{what} is written as .{}: name the file so, or without an ending", kinds[0]))
        }
        _ => Ok(path),
    }
}
