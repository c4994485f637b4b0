//! What stands in for the GPU's side where candle is built without its CUDA backend.

use candle_core::{CudaStorage, Device, Layout, Result, Shape, Tensor};

use crate::error::Error;
use crate::problem::{Gradients, Posed};

pub(crate) fn forward(
    _: &Posed,
    _: [(&CudaStorage, &Layout); 3],
    _: bool,
) -> Result<(CudaStorage, Shape, Option<Tensor>)> {
    Err(Error::Backend { device: "CUDA" }.into())
}

pub(crate) fn backward(_: &Posed, _: [&Tensor; 3], _: [&Tensor; 3], _: Option<&Tensor>) -> Result<Gradients> {
    Err(Error::Backend { device: "other" }.into())
}

pub(crate) fn token(_: &CudaStorage) -> Result<(CudaStorage, Shape)> {
    Err(Error::Backend { device: "CUDA" }.into())
}

pub(crate) fn check_not_captured(_: &Device) -> Result<()> {
    Ok(())
}
