//! Reading and writing safetensors files: an 8-byte little-endian header length, a JSON header, the tensors'
//! bytes.
//!
//! Types and entries are those of the `safetensors` crate. Its reader wants the whole file in memory, takes
//! the last of two tensors of a name and refuses without saying which tensor or number is wrong. Here the
//! untrusted header is checked as a whole (names, lengths, offsets, overlaps, products) before a byte of data
//! is read or a buffer is allocated, each refusal names the tensor, and only the tensors asked for are read.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use fa_attn::Tensor;
use fa_core::counted;
use fa_core::quantize::Codes;
use fa_cpu::Element;
use half::{bf16, f16};
use safetensors::tensor::{Dtype, TensorInfo};
use serde::de::value::StrDeserializer;
use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};

use crate::term::failure::InputError;

/// Longest header that is read, the format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The key of the header's free-text entries.
const METADATA_KEY: &str = "__metadata__";

/// A number that tensors hold.
pub(crate) trait Plain: Copy {
    /// The format's type.
    const STORED: Dtype;
    /// One element from its little-endian bytes, of which there are as many as the type has.
    fn from_bytes(bytes: &[u8]) -> Self;
    /// Appends the element's little-endian bytes.
    fn push_bytes(self, bytes: &mut Vec<u8>);
}

/// An element type that tensors are read into and written from.
pub(crate) trait Stored: Plain + Element {}

impl<T: Plain + Element> Stored for T {}

macro_rules! stored {
    ($type:ty, $stored:ident) => {
        impl Plain for $type {
            const STORED: Dtype = Dtype::$stored;
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

/// A truth value, by its byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Truth(pub u8);

impl Plain for Truth {
    const STORED: Dtype = Dtype::BOOL;

    fn from_bytes(bytes: &[u8]) -> Self {
        Truth(bytes[0])
    }

    fn push_bytes(self, bytes: &mut Vec<u8>) {
        bytes.push(self.0);
    }
}

stored!(u8, U8);
stored!(u32, U32);
stored!(i32, I32);
stored!(f64, F64);
stored!(f32, F32);
stored!(f16, F16);
stored!(bf16, BF16);

/// An open safetensors file with a checked header.
#[derive(Debug)]
pub(crate) struct TensorFile {
    path: PathBuf,
    file: File,
    data_start: u64,
    entries: BTreeMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
    /// Names that were asked for, of tensors that are here or not.
    asked: RefCell<BTreeSet<String>>,
}

impl TensorFile {
    /// Opens `path` and checks its header.
    ///
    /// # Errors
    /// [`InputError::Read`], or [`InputError::Format`] when the header is too long, no JSON, or contradicts
    /// itself or the file's length.
    pub(crate) fn open(path: &Path) -> Result<TensorFile, InputError> {
        // Asked before it is opened: opening a named pipe waits for its writer.
        let about = fs::metadata(path).map_err(InputError::read(path))?;
        if !about.is_file() {
            let kind = if about.is_dir() { "it is a directory" } else { "it is not a regular file" };
            return Err(InputError::Read { path: path.to_owned(), source: io::Error::other(kind) });
        }
        let mut file = File::open(path).map_err(InputError::read(path))?;
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
        let Header { entries, metadata } = parse_header(&header).map_err(bad)?;
        check_cover(&entries, file_len - data_start).map_err(bad)?;
        tracing::debug!(path = %path.display(), tensors = entries.len(), header_len, "opened");
        let asked = RefCell::default();
        Ok(TensorFile { path: path.to_owned(), file, data_start, entries, metadata, asked })
    }

    /// Where the file lies.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The header's free-text entries.
    pub(crate) fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Whether the tensor is there.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.asked.borrow_mut().insert(name.to_owned());
        self.entries.contains_key(name)
    }

    /// The names of all tensors, sorted.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// The names of the tensors that nobody has asked for, sorted.
    pub(crate) fn never_asked(&self) -> Vec<&str> {
        let asked = self.asked.borrow();
        self.names().filter(|name| !asked.contains(*name)).collect()
    }

    /// A tensor's entry.
    ///
    /// # Errors
    /// [`InputError::MissingTensor`].
    pub(crate) fn entry(&self, name: &str) -> Result<&TensorInfo, InputError> {
        self.asked.borrow_mut().insert(name.to_owned());
        self.entries.get(name).ok_or_else(|| InputError::MissingTensor {
            path: self.path.clone(),
            name: name.to_owned(),
            have: self.named(),
        })
    }

    /// The tensors' names for a message: all of a few, the first of many.
    pub(crate) fn named(&self) -> String {
        const SHOWN: usize = 8;
        let names: Vec<&str> = self.names().collect();
        match names.len() {
            0 => "none".to_owned(),
            n if n <= SHOWN => names.join(", "),
            n => format!("{} and {} more", names[..SHOWN].join(", "), n - SHOWN),
        }
    }

    /// A tensor's elements, which must be stored as `T`.
    ///
    /// # Errors
    /// [`InputError::MissingTensor`], [`InputError::Dtype`], [`InputError::Read`].
    pub(crate) fn read<T: Plain>(&self, name: &str) -> Result<Vec<T>, InputError> {
        let entry = self.entry(name)?;
        if entry.dtype != T::STORED {
            let need = format!("it must hold {}", T::STORED);
            return Err(InputError::Dtype { name: name.to_owned(), got: entry.dtype.to_string(), need });
        }
        Ok(self.bytes(entry)?.chunks_exact(size_of::<T>()).map(T::from_bytes).collect())
    }

    /// A tensor's elements as f64, whichever float type they are stored as.
    ///
    /// # Errors
    /// [`InputError::MissingTensor`], [`InputError::Dtype`] for a type that is no supported float,
    /// [`InputError::Read`].
    pub(crate) fn read_f64(&self, name: &str) -> Result<Vec<f64>, InputError> {
        fn widen<T: Stored>(values: Vec<T>) -> Vec<f64> {
            values.into_iter().map(T::to_f64).collect()
        }
        let stored = self.entry(name)?.dtype;
        if stored == f64::STORED {
            return self.read::<f64>(name);
        }
        match dtype_of(stored) {
            Some(fa_core::Dtype::F32) => self.read::<f32>(name).map(widen),
            Some(fa_core::Dtype::F16) => self.read::<f16>(name).map(widen),
            Some(fa_core::Dtype::Bf16) => self.read::<bf16>(name).map(widen),
            Some(
                fa_core::Dtype::E4m3 | fa_core::Dtype::Int8 | fa_core::Dtype::Int4 | fa_core::Dtype::E5m2,
            )
            | None => Err(InputError::Dtype {
                name: name.to_owned(),
                got: stored.to_string(),
                need: "F64, F32, F16 and BF16 can be compared".to_owned(),
            }),
        }
    }

    /// A tensor's bytes: the bits of the codes that it is stored as.
    ///
    /// # Errors
    /// [`InputError::MissingTensor`], [`InputError::Read`].
    pub(crate) fn read_bits(&self, name: &str) -> Result<Vec<u8>, InputError> {
        self.bytes(self.entry(name)?)
    }

    fn bytes(&self, entry: &TensorInfo) -> Result<Vec<u8>, InputError> {
        let (begin, end) = entry.data_offsets;
        let mut bytes = vec![0; end - begin];
        let mut file = &self.file;
        file.seek(SeekFrom::Start(self.data_start + begin as u64)).map_err(InputError::read(&self.path))?;
        file.read_exact(&mut bytes).map_err(InputError::read(&self.path))?;
        Ok(bytes)
    }
}

/// The codes that K and V of a stored type are; `None` for numbers.
pub(crate) fn codes_of(stored: Dtype) -> Option<Codes> {
    Codes::ALL.into_iter().find(|codes| stored_codes(*codes) == stored)
}

fn stored_codes(codes: Codes) -> Dtype {
    match codes {
        Codes::E4m3 => Dtype::F8_E4M3,
        Codes::E5m2 => Dtype::F8_E5M2,
        Codes::Int8 => Dtype::I8,
        // Bytes of two codes.
        Codes::Int4 => Dtype::U8,
    }
}

/// The element type that attention is computed on for a stored type; `None` for all others.
pub(crate) fn dtype_of(stored: Dtype) -> Option<fa_core::Dtype> {
    let computed = [
        (f32::STORED, fa_core::Dtype::F32),
        (f16::STORED, fa_core::Dtype::F16),
        (bf16::STORED, fa_core::Dtype::Bf16),
    ];
    computed.into_iter().find(|(own, _)| *own == stored).map(|(_, dtype)| dtype)
}

/// A checked header.
#[derive(Debug, Default)]
struct Header {
    entries: BTreeMap<String, TensorInfo>,
    metadata: BTreeMap<String, String>,
}

fn parse_header(header: &[u8]) -> Result<Header, String> {
    let text = std::str::from_utf8(header).map_err(|e| format!("the header is not UTF-8: {e}"))?;
    let mut refusal = None;
    let mut json = serde_json::Deserializer::from_str(text);
    let header = json.deserialize_map(HeaderVisitor { refusal: &mut refusal });
    let parsed = header.and_then(|header| json.end().map(|()| header));
    parsed.map_err(|e| refusal.unwrap_or_else(|| format!("the header is not a JSON object: {e}")))
}

/// Reads a header's entries one by one: a map that is read as a whole hides names that are there twice.
struct HeaderVisitor<'a> {
    /// What is wrong with an entry, in words of its own.
    refusal: &'a mut Option<String>,
}

impl<'de> Visitor<'de> for HeaderVisitor<'_> {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut header = Header::default();
        let mut refuse = |reason: String| {
            *self.refusal = Some(reason);
            de::Error::custom("refused")
        };
        let mut metadata = None;
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA_KEY {
                let Texts(texts) = map
                    .next_value()
                    .map_err(|e: A::Error| refuse(format!("{METADATA_KEY} must map text to text: {e}")))?;
                if metadata.replace(texts).is_some() {
                    return Err(refuse(format!("{METADATA_KEY} is there twice")));
                }
                continue;
            }
            let raw = map.next_value().map_err(|e: A::Error| refuse(format!("tensor '{name}': {e}")))?;
            let entry = check_entry(raw).map_err(|reason| refuse(format!("tensor '{name}': {reason}")))?;
            if header.entries.contains_key(&name) {
                return Err(refuse(format!("tensor '{name}' is there twice")));
            }
            header.entries.insert(name, entry);
        }
        header.metadata = metadata.unwrap_or_default();
        Ok(header)
    }
}

/// Free-text entries, each key once.
struct Texts(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Texts, D::Error> {
        struct TextsVisitor;
        impl<'de> Visitor<'de> for TextsVisitor {
            type Value = Texts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of texts")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Texts, A::Error> {
                let mut texts = BTreeMap::new();
                while let Some((key, text)) = map.next_entry::<String, String>()? {
                    if texts.contains_key(&key) {
                        return Err(de::Error::custom(format!("'{key}' is there twice")));
                    }
                    texts.insert(key, text);
                }
                Ok(Texts(texts))
            }
        }
        deserializer.deserialize_map(TextsVisitor)
    }
}

/// An entry as it stands in the header, strictly read: the crate's own takes fields that it does not know.
#[derive(Deserialize)]
#[serde(expecting = "dtype, shape and data_offsets", deny_unknown_fields)]
struct RawEntry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

fn check_entry(raw: RawEntry) -> Result<TensorInfo, String> {
    let RawEntry { dtype, shape, data_offsets: (begin, end) } = raw;
    // Variants of the same width that the crate does not know; nothing computes in either.
    let known = match dtype.as_str() {
        "F8_E4M3FNUZ" => "F8_E4M3",
        "F8_E5M2FNUZ" => "F8_E5M2",
        other => other,
    };
    let named = StrDeserializer::<de::value::Error>::new(known);
    let Ok(dtype) = Dtype::deserialize(named) else { return Err(format!("unknown dtype '{dtype}'")) };
    let elements = shape.iter().try_fold(1usize, |product, &extent| product.checked_mul(extent));
    let Some(bits) = elements.and_then(|n| n.checked_mul(dtype.bitsize())) else {
        return Err(format!("shape {shape:?} of {dtype} has more than 2^{} - 1 bits", usize::BITS));
    };
    let len = end.checked_sub(begin).ok_or_else(|| format!("data offsets {begin}..{end} run backwards"))?;
    if !bits.is_multiple_of(8) || bits / 8 != len {
        let need = if bits.is_multiple_of(8) { counted(bits / 8, "byte") } else { format!("{bits} bits") };
        return Err(format!(
            "shape {shape:?} of {dtype} needs {need}, data offsets {begin}..{end} hold {}",
            counted(len, "byte")
        ));
    }
    Ok(TensorInfo { dtype, shape, data_offsets: (begin, end) })
}

/// The tensors must cover the data without overlap, gap or excess: anything else is a damaged or crafted
/// file.
fn check_cover(entries: &BTreeMap<String, TensorInfo>, data_len: u64) -> Result<(), String> {
    let mut by_offset: Vec<(&String, (usize, usize))> =
        entries.iter().map(|(name, entry)| (name, entry.data_offsets)).collect();
    by_offset.sort_by_key(|&(_, offsets)| offsets);
    let mut covered = 0;
    for (name, (begin, end)) in by_offset {
        if begin < covered {
            return Err(format!("tensor '{name}' at {begin}..{end} overlaps the one before it"));
        }
        if begin > covered {
            return Err(format!("no tensor covers the bytes {covered}..{begin}"));
        }
        covered = end;
    }
    let covered = covered as u64;
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
pub(crate) struct NewTensor {
    name: Cow<'static, str>,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl NewTensor {
    /// A tensor with `values` in the order of `shape`, slowest first.
    pub(crate) fn new<T: Plain>(
        name: impl Into<Cow<'static, str>>,
        shape: &[usize],
        values: &[T],
    ) -> NewTensor {
        let name = name.into();
        debug_assert_eq!(shape.iter().product::<usize>(), values.len(), "{name}");
        let mut bytes = Vec::with_capacity(size_of_val(values));
        values.iter().for_each(|&value| value.push_bytes(&mut bytes));
        NewTensor { name, dtype: T::STORED, shape: shape.to_vec(), bytes }
    }

    /// A tensor of codes of a cache, as their type.
    pub(crate) fn of_codes(name: &'static str, tensor: &Tensor<u8>, codes: Codes) -> NewTensor {
        let [batch, seqlen, heads, dim] = tensor.shape;
        let shape = tensor.layout.shape(batch, seqlen, heads, dim).to_vec();
        NewTensor { name: name.into(), dtype: stored_codes(codes), shape, bytes: tensor.data.clone() }
    }

    /// A tensor of attention, its axes in its own order; of packed sequences without the batch.
    pub(crate) fn of<T: Stored>(name: &'static str, tensor: &Tensor<T>, packed: bool) -> NewTensor {
        let [batch, seqlen, heads, dim] = tensor.shape;
        let shape = tensor.layout.shape(batch, seqlen, heads, dim);
        NewTensor::new(name, &shape[usize::from(packed)..], &tensor.data)
    }
}

/// Writes a safetensors file: equal tensors and metadata give equal bytes. (The crate's own writer puts the
/// metadata in an order that differs from run to run.)
///
/// # Errors
/// What `writer` reports.
pub(crate) fn write(
    writer: &mut impl Write,
    tensors: &[NewTensor],
    metadata: &BTreeMap<String, String>,
) -> io::Result<()> {
    #[derive(Serialize)]
    struct Header<'a> {
        #[serde(rename = "__metadata__", skip_serializing_if = "BTreeMap::is_empty")]
        metadata: &'a BTreeMap<String, String>,
        #[serde(flatten)]
        entries: BTreeMap<&'a str, TensorInfo>,
    }
    // Widest elements first keep every tensor aligned to its element size.
    let mut order: Vec<&NewTensor> = tensors.iter().collect();
    order.sort_by(|a, b| b.dtype.bitsize().cmp(&a.dtype.bitsize()).then_with(|| a.name.cmp(&b.name)));
    let mut offset = 0;
    let mut entries = BTreeMap::new();
    for tensor in &order {
        let begin = offset;
        offset += tensor.bytes.len();
        let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
        entries.insert(&*tensor.name, TensorInfo { dtype, shape, data_offsets: (begin, offset) });
    }
    let header = Header { metadata, entries };
    let mut text = serde_json::to_vec(&header)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    writer.write_all(&(text.len() as u64).to_le_bytes())?;
    writer.write_all(&text)?;
    order.iter().try_for_each(|tensor| writer.write_all(&tensor.bytes))
}
