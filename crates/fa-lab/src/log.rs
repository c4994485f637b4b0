//! Files of results, a line of JSON each, to which a run that was stopped goes on adding.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Context, Error, Result};

/// The lines of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Lines<T> {
    /// The results.
    pub results: Vec<T>,
    /// Number of lines that are none: cut off, or of another form.
    pub others: usize,
}

/// Reads a file; no lines where there is none.
///
/// # Errors
/// [`Error::Read`] for a file that cannot be read.
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<Lines<T>> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
        Err(error) => return Err(Error::read(path)(error)),
    };
    let results: Vec<T> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    Ok(Lines { others: text.lines().count() - results.len(), results })
}

/// A file that is added to.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    file: File,
}

impl Log {
    /// Opens a file, or makes it and its folder. A last line that was cut off is ended, so that the next
    /// result has a line of its own.
    ///
    /// # Errors
    /// When the file cannot be read or written.
    pub fn open(path: &Path) -> Result<Log> {
        let doing = || format!("cannot add to {}", path.display());
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            fs::create_dir_all(folder).context(doing())?;
        }
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(path).context(doing())?;
        let mut last = [b'\n'];
        if file.metadata().context(doing())?.len() > 0 {
            file.seek(SeekFrom::End(-1)).and_then(|_| file.read_exact(&mut last)).context(doing())?;
        }
        if last != [b'\n'] {
            writeln!(file).context(doing())?;
        }
        Ok(Log { path: path.to_owned(), file })
    }

    /// Adds a line for each of the results, in one write.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn add<T: Serialize>(&mut self, results: &[T]) -> Result<()> {
        let mut lines = String::new();
        for result in results {
            lines += &(serde_json::to_string(result)? + "\n");
        }
        self.file.write_all(lines.as_bytes()).context(format!("cannot add to {}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_was_cut_off_takes_no_other_with_it() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("deep/log.jsonl");
        let lines = || read::<Vec<u32>>(&path).expect("read");
        assert_eq!(lines(), Lines { results: Vec::new(), others: 0 });
        Log::open(&path).expect("opened").add(&[vec![1, 2], vec![3]]).expect("added");
        let text = fs::read_to_string(&path).expect("read");
        fs::write(&path, format!("{text}[4, ")).expect("cut off");
        assert_eq!(lines(), Lines { results: vec![vec![1, 2], vec![3]], others: 1 });
        Log::open(&path).expect("opened again").add(&[vec![5]]).expect("added");
        assert_eq!(lines(), Lines { results: vec![vec![1, 2], vec![3], vec![5]], others: 1 });
    }
}
