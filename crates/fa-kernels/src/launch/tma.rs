//! Tensor maps, which describe tensors to TMA.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use cudarc::driver::sys::{
    self, CUtensorMap, CUtensorMapDataType as DataType, CUtensorMapFloatOOBfill as OobFill,
    CUtensorMapInterleave as Interleave, CUtensorMapL2promotion as L2Promotion,
    CUtensorMapSwizzle as Swizzle,
};
use fa_core::{Dtype, Strides};

use crate::Error;
use crate::jit::params::TmaStrides;
use crate::launch::args::Shape;

/// The most axes of a tensor map.
const MAX_RANK: usize = 5;

/// A tensor and the box that one load copies, innermost axis first. The innermost axis is contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapShape {
    /// Axes: 4 or 5. Unused ones have length 1.
    pub rank: usize,
    /// Lengths in elements.
    pub dims: [u64; MAX_RANK],
    /// Distances between neighbours in elements; the first is 1. Those of a ragged map wrap around.
    pub strides: [u64; MAX_RANK],
    /// Lengths of the box.
    pub tile: [u32; MAX_RANK],
}

/// A tensor map without address and strides, which [`Launches::maps`](super::Launches::maps) fills in.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct MapTemplate {
    /// The map's name in errors.
    pub name: &'static str,
    /// The tensor among [`Launches::tensors`](super::Launches::tensors).
    pub tensor: usize,
    /// Columns of a box: those of a shared-memory panel.
    pub panel: u32,
    /// Positions of a box: those of a tile.
    pub rows: u32,
    /// With packed heads: query heads of a group. A box then holds `rows / group` positions of all of them.
    pub group: Option<u32>,
    /// Whether rows start and end anywhere: sequences with lengths on the device, pages.
    pub is_ragged: bool,
}

/// A tensor map before it is encoded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TensorMap {
    /// The tensor.
    pub tensor: &'static str,
    /// Its device address.
    pub address: u64,
    /// Lengths, strides and box.
    pub shape: MapShape,
}

impl MapShape {
    /// `{head dim, sequence, heads, batch}` with a box of one panel and some positions; with packed heads
    /// `{head dim, group, sequence, K/V heads, batch}` and a box of all heads of a group.
    pub(crate) fn of(shape: &Shape, strides: &Strides, map: &MapTemplate) -> MapShape {
        if map.is_ragged {
            return Ragged::of(shape, strides, map.group).map_shape(map);
        }
        let Shape { batch, seqlen, heads, dim, .. } = *shape;
        let (dim, seqlen, heads, batch) = (dim as u64, seqlen.max(1) as u64, heads as u64, batch as u64);
        // The strides have been checked to be 0 or more on every axis longer than 1.
        let [seq, head, entry] =
            [strides.seq, strides.head, strides.batch].map(|stride| stride.max(0) as u64);
        match map.group {
            None => MapShape {
                rank: 4,
                dims: [dim, seqlen, heads, batch, 1],
                strides: [1, seq, head, entry, 0],
                tile: [map.panel, map.rows, 1, 1, 1],
            },
            Some(group) => MapShape {
                rank: 5,
                dims: [dim, group.into(), seqlen, heads / u64::from(group), batch],
                strides: [1, head, seq, head * u64::from(group), entry],
                tile: [map.panel, group, map.rows / group, 1, 1],
            },
        }
    }
}

/// The extent of a ragged map's axis of rows: a range of rows ends there.
const RAGGED_ROWS: u64 = 1 << 30;

/// Where the distance of two rows ends, in elements: kernels that copy rows count bytes of a unit in 32 bits.
const RAGGED_STRIDE: u64 = 1 << 31;

/// The extent of its axis of units.
const RAGGED_UNITS: u64 = 1 << 31;

/// A ragged map: see `attn/ragged.cuh`. Strides in elements, 0 along axes that are never stepped along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ragged {
    dim: u64,
    row: u64,
    /// Between heads, or groups of packed heads.
    head: u64,
    entry: u64,
    /// Between the heads of a group.
    within: u64,
    /// Divides all strides.
    unit: u64,
    /// The largest multiple of the unit that a range of rows ends at.
    span: u64,
    /// Elements in 16 bytes, which copies move.
    step: u64,
}

impl Ragged {
    pub(super) fn of(shape: &Shape, strides: &Strides, group: Option<u32>) -> Ragged {
        fn gcd(a: u64, b: u64) -> u64 {
            if b == 0 { a } else { gcd(b, a % b) }
        }
        let Shape { batch, seqlen, heads, dim, step, .. } = *shape;
        let step = step as u64;
        let along = |len: usize, stride: i64| if len > 1 { stride.max(0) as u64 } else { 0 };
        let group = group.unwrap_or(1) as usize;
        let head = along(heads / group, strides.head) * group as u64;
        let entry = along(batch, strides.batch);
        // Of entries of one position (pages of one key) the next row is the next entry.
        let row = match (seqlen > 1, entry) {
            (true, _) => strides.seq.max(0) as u64,
            (false, 1..RAGGED_STRIDE) => entry,
            (false, _) => (dim as u64).next_multiple_of(step),
        };
        let last = |len: usize, stride: u64| (len.max(1) as u64 - 1).saturating_mul(stride);
        let span = (seqlen as u64)
            .saturating_mul(row)
            .saturating_add(last(heads / group, head))
            .saturating_add(last(batch, entry));
        let unit = gcd(gcd(row, head), entry);
        let unit = if unit == 0 { step } else { unit };
        Ragged { dim: dim as u64, row, head, entry, within: strides.head.max(0) as u64, unit, span, step }
    }

    /// Checks that the map's coordinates reach all of the tensor.
    ///
    /// # Errors
    /// [`Error::Stride`] and [`Error::TooLong`].
    pub(super) fn check(&self, tensor: &'static str) -> Result<(), Error> {
        if self.row >= RAGGED_STRIDE {
            let need = "below 2^31 elements where lengths are on the device";
            return Err(Error::Stride { tensor, axis: "seq", stride: self.row as i64, need });
        }
        let units = self.span / self.unit;
        if units < RAGGED_UNITS {
            return Ok(());
        }
        let name = "units of a tensor whose lengths are on the device";
        Err(Error::TooLong { name, value: units as usize, limit: RAGGED_UNITS as usize - 1 })
    }

    /// Strides in units, modulo 2^32 as coordinates are.
    pub(super) fn params(&self) -> TmaStrides {
        let units = |stride: u64| (stride / self.unit) as u32;
        TmaStrides { row: units(self.row), head: units(self.head), entry: units(self.entry) }
    }

    /// `{head dim, row, unit, wrap}`; with packed heads `{head dim, group, row, unit, wrap}`.
    fn map_shape(&self, map: &MapTemplate) -> MapShape {
        // In bytes, the last axis steps over 2^34 bytes less a row: 2^30 steps wrap around to minus
        // 2^30 rows.
        let wrap = RAGGED_ROWS * self.step - self.row;
        match map.group {
            None => MapShape {
                rank: 4,
                dims: [self.dim, RAGGED_ROWS, RAGGED_UNITS, RAGGED_ROWS + 1, 1],
                strides: [1, self.row, self.unit, wrap, 0],
                tile: [map.panel, map.rows, 1, 1, 1],
            },
            Some(group) => MapShape {
                rank: 5,
                dims: [self.dim, group.into(), RAGGED_ROWS, RAGGED_UNITS, RAGGED_ROWS + 1],
                strides: [1, self.within, self.row, self.unit, wrap],
                tile: [map.panel, group, map.rows / group, 1, 1],
            },
        }
    }
}

/// Encodes a map. Pure host arithmetic of a fraction of a microsecond, so each call encodes its own maps and
/// nothing has to be kept or invalidated.
///
/// Elements of a box outside the tensor read as zero: that fills rows beyond the end and padded head dims.
///
/// # Errors
/// [`Error::TensorMap`] with the tensor's name, for a shape that the driver refuses.
pub(crate) fn encode(map: &TensorMap, dtype: Dtype) -> Result<CUtensorMap, Error> {
    let TensorMap { tensor, address, shape } = *map;
    let data_type = match dtype {
        Dtype::F32 => DataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        Dtype::F16 => DataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        Dtype::Bf16 => DataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        // 8-bit floats are copied as bytes: there is no type of their own.
        Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2 => DataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
    };
    let bytes = dtype.bytes() as u64;
    // The stride of an axis of length 1 is never used; it only has to pass the driver's checks.
    let strides: [u64; MAX_RANK] = std::array::from_fn(|axis| {
        let stepped = shape.dims[axis] > 1;
        bytes * if stepped { shape.strides[axis] } else { shape.dims[0].next_multiple_of(16 / bytes) }
    });
    let swizzle = match u64::from(shape.tile[0]) * bytes {
        128 => Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        64 => Swizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        _ => Swizzle::CU_TENSOR_MAP_SWIZZLE_32B,
    };
    let mut encoded = MaybeUninit::<CUtensorMap>::zeroed();
    // SAFETY: the arrays have `rank` elements at least (of the strides those after the innermost), and the
    // address is stored, not read.
    let status = unsafe {
        sys::cuTensorMapEncodeTiled(
            encoded.as_mut_ptr(),
            data_type,
            shape.rank as u32,
            address as *mut _,
            shape.dims.as_ptr(),
            strides[1..].as_ptr(),
            shape.tile.as_ptr(),
            [1u32; MAX_RANK].as_ptr(),
            Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            // 256 bytes cost short sequences 2 to 3 %, and win nothing elsewhere (NB-014).
            L2Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            OobFill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    status.result().map_err(|source| Error::TensorMap { tensor, shape: format!("{shape:?}"), source })?;
    // SAFETY: zeroed, then written by the driver; every bit pattern is valid.
    Ok(unsafe { encoded.assume_init() })
}

#[cfg(test)]
mod tests {
    use fa_core::TensorLayout;
    use fa_core::spec::operand_panel;

    use super::*;
    use crate::launch::args::STEP;

    /// The address at coordinates of `attn/ragged.cuh`, in bytes modulo 2^64.
    fn address(map: &MapShape, [x, y, z]: [u64; 3]) -> u64 {
        let at = |axis: usize, index: u64| index.wrapping_mul(2 * map.strides[axis]);
        let first = map.rank - 3;
        at(first, x).wrapping_add(at(first + 1, y)).wrapping_add(at(first + 2, z))
    }

    #[test]
    fn ragged_coordinates_lead_to_rows() {
        let shape = Shape { name: "k", batch: 7, seqlen: 48, heads: 4, dim: 64, step: STEP };
        for strides in [
            TensorLayout::Bshd.strides(48, 4, 64),
            TensorLayout::Bhsd.strides(48, 4, 64),
            Strides { batch: 1 << 30, seq: 264, head: 72, dim: 1 },
            Strides { batch: 4096, seq: 0, head: 0, dim: 1 },
        ] {
            for group in [None, Some(2)] {
                let template =
                    MapTemplate { name: "k", tensor: 1, panel: 64, rows: 16, group, is_ragged: true };
                let map = MapShape::of(&shape, &strides, &template);
                let ragged = Ragged::of(&shape, &strides, group);
                ragged.check("k").unwrap();
                let units = ragged.params();
                let heads = 4 / u64::from(group.unwrap_or(1));
                for (entry, head, first, len) in
                    [(0, 0, 0, 48), (6, heads - 1, 40, 8), (3, 1, 5, 0), (6, 0, 47, 1)]
                {
                    let y = (entry as u32)
                        .wrapping_mul(units.entry)
                        .wrapping_add((head as u32).wrapping_mul(units.head))
                        .wrapping_add((first as u32 + len).wrapping_mul(units.row));
                    let x = RAGGED_ROWS - u64::from(len);
                    let base = entry * strides.batch as u64
                        + head * u64::from(group.unwrap_or(1)) * strides.head as u64
                        + first * strides.seq as u64;
                    for row in 0..u64::from(len) {
                        let found = address(&map, [x + row, y.into(), RAGGED_ROWS]);
                        assert_eq!(found, 2 * (base + row * strides.seq as u64), "{strides:?} {group:?}");
                    }
                    // The row after the last is out of bounds.
                    assert_eq!(x + u64::from(len), map.dims[map.rank - 3]);
                    assert!(u64::from(y) < map.dims[map.rank - 2] && RAGGED_ROWS < map.dims[map.rank - 1]);
                }
            }
        }
    }

    #[test]
    fn ragged_maps_have_limits() {
        let shape = Shape { name: "k", batch: 1 << 20, seqlen: 16, heads: 8, dim: 128, step: STEP };
        let strides = TensorLayout::Bshd.strides(16, 8, 128);
        Ragged::of(&shape, &strides, None).check("k").unwrap();
        // An odd stride leaves units of 16 bytes, of which 2^31 are 32 GB.
        let odd = Strides { batch: 16 * 1024 + 8, ..strides };
        assert!(matches!(Ragged::of(&shape, &odd, None).check("k"), Err(Error::TooLong { .. })));
        let far = Strides { seq: 1 << 31, ..strides };
        assert!(matches!(Ragged::of(&shape, &far, None).check("k"), Err(Error::Stride { axis: "seq", .. })));
    }

    /// Pages of one key: a box of several rows steps from page to page.
    #[test]
    fn entries_of_one_position_are_rows() {
        let shape = Shape { name: "k", batch: 4096, seqlen: 1, heads: 8, dim: 128, step: STEP };
        let of = |strides: Strides| Ragged::of(&shape, &strides, None);
        let pages = of(TensorLayout::Bshd.strides(1, 8, 128));
        assert_eq!((pages.row, pages.unit), (8 * 128, 128));
        assert_eq!(pages.params(), TmaStrides { row: 8, head: 1, entry: 8 });
        let far = of(Strides { batch: 1 << 40, seq: 0, head: 128, dim: 1 });
        assert_eq!((far.row, far.unit), (128, 128));
    }

    #[test]
    fn panels_divide_the_row() {
        for (head_dim, expected) in [(64, 64), (128, 64), (192, 64), (256, 64), (96, 32), (32, 32), (80, 32)]
        {
            assert_eq!(operand_panel(head_dim), expected);
        }
    }
}
