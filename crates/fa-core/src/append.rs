//! New keys and values for a cache, and rotary embedding of keys and queries: what is appended, as data.
//!
//! Row `t` of a sequence's new keys goes to position `len + t` of its cache, where `len` is the cache's
//! length before (`seqused_k`, i32 `[batch]`, on the device for a GPU). With rotary embedding, K is rotated
//! by that position as it is copied, and Q by the positions of its rows. Rows without a slot (beyond the
//! cache's capacity, in a page that does not exist, at a position beyond the tables) are skipped and counted.
//!
//! A cache of codes ([`Append::codes`]) gets each value times `1 / descale`, as
//! [`crate::quantize`] rounds it. Descales per head, or per sequence and head, are read; those per row and
//! head ([`DescaleForm::TokenHead`]) are written, from the largest magnitude of the row after the rotation.
//! No other row of the cache or of the descales is touched.

use serde::{Deserialize, Serialize};

use crate::quantize::Codes;
use crate::{DescaleForm, Descales, Dtype, Side, SideRows};

/// New rows for a cache, and how they are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Append {
    /// Sequences.
    pub sequences: usize,
    /// Rows of new keys and values, `[batch, rows, heads_kv, dim]` or packed.
    pub new: Side,
    /// The cache: `[batch, capacity, heads_kv, dim]`, or pages. Its lengths are on the device.
    pub cache: Side,
    /// Heads of K and V.
    pub heads_kv: usize,
    /// Elements of a key (and a query); on a GPU a multiple of 8.
    pub head_dim: usize,
    /// Elements of a value; on a GPU a multiple of 8.
    pub head_dim_v: usize,
    /// Element type of all tensors but the tables and a cache of codes: f16 or bf16, on the CPU also f32.
    pub dtype: Dtype,
    /// What the cache holds where it is in codes; `None` for elements of `dtype`.
    pub codes: Option<CacheCodes>,
    /// Rotary embedding of keys and queries; `None` for none.
    pub rotary: Option<Rotary>,
}

/// A cache in codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheCodes {
    /// Its codes.
    pub kind: Codes,
    /// What they are multiplied by.
    pub descales: Descales,
}

/// Rotary embedding: pairs among the first `dim` elements of a row are rotated by the angle of the row's
/// position, whose cosine and sine are in tables `[positions, dim / 2]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotary {
    /// Elements that are rotated: an even number up to the head dim, on a GPU a multiple of 16; the rest are
    /// copied unchanged.
    pub dim: usize,
    /// How elements are paired.
    pub pairs: RotaryPairs,
    /// Rows of the tables.
    pub positions: usize,
    /// Type of the tables: f32, or that of the tensors.
    pub table: Dtype,
    /// Queries that are rotated as well; `None` for keys alone.
    pub queries: Option<RotaryQueries>,
}

/// How rotary embedding pairs the elements of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RotaryPairs {
    /// `i` and `i + dim / 2` (GPT-NeoX, Llama).
    Halves,
    /// `2 i` and `2 i + 1` (GPT-J).
    Neighbours,
}

/// Queries that rotary embedding rotates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RotaryQueries {
    /// Their rows, `[batch, rows, heads, head_dim]` or packed.
    pub rows: Side,
    /// Query heads.
    pub heads: usize,
    /// Their positions.
    pub positions: QueryPositions,
}

/// The position by which a query is rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueryPositions {
    /// Row `i` at `len + i`, as the new keys: what causal and windowed attention needs.
    Following,
    /// All at `len`.
    Same,
}

/// Why an append is not valid.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AppendError {
    /// A number is out of range, or not a multiple of what it must be.
    #[error("{name} = {value}: must be {need}")]
    BadValue {
        /// The field.
        name: &'static str,
        /// Its value.
        value: usize,
        /// What it must be.
        need: String,
    },
    /// An element type that appending does not support.
    #[error("{name} is {dtype}: must be {need}")]
    Dtype {
        /// The field.
        name: &'static str,
        /// Its type.
        dtype: Dtype,
        /// What it must be.
        need: String,
    },
    /// A layout of rows that appending does not support.
    #[error("{name} is {rows}: {need}")]
    Rows {
        /// The side.
        name: &'static str,
        /// The layout of its rows.
        rows: &'static str,
        /// The layout that it needs.
        need: &'static str,
    },
}

/// 16-bit elements of a copy, which moves 16 bytes on a GPU.
const CHUNK: usize = 8;

/// The most elements of a row.
const WIDEST: usize = 1 << 16;

/// Elements of two chunks, one in each half of a rotated row.
const ROTARY_CHUNK: usize = 16;

/// Counts are 32-bit integers on the device, with room for sums.
const MAX_COUNT: usize = 1 << 30;

fn multiple(name: &'static str, value: usize, of: usize, most: usize) -> Result<(), AppendError> {
    if value > 0 && value.is_multiple_of(of) && value <= most {
        return Ok(());
    }
    let need = match of {
        1 => format!("from 1 to {most}"),
        _ => format!("a multiple of {of} from {of} to {}", most / of * of),
    };
    Err(AppendError::BadValue { name, value, need })
}

fn name_of(rows: &SideRows) -> &'static str {
    match rows {
        SideRows::Padded { .. } => "padded",
        SideRows::Packed { .. } => "packed",
        SideRows::Paged { .. } => "in pages",
    }
}

impl Append {
    /// Checks types, head dims, the rotary embedding and the layouts.
    ///
    /// # Errors
    /// The first [`AppendError`] found.
    pub fn check(&self) -> Result<(), AppendError> {
        if !Dtype::COMPUTED.contains(&self.dtype) {
            let need = "f32, f16 or bf16".into();
            return Err(AppendError::Dtype { name: "dtype", dtype: self.dtype, need });
        }
        let whole = self.cache_dtype().per_element();
        multiple("head_dim", self.head_dim, whole, WIDEST)?;
        multiple("head_dim_v", self.head_dim_v, whole, WIDEST)?;
        if self.heads_kv == 0 {
            return Err(AppendError::BadValue { name: "heads_kv", value: 0, need: "at least 1".into() });
        }
        match self.cache.rows {
            SideRows::Packed { .. } => {
                let need = "a cache needs room behind each sequence: padded, or in pages";
                return Err(AppendError::Rows { name: "cache", rows: "packed", need });
            }
            SideRows::Paged { page: 0, .. } => {
                return Err(AppendError::BadValue { name: "page", value: 0, need: "at least 1".into() });
            }
            SideRows::Paged { .. } | SideRows::Padded { .. } => {}
        }
        let mut sides = vec![("new", self.new)];
        if let Some(rotary) = &self.rotary {
            multiple("rotary.dim", rotary.dim, 2, self.head_dim)?;
            if rotary.table != Dtype::F32 && rotary.table != self.dtype {
                let own = self.dtype;
                let need = if own == Dtype::F32 { "f32".to_owned() } else { format!("f32 or {own}") };
                return Err(AppendError::Dtype { name: "rotary.table", dtype: rotary.table, need });
            }
            if let Some(queries) = &rotary.queries {
                sides.push(("queries", queries.rows));
                if queries.heads == 0 {
                    let need = "at least 1".into();
                    return Err(AppendError::BadValue { name: "queries.heads", value: 0, need });
                }
            }
        }
        for (name, side) in &sides {
            if let rows @ SideRows::Paged { .. } = side.rows {
                let need = "rows that are read must be padded or packed";
                return Err(AppendError::Rows { name, rows: name_of(&rows), need });
            }
        }
        let rotary = self.rotary.map_or(0, |rotary| rotary.positions);
        let queries = self.queries();
        for (name, value) in [
            ("sequences", self.sequences),
            ("rows of new keys", self.new.total(self.sequences)),
            ("rows of queries", queries.map_or(0, |queries| queries.rows.total(self.sequences))),
            ("room of the cache", self.cache.max()),
            ("positions of the tables", rotary),
            ("entries of the page table", self.sequences.saturating_mul(self.table_columns())),
        ] {
            if value > MAX_COUNT {
                return Err(AppendError::BadValue { name, value, need: format!("at most {MAX_COUNT}") });
            }
        }
        Ok(())
    }

    /// [`Append::check`], and what the GPU kernel requires in addition: it copies 16 bytes at a time, of f16
    /// or bf16.
    ///
    /// # Errors
    /// The first [`AppendError`] found.
    pub fn check_on_gpu(&self) -> Result<(), AppendError> {
        self.check()?;
        if !self.dtype.is_half() {
            let need = "f16 or bf16 on a GPU (the CPU appends f32 too)".to_owned();
            return Err(AppendError::Dtype { name: "dtype", dtype: self.dtype, need });
        }
        multiple("head_dim", self.head_dim, CHUNK, WIDEST)?;
        multiple("head_dim_v", self.head_dim_v, CHUNK, WIDEST)?;
        let Some(rotary) = &self.rotary else { return Ok(()) };
        if self.head_dim < ROTARY_CHUNK {
            let need = format!("at least {ROTARY_CHUNK} for a rotary embedding");
            return Err(AppendError::BadValue { name: "head_dim", value: self.head_dim, need });
        }
        multiple("rotary.dim", rotary.dim, ROTARY_CHUNK, self.head_dim)
    }

    /// Element type of the cache.
    pub const fn cache_dtype(&self) -> Dtype {
        match self.codes {
            Some(codes) => codes.kind.dtype(),
            None => self.dtype,
        }
    }

    /// The forms of the cache's descales.
    pub const fn descales(&self) -> Descales {
        match self.codes {
            Some(codes) => codes.descales,
            None => Descales::NONE,
        }
    }

    /// The shape of a tensor of descales; `None` where there is none.
    pub fn descale_shape(&self, form: DescaleForm) -> Option<Vec<usize>> {
        let heads = self.heads_kv;
        match form {
            DescaleForm::None => None,
            DescaleForm::Head => Some(vec![heads]),
            DescaleForm::SequenceHead => Some(vec![self.sequences, heads]),
            DescaleForm::TokenHead => {
                let [outer, rows] = outer(self.cache, self.sequences);
                Some(vec![outer, rows, heads])
            }
        }
    }

    /// The queries that are rotated.
    pub fn queries(&self) -> Option<RotaryQueries> {
        self.rotary.and_then(|rotary| rotary.queries)
    }

    /// Entries of a sequence's row of the page table; 0 without pages.
    pub fn table_columns(&self) -> usize {
        match self.cache.rows {
            SideRows::Paged { page, max, .. } if page > 0 => max.div_ceil(page),
            SideRows::Paged { .. } | SideRows::Packed { .. } | SideRows::Padded { .. } => 0,
        }
    }

    /// `[batch, rows, heads, dim]` of a tensor of new keys (`dim` elements a row).
    pub fn new_shape(&self, dim: usize) -> [usize; 4] {
        let [batch, rows] = outer(self.new, self.sequences);
        [batch, rows, self.heads_kv, dim]
    }

    /// The same of the cache, in elements of its type: `[batch, room, heads, dim]` or `[pages, page, heads,
    /// dim]`, of int4 with rows of `dim / 2` bytes.
    pub fn cache_shape(&self, dim: usize) -> [usize; 4] {
        let [batch, rows] = outer(self.cache, self.sequences);
        [batch, rows, self.heads_kv, self.cache_dtype().elements(dim)]
    }

    /// The same of the queries; all 0 where none are rotated.
    pub fn query_shape(&self) -> [usize; 4] {
        let Some(queries) = self.queries() else { return [0; 4] };
        let [batch, rows] = outer(queries.rows, self.sequences);
        [batch, rows, queries.heads, self.head_dim]
    }
}

fn outer(side: Side, sequences: usize) -> [usize; 2] {
    match side.rows {
        SideRows::Padded { len } => [sequences, len],
        SideRows::Packed { total, .. } => [1, total],
        SideRows::Paged { page, pages, .. } => [pages, page],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn append() -> Append {
        let queries =
            RotaryQueries { rows: Side::packed(9, 4), heads: 8, positions: QueryPositions::Following };
        Append {
            sequences: 3,
            new: Side::packed(9, 4),
            cache: Side::paged(16, 20, 100),
            heads_kv: 2,
            head_dim: 128,
            head_dim_v: 64,
            dtype: Dtype::Bf16,
            codes: None,
            rotary: Some(Rotary {
                dim: 64,
                pairs: RotaryPairs::Halves,
                positions: 4096,
                table: Dtype::F32,
                queries: Some(queries),
            }),
        }
    }

    #[test]
    fn shapes_follow_the_rows() {
        let append = append();
        append.check().unwrap();
        assert_eq!(append.new_shape(128), [1, 9, 2, 128]);
        assert_eq!(append.cache_shape(64), [20, 16, 2, 64]);
        assert_eq!((append.query_shape(), append.table_columns()), ([1, 9, 8, 128], 7));
        let padded = Append { new: Side::padded(5), cache: Side::padded(64), rotary: None, ..append };
        assert_eq!((padded.new_shape(64), padded.cache_shape(64)), ([3, 5, 2, 64], [3, 64, 2, 64]));
        assert_eq!((padded.query_shape(), padded.table_columns()), ([0; 4], 0));
        let forms = DescaleForm::ALL.map(|form| append.descale_shape(form));
        assert_eq!(forms, [None, Some(vec![2]), Some(vec![3, 2]), Some(vec![20, 16, 2])]);
        assert_eq!(padded.descale_shape(DescaleForm::TokenHead), Some(vec![3, 64, 2]));
    }

    #[test]
    fn refusals_name_field_value_and_what_works() {
        let good = append();
        let rotary = good.rotary.unwrap();
        let refused = |append: Append, part: &str| {
            let text = append.check().expect_err("must be refused").to_string();
            assert!(text.contains(part), "{text} does not say {part}");
        };
        refused(Append { dtype: Dtype::E4m3, ..good }, "dtype is e4m3: must be f32, f16 or bf16");
        refused(Append { head_dim_v: 0, ..good }, "head_dim_v = 0: must be from 1 to 65536");
        refused(Append { cache: Side::packed(100, 100), ..good }, "a cache needs room");
        refused(Append { new: Side::paged(16, 4, 16), ..good }, "new is in pages");
        refused(
            Append { head_dim: 101, rotary: Some(Rotary { dim: 102, ..rotary }), ..good },
            "rotary.dim = 102: must be a multiple of 2 from 2 to 100",
        );
        refused(
            Append { rotary: Some(Rotary { table: Dtype::F16, ..rotary }), ..good },
            "rotary.table is f16: must be f32 or bf16",
        );
        let single =
            Append { dtype: Dtype::F32, rotary: Some(Rotary { table: Dtype::F16, ..rotary }), ..good };
        assert_eq!(single.check().unwrap_err().to_string(), "rotary.table is f16: must be f32");
        refused(Append { new: Side::packed(1 << 31, 4), ..good }, "rows of new keys");
    }

    #[test]
    fn a_gpu_asks_for_whole_chunks() {
        let good = append();
        good.check_on_gpu().unwrap();
        let rotary = good.rotary.unwrap();
        let turned = |dim| Some(Rotary { dim, ..rotary });
        let descales = Descales::both(DescaleForm::TokenHead);
        let codes = Some(CacheCodes { kind: Codes::E4m3, descales });
        assert_eq!(Append { codes, ..good }.check_on_gpu(), Ok(()));
        let int4 = Append { codes: Some(CacheCodes { kind: Codes::Int4, descales }), ..good };
        assert_eq!(
            (int4.check_on_gpu(), int4.cache_shape(64), int4.new_shape(64)),
            (Ok(()), [20, 16, 2, 32], [1, 9, 2, 64])
        );
        let odd = Append { head_dim_v: 63, ..int4 }.check().unwrap_err();
        assert_eq!(odd.to_string(), "head_dim_v = 63: must be a multiple of 2 from 2 to 65536");
        for (append, part) in [
            (Append { head_dim: 100, ..good }, "head_dim = 100: must be a multiple of 8"),
            (Append { head_dim_v: 4, ..good }, "head_dim_v = 4: must be a multiple of 8"),
            (
                Append { rotary: turned(24), ..good },
                "rotary.dim = 24: must be a multiple of 16 from 16 to 128",
            ),
            (Append { head_dim: 8, rotary: turned(8), ..good }, "head_dim = 8: must be at least 16"),
            (Append { dtype: Dtype::F32, ..good }, "dtype is f32: must be f16 or bf16 on a GPU"),
        ] {
            append.check().unwrap();
            let text = append.check_on_gpu().expect_err("must be refused").to_string();
            assert!(text.contains(part), "{text} does not say {part}");
        }
    }
}
