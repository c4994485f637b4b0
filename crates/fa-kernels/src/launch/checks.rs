//! Checks of addresses and counts.

use fa_core::spec::MAX_COUNT;

use crate::Error;

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
