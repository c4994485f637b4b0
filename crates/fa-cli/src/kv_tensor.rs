//! Tensors of a file that may be codes.

use fa_attn::{CacheMut, Element, KvRef, Tensor};
use fa_core::TensorLayout;
use fa_core::quantize::Codes;

use crate::safetensors::{NewTensor, Stored, TensorFile};

/// Q, K or V as the file holds it.
#[derive(Debug)]
pub(crate) enum KvTensor<T> {
    /// Elements of Q's type; of an fp8 problem T is that of O.
    Same(Tensor<T>),
    /// The bytes of codes.
    Codes(Tensor<u8>, Codes),
}

impl<T: Element + Stored> KvTensor<T> {
    /// The tensor of a file.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(crate) fn read(
        file: &TensorFile,
        name: &str,
        shape: [usize; 4],
        layout: TensorLayout,
        codes: Option<Codes>,
    ) -> anyhow::Result<KvTensor<T>> {
        Ok(match codes {
            Some(codes) => KvTensor::Codes(Tensor::with_layout(shape, layout, file.read_bits(name)?)?, codes),
            None => KvTensor::Same(Tensor::with_layout(shape, layout, file.read(name)?)?),
        })
    }

    /// A view for a call.
    ///
    /// # Errors
    /// When it is shorter than the problem says.
    pub(crate) fn view(&self, name: &'static str) -> Result<KvRef<'_, T>, fa_attn::Error> {
        Ok(match self {
            KvTensor::Same(tensor) => KvRef::Same(tensor.view(name)?),
            KvTensor::Codes(tensor, _) => KvRef::Codes(tensor.view(name)?),
        })
    }

    /// A view that is appended to.
    ///
    /// # Errors
    /// As [`KvTensor::view`].
    pub(crate) fn view_mut(&mut self, name: &'static str) -> Result<CacheMut<'_, T>, fa_attn::Error> {
        Ok(match self {
            KvTensor::Same(tensor) => tensor.view_mut(name)?.into(),
            KvTensor::Codes(tensor, _) => tensor.view_mut(name)?.into(),
        })
    }

    /// As a file has it.
    pub(crate) fn stored(&self, name: &'static str, packed: bool) -> NewTensor {
        match self {
            KvTensor::Same(tensor) => NewTensor::of(name, tensor, packed),
            KvTensor::Codes(tensor, codes) => NewTensor::of_codes(name, tensor, *codes),
        }
    }
}
