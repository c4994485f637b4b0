//! The shared-memory layout of a kernel, buffer by buffer.
//!
//! A kernel's `SharedStorage` asserts that its size is [`SmemPlan::total`], so sizes are added up once, on
//! the host.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

/// One named buffer in shared memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SmemBuffer {
    /// The name, as in the kernel's `SharedStorage`.
    pub name: Cow<'static, str>,
    /// Bytes that the buffer uses.
    pub size: u32,
    /// Bytes from the start of dynamic shared memory.
    pub offset: u32,
    /// The offset is a multiple of this.
    pub align: u32,
    /// The buffer whose memory this one reuses after its last read; `None` where it shares no memory.
    #[serde(default)]
    pub alias_of: Option<Cow<'static, str>>,
}

/// The buffers of a kernel in the order of their declaration, and the bytes of dynamic shared memory it asks
/// for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SmemPlan {
    /// Every buffer; an alias follows the buffer whose memory it reuses.
    pub buffers: Vec<SmemBuffer>,
    /// Bytes of dynamic shared memory.
    pub total: u32,
}

/// Alignment of a tile that TMA writes or wgmma reads under the 128-byte swizzle: one swizzle atom of 8 rows
/// x 128 B.
pub const TILE_ALIGN: u32 = 1024;

/// Bytes of an mbarrier object (PTX ISA, "mbarrier": 64-bit opaque, 8-byte aligned).
pub const MBARRIER_BYTES: u32 = 8;

impl SmemPlan {
    /// Appends a buffer of `size` bytes at the next multiple of `align` and returns its offset.
    pub fn push(&mut self, name: impl Into<Cow<'static, str>>, size: u32, align: u32) -> u32 {
        let offset = self.total.next_multiple_of(align);
        self.total = offset + size;
        self.buffers.push(SmemBuffer { name: name.into(), size, offset, align, alias_of: None });
        offset
    }

    /// Appends `count` mbarriers as one buffer.
    pub fn push_mbarriers(&mut self, name: impl Into<Cow<'static, str>>, count: u32) -> u32 {
        self.push(name, count * MBARRIER_BYTES, MBARRIER_BYTES)
    }

    /// Lets `name` reuse the memory of the newest buffer, which grows in place when the alias is the larger
    /// of the two.
    ///
    /// # Panics
    /// When there is no buffer yet.
    pub fn alias_last(&mut self, name: impl Into<Cow<'static, str>>, size: u32) {
        let owner = self.buffers.iter().rfind(|b| b.alias_of.is_none()).expect("an alias follows its buffer");
        let (offset, align, of) = (owner.offset, owner.align, owner.name.clone());
        self.total = self.total.max(offset + size);
        self.buffers.push(SmemBuffer { name: name.into(), size, offset, align, alias_of: Some(of) });
    }

    /// Rounds the total up to a multiple of `granule`.
    pub fn round_up(mut self, granule: u32) -> SmemPlan {
        self.total = self.total.next_multiple_of(granule);
        self
    }

    /// The buffer of that name.
    pub fn buffer(&self, name: &str) -> Option<&SmemBuffer> {
        self.buffers.iter().find(|b| b.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_follow_each_other() {
        let mut plan = SmemPlan::default();
        plan.push("a", 100, 8);
        plan.push("b", 1000, 1024);
        plan.alias_last("c", 3000);
        plan.alias_last("d", 10);
        plan.push_mbarriers("e", 3);
        let plan = plan.round_up(1024);
        let offsets: Vec<u32> = plan.buffers.iter().map(|b| b.offset).collect();
        assert_eq!(offsets, [0, 1024, 1024, 1024, 4024]);
        assert_eq!(plan.buffer("d").and_then(|b| b.alias_of.as_deref()), Some("b"));
        assert_eq!(plan.total, 4096);
    }
}
