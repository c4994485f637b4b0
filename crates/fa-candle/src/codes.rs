//! Candle's tensors of e4m3 as the bits of codes.
#![allow(unsafe_code)]

use candle_core::{CpuStorage, DType, Layout, Result};

use crate::error::Error;

/// The type of tensors that are codes: of K and V, or of Q as well.
pub(crate) const CODES: DType = DType::F8E4M3;

/// The bits of codes from the layout's first on.
pub(crate) fn bits<'a>(name: &'static str, storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [u8]> {
    let CpuStorage::F8E4M3(codes) = storage else {
        let need = "f8e4m3, the type of k".to_owned();
        return Err(Error::Dtype { tensor: name, got: dtype(storage), need }.into());
    };
    // SAFETY: an F8E4M3 is a byte by its representation, of which every pattern is valid.
    let bits = unsafe { std::slice::from_raw_parts(codes.as_ptr().cast::<u8>(), size_of_val(&codes[..])) };
    Ok(bits.get(layout.start_offset()..).unwrap_or_default())
}

fn dtype(storage: &CpuStorage) -> DType {
    candle_core::backend::BackendStorage::dtype(storage)
}
