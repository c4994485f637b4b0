//! Files that appear whole or not at all: written without a name where the system supports that (a program
//! that is stopped then leaves nothing), otherwise under a temporary name, and then renamed.

use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A file that cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {source}", path.display())]
pub struct WriteError {
    /// The file, as the caller named it.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

/// A file to be written, probed before any work is done for it.
///
/// An existing file keeps its permissions; a symbolic link stays, and its target is replaced.
#[derive(Debug)]
pub struct AtomicFile {
    path: PathBuf,
    /// `path` with its last component's links followed.
    target: PathBuf,
}

/// Temporary names under which files are being written.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn unfinished() -> MutexGuard<'static, Vec<PathBuf>> {
    // A list of paths is valid even if another thread panicked.
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes unfinished files with temporary names: for a program that has received a signal to stop, and must
/// then end. A thread that is about to create another such file waits until it has.
pub fn remove_unfinished() {
    let mut files = unfinished();
    for file in files.drain(..) {
        let _ = fs::remove_file(file);
    }
    std::mem::forget(files);
}

/// A temporary name in [`UNFINISHED`].
struct Listed(PathBuf);

impl Listed {
    /// Creates a file and lists it, atomically.
    fn make<T>(path: &Path, make: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<(T, Listed)> {
        let mut files = unfinished();
        let made = make(path)?;
        files.push(path.to_owned());
        Ok((made, Listed(path.to_owned())))
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        unfinished().retain(|file| *file != self.0);
    }
}

/// A file under a temporary name, removed when it is dropped.
type Temporary = tempfile::NamedTempFile<(fs::File, Listed)>;

/// Links that are followed from a path, as many as Linux follows.
const MAX_LINKS: usize = 40;

impl AtomicFile {
    /// Checks that a file can be made at `path`, leaving nothing behind.
    ///
    /// # Errors
    /// When the folder is missing or not writable, or `path` is something other than a file.
    pub fn probe(path: &Path) -> Result<AtomicFile, WriteError> {
        let file = AtomicFile::at(path)?;
        let tried = unnamed(file.folder()).map(drop).or_else(|_| file.temporary().map(drop));
        tried.map_err(|source| file.error(source))?;
        Ok(file)
    }

    fn at(path: &Path) -> Result<AtomicFile, WriteError> {
        let refuse = |reason: String| WriteError { path: path.to_owned(), source: io::Error::other(reason) };
        // Renaming over a device or a pipe would replace it, so anything that is there must be a plain file.
        match fs::metadata(path) {
            Ok(about) if about.is_dir() => return Err(refuse("it is a directory".into())),
            Ok(about) if !about.is_file() => return Err(refuse("it is not a regular file".into())),
            Ok(_) | Err(_) => {}
        }
        if path.file_name().is_none() {
            return Err(refuse("it names no file".into()));
        }
        let target = follow_links(path).ok_or_else(|| refuse("too many symbolic links".into()))?;
        let file = AtomicFile { path: path.to_owned(), target };
        if !file.folder().is_dir() {
            return Err(refuse(format!("there is no folder {}", file.folder().display())));
        }
        Ok(file)
    }

    /// The file, as the caller named it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Lets `fill` write the file, then puts it in place. On an error nothing is left behind.
    ///
    /// # Errors
    /// What `fill` or the file system reports, about the file as the caller named it.
    pub fn write(&self, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), WriteError> {
        self.replace(fill).map_err(|source| self.error(source))?;
        tracing::debug!(path = %self.path.display(), "written");
        Ok(())
    }

    fn replace(&self, fill: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
        if let Ok(file) = unnamed(self.folder()) {
            return self.replace_by(file, fill);
        }
        let temporary = self.temporary()?;
        // The file below the temporary name: its errors do not quote that name.
        let (file, _) = temporary.as_file();
        let mut writer = BufWriter::new(file);
        fill(&mut writer)?;
        writer.flush()?;
        drop(writer);
        if let Ok(about) = fs::metadata(&self.target) {
            file.set_permissions(about.permissions())?;
        }
        temporary.persist(&self.target).map_err(|e| e.error).map(drop)
    }

    /// As [`AtomicFile::replace`], by a file that gets its name at the end.
    fn replace_by(
        &self,
        mut file: fs::File,
        fill: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut writer = BufWriter::new(&file);
        fill(&mut writer)?;
        writer.flush()?;
        drop(writer);
        if let Ok(about) = fs::metadata(&self.target) {
            file.set_permissions(about.permissions())?;
        }
        match name(&file, &self.target) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            // Without /proc there is no way to name it: its content is copied.
            Err(_) => {
                let temporary = self.temporary()?;
                io::Seek::rewind(&mut file)?;
                let (copy, _) = temporary.as_file();
                io::copy(&mut file, &mut &*copy)?;
                copy.set_permissions(file.metadata()?.permissions())?;
                return temporary.persist(&self.target).map_err(|e| e.error).map(drop);
            }
        }
        // Linking cannot replace an existing file: the new file gets a temporary name first and is renamed.
        let named = |path: &Path| Listed::make(path, |path| name(&file, path));
        let temporary = tempfile::Builder::new().prefix(".fa-").make_in(self.folder(), named)?;
        temporary.persist(&self.target).map_err(|e| e.error).map(drop)
    }

    fn folder(&self) -> &Path {
        self.target.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
    }

    fn temporary(&self) -> io::Result<Temporary> {
        let mut options = fs::OpenOptions::new();
        // The default mode: the user's umask decides who may read it.
        options.read(true).write(true).create_new(true);
        let make = |path: &Path| Listed::make(path, |path| options.open(path));
        // The whole error quotes the temporary name, which says nothing to anyone.
        let made = tempfile::Builder::new().prefix(".fa-").make_in(self.folder(), make);
        made.map_err(|error| error.kind().into())
    }

    fn error(&self, source: io::Error) -> WriteError {
        WriteError { path: self.path.clone(), source }
    }
}

/// A file in `folder` that has no name.
#[cfg(target_os = "linux")]
fn unnamed(folder: &Path) -> io::Result<fs::File> {
    use rustix::fs::{Mode, OFlags, open};
    // The default mode, less the user's umask.
    let mode = Mode::from_raw_mode(0o666);
    Ok(fs::File::from(open(folder, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, mode)?))
}

/// Gives a file of [`unnamed`] its name.
#[cfg(target_os = "linux")]
fn name(file: &fs::File, path: &Path) -> io::Result<()> {
    use rustix::fs::{AtFlags, CWD, linkat};
    let own = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(file));
    Ok(linkat(CWD, own, CWD, path, AtFlags::SYMLINK_FOLLOW)?)
}

#[cfg(not(target_os = "linux"))]
fn unnamed(_: &Path) -> io::Result<fs::File> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(not(target_os = "linux"))]
fn name(_: &fs::File, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Puts a file of these bytes at `path`; its folder is made where it is missing.
///
/// # Errors
/// What the file system reports; nothing is left behind then.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), WriteError> {
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        fs::create_dir_all(folder).map_err(|source| WriteError { path: path.to_owned(), source })?;
    }
    AtomicFile::at(path)?.write(|writer| writer.write_all(bytes))
}

/// The target of `path` when links in its last component are followed, whether it exists or not.
fn follow_links(path: &Path) -> Option<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..=MAX_LINKS {
        match fs::read_link(&path) {
            Ok(next) => path = path.parent().unwrap_or(Path::new("")).join(next),
            // Not a link.
            Err(_) => return Some(path),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// A writer that is stopped leaves nothing.
    #[cfg(target_os = "linux")]
    #[test]
    fn what_is_being_written_has_no_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("target");
        for (content, before) in [("first", vec![]), ("second", vec!["target".to_owned()])] {
            let file = AtomicFile::probe(&path).unwrap();
            assert_eq!(names(folder.path()), before);
            let fill = |writer: &mut dyn Write| {
                writer.write_all(content.as_bytes())?;
                writer.flush()?;
                assert_eq!(names(folder.path()), before);
                Ok(())
            };
            file.write(fill).unwrap();
            assert_eq!(names(folder.path()), ["target"]);
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
        }
    }

    /// A file is on the list of those that a stopped program removes as long as it has a temporary name.
    #[test]
    fn what_has_a_temporary_name_is_listed() {
        let folder = tempfile::tempdir().unwrap();
        let listed = || {
            let files = unfinished();
            files.iter().filter(|file| file.starts_with(folder.path())).cloned().collect::<Vec<_>>()
        };
        let file = AtomicFile::at(&folder.path().join("target")).unwrap();
        let (one, other) = (file.temporary().unwrap(), file.temporary().unwrap());
        assert_eq!(listed(), [one.path(), other.path()]);
        one.persist(file.path()).map_err(|error| error.error).unwrap();
        assert_eq!(listed(), [other.path()]);
        drop(other);
        assert!(listed().is_empty());
        assert_eq!(names(folder.path()), ["target"]);
        // When it replaces a file, an unnamed file has a temporary name for a moment.
        write(&folder.path().join("target"), b"new").unwrap();
        assert!(listed().is_empty() && names(folder.path()) == ["target"]);
    }

    #[test]
    fn a_file_is_whole_or_untouched() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/er/file");
        write(&path, b"one").unwrap();
        let file = AtomicFile::probe(&path).unwrap();
        let failed = file.write(|writer| {
            writer.write_all(b"half of two")?;
            Err(io::Error::other("no more"))
        });
        let text = failed.expect_err("the error of what fills it").to_string();
        assert_eq!(text, format!("cannot write {}: no more", path.display()));
        assert_eq!(fs::read(&path).unwrap(), b"one");
        file.write(|writer| writer.write_all(b"two")).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(names(path.parent().unwrap()), ["file"]);
    }

    #[cfg(unix)]
    #[test]
    fn permissions_and_links_stay() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("real")).unwrap();
        write(&at("real/file"), b"old").unwrap();
        fs::set_permissions(at("real/file"), fs::Permissions::from_mode(0o640)).unwrap();
        symlink("second", at("first")).unwrap();
        symlink(at("real/file"), at("second")).unwrap();
        write(&at("first"), b"new").unwrap();
        assert_eq!(fs::read(at("real/file")).unwrap(), b"new");
        assert_eq!(fs::metadata(at("real/file")).unwrap().permissions().mode() & 0o777, 0o640);
        for link in ["first", "second"] {
            assert!(fs::symlink_metadata(at(link)).unwrap().is_symlink(), "{link}");
        }
        // The target of a link need not exist yet.
        symlink("real/later", at("dangling")).unwrap();
        write(&at("dangling"), b"made").unwrap();
        assert_eq!(fs::read(at("real/later")).unwrap(), b"made");
        symlink("round", at("round")).unwrap();
        let error = write(&at("round"), b"").expect_err("it leads nowhere").to_string();
        assert!(error.contains("too many symbolic links"), "{error}");
        assert_eq!(names(folder.path()), ["dangling", "first", "real", "round", "second"]);
        assert_eq!(names(&at("real")), ["file", "later"]);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_is_no_file_is_refused() {
        let refused = |path: &str, part: &str| {
            let error = AtomicFile::probe(Path::new(path)).expect_err("must be refused").to_string();
            assert!(error.starts_with(&format!("cannot write {path}")) && error.contains(part), "{error}");
            assert!(!error.contains(".fa-"), "{error}");
        };
        refused("/dev/null", "not a regular file");
        refused("/tmp", "a directory");
        refused("/no-such-folder/file", "there is no folder /no-such-folder");
        refused("..", "a directory");
        // A folder in which nobody, not even root, creates files.
        refused("/proc/self/file", "not found");
    }
}
