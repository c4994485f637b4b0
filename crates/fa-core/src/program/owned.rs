//! Arrays and scalars of a program that own their values, and values for tests and timing.

use super::eval::{ArrayData, ArrayView, InputError, Inputs};
use super::limits::{MAX_RANK, MAX_SCALARS};
use super::node::{Node, NodeId};
use super::ops::Value;
use super::types::{ArrayDecl, Element, Type, Var};
use super::whole::Program;
use crate::Problem;

/// The elements of an array, by its element type; see [`ArrayData`].
#[derive(Clone, Debug, PartialEq)]
pub enum OwnedData {
    /// f32.
    F32(Vec<f32>),
    /// The bits of f16.
    F16(Vec<u16>),
    /// The bits of bf16.
    Bf16(Vec<u16>),
    /// i32.
    I32(Vec<i32>),
    /// Bytes.
    U8(Vec<u8>),
    /// Bytes that are true if not 0.
    Bool(Vec<u8>),
    /// Words of bits along the last axis.
    Bits(Vec<u32>),
}

/// An array; see [`ArrayView`].
#[derive(Clone, Debug, PartialEq)]
pub struct OwnedArray {
    /// Its elements.
    pub data: OwnedData,
    /// Elements from one index of an axis to the next.
    pub strides: [i64; MAX_RANK],
    /// Indices of each axis.
    pub extents: [i32; MAX_RANK],
}

/// What a call gives a program.
#[derive(Clone, Debug, PartialEq)]
pub struct OwnedInputs {
    /// In the order of the program's declarations.
    pub arrays: Vec<OwnedArray>,
    /// Likewise.
    pub scalars: Vec<Value>,
}

impl OwnedData {
    /// The elements whose bytes of this machine these are: the inverse of [`ArrayData::bytes`].
    pub fn of_bytes(element: Element, bytes: &[u8]) -> OwnedData {
        fn words<T, const N: usize>(bytes: &[u8], of: impl Fn([u8; N]) -> T) -> Vec<T> {
            bytes.chunks_exact(N).map(|own| of(std::array::from_fn(|at| own[at]))).collect()
        }
        match element {
            Element::F32 => OwnedData::F32(words(bytes, f32::from_ne_bytes)),
            Element::F16 => OwnedData::F16(words(bytes, u16::from_ne_bytes)),
            Element::Bf16 => OwnedData::Bf16(words(bytes, u16::from_ne_bytes)),
            Element::I32 => OwnedData::I32(words(bytes, i32::from_ne_bytes)),
            Element::U8 => OwnedData::U8(bytes.to_vec()),
            Element::Bool => OwnedData::Bool(bytes.to_vec()),
            Element::Bits => OwnedData::Bits(words(bytes, u32::from_ne_bytes)),
        }
    }

    /// A borrow.
    pub fn view(&self) -> ArrayData<'_> {
        match self {
            OwnedData::F32(data) => ArrayData::F32(data),
            OwnedData::F16(data) => ArrayData::F16(data),
            OwnedData::Bf16(data) => ArrayData::Bf16(data),
            OwnedData::I32(data) => ArrayData::I32(data),
            OwnedData::U8(data) => ArrayData::U8(data),
            OwnedData::Bool(data) => ArrayData::Bool(data),
            OwnedData::Bits(data) => ArrayData::Bits(data),
        }
    }
}

impl OwnedArray {
    /// A borrow.
    pub fn view(&self) -> ArrayView<'_> {
        ArrayView { data: self.data.view(), strides: self.strides, extents: self.extents }
    }
}

impl ArrayData<'_> {
    /// The elements as bytes of this machine.
    pub fn bytes(&self) -> Vec<u8> {
        match self {
            ArrayData::F32(data) => data.iter().flat_map(|value| value.to_ne_bytes()).collect(),
            ArrayData::F16(data) | ArrayData::Bf16(data) => {
                data.iter().flat_map(|value| value.to_ne_bytes()).collect()
            }
            ArrayData::I32(data) => data.iter().flat_map(|value| value.to_ne_bytes()).collect(),
            ArrayData::U8(data) | ArrayData::Bool(data) => data.to_vec(),
            ArrayData::Bits(data) => data.iter().flat_map(|value| value.to_ne_bytes()).collect(),
        }
    }
}

impl Inputs<'_> {
    /// The scalars by their bits, as a launch takes them.
    pub fn scalar_bits(&self) -> [u32; MAX_SCALARS] {
        let mut bits = [0; MAX_SCALARS];
        for (to, value) in bits.iter_mut().zip(self.scalars()) {
            *to = match *value {
                Value::I32(value) => value as u32,
                Value::F32(value) => (value as f32).to_bits(),
                Value::Bool(value) => value.into(),
            };
        }
        bits
    }
}

impl OwnedInputs {
    /// The inputs of `program`.
    ///
    /// # Errors
    /// What does not fit its declarations.
    pub fn view(&self, program: &Program) -> Result<Inputs<'_>, InputError> {
        Inputs::new(program, self.arrays.iter().map(OwnedArray::view).collect(), self.scalars.clone())
    }

    /// Values for tests and timing: arrays as large as the indices of `problem` that read them ask for, and
    /// of about normal numbers; integers up to the number of keys; the bits of the problem's dropout. `None`
    /// for a problem without a program.
    pub fn drawn(problem: &Problem, seed: u64) -> Option<OwnedInputs> {
        let program = problem.score.program?;
        let mut random = Random(seed ^ program.hash64());
        let lengths = &problem.lengths;
        let most = lengths.max_k().max(lengths.max_q()).max(1);
        let extents = OwnedInputs::drawn_extents(problem);
        let arrays = program.arrays().iter().zip(extents);
        let arrays = arrays.map(|(decl, extents)| drawn_array(decl, &extents, most, &mut random)).collect();
        let scalars = program.scalars().iter().map(|decl| match decl.ty {
            Type::F32 => Value::F32(f64::from((0.25 + random.unit()) as f32)),
            Type::I32 | Type::Bool => Value::I32((1 + random.below(most / 3 + 1)) as i32),
        });
        let scalars = scalars.collect();
        let mut inputs = OwnedInputs { arrays, scalars };
        if let Some(dropout) = problem.score.dropout {
            dropout.set(problem, &mut inputs);
        }
        Some(inputs)
    }

    /// Extents of the arrays of [`OwnedInputs::drawn`], which are packed.
    pub fn drawn_extents(problem: &Problem) -> Vec<Vec<usize>> {
        let Some(program) = problem.score.program else { return Vec::new() };
        let decls = program.arrays().iter().enumerate();
        decls.map(|(slot, decl)| program.extents(slot, decl, problem)).collect()
    }
}

impl Program {
    /// What the axes of an array are indexed by, in lengths of `problem`.
    fn extents(&self, slot: usize, decl: &ArrayDecl, problem: &Problem) -> Vec<usize> {
        let lengths = &problem.lengths;
        let mut extents = vec![1; decl.rank];
        let length = |index: NodeId| match self.nodes()[index.index()] {
            _ if self.distance(index).is_some() => lengths.max_q() + lengths.max_k(),
            Node::Var(Var::B) => lengths.sequences(),
            Node::Var(Var::H) => problem.heads_q,
            Node::Var(Var::Hk) => problem.heads_kv,
            Node::Var(Var::Q | Var::Sq) => lengths.max_q(),
            Node::Var(Var::K | Var::Sk) => lengths.max_k(),
            Node::Const(_) => 1,
            Node::Var(Var::S | Var::Off)
            | Node::Scalar(_)
            | Node::Load(..)
            | Node::Unary(..)
            | Node::Binary(..)
            | Node::Select(..) => 32.min(lengths.max_k()),
        };
        for (_, node) in self.own() {
            let Node::Load(array, indices) = node else { continue };
            if usize::from(array) != slot {
                continue;
            }
            for (extent, index) in extents.iter_mut().zip(indices.into_iter().flatten()) {
                *extent = (*extent).max(length(index));
            }
        }
        extents
    }
}

fn drawn_array(decl: &ArrayDecl, extents: &[usize], most: usize, random: &mut Random) -> OwnedArray {
    let (outer, last) = extents.split_at(extents.len() - 1);
    let words = last[0].div_ceil(32);
    let bits = decl.element == Element::Bits;
    let count = outer.iter().product::<usize>() * if bits { words } else { last[0] };
    let mut numbers = || (0..count).map(|_| random.normal()).collect::<Vec<f32>>();
    let data = match decl.element {
        Element::F32 => OwnedData::F32(numbers()),
        // A number's upper bits are those of bf16; halves of f16 are exact.
        Element::Bf16 => OwnedData::Bf16(numbers().iter().map(|x| (x.to_bits() >> 16) as u16).collect()),
        Element::F16 => OwnedData::F16(numbers().iter().map(|&x| f16_bits(x)).collect()),
        Element::I32 => OwnedData::I32((0..count).map(|_| random.below(most) as i32).collect()),
        Element::U8 => OwnedData::U8((0..count).map(|_| random.below(4) as u8).collect()),
        Element::Bool => OwnedData::Bool((0..count).map(|_| u8::from(random.below(4) > 0)).collect()),
        Element::Bits => OwnedData::Bits((0..count).map(|_| random.next() as u32).collect()),
    };
    let view = ArrayView::contiguous(data.view(), extents);
    let (strides, extents) = (view.strides, view.extents);
    OwnedArray { data, strides, extents }
}

/// Eighths of a number up to 8 as f16.
fn f16_bits(x: f32) -> u16 {
    let eighths = (x.abs() * 8.0).round().min(64.0);
    let sign = if x < 0.0 { 0x8000 } else { 0 };
    if eighths == 0.0 {
        return sign;
    }
    let bits = (eighths / 8.0).to_bits();
    let exponent = ((bits >> 23) as i32 - 127 + 15) as u16;
    sign | exponent << 10 | ((bits >> 13) & 0x3ff) as u16
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// The sum of twelve uniform numbers, less 6.
    fn normal(&mut self) -> f32 {
        ((0..12).map(|_| self.unit()).sum::<f64>() - 6.0) as f32
    }
}
