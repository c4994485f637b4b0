//! Q, K or V as a call gives it: elements of Q's type, or the bytes of codes.

use fa_core::{Dtype, Strides};

use crate::element::Element;
use crate::error::CpuError;
use crate::view::TensorRef;

/// K or V of a call, or Q of an fp8 one. Made from a reference to a tensor of Q's type (of fp8 that of O) or
/// of bytes, which hold codes: the problem says which ([`fa_core::Types::kv`]). Rows of int4 codes have half
/// as many bytes as numbers.
#[derive(Clone, Copy, Debug)]
pub enum KvRef<'a, T> {
    /// Elements of Q's type.
    Same(TensorRef<'a, T>),
    /// The bytes of codes.
    Codes(TensorRef<'a, u8>),
}

impl<'a, T: Element> From<&TensorRef<'a, T>> for KvRef<'a, T> {
    fn from(tensor: &TensorRef<'a, T>) -> KvRef<'a, T> {
        KvRef::Same(*tensor)
    }
}

impl<'a, T: Element> From<&TensorRef<'a, u8>> for KvRef<'a, T> {
    fn from(tensor: &TensorRef<'a, u8>) -> KvRef<'a, T> {
        KvRef::Codes(*tensor)
    }
}

impl<'a, T: Element> KvRef<'a, T> {
    /// The tensor, where its elements are of Q's type.
    pub fn same(&self) -> Option<&TensorRef<'a, T>> {
        match self {
            KvRef::Same(tensor) => Some(tensor),
            KvRef::Codes(_) => None,
        }
    }

    /// The bytes, where they are those of codes.
    pub fn codes(&self) -> Option<&TensorRef<'a, u8>> {
        match self {
            KvRef::Codes(tensor) => Some(tensor),
            KvRef::Same(_) => None,
        }
    }

    /// `[batch, seqlen, heads, dim]`.
    pub fn shape(&self) -> [usize; 4] {
        match self {
            KvRef::Same(tensor) => tensor.shape(),
            KvRef::Codes(tensor) => tensor.shape(),
        }
    }

    /// Strides in elements.
    pub fn strides(&self) -> Strides {
        match self {
            KvRef::Same(tensor) => tensor.strides(),
            KvRef::Codes(tensor) => tensor.strides(),
        }
    }

    /// The elements are what the problem says.
    ///
    /// # Errors
    /// [`CpuError::Dtype`], [`CpuError::Codes`].
    pub(crate) fn check(&self, need: Dtype) -> Result<(), CpuError> {
        match self {
            KvRef::Same(_) if need.is_code() || T::DTYPE.is_some_and(|dtype| dtype != need) => {
                Err(CpuError::Dtype { got: T::DTYPE, need })
            }
            KvRef::Codes(_) if !need.is_code() => Err(CpuError::Codes { need }),
            KvRef::Same(_) | KvRef::Codes(_) => Ok(()),
        }
    }
}

/// The bits of int8 codes.
#[allow(unsafe_code)]
pub fn bits_of(codes: &[i8]) -> &[u8] {
    // SAFETY: both are bytes, of which every pattern is valid.
    unsafe { std::slice::from_raw_parts(codes.as_ptr().cast(), codes.len()) }
}
