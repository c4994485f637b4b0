//! Nested tuples of numbers, `(4,(2,8))`: the shapes, strides and coordinates of layouts.

use std::fmt;

use super::error::{self, LayoutError};

/// Deepest nesting accepted. The operations nest by at most one level each; the bound keeps recursion over
/// hostile text shallow.
pub const MAX_DEPTH: usize = error::MAX_DEPTH;

/// A number, or a tuple of numbers and tuples.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum IntTuple {
    /// A number.
    Int(u64),
    /// Entries in order; in a shape the first varies fastest.
    Tuple(Vec<IntTuple>),
}

impl IntTuple {
    /// Number of entries; 1 for a number.
    pub fn rank(&self) -> usize {
        match self {
            Self::Int(_) => 1,
            Self::Tuple(entries) => entries.len(),
        }
    }

    /// Levels of nesting; 0 for a number.
    pub fn depth(&self) -> usize {
        match self {
            Self::Int(_) => 0,
            Self::Tuple(entries) => 1 + entries.iter().map(Self::depth).max().unwrap_or(0),
        }
    }

    /// The numbers from left to right.
    pub fn flatten(&self) -> Vec<u64> {
        let mut flat = Vec::new();
        self.flatten_into(&mut flat);
        flat
    }

    /// Whether both are nested alike.
    pub fn congruent(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Int(_), Self::Int(_)) => true,
            (Self::Tuple(a), Self::Tuple(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.congruent(b))
            }
            (Self::Int(_), Self::Tuple(_)) | (Self::Tuple(_), Self::Int(_)) => false,
        }
    }

    /// Whether every coordinate into a shape `self` is also one into `other`: the sizes agree where `self`
    /// stops nesting, and `other` may nest on from there.
    pub fn compatible(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Int(extent), _) => *extent == other.product(),
            (Self::Tuple(a), Self::Tuple(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.compatible(b))
            }
            (Self::Tuple(_), Self::Int(_)) => false,
        }
    }

    /// Product of the numbers, stopping at `u64::MAX` (which [`super::Layout::new`] refuses).
    pub fn product(&self) -> u64 {
        match self {
            Self::Int(value) => *value,
            Self::Tuple(entries) => entries.iter().fold(1, |p, e| p.saturating_mul(e.product())),
        }
    }

    pub(super) fn flatten_into(&self, flat: &mut Vec<u64>) {
        match self {
            Self::Int(value) => flat.push(*value),
            Self::Tuple(entries) => entries.iter().for_each(|e| e.flatten_into(flat)),
        }
    }

    /// No empty tuples, and no nesting past [`MAX_DEPTH`].
    pub(super) fn check(&self) -> Result<(), LayoutError> {
        fn walk(tuple: &IntTuple, levels_left: usize) -> Result<(), LayoutError> {
            let IntTuple::Tuple(entries) = tuple else { return Ok(()) };
            if entries.is_empty() {
                return Err(LayoutError::EmptyTuple);
            }
            let levels_left = levels_left.checked_sub(1).ok_or(LayoutError::TooDeep)?;
            entries.iter().try_for_each(|e| walk(e, levels_left))
        }
        walk(self, MAX_DEPTH)
    }
}

impl From<u64> for IntTuple {
    fn from(value: u64) -> Self {
        Self::Int(value)
    }
}

impl FromIterator<IntTuple> for IntTuple {
    fn from_iter<I: IntoIterator<Item = IntTuple>>(entries: I) -> Self {
        Self::Tuple(entries.into_iter().collect())
    }
}

impl FromIterator<u64> for IntTuple {
    fn from_iter<I: IntoIterator<Item = u64>>(entries: I) -> Self {
        Self::Tuple(entries.into_iter().map(Self::Int).collect())
    }
}

impl fmt::Display for IntTuple {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int(value) => write!(f, "{value}"),
            Self::Tuple(entries) => {
                f.write_str("(")?;
                for (i, entry) in entries.iter().enumerate() {
                    if i > 0 {
                        f.write_str(",")?;
                    }
                    entry.fmt(f)?;
                }
                f.write_str(")")
            }
        }
    }
}

impl std::str::FromStr for IntTuple {
    type Err = LayoutError;

    fn from_str(text: &str) -> Result<Self, LayoutError> {
        let mut parser = Parser { text, at: 0 };
        let tuple = parser.tuple(MAX_DEPTH)?;
        parser.end()?;
        Ok(tuple)
    }
}

/// `shape:stride`.
pub(super) fn parse_pair(text: &str) -> Result<(IntTuple, IntTuple), LayoutError> {
    let mut parser = Parser { text, at: 0 };
    let shape = parser.tuple(MAX_DEPTH)?;
    if !parser.eat(b':') {
        return Err(parser.fail("a colon is missing"));
    }
    let stride = parser.tuple(MAX_DEPTH)?;
    parser.end()?;
    Ok((shape, stride))
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl Parser<'_> {
    fn fail(&self, what: &'static str) -> LayoutError {
        LayoutError::Parse { text: self.text.chars().take(80).collect(), at: self.at, what }
    }

    fn skip_space(&mut self) {
        while self.text.as_bytes().get(self.at) == Some(&b' ') {
            self.at += 1;
        }
    }

    fn eat(&mut self, byte: u8) -> bool {
        self.skip_space();
        let found = self.text.as_bytes().get(self.at) == Some(&byte);
        self.at += usize::from(found);
        found
    }

    fn tuple(&mut self, levels_left: usize) -> Result<IntTuple, LayoutError> {
        if !self.eat(b'(') {
            return self.number();
        }
        let levels_left = levels_left.checked_sub(1).ok_or(LayoutError::TooDeep)?;
        let mut entries = vec![self.tuple(levels_left)?];
        while self.eat(b',') {
            entries.push(self.tuple(levels_left)?);
        }
        if self.eat(b')') { Ok(IntTuple::Tuple(entries)) } else { Err(self.fail("expected , or )")) }
    }

    fn number(&mut self) -> Result<IntTuple, LayoutError> {
        self.skip_space();
        let digits = self.text.as_bytes()[self.at..].iter().take_while(|b| b.is_ascii_digit()).count();
        if digits == 0 {
            return Err(self.fail("expected a number or ("));
        }
        let value = self.text[self.at..self.at + digits]
            .parse()
            .map_err(|_| self.fail("the number does not fit 64 bits"))?;
        self.at += digits;
        Ok(IntTuple::Int(value))
    }

    fn end(&mut self) -> Result<(), LayoutError> {
        self.skip_space();
        if self.at == self.text.len() { Ok(()) } else { Err(self.fail("unexpected text")) }
    }
}
