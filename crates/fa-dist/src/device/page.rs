//! Words that all ranks of a host see, and their GPUs: a page of shared memory.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use fa_attn::device::Gpu;
use fa_kernels::cudarc::driver::sys;

use super::memory::driver;
use crate::error::Error;
use crate::pulls::RELEASED;

/// Bytes from a word to the next.
const LINE: usize = 64;
const PAGE: usize = 4096;

/// Shared memory of some ranks: whether one has given up, which of them have ended, and a word for each two
/// of them and each way.
struct Words {
    address: *mut c_void,
    world: usize,
}

// SAFETY: the memory is mapped until this is dropped, and is only accessed as atomic words.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    fn bytes(world: usize) -> usize {
        ((1 + world + world * world) * LINE).next_multiple_of(PAGE)
    }

    fn word(&self, line: usize) -> &AtomicU32 {
        assert!((line + 1) * LINE <= Words::bytes(self.world), "a word of the page");
        // SAFETY: the word lies in the mapping, which lives as long as this, and words begin lines.
        unsafe { AtomicU32::from_ptr(self.address.cast::<u8>().add(line * LINE).cast()) }
    }

    fn ended(&self, rank: usize) -> &AtomicU32 {
        self.word(1 + rank)
    }

    /// The line of the word of messages.
    fn turn(&self, from: usize, to: usize) -> usize {
        1 + self.world + from * self.world + to
    }
}

/// A file for the words of `world` ranks, for this user alone; whoever opens it later has it, too, once all
/// have and it is removed.
pub(super) fn create(world: usize) -> Result<PathBuf, Error> {
    use std::hash::{BuildHasher, Hasher};
    let random = std::hash::RandomState::new().build_hasher().finish();
    let path = PathBuf::from(format!("/dev/shm/fa-dist-{random:016x}"));
    let failed = |source| Error::Io { path: path.clone(), source };
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.open(&path).map_err(failed)?;
    file.set_len(Words::bytes(world) as u64).map_err(failed)?;
    Ok(path)
}

#[cfg(target_os = "linux")]
fn open(path: &Path, world: usize) -> Result<Words, Error> {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    let failed = |source| Error::Io { path: path.to_owned(), source };
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).map_err(failed)?;
    let len = file.metadata().map_err(failed)?.len();
    if len != Words::bytes(world) as u64 {
        return Err(failed(std::io::Error::other(format!("has {len} bytes: another program's"))));
    }
    let (bytes, access) = (Words::bytes(world), ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: a new mapping, of the whole file, where the system chooses.
    let mapped = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, &file, 0) };
    Ok(Words { address: mapped.map_err(|error| failed(error.into()))?, world })
}

#[cfg(not(target_os = "linux"))]
fn open(path: &Path, _: usize) -> Result<Words, Error> {
    Err(Error::Io { path: path.to_owned(), source: std::io::ErrorKind::Unsupported.into() })
}

#[cfg(target_os = "linux")]
impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's, and so long.
        unsafe { rustix::mm::munmap(self.address, Words::bytes(self.world)) }.ok();
    }
}

/// The words, for the host and for a GPU.
pub(super) struct Page {
    words: Words,
    on_gpu: u64,
    gpu: Arc<Gpu>,
}

impl Page {
    /// Maps a file of [`create`].
    pub(super) fn open(path: &Path, world: usize, gpu: &Arc<Gpu>) -> Result<Page, Error> {
        const FOR_ALL_CONTEXTS_AND_MAPPED: u32 = 3;
        let words = open(path, world)?;
        gpu.context().bind_to_thread().map_err(driver("entering the context"))?;
        let (address, bytes, mut on_gpu) = (words.address, Words::bytes(world), 0);
        // SAFETY: the memory is mapped, begins a page, and is unregistered before it is unmapped.
        let registered =
            unsafe { sys::cuMemHostRegister_v2(address, bytes, FOR_ALL_CONTEXTS_AND_MAPPED) }.result();
        registered.map_err(driver("giving the GPU shared memory"))?;
        // Unregistered from here on, whatever fails.
        let mut page = Page { words, on_gpu, gpu: gpu.clone() };
        // SAFETY: the argument points at a local.
        let found = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut on_gpu, address, 0) }.result();
        found.map_err(driver("giving the GPU shared memory"))?;
        page.on_gpu = on_gpu;
        Ok(page)
    }

    /// The GPU's address of the word of messages from one rank to another.
    pub(super) fn turn(&self, from: usize, to: usize) -> u64 {
        self.on_gpu + (self.words.turn(from, to) * LINE) as u64
    }

    /// Notes that the ranks do not go on, since `rank` is lost, unless this is noted already.
    pub(super) fn give_up(&self, rank: usize) {
        let word = self.words.word(0);
        word.compare_exchange(0, 1 + rank as u32, Ordering::SeqCst, Ordering::SeqCst).ok();
    }

    /// The rank for which they do not go on.
    pub(super) fn given_up(&self) -> Option<usize> {
        (self.words.word(0).load(Ordering::SeqCst) as usize).checked_sub(1)
    }

    /// Ends all waits. Only where it is noted that ranks do not go on: what is behind the waits is no result.
    pub(super) fn release(&self) {
        let world = self.words.world;
        for line in self.words.turn(0, 0)..=self.words.turn(world - 1, world - 1) {
            self.words.word(line).store(RELEASED, Ordering::SeqCst);
        }
    }

    /// Notes that a rank reads no memory of others any more.
    pub(super) fn end(&self, rank: usize) {
        self.words.ended(rank).store(1, Ordering::SeqCst);
    }

    /// Whether a rank reads no memory of others any more.
    pub(super) fn has_ended(&self, rank: usize) -> bool {
        self.words.ended(rank).load(Ordering::SeqCst) != 0
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        if self.gpu.context().bind_to_thread().is_ok() {
            // SAFETY: the memory was registered, and nothing that is enqueued uses it any more.
            unsafe { sys::cuMemHostUnregister(self.words.address) };
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn ranks_see_each_others_words_and_each_has_its_own() {
        let world = 3;
        let path = create(world).unwrap();
        let [one, other] = [(); 2].map(|()| open(&path, world).unwrap());
        let wrong = open(&path, 60).err().unwrap().to_string();
        std::fs::remove_file(&path).unwrap();
        assert!(wrong.contains("another program's"), "{wrong}");
        let pairs = (0..world).flat_map(|from| (0..world).map(move |to| (from, to)));
        let mut lines: Vec<usize> = pairs.map(|(from, to)| one.turn(from, to)).collect();
        lines.extend((0..=world).collect::<Vec<_>>());
        assert_eq!(lines.iter().collect::<BTreeSet<_>>().len(), lines.len());
        for &line in &lines {
            assert_eq!(other.word(line).load(Ordering::SeqCst), 0);
            one.word(line).store(line as u32 + 7, Ordering::SeqCst);
        }
        assert!(lines.iter().all(|&line| other.word(line).load(Ordering::SeqCst) == line as u32 + 7));
        assert_eq!(one.ended(2).load(Ordering::SeqCst), 3 + 7);
    }
}
