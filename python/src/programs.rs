//! Masks and modifications of scores as programs: checked, described and evaluated.

use fa_core::program::{
    ArrayData, ArrayView, Deps, Element, Inputs, Point, Precision, Program, ScoreClass, Type, Value,
};
use pyo3::prelude::*;
use serde::Serialize;

use crate::error::InputError;

#[derive(Serialize)]
struct Described<'a> {
    text: &'a str,
    hash: u64,
    arrays: Vec<Array<'a>>,
    scalars: Vec<Scalar<'a>>,
    mask: bool,
    score: bool,
    /// `additive`, `affine` or `general`; null without a score.
    class: Option<&'static str>,
    /// Whether the mask differs between sequences, and between heads.
    mask_batch: bool,
    mask_heads: bool,
}

#[derive(Serialize)]
struct Array<'a> {
    name: &'a str,
    element: &'static str,
    rank: usize,
    gradient: bool,
    /// How the gradient of each load is summed.
    forms: Vec<&'static str>,
}

#[derive(Serialize)]
struct Scalar<'a> {
    name: &'a str,
    r#type: &'static str,
    positive: bool,
}

pub(crate) fn parsed(text: &str) -> PyResult<Program> {
    Program::parse(text).map_err(|error| InputError::new_err(error.to_string()))
}

/// A program of a text, described as JSON.
#[pyfunction]
pub(crate) fn program(text: &str) -> PyResult<String> {
    let program = parsed(text)?;
    let arrays = program.arrays().iter().enumerate().map(|(slot, array)| Array {
        name: &array.name,
        element: array.element.name(),
        rank: array.rank,
        gradient: array.gradient,
        forms: program
            .gradients()
            .iter()
            .filter(|gradient| gradient.array == slot)
            .map(|gradient| program.form(gradient.load).name())
            .collect(),
    });
    let scalars = program.scalars().iter().map(|scalar| Scalar {
        name: &scalar.name,
        r#type: scalar.ty.name(),
        positive: scalar.positive,
    });
    let described = Described {
        text: program.text(),
        hash: program.hash64(),
        arrays: arrays.collect(),
        scalars: scalars.collect(),
        mask: program.mask().is_some(),
        score: program.score().is_some(),
        class: program.class().map(ScoreClass::name),
        mask_batch: program.mask_deps().has(Deps::BATCH),
        mask_heads: program.mask_deps().has(Deps::HEAD),
    };
    serde_json::to_string(&described).map_err(|error| InputError::new_err(error.to_string()))
}

/// The program that applies the mask of both, and `second`'s score to that of `first`.
#[pyfunction]
pub(crate) fn program_with(first: &str, second: &str) -> PyResult<String> {
    let joined = parsed(first)?.with(&parsed(second)?);
    joined.map(|program| program.text().to_owned()).map_err(|error| InputError::new_err(error.to_string()))
}

/// An array's elements, as many as its bytes hold.
enum Elements {
    F32(Vec<f32>),
    Halves(Vec<u16>),
    I32(Vec<i32>),
    Bytes(Vec<u8>),
    Words(Vec<u32>),
}

impl Elements {
    fn of(element: Element, bytes: &[u8]) -> Elements {
        let four = || bytes.chunks_exact(4).map(|four| [four[0], four[1], four[2], four[3]]);
        match element {
            Element::F32 => Elements::F32(four().map(f32::from_le_bytes).collect()),
            Element::I32 => Elements::I32(four().map(i32::from_le_bytes).collect()),
            Element::Bits => Elements::Words(four().map(u32::from_le_bytes).collect()),
            Element::U8 | Element::Bool => Elements::Bytes(bytes.to_vec()),
            Element::F16 | Element::Bf16 => Elements::Halves(
                bytes.chunks_exact(2).map(|two| u16::from_le_bytes([two[0], two[1]])).collect(),
            ),
        }
    }

    fn view(&self, element: Element, extents: &[usize]) -> ArrayView<'_> {
        let data = match self {
            Elements::F32(data) => ArrayData::F32(data),
            Elements::Halves(data) if element == Element::F16 => ArrayData::F16(data),
            Elements::Halves(data) => ArrayData::Bf16(data),
            Elements::I32(data) => ArrayData::I32(data),
            Elements::Bytes(data) if element == Element::Bool => ArrayData::Bool(data),
            Elements::Bytes(data) => ArrayData::U8(data),
            Elements::Words(data) => ArrayData::Bits(data),
        };
        ArrayView::contiguous(data, extents)
    }
}

/// Evaluates a program in f64 at points `(s, b, h, hk, q, k, sq, sk, off)`: whether the key is visible, the
/// score, and its derivative by `s`. Arrays are the bytes of contiguous elements and the extents.
#[pyfunction]
pub(crate) fn program_eval(
    text: &str,
    arrays: Vec<(Vec<u8>, Vec<usize>)>,
    scalars: Vec<f64>,
    points: Vec<(f64, [i32; 8])>,
) -> PyResult<Vec<(bool, f64, f64)>> {
    let program = parsed(text)?;
    let elements: Vec<_> = program
        .arrays()
        .iter()
        .zip(&arrays)
        .map(|(decl, (bytes, _))| Elements::of(decl.element, bytes))
        .collect();
    let views = program.arrays().iter().zip(&elements).zip(&arrays);
    let views = views.map(|((decl, elements), (_, extents))| elements.view(decl.element, extents)).collect();
    let values = program.scalars().iter().zip(&scalars);
    let values = values.map(|(decl, &value)| match decl.ty {
        Type::I32 => Value::I32(value as i32),
        Type::F32 | Type::Bool => Value::F32(value),
    });
    let inputs = Inputs::new(&program, views, values.collect())
        .map_err(|error| InputError::new_err(error.to_string()))?;
    let outcome = |(s, [b, h, hk, q, k, sq, sk, off]): (f64, [i32; 8])| {
        let outcome = program.eval(&inputs, &Point { s, b, h, hk, q, k, sq, sk, off }, Precision::F64);
        (outcome.visible, outcome.score, outcome.slope)
    };
    Ok(points.into_iter().map(outcome).collect())
}
