//! Tensor maps: how the copy engine of SM90 sees Q, K and V.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use cudarc::driver::sys::{
    self, CUtensorMap, CUtensorMapDataType as DataType, CUtensorMapFloatOOBfill as OobFill,
    CUtensorMapInterleave as Interleave, CUtensorMapL2promotion as L2Promotion,
    CUtensorMapSwizzle as Swizzle,
};
use fa_core::Dtype;
/// Elements of the widest panel that divides a padded row: the inner length of a box. Its bytes are the swizzle.
pub(crate) use fa_planner::account::panels::widest as panel;

use crate::Error;

/// A tensor and the box that one copy brings, innermost axis first. The innermost axis is contiguous.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct MapShape<const RANK: usize> {
    /// Lengths in elements.
    pub dims: [u64; RANK],
    /// Distances between neighbours in elements; the first is 1.
    pub strides: [u64; RANK],
    /// Lengths of the box.
    pub tile: [u32; RANK],
}

/// Encodes a map. Pure host arithmetic of a fraction of a microsecond, so maps are made anew in
/// every call and nothing has to be remembered or invalidated.
///
/// What a box reads outside the tensor is zero, which is how rows beyond the end and padded head dims come about.
///
/// # Errors
/// [`Error::TensorMap`] with the tensor's name, for what the driver refuses.
pub(crate) fn encode<const RANK: usize>(
    tensor: &'static str,
    dtype: Dtype,
    address: u64,
    shape: &MapShape<RANK>,
) -> Result<CUtensorMap, Error> {
    let data_type = match dtype {
        Dtype::F32 => DataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        Dtype::F16 => DataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        Dtype::Bf16 => DataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        // 8-bit floats are copied as bytes: there is no type of their own.
        Dtype::E4m3 => DataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
    };
    let bytes = dtype.bytes() as u64;
    // An axis of length 1 is never stepped along; its stride only has to pass the driver's checks.
    let strides: [u64; RANK] = std::array::from_fn(|axis| {
        let stepped = shape.dims[axis] > 1;
        bytes * if stepped { shape.strides[axis] } else { shape.dims[0].next_multiple_of(8) }
    });
    let swizzle = match u64::from(shape.tile[0]) * bytes {
        128 => Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        64 => Swizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        _ => Swizzle::CU_TENSOR_MAP_SWIZZLE_32B,
    };
    let mut map = MaybeUninit::<CUtensorMap>::zeroed();
    // SAFETY: the arrays have RANK elements (the strides one fewer, those after the innermost), and the address is
    // stored, not read.
    let status = unsafe {
        sys::cuTensorMapEncodeTiled(
            map.as_mut_ptr(),
            data_type,
            RANK as u32,
            address as *mut _,
            shape.dims.as_ptr(),
            strides[1..].as_ptr(),
            shape.tile.as_ptr(),
            [1u32; RANK].as_ptr(),
            Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            // 256 bytes cost short sequences 2 to 3 %, and win nothing elsewhere (NB-014).
            L2Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            OobFill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    status.result().map_err(|source| Error::TensorMap { tensor, shape: format!("{shape:?}"), source })?;
    // SAFETY: zeroed at first and written by the driver; every bit pattern is a value.
    Ok(unsafe { map.assume_init() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panels_divide_the_row() {
        for (head_dim, expected) in [(64, 64), (128, 64), (192, 64), (256, 64), (96, 32), (32, 32), (80, 16)]
        {
            assert_eq!(panel(head_dim), expected);
        }
    }
}
