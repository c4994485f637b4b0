//! Scratch memory for a worker.

use std::any::Any;
use std::cell::RefCell;

/// Values that start on a cache line.
pub(super) struct Buffer<T: Copy + Default + 'static = f32> {
    storage: Vec<T>,
    start: usize,
    len: usize,
}

/// Bytes of a cache line (and of an AVX-512 register).
const LINE: usize = 64;
/// Bytes that a thread keeps for its next call: fresh memory costs a page fault every 4 KiB, which short
/// sequences feel.
const KEEP: usize = 32 << 20;

thread_local! {
    /// Storage of dropped buffers (`Vec<f32>` or `Vec<u32>`) and its bytes.
    static KEPT: RefCell<(Vec<Box<dyn Any>>, usize)> = const { RefCell::new((Vec::new(), 0)) };
}

/// A kept storage of at least `len` values that is not much too large.
fn recycle<T: 'static>(len: usize) -> Option<Vec<T>> {
    KEPT.with_borrow_mut(|(kept, bytes)| {
        let fits = |storage: &dyn Any| {
            storage.downcast_ref::<Vec<T>>().is_some_and(|storage| (len..=2 * len).contains(&storage.len()))
        };
        let index = kept.iter().position(|storage| fits(storage.as_ref()))?;
        let storage: Box<Vec<T>> = kept.swap_remove(index).downcast().ok()?;
        *bytes -= storage.len() * size_of::<T>();
        Some(*storage)
    })
}

impl<T: Copy + Default + 'static> Buffer<T> {
    /// `len` zeros.
    pub(super) fn new(len: usize) -> Self {
        let spare = LINE / size_of::<T>();
        let storage = match recycle::<T>(len + spare) {
            Some(mut storage) => {
                storage.fill(T::default());
                storage
            }
            None => vec![T::default(); len + spare],
        };
        let start = storage.as_ptr().align_offset(LINE).min(spare);
        Buffer { storage, start, len }
    }
}

impl<T: Copy + Default + 'static> Default for Buffer<T> {
    /// No values.
    fn default() -> Self {
        Buffer { storage: Vec::new(), start: 0, len: 0 }
    }
}

impl<T: Copy + Default + 'static> Drop for Buffer<T> {
    fn drop(&mut self) {
        let storage = std::mem::take(&mut self.storage);
        if storage.is_empty() {
            return;
        }
        let size = storage.len() * size_of::<T>();
        // When the thread is going away there is nothing to keep it for.
        let _ = KEPT.try_with(|kept| {
            if let Ok(mut kept) = kept.try_borrow_mut()
                && kept.1 + size <= KEEP
            {
                kept.1 += size;
                kept.0.push(Box::new(storage));
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
        let bytes = KEPT.with_borrow(|kept| kept.1);
        assert!(bytes > KEEP / 2 && bytes <= KEEP, "{bytes} bytes");
    }
}
