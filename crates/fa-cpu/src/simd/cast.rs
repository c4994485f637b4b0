//! Views of the same memory under another type, where the types say that this is right.
#![allow(unsafe_code)]

use std::any::TypeId;

use crate::view::{TensorMut, TensorRef};

/// 32-bit words as pairs of 16-bit values, in memory order.
pub(crate) fn halves(words: &[u32]) -> &[u16] {
    // SAFETY: a u32 is two u16, alignment 4 covers 2, and every bit pattern is valid.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), 2 * words.len()) }
}

/// As [`halves`], to be written.
pub(crate) fn halves_mut(words: &mut [u32]) -> &mut [u16] {
    // SAFETY: as in `halves`; the borrow is exclusive.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), 2 * words.len()) }
}

/// The tensor itself, if its elements are of type `U`.
pub(crate) fn tensor<'a, T: 'static, U: 'static>(tensor: &TensorRef<'a, T>) -> Option<TensorRef<'a, U>>
where
    TensorRef<'a, U>: Copy,
{
    // SAFETY: T and U are the same type, so both views are.
    (TypeId::of::<T>() == TypeId::of::<U>())
        .then(|| unsafe { *std::ptr::from_ref(tensor).cast::<TensorRef<'a, U>>() })
}

/// As [`tensor`], for a tensor that is written.
pub(crate) fn tensor_mut<'s, 'a, T: 'static, U: 'static>(
    tensor: &'s mut TensorMut<'a, T>,
) -> Option<&'s mut TensorMut<'a, U>> {
    // SAFETY: T and U are the same type, so both views are; the borrow passes from one to the other.
    (TypeId::of::<T>() == TypeId::of::<U>())
        .then(|| unsafe { &mut *std::ptr::from_mut(tensor).cast::<TensorMut<'a, U>>() })
}

#[cfg(test)]
mod tests {
    use fa_core::TensorLayout;

    use super::*;

    #[test]
    fn only_the_same_type_passes() {
        let mut data = [1f32, 2.0];
        let view = TensorRef::packed("t", &data, [1, 2, 1, 1], TensorLayout::Bshd).unwrap();
        assert!(super::tensor::<f32, u32>(&view).is_none());
        assert_eq!(super::tensor::<f32, f32>(&view).unwrap().at(0, 1, 0, 0), 2.0);
        let mut view = TensorMut::packed("t", &mut data, [1, 2, 1, 1], TensorLayout::Bshd).unwrap();
        assert!(tensor_mut::<f32, u32>(&mut view).is_none());
        tensor_mut::<f32, f32>(&mut view).unwrap().data_mut()[0] = 5.0;
        assert_eq!(data, [5.0, 2.0]);
    }

    #[test]
    fn words_hold_the_earlier_half_low() {
        let mut words = [0x0002_0001, 0x0004_0003];
        assert_eq!(halves(&words), if cfg!(target_endian = "little") { [1, 2, 3, 4] } else { [2, 1, 4, 3] });
        halves_mut(&mut words)[1] = 7;
        assert_ne!(words[0], 0x0002_0001);
    }
}
