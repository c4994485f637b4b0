//! Reading safetensors files of the repository.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use fa_core::{Dtype, Lengths, Mask, Problem, ScoreMod, Types};
use fa_cpu::Element;
use half::{bf16, f16};
use safetensors::{Dtype as FileDtype, SafeTensors};

/// A file, held whole.
pub(crate) struct File {
    pub name: String,
    bytes: Vec<u8>,
    metadata: HashMap<String, String>,
}

/// Files in a folder of the repository, sorted by name.
pub(crate) fn folder(path: &str) -> Vec<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    let mut files: Vec<PathBuf> = std::fs::read_dir(&path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        .map(|entry| entry.expect("a readable folder").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
        .collect();
    files.sort();
    files
}

impl File {
    pub(crate) fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let (_, header) = SafeTensors::read_metadata(&bytes).expect("a valid header");
        let metadata = header.metadata().clone().unwrap_or_default();
        File { name: path.file_stem().unwrap().to_string_lossy().into_owned(), bytes, metadata }
    }

    fn tensor(&self, name: &str) -> (FileDtype, Vec<usize>, Vec<u8>) {
        let tensors = SafeTensors::deserialize(&self.bytes).expect("a valid file");
        let view = tensors.tensor(name).unwrap_or_else(|error| panic!("{}: {name}: {error}", self.name));
        (view.dtype(), view.shape().to_vec(), view.data().to_vec())
    }

    /// The shape of a tensor.
    pub(crate) fn shape<const RANK: usize>(&self, name: &str) -> [usize; RANK] {
        self.tensor(name).1.try_into().expect("the rank asked for")
    }

    /// The type of `q`.
    pub(crate) fn dtype(&self) -> Dtype {
        let stored = self.tensor("q").0;
        let known =
            [(FileDtype::F32, Dtype::F32), (FileDtype::F16, Dtype::F16), (FileDtype::BF16, Dtype::Bf16)];
        let found = known.into_iter().find(|(own, _)| *own == stored);
        found.unwrap_or_else(|| panic!("{}: unexpected dtype {stored:?}", self.name)).1
    }

    /// A tensor's values, which must lie in the file as `T`.
    pub(crate) fn values<T: Element>(&self, name: &str) -> Vec<T> {
        let (dtype, _, data) = self.tensor(name);
        let bytes = data.as_slice();
        let (expected, values) = match T::DTYPE {
            None => (FileDtype::F64, read(bytes, |b| T::from_f64(f64::from_le_bytes(b)))),
            Some(Dtype::F32) => (FileDtype::F32, read(bytes, |b| T::from_f32(f32::from_le_bytes(b)))),
            Some(Dtype::F16) => {
                (FileDtype::F16, read(bytes, |b| T::from_f32(f16::from_le_bytes(b).to_f32())))
            }
            Some(Dtype::Bf16) => {
                (FileDtype::BF16, read(bytes, |b| T::from_f32(bf16::from_le_bytes(b).to_f32())))
            }
            Some(Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2) => panic!("no files of codes"),
        };
        assert_eq!(dtype, expected, "{}: {name}", self.name);
        values
    }

    /// A golden file's problem, as its metadata says it.
    pub(crate) fn problem(&self) -> Problem {
        let number = |key: &str| self.text(key).parse().unwrap_or_else(|_| panic!("{}: {key}", self.name));
        let optional = |key: &str| (self.text(key) != "none").then(|| self.text(key));
        let side = |key: &str| optional(key).map(|text| text.parse::<u32>().unwrap());
        let scalar = |key: &str| optional(key).map(|text| text.parse::<f64>().unwrap());
        let causal = self.text("causal") == "true";
        Problem::new(
            Lengths::uniform(number("batch"), number("seqlen_q"), number("seqlen_k")),
            (number("heads_q"), number("heads_kv")),
            (number("head_dim"), number("head_dim_v")),
            Types::same(self.text("dtype").parse().unwrap()),
        )
        .with_mask(Mask::band(side("window_left"), if causal { Some(0) } else { side("window_right") }))
        .with_softmax_scale(scalar("scale"))
        .with_score(ScoreMod::NONE.with_softcap(scalar("softcap")))
    }

    fn text(&self, key: &str) -> &str {
        self.metadata.get(key).unwrap_or_else(|| panic!("{}: no {key} in the metadata", self.name))
    }
}

fn read<T, const N: usize>(bytes: &[u8], convert: impl Fn([u8; N]) -> T) -> Vec<T> {
    let (chunks, rest) = bytes.as_chunks::<N>();
    assert!(rest.is_empty(), "a whole number of elements");
    chunks.iter().map(|&chunk| convert(chunk)).collect()
}
