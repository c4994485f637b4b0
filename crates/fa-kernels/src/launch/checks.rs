//! Checks of addresses and counts.

use crate::Error;

/// Lengths and counts that kernels hold in 32-bit integers stay below this, with room for a tile beyond the
/// end.
const MAX_COUNT: usize = 1 << 30;

/// `value` as kernels hold it.
///
/// # Errors
/// [`Error::TooLong`].
pub(crate) fn count(name: &'static str, value: usize) -> Result<i32, Error> {
    if value <= MAX_COUNT {
        return Ok(value as i32);
    }
    Err(Error::TooLong { name, value, limit: MAX_COUNT })
}

/// Checks that `tensor` starts on a multiple of `align` bytes.
pub(crate) fn check_address(tensor: &'static str, address: u64, align: u64) -> Result<(), Error> {
    if address != 0 && address.is_multiple_of(align) {
        return Ok(());
    }
    Err(Error::Address { tensor, address, align })
}
