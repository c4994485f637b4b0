//! Running the program, and files for it to run on.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use half::{bf16, f16};
use safetensors::tensor::{Dtype, TensorView};

/// What the program did.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Outcome {
    /// Asserts success and gives standard output.
    #[track_caller]
    pub(crate) fn good(self) -> String {
        assert_eq!(self.code, 0, "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self.stdout
    }

    /// Asserts success and gives standard output as JSON.
    #[track_caller]
    pub(crate) fn json(self) -> serde_json::Value {
        let text = self.good();
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e} in\n{text}"))
    }
}

pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fa"));
    command.args(args).stdin(Stdio::null());
    command
}

/// Runs the program with arguments split at blanks.
#[track_caller]
pub(crate) fn fa(line: &str) -> Outcome {
    fa_args(&line.split_whitespace().collect::<Vec<_>>())
}

#[track_caller]
pub(crate) fn fa_args(args: &[&str]) -> Outcome {
    fa_with(args, &[])
}

/// Runs `fa` with these arguments and environment variables.
pub(crate) fn fa_with(args: &[&str], variables: &[(&str, &str)]) -> Outcome {
    let done = command(args).envs(variables.iter().copied()).output().expect("the program starts");
    Outcome {
        code: done.status.code().unwrap_or_else(|| panic!("{args:?} was killed: {}", done.status)),
        stdout: String::from_utf8(done.stdout).expect("text"),
        stderr: String::from_utf8(done.stderr).expect("text"),
    }
}

/// A folder of a test's own, which goes with it.
pub(crate) struct Dir(tempfile::TempDir);

impl Dir {
    pub(crate) fn new() -> Dir {
        Dir(tempfile::tempdir().expect("a folder for temporary files"))
    }

    pub(crate) fn root(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.root().join(name)
    }

    /// A path as an argument of the program.
    pub(crate) fn file(&self, name: impl AsRef<Path>) -> String {
        text(&self.path(name)).to_owned()
    }

    /// Writes a file of tensors; its path as an argument.
    pub(crate) fn write(&self, name: &str, tensors: &[Tensor]) -> String {
        write(&self.path(name), tensors, &[]);
        self.file(name)
    }

    /// The names of its files, hidden ones too.
    pub(crate) fn listing(&self) -> Vec<String> {
        listing(self.root())
    }
}

/// A file of this repository.
pub(crate) fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("paths here are text")
}

/// A tensor to write: name, type as the format spells it, shape, values.
pub(crate) type Tensor<'a> = (&'a str, &'a str, &'a [usize], Vec<f64>);

/// Writes a file with the format's own library, so that ours is not tested against itself.
pub(crate) fn write(path: &Path, tensors: &[Tensor], metadata: &[(&str, &str)]) {
    let bytes: Vec<Vec<u8>> = tensors.iter().map(|(_, dtype, _, values)| encode(dtype, values)).collect();
    let views = tensors.iter().zip(&bytes).map(|((name, dtype, shape, _), bytes)| {
        let dtype = match *dtype {
            "F64" => Dtype::F64,
            "F32" => Dtype::F32,
            "F16" => Dtype::F16,
            "BF16" => Dtype::BF16,
            "I32" => Dtype::I32,
            "I64" => Dtype::I64,
            "U32" => Dtype::U32,
            "BOOL" => Dtype::BOOL,
            "I8" => Dtype::I8,
            "U8" => Dtype::U8,
            "F8_E4M3" => Dtype::F8_E4M3,
            "F8_E5M2" => Dtype::F8_E5M2,
            other => panic!("no dtype {other} here"),
        };
        (*name, TensorView::new(dtype, shape.to_vec(), bytes).expect("a valid tensor"))
    });
    let metadata: HashMap<String, String> =
        metadata.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
    let file =
        safetensors::serialize(views, (!metadata.is_empty()).then_some(metadata)).expect("a valid file");
    std::fs::write(path, file).expect("a writable folder");
}

fn encode(dtype: &str, values: &[f64]) -> Vec<u8> {
    match dtype {
        "F64" => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        "F32" => values.iter().flat_map(|v| (*v as f32).to_le_bytes()).collect(),
        "F16" => values.iter().flat_map(|v| f16::from_f64(*v).to_le_bytes()).collect(),
        "BF16" => values.iter().flat_map(|v| bf16::from_f64(*v).to_le_bytes()).collect(),
        "I32" => values.iter().flat_map(|v| (*v as i32).to_le_bytes()).collect(),
        "I64" => values.iter().flat_map(|v| (*v as i64).to_le_bytes()).collect(),
        "U32" => values.iter().flat_map(|v| (*v as u32).to_le_bytes()).collect(),
        "BOOL" => values.iter().map(|v| u8::from(*v != 0.0)).collect(),
        "I8" => values.iter().map(|v| *v as i8 as u8).collect(),
        // The bits of codes.
        "F8_E4M3" | "F8_E5M2" | "U8" => values.iter().map(|v| *v as u8).collect(),
        other => panic!("no dtype {other} here"),
    }
}

/// Reads a file with the format's own library: name to (type, shape, values).
pub(crate) fn read(path: &Path) -> HashMap<String, (String, Vec<usize>, Vec<f64>)> {
    let bytes = std::fs::read(path).expect("a file");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("a valid file");
    let tensor = |(name, view): (String, TensorView)| {
        let data = view.data();
        let dtype = format!("{:?}", view.dtype());
        let values: Vec<f64> = match dtype.as_str() {
            "F64" => data.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
            "F32" => data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b).into()).collect(),
            "F16" => data.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f64()).collect(),
            "BF16" => data.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f64()).collect(),
            "I32" => data.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b).into()).collect(),
            "I8" => data.iter().map(|&b| f64::from(b as i8)).collect(),
            "F8_E4M3" => data.iter().map(|&b| f64::from(b)).collect(),
            other => panic!("{name} is {other}"),
        };
        (name, (dtype, view.shape().to_vec(), values))
    };
    file.tensors().into_iter().map(tensor).collect()
}

/// The header's text entries of a file.
pub(crate) fn metadata(path: &Path) -> HashMap<String, String> {
    let bytes = std::fs::read(path).expect("a file");
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).expect("a valid file");
    metadata.metadata().clone().unwrap_or_default()
}

/// Numbers without a pattern, between -1 and 1.
pub(crate) fn noise(seed: u64, len: usize) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// The names of a folder's files, hidden ones too.
pub(crate) fn listing(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("a folder");
    let mut names: Vec<String> =
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// Asserts that arguments, split at blanks, are refused in words that have `part`: clap's, which also show
/// the usage, or the program's own.
#[track_caller]
pub(crate) fn refuses(line: &str, part: &str) {
    let outcome = fa(line);
    assert!(outcome.code == 2 && outcome.stdout.is_empty(), "{line}: {outcome:?}");
    assert!(outcome.stderr.contains(part), "{line}: '{part}' is not in {}", outcome.stderr);
}

/// Asserts a refusal of one line that names every part.
#[track_caller]
pub(crate) fn refused(outcome: &Outcome, parts: &[&str], what: &str) {
    let Outcome { code, stdout, stderr } = outcome;
    assert_eq!(*code, 2, "{what}\nstdout: {stdout}\nstderr: {stderr}");
    assert_eq!(stdout, "", "{what}");
    assert!(stderr.starts_with("error: ") && stderr.lines().count() == 1, "{what}: {stderr}");
    for part in parts {
        assert!(stderr.contains(part), "{what}: '{part}' is not in {stderr}");
    }
}
