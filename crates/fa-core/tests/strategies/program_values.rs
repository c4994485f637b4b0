//! Values for the arrays and scalars of random programs.

use fa_core::program::{ArrayData, ArrayView, Inputs, Program, ScalarDecl, Type, Value};

use super::random::Random;

/// The extents of the arrays: odd ones, and an axis of 1.
const EXTENTS: [(&str, &[usize]); 8] = [
    ("x", &[37]),
    ("y", &[3, 19]),
    ("z", &[1, 4, 17, 23]),
    ("id", &[41]),
    ("level", &[2, 29]),
    ("valid", &[2, 33]),
    ("tree", &[2, 21, 75]),
    ("w", &[4, 61]),
];

/// Values of the arrays of random programs, and of its scalars.
pub(crate) struct Values {
    pub(crate) f32s: Vec<f32>,
    pub(crate) halves: Vec<u16>,
    pub(crate) i32s: Vec<i32>,
    pub(crate) bytes: Vec<u8>,
    pub(crate) words: Vec<u32>,
}

impl Values {
    /// The values of `seed`.
    pub(crate) fn new(seed: u64) -> Values {
        let mut random = Random(seed);
        Values {
            f32s: (0..4096).map(|_| (random.unit() * 2.0) as f32).collect(),
            // bf16 and f16 of magnitudes around 1.
            halves: (0..4096)
                .map(|_| (0x3c00 | random.below(0x3ff) | random.below(2) << 15) as u16)
                .collect(),
            i32s: (0..4096).map(|i| i / 7 + random.below(3) as i32).collect(),
            bytes: (0..4096).map(|_| random.below(4) as u8).collect(),
            words: (0..4096).map(|_| random.bits() as u32).collect(),
        }
    }

    /// The view of an array of random programs.
    pub(crate) fn view(&self, name: &str) -> ArrayView<'_> {
        let (_, extents) = EXTENTS.into_iter().find(|(own, _)| *own == name).expect("declared");
        let data = match name {
            "y" => ArrayData::F16(&self.halves),
            "z" => ArrayData::Bf16(&self.halves),
            "id" => ArrayData::I32(&self.i32s),
            "level" => ArrayData::U8(&self.bytes),
            "valid" => ArrayData::Bool(&self.bytes),
            "tree" => ArrayData::Bits(&self.words),
            _ => ArrayData::F32(&self.f32s),
        };
        ArrayView::contiguous(data, extents)
    }

    /// The value of a scalar.
    pub(crate) fn scalar(decl: &ScalarDecl) -> Value {
        if decl.ty == Type::I32 { Value::I32(6) } else { Value::F32(2.5) }
    }

    /// The inputs of a program of random programs.
    pub(crate) fn inputs(&self, program: &Program) -> Inputs<'_> {
        let arrays = program.arrays().iter().map(|array| self.view(&array.name)).collect();
        let scalars = program.scalars().iter().map(Values::scalar).collect();
        Inputs::new(program, arrays, scalars).expect("the inputs fit")
    }
}
