//! Scratch memory for a worker.

/// f32 values that start on a cache line.
pub(super) struct Buffer {
    storage: Vec<f32>,
    start: usize,
    len: usize,
}

/// Bytes of a cache line (and of an AVX-512 register).
const LINE: usize = 64;

impl Buffer {
    /// `len` zeros.
    pub(super) fn new(len: usize) -> Buffer {
        let storage = vec![0f32; len + LINE / size_of::<f32>()];
        let start = storage.as_ptr().align_offset(LINE).min(LINE / size_of::<f32>());
        Buffer { storage, start, len }
    }
}

impl std::ops::Deref for Buffer {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.storage[self.start..self.start + self.len]
    }
}

impl std::ops::DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.storage[self.start..self.start + self.len]
    }
}
