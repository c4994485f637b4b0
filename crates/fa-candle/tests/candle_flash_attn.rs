//! candle-flash-attn's own tests, on this crate: `cargo xtask candle tests` fetches the file, which is not of
//! this workspace, and names it to the compiler. Without the feature `cuda` their GPU is the CPU.

/// Their crate.
mod candle_flash_attn {
    pub(crate) use fa_candle::*;
}

/// What they import as `candle`.
mod candle {
    pub(crate) use candle_core::*;

    /// On the CPU their tensors are made by this.
    #[cfg(not(feature = "cuda"))]
    pub(crate) struct Device;

    #[cfg(not(feature = "cuda"))]
    impl Device {
        pub(crate) fn new_cuda(_: usize) -> Result<candle_core::Device> {
            Ok(candle_core::Device::Cpu)
        }
    }
}

include!(env!("FA_CANDLE_FLASH_ATTN_TESTS"));
