//! Records as files of RON, which appear whole or not at all.

use std::path::Path;

use fa_kernels::atomic_file;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::Error;

/// The value in a file; the default where there is no file.
///
/// # Errors
/// [`Error::Record`] for a file that cannot be read or holds something else.
pub(crate) fn read<T: DeserializeOwned + Default>(path: &Path) -> Result<T, Error> {
    let bad = |reason: String| Error::Record { path: path.to_owned(), reason };
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(T::default()),
        Err(error) => return Err(bad(error.to_string())),
    };
    ron::from_str(&text).map_err(|error| bad(error.to_string()))
}

/// Writes a value, and makes the folder where there is none.
///
/// # Errors
/// [`Error::Io`].
pub(crate) fn write<T: Serialize>(path: &Path, value: &T) -> Result<(), Error> {
    let text = ron::ser::to_string_pretty(value, ron::ser::PrettyConfig::new().depth_limit(2));
    let text = text.map_err(|error| Error::io(path, std::io::Error::other(error)))? + "\n";
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|error| Error::io(folder, error))?;
    }
    atomic_file::write(path, text.as_bytes()).map_err(|error| Error::io(path, std::io::Error::other(error)))
}
