//! Weights and tokens from a seed, for models that tests make up.

use std::collections::HashMap;

use candle_core::{Device, Result, Tensor};

/// Numbers of an xorshift generator.
pub struct Random(u64);

impl Random {
    /// The generator of a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 32
    }

    /// Token ids `(batch, len)` below `vocab`.
    ///
    /// # Errors
    /// Those of candle.
    pub fn tokens(&mut self, batch: usize, len: usize, vocab: usize, device: &Device) -> Result<Tensor> {
        let ids: Vec<u32> = (0..batch * len).map(|_| (self.next() % vocab as u64) as u32).collect();
        Tensor::from_vec(ids, (batch, len), device)
    }

    /// Matrices whose products keep the size of what they multiply, vectors near 1 where they scale (names
    /// that end in `norm.weight` or `LayerNorm.weight`) and near 0 elsewhere. On the CPU, in f32.
    ///
    /// # Errors
    /// Those of candle.
    pub fn weights(&mut self, shapes: Vec<(String, Vec<usize>)>) -> Result<HashMap<String, Tensor>> {
        let mut made = HashMap::new();
        for (name, shape) in shapes {
            let (center, width) = match shape[..] {
                [_] if name.ends_with("orm.weight") => (1.0, 0.2),
                [_] => (0.0, 0.2),
                [.., columns] => (0.0, (3.0 / columns as f32).sqrt()),
                [] => (0.0, 1.0),
            };
            let mut value = || center + width * (self.next() as f32 / (1u64 << 31) as f32 - 1.0);
            let data: Vec<f32> = (0..shape.iter().product()).map(|_| value()).collect();
            made.insert(name, Tensor::from_vec(data, shape, &Device::Cpu)?);
        }
        Ok(made)
    }
}
