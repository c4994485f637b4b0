//! The two head dims of an attention problem, as the planner reads them.

use std::fmt;
use std::str::FromStr;

use fa_core::spec::MAX_HEAD_DIM;
use serde::{Deserialize, Serialize};

/// Head dim of Q and K, and of V and O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadDims {
    /// Elements of a query or key.
    pub head_dim: u32,
    /// Elements of a value or output row.
    pub head_dim_v: u32,
}

/// What is wrong with a pair of head dims.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeadDimsError {
    /// The text is neither a number nor two numbers.
    #[error("'{0}' is no head dim: write one number (128), or those of Q/K and of V (192-128)")]
    Text(String),
    /// A head dim is outside the range.
    #[error("{name} is {value}: it must be 1 to {MAX_HEAD_DIM}")]
    Range {
        /// `head_dim` or `head_dim_v`.
        name: &'static str,
        /// Its value.
        value: u32,
    },
}

impl HeadDims {
    /// Equal head dims.
    pub const fn square(head_dim: u32) -> HeadDims {
        HeadDims { head_dim, head_dim_v: head_dim }
    }

    /// Checks both against [`MAX_HEAD_DIM`].
    ///
    /// # Errors
    /// [`HeadDimsError::Range`].
    pub fn check(self) -> Result<(), HeadDimsError> {
        for (name, value) in [("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)] {
            if !(1..=MAX_HEAD_DIM).contains(&value) {
                return Err(HeadDimsError::Range { name, value });
            }
        }
        Ok(())
    }

    /// Both rounded up to multiples of `granule`: the extents of a kernel's tiles.
    pub const fn padded(self, granule: u32) -> HeadDims {
        HeadDims {
            head_dim: self.head_dim.next_multiple_of(granule),
            head_dim_v: self.head_dim_v.next_multiple_of(granule),
        }
    }
}

impl FromStr for HeadDims {
    type Err = HeadDimsError;

    /// Reads `128` or `192-128`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |part: &str| {
            let digits = !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
            part.parse().ok().filter(|_| digits).ok_or_else(|| HeadDimsError::Text(text.to_owned()))
        };
        let dims = match text.split_once('-') {
            Some((qk, v)) => HeadDims { head_dim: number(qk)?, head_dim_v: number(v)? },
            None => HeadDims::square(number(text)?),
        };
        dims.check()?;
        Ok(dims)
    }
}

impl fmt::Display for HeadDims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.head_dim)?;
        if self.head_dim_v != self.head_dim {
            write!(f, "-{}", self.head_dim_v)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_reads_back() {
        for text in ["1", "72", "128", "192-128", "512", "576-512"] {
            assert_eq!(text.parse::<HeadDims>().map(|d| d.to_string()), Ok(text.to_owned()));
        }
        assert_eq!("64-64".parse(), Ok(HeadDims::square(64)));
        assert_eq!("72-1".parse::<HeadDims>().map(|d| d.padded(32).to_string()), Ok("96-32".to_owned()));
    }

    #[test]
    fn bad_text_is_refused_by_name() {
        for text in ["", "abc", "192-", "-128", "128-64-32", "+64", "12.5", "64 ", "99999999999"] {
            assert_eq!(text.parse::<HeadDims>(), Err(HeadDimsError::Text(text.into())));
        }
        for (text, name, value) in [("0", "head_dim", 0), ("577", "head_dim", 577), ("64-0", "head_dim_v", 0)]
        {
            assert_eq!(text.parse::<HeadDims>(), Err(HeadDimsError::Range { name, value }));
        }
    }
}
