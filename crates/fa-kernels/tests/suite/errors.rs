//! What goes wrong where there is no GPU is a typed error.

use fa_kernels::{Error, driver};

#[test]
fn without_a_driver_a_context_is_an_error_and_no_panic() {
    match driver::probe() {
        Err(error) => {
            assert!(matches!(error, Error::NoDriver));
            assert!(matches!(driver::version(), Err(Error::NoDriver)));
            let error = driver::context(0).unwrap_err();
            assert!(error.to_string().contains("install NVIDIA's driver"), "{error}");
        }
        // With a driver, a GPU that is not there is the error.
        Ok(()) => {
            assert!(matches!(driver::context(4096), Err(Error::Driver { .. } | Error::OldDriver { .. })))
        }
    }
}
