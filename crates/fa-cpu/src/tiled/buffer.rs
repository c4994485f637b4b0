//! Scratch memory for a worker.

/// Values that start on a cache line.
pub(super) struct Buffer<T = f32> {
    storage: Vec<T>,
    start: usize,
    len: usize,
}

/// Bytes of a cache line (and of an AVX-512 register).
const LINE: usize = 64;

impl<T: Copy + Default> Buffer<T> {
    /// `len` zeros.
    pub(super) fn new(len: usize) -> Self {
        let spare = LINE / size_of::<T>();
        let storage = vec![T::default(); len + spare];
        let start = storage.as_ptr().align_offset(LINE).min(spare);
        Buffer { storage, start, len }
    }
}

impl<T> std::ops::Deref for Buffer<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.storage[self.start..self.start + self.len]
    }
}

impl<T> std::ops::DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.storage[self.start..self.start + self.len]
    }
}
