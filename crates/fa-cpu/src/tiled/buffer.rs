//! Scratch memory for a worker.

use std::any::{Any, TypeId};
use std::cell::RefCell;
use std::collections::HashMap;

/// Values that start on a cache line.
pub(super) struct Buffer<T: Copy + Default + 'static = f32> {
    storage: Vec<T>,
    start: usize,
    len: usize,
    /// Whether an earlier buffer had the storage.
    is_reused: bool,
}

/// Bytes of a cache line (and of an AVX-512 register).
const LINE: usize = 64;
/// Bytes that a thread keeps for its next call: fresh memory costs a page fault every 4 KiB, which matters
/// for short sequences.
const KEEP: usize = 32 << 20;
/// Fewer bytes are not kept: the allocator has them at hand.
const LEAST: usize = 1 << 10;

thread_local! {
    static KEPT: RefCell<Kept> = RefCell::default();
}

/// Storage of dropped buffers.
#[derive(Default)]
struct Kept {
    /// `Vec<T>`s by their type and length, so that only fitting ones are searched: a process that has
    /// computed problems of many sizes keeps thousands.
    storage: HashMap<(TypeId, usize), Vec<Storage>>,
    bytes: usize,
}

/// A `Vec<T>` and its bytes.
struct Storage {
    values: Box<dyn Any>,
    bytes: usize,
}

impl Kept {
    fn take<T: 'static>(&mut self, len: usize) -> Option<Vec<T>> {
        let Storage { values, bytes } = self.storage.get_mut(&(TypeId::of::<T>(), len))?.pop()?;
        self.bytes -= bytes;
        values.downcast().ok().map(|values| *values)
    }

    /// Keeps a storage, replacing those of other sizes where there is no room.
    fn put<T: 'static>(&mut self, storage: Vec<T>) {
        let size = storage.len() * size_of::<T>();
        let key = (TypeId::of::<T>(), storage.len());
        if size < LEAST {
            return;
        }
        while self.bytes + size > KEEP {
            let Some(&other) = self.storage.keys().find(|&&other| other != key) else { return };
            match self.storage.get_mut(&other).and_then(Vec::pop) {
                Some(dropped) => self.bytes -= dropped.bytes,
                None => drop(self.storage.remove(&other)),
            }
        }
        self.bytes += size;
        self.storage.entry(key).or_default().push(Storage { values: Box::new(storage), bytes: size });
    }
}

/// The length of a storage for `len` values: of few sizes, each at most a quarter larger than the one before.
fn rounded(len: usize) -> usize {
    let step = (len.next_power_of_two() / 8).max(1);
    len.next_multiple_of(step)
}

impl<T: Copy + Default + 'static> Buffer<T> {
    /// `len` zeros.
    pub(super) fn new(len: usize) -> Self {
        let mut buffer = Self::uncleared(len);
        if buffer.is_reused {
            buffer.fill(T::default());
        }
        buffer
    }

    /// `len` values of an earlier buffer, or zeros: for what is written before it is read.
    pub(super) fn uncleared(len: usize) -> Self {
        let spare = LINE / size_of::<T>();
        let room = rounded(len + spare);
        let kept = KEPT.with_borrow_mut(|kept| kept.take::<T>(room));
        let is_reused = kept.is_some();
        let storage = kept.unwrap_or_else(|| vec![T::default(); room]);
        let start = storage.as_ptr().align_offset(LINE).min(spare);
        Buffer { storage, start, len, is_reused }
    }
}

impl<T: Copy + Default + 'static> Default for Buffer<T> {
    /// No values.
    fn default() -> Self {
        Buffer { storage: Vec::new(), start: 0, len: 0, is_reused: false }
    }
}

impl<T: Copy + Default + 'static> Drop for Buffer<T> {
    fn drop(&mut self) {
        let storage = std::mem::take(&mut self.storage);
        if storage.is_empty() {
            return;
        }
        // A thread that ends keeps nothing.
        let _ = KEPT.try_with(|kept| {
            if let Ok(mut kept) = kept.try_borrow_mut() {
                kept.put(storage);
            }
        });
    }
}

impl<T: Copy + Default + 'static> std::ops::Deref for Buffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.storage[self.start..self.start + self.len]
    }
}

impl<T: Copy + Default + 'static> std::ops::DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.storage[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_start_on_a_line_and_with_zeros_when_storage_is_used_again() {
        for _ in 0..3 {
            let mut buffers = [1, 100, 1000].map(Buffer::<f32>::new);
            for buffer in &mut buffers {
                assert!(
                    buffer.as_ptr().addr().is_multiple_of(LINE) && buffer.iter().all(|&value| value == 0.0)
                );
                buffer.fill(7.0);
            }
            assert!(Buffer::<u32>::new(500).iter().all(|&word| word == 0));
        }
    }

    #[test]
    fn no_more_is_kept_than_the_limit() {
        drop((0..5).map(|_| Buffer::<f32>::new(KEEP / 12)).collect::<Vec<_>>());
        let bytes = KEPT.with_borrow(|kept| kept.bytes);
        assert!(bytes > KEEP / 2 && bytes <= KEEP, "{bytes} bytes");
        // A buffer of another problem replaces what is kept.
        drop(Buffer::<f32>::new(KEEP / 5));
        let bytes = KEPT.with_borrow(|kept| kept.bytes);
        assert!((4 * (KEEP / 5)..=KEEP).contains(&bytes), "{bytes} bytes");
        let at = Buffer::<f32>::new(KEEP / 5).storage.as_ptr();
        assert_eq!(at, Buffer::<f32>::new(KEEP / 5 - 1000).storage.as_ptr(), "the storage is used again");
        drop(Buffer::<f32>::new(8));
        assert!(KEPT.with_borrow(|kept| kept.storage.keys().all(|&(_, len)| len >= LEAST / 4)));
    }

    #[test]
    fn sizes_are_few_and_close() {
        let mut sizes: Vec<usize> = (1..1 << 16).map(rounded).collect();
        assert!(sizes.iter().zip(1..).all(|(&size, len)| size >= len && size <= len + len / 4));
        sizes.dedup();
        assert!(sizes.len() < 80, "{}", sizes.len());
    }
}
