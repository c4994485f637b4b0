//! Files that appear whole or not at all: written beside their place under a temporary name, then renamed.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

/// Puts a file of these bytes at `path`; its folder is made where it is missing.
///
/// # Errors
/// What the file system reports; nothing is left behind then.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let mut builder = tempfile::Builder::new();
    builder.prefix(".fa-");
    // A temporary file is private by default; this one becomes the user's, so their umask decides.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut file = builder.tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.persist(path).map_err(|e| e.error).map(drop)
}
