//! Files that appear whole or not at all: written beside their target under a temporary name, then renamed.

use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::term::failure::InputError;

/// A place to write to, probed before any work is done.
#[derive(Debug)]
pub struct Target {
    path: PathBuf,
    folder: PathBuf,
}

impl Target {
    /// Checks that a file can be made at `path`, leaving nothing behind.
    ///
    /// # Errors
    /// [`InputError::Target`] when the folder is missing or not writable, or `path` is something other than a file.
    pub fn probe(path: &Path) -> Result<Target, InputError> {
        let refuse = |reason: String| InputError::Target { path: path.to_owned(), reason };
        // Renaming over a device or a pipe would replace it, so anything that is there must be a plain file.
        match fs::metadata(path) {
            Ok(about) if about.is_dir() => return Err(refuse("it is a directory".into())),
            Ok(about) if !about.is_file() => return Err(refuse("it is not a regular file".into())),
            Ok(_) | Err(_) => {}
        }
        if path.file_name().is_none() {
            return Err(refuse("it names no file".into()));
        }
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
            _ => PathBuf::from("."),
        };
        if !folder.is_dir() {
            return Err(refuse(format!("there is no folder {}", folder.display())));
        }
        let target = Target { path: path.to_owned(), folder };
        target.temporary().map_err(|e| refuse(e.to_string()))?;
        Ok(target)
    }

    /// Where the file will be.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Lets `fill` write the file, then puts it in place. On an error nothing is left behind.
    ///
    /// # Errors
    /// What `fill` or the file system reports.
    pub fn write(&self, fill: impl FnOnce(&mut dyn Write) -> anyhow::Result<()>) -> anyhow::Result<()> {
        let refuse =
            |e: std::io::Error| InputError::Target { path: self.path.clone(), reason: e.to_string() };
        let mut writer = BufWriter::new(self.temporary().map_err(refuse)?);
        fill(&mut writer)?;
        let file = writer.into_inner().map_err(|e| refuse(e.into_error()))?;
        file.persist(&self.path).map_err(|e| refuse(e.error))?;
        tracing::debug!(path = %self.path.display(), "written");
        Ok(())
    }

    fn temporary(&self) -> std::io::Result<tempfile::NamedTempFile> {
        let mut builder = tempfile::Builder::new();
        builder.prefix(".fa-");
        // A temporary file is private by default; this one becomes the user's, so their umask decides.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        builder.tempfile_in(&self.folder)
    }
}
