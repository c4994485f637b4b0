//! Candle's tensors of e4m3, and of bytes that hold codes, as the bytes of codes.
#![allow(unsafe_code)]

use candle_core::{CpuStorage, DType, Layout, Result};
use fa_core::quantize::Codes;

use crate::error::Error;

/// The type of a Q that is codes, and of K and V beside it.
pub(crate) const CODES: DType = DType::F8E4M3;

/// The codes that K and V of a type are, of which bytes are `bytes`; `None` for numbers.
pub(crate) fn codes_of(dtype: DType, bytes: Codes) -> Option<Codes> {
    [(CODES, Codes::E4m3), (DType::U8, bytes)]
        .into_iter()
        .find(|(own, _)| *own == dtype)
        .map(|(_, codes)| codes)
}

/// The bits of codes from the layout's first on.
pub(crate) fn bits<'a>(name: &'static str, storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [u8]> {
    if let CpuStorage::U8(bytes) = storage {
        return Ok(bytes.get(layout.start_offset()..).unwrap_or_default());
    }
    let CpuStorage::F8E4M3(codes) = storage else {
        let need = "f8e4m3 or u8, the type of k".to_owned();
        return Err(Error::Dtype { tensor: name, got: dtype(storage), need }.into());
    };
    // SAFETY: an F8E4M3 is a byte by its representation, of which every pattern is valid.
    let bits = unsafe { std::slice::from_raw_parts(codes.as_ptr().cast::<u8>(), size_of_val(&codes[..])) };
    Ok(bits.get(layout.start_offset()..).unwrap_or_default())
}

fn dtype(storage: &CpuStorage) -> DType {
    candle_core::backend::BackendStorage::dtype(storage)
}
