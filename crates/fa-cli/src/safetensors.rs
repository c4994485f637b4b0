//! Reading and writing safetensors files: an 8-byte little-endian header length, a JSON header, the tensors' bytes.
//!
//! The header is untrusted. It is checked as a whole (lengths, offsets, overlaps, products) before a byte of data is
//! read or a buffer is allocated, and only the tensors asked for are read.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use fa_attn::Tensor;
use fa_cpu::Element;
use half::{bf16, f16};
use serde::Deserialize;

use crate::term::failure::InputError;

/// Longest header that is read, the format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The key of the header's free-text entries.
const METADATA_KEY: &str = "__metadata__";

/// Element types of the format with their bits. Types narrower than a byte exist, so bits.
const DTYPE_BITS: [(&str, u64); 21] = [
    ("BOOL", 8),
    ("F4", 4),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("U8", 8),
    ("I8", 8),
    ("F8_E5M2", 8),
    ("F8_E4M3", 8),
    ("F8_E8M0", 8),
    ("F8_E4M3FNUZ", 8),
    ("F8_E5M2FNUZ", 8),
    ("I16", 16),
    ("U16", 16),
    ("F16", 16),
    ("BF16", 16),
    ("I32", 32),
    ("U32", 32),
    ("F32", 32),
    ("I64", 64),
    ("U64", 64),
    ("F64", 64),
];

/// An element type that tensors are read into and written from.
pub trait Stored: Element {
    /// The format's name of the type.
    const TAG: &'static str;
    /// One element from its little-endian bytes, of which there are as many as the type has.
    fn from_bytes(bytes: &[u8]) -> Self;
    /// Appends the element's little-endian bytes.
    fn push_bytes(self, bytes: &mut Vec<u8>);
}

macro_rules! stored {
    ($type:ty, $tag:literal) => {
        impl Stored for $type {
            const TAG: &'static str = $tag;
            fn from_bytes(bytes: &[u8]) -> Self {
                let mut array = [0; size_of::<$type>()];
                array.copy_from_slice(bytes);
                <$type>::from_le_bytes(array)
            }
            fn push_bytes(self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.to_le_bytes());
            }
        }
    };
}

stored!(f64, "F64");
stored!(f32, "F32");
stored!(f16, "F16");
stored!(bf16, "BF16");

/// One tensor's entry in the header.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The format's name of the element type, such as `BF16`.
    pub dtype: String,
    /// Extents, slowest first.
    pub shape: Vec<u64>,
    /// Bytes of the tensor, counted from the end of the header.
    bytes: Range<u64>,
}

/// An open safetensors file with a checked header.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: File,
    data_start: u64,
    entries: BTreeMap<String, Entry>,
    metadata: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl TensorFile {
    /// Opens `path` and checks its header.
    ///
    /// # Errors
    /// [`InputError::Read`], or [`InputError::Format`] when the header is too long, no JSON, or contradicts itself or
    /// the file's length.
    pub fn open(path: &Path) -> Result<TensorFile, InputError> {
        let mut file = File::open(path).map_err(InputError::read(path))?;
        let about = file.metadata().map_err(InputError::read(path))?;
        if !about.is_file() {
            let kind = if about.is_dir() { "it is a directory" } else { "it is not a regular file" };
            return Err(InputError::Read { path: path.to_owned(), source: std::io::Error::other(kind) });
        }
        let bad = |reason: String| InputError::Format { path: path.to_owned(), reason };
        let file_len = about.len();
        let mut prefix = [0; 8];
        if file_len < 8 {
            return Err(bad(format!("{file_len} bytes are too few for the 8-byte header length")));
        }
        file.read_exact(&mut prefix).map_err(InputError::read(path))?;
        let header_len = u64::from_le_bytes(prefix);
        if header_len > MAX_HEADER_BYTES {
            return Err(bad(format!(
                "a header of {header_len} bytes is over the limit of {MAX_HEADER_BYTES}"
            )));
        }
        if header_len > file_len - 8 {
            return Err(bad(format!(
                "truncated: a header of {header_len} bytes, but {} follow",
                file_len - 8
            )));
        }
        let mut header = vec![0; header_len as usize];
        file.read_exact(&mut header).map_err(InputError::read(path))?;
        let data_start = 8 + header_len;
        let (entries, metadata) = parse_header(&header).map_err(bad)?;
        check_cover(&entries, file_len - data_start).map_err(bad)?;
        tracing::debug!(path = %path.display(), tensors = entries.len(), header_len, "opened");
        Ok(TensorFile { path: path.to_owned(), file, data_start, entries, metadata })
    }

    /// Where the file lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The header's free-text entries.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Whether the tensor is there.
    pub fn has(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// A tensor's entry.
    ///
    /// # Errors
    /// [`InputError::MissingTensor`].
    pub fn entry(&self, name: &str) -> Result<&Entry, InputError> {
        self.entries.get(name).ok_or_else(|| InputError::MissingTensor {
            path: self.path.clone(),
            name: name.to_owned(),
            have: list_names(self.names()),
        })
    }

    /// A tensor's elements, which must be stored as `T`.
    ///
    /// # Errors
    /// [`InputError::MissingTensor`], [`InputError::Dtype`], [`InputError::Read`].
    pub fn read<T: Stored>(&self, name: &str) -> Result<Vec<T>, InputError> {
        let entry = self.entry(name)?;
        if entry.dtype != T::TAG {
            let need = format!("it must hold {}", T::TAG);
            return Err(InputError::Dtype { name: name.to_owned(), got: entry.dtype.clone(), need });
        }
        Ok(self.bytes(entry)?.chunks_exact(size_of::<T>()).map(T::from_bytes).collect())
    }

    /// A tensor's elements as f64, whichever float type they are stored as.
    ///
    /// # Errors
    /// [`InputError::MissingTensor`], [`InputError::Dtype`] for a type that is no supported float, [`InputError::Read`].
    pub fn read_f64(&self, name: &str) -> Result<Vec<f64>, InputError> {
        fn widen<T: Stored>(values: Vec<T>) -> Vec<f64> {
            values.into_iter().map(T::to_f64).collect()
        }
        let entry = self.entry(name)?;
        match entry.dtype.as_str() {
            f64::TAG => self.read::<f64>(name),
            f32::TAG => self.read::<f32>(name).map(widen),
            f16::TAG => self.read::<f16>(name).map(widen),
            bf16::TAG => self.read::<bf16>(name).map(widen),
            _ => Err(InputError::Dtype {
                name: name.to_owned(),
                got: entry.dtype.clone(),
                need: "F64, F32, F16 and BF16 can be compared".to_owned(),
            }),
        }
    }

    fn bytes(&self, entry: &Entry) -> Result<Vec<u8>, InputError> {
        let mut bytes = vec![0; (entry.bytes.end - entry.bytes.start) as usize];
        let mut file = &self.file;
        file.seek(SeekFrom::Start(self.data_start + entry.bytes.start))
            .map_err(InputError::read(&self.path))?;
        file.read_exact(&mut bytes).map_err(InputError::read(&self.path))?;
        Ok(bytes)
    }
}

/// Names for a message: all of a few, the first of many.
fn list_names<'a>(names: impl Iterator<Item = &'a str>) -> String {
    const SHOWN: usize = 8;
    let names: Vec<&str> = names.collect();
    match names.len() {
        0 => "none".to_owned(),
        n if n <= SHOWN => names.join(", "),
        n => format!("{} and {} more", names[..SHOWN].join(", "), n - SHOWN),
    }
}

type Header = (BTreeMap<String, Entry>, BTreeMap<String, String>);

fn parse_header(header: &[u8]) -> Result<Header, String> {
    let text = std::str::from_utf8(header).map_err(|e| format!("the header is not UTF-8: {e}"))?;
    let mut raw: BTreeMap<String, serde_json::Value> =
        serde_json::from_str(text).map_err(|e| format!("the header is not a JSON object: {e}"))?;
    let metadata = match raw.remove(METADATA_KEY) {
        Some(value) => {
            serde_json::from_value(value).map_err(|e| format!("{METADATA_KEY} must map text to text: {e}"))?
        }
        None => BTreeMap::new(),
    };
    let mut entries = BTreeMap::new();
    for (name, value) in raw {
        let entry: RawEntry = serde_json::from_value(value).map_err(|e| format!("tensor '{name}': {e}"))?;
        let entry = check_entry(entry).map_err(|reason| format!("tensor '{name}': {reason}"))?;
        entries.insert(name, entry);
    }
    Ok((entries, metadata))
}

fn check_entry(raw: RawEntry) -> Result<Entry, String> {
    let RawEntry { dtype, shape, data_offsets: [begin, end] } = raw;
    let Some(&(_, bits)) = DTYPE_BITS.iter().find(|(name, _)| *name == dtype) else {
        return Err(format!("unknown dtype '{dtype}'"));
    };
    let elements = shape.iter().try_fold(1u64, |product, &extent| product.checked_mul(extent));
    let Some(size_bits) = elements.and_then(|n| n.checked_mul(bits)) else {
        return Err(format!("shape {shape:?} of {dtype} has more than 2^64 - 1 bits"));
    };
    let len = end.checked_sub(begin).ok_or_else(|| format!("data offsets {begin}..{end} run backwards"))?;
    if !size_bits.is_multiple_of(8) || size_bits / 8 != len {
        return Err(format!(
            "shape {shape:?} of {dtype} needs {size_bits} bits, data offsets {begin}..{end} hold {len} bytes"
        ));
    }
    Ok(Entry { dtype, shape, bytes: begin..end })
}

/// The tensors must cover the data without overlap, gap or excess: anything else is a damaged or crafted file.
fn check_cover(entries: &BTreeMap<String, Entry>, data_len: u64) -> Result<(), String> {
    let mut by_offset: Vec<(&String, &Range<u64>)> =
        entries.iter().map(|(name, e)| (name, &e.bytes)).collect();
    by_offset.sort_by_key(|(_, bytes)| (bytes.start, bytes.end));
    let mut covered = 0;
    for (name, bytes) in by_offset {
        if bytes.start < covered {
            return Err(format!(
                "tensor '{name}' at {}..{} overlaps the one before it",
                bytes.start, bytes.end
            ));
        }
        if bytes.start > covered {
            return Err(format!("no tensor covers the bytes {covered}..{}", bytes.start));
        }
        covered = bytes.end;
    }
    if covered > data_len {
        return Err(format!("truncated: the tensors need {covered} bytes, the file holds {data_len}"));
    }
    if covered < data_len {
        return Err(format!("{} bytes follow the last tensor", data_len - covered));
    }
    Ok(())
}

/// A tensor to be written.
#[derive(Debug)]
pub struct NewTensor {
    name: &'static str,
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl NewTensor {
    /// A tensor with `values` in the order of `shape`, slowest first.
    pub fn new<T: Stored>(name: &'static str, shape: &[usize], values: &[T]) -> NewTensor {
        debug_assert_eq!(shape.iter().product::<usize>(), values.len(), "{name}");
        let mut bytes = Vec::with_capacity(size_of_val(values));
        values.iter().for_each(|&value| value.push_bytes(&mut bytes));
        NewTensor { name, dtype: T::TAG, shape: shape.to_vec(), bytes }
    }

    /// A tensor of attention, its axes in its own order.
    pub fn of<T: Stored>(name: &'static str, tensor: &Tensor<T>) -> NewTensor {
        let [batch, seqlen, heads, dim] = tensor.shape;
        NewTensor::new(name, &tensor.layout.shape(batch, seqlen, heads, dim), &tensor.data)
    }
}

/// Writes a safetensors file: equal tensors and metadata give equal bytes.
///
/// # Errors
/// What `writer` reports.
pub fn write(
    writer: &mut impl Write,
    tensors: &[NewTensor],
    metadata: &BTreeMap<String, String>,
) -> std::io::Result<()> {
    let mut header = serde_json::Map::new();
    if !metadata.is_empty() {
        header.insert(METADATA_KEY.to_owned(), serde_json::json!(metadata));
    }
    // Widest elements first keep every tensor aligned to its element size.
    let mut order: Vec<&NewTensor> = tensors.iter().collect();
    order.sort_by_key(|tensor| {
        let bits = DTYPE_BITS.iter().find(|(name, _)| *name == tensor.dtype).map_or(0, |&(_, bits)| bits);
        (std::cmp::Reverse(bits), tensor.name)
    });
    let mut offset = 0;
    for tensor in &order {
        let end = offset + tensor.bytes.len();
        let entry = serde_json::json!({ "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, end] });
        header.insert(tensor.name.to_owned(), entry);
        offset = end;
    }
    let mut text = serde_json::to_vec(&header)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    writer.write_all(&(text.len() as u64).to_le_bytes())?;
    writer.write_all(&text)?;
    order.iter().try_for_each(|tensor| writer.write_all(&tensor.bytes))
}
