//! Masks and modifications of scores as programs: checked, described and evaluated.

use fa_core::program::{
    ArrayData, ArrayView, Const, Deps, Element, GradientForm, Inputs, Node, NodeId, Point, Precision,
    Program, ScoreClass, Tile, TileState, Type, Unary, Value,
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
    weight: bool,
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
        weight: program.weight().is_some(),
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

/// What an array that stands for a load holds: `Direct` of fa-core.
#[derive(Serialize)]
struct Load {
    name: String,
    array: String,
    axes: Vec<&'static str>,
    /// Whether the indices follow the distance of the query and the key, and neither of them alone.
    is_by_distance: bool,
    /// Places among the nodes.
    indices: Vec<usize>,
}

#[derive(Serialize)]
struct DirectGradients<'a> {
    text: &'a str,
    loads: Vec<Load>,
}

#[derive(Serialize)]
struct Nodes {
    /// The operation, by its name in texts, and its operands: those of derivatives last.
    nodes: Vec<(String, Vec<serde_json::Value>)>,
    mask: Option<usize>,
    score: Option<usize>,
    weight: Option<usize>,
    /// d score / d s.
    slope: Option<usize>,
    /// A load, and d score / d load.
    gradients: Vec<(usize, usize)>,
}

/// What a program computes, as JSON: its nodes, each behind its operands, and which of them are its results.
#[pyfunction]
pub(crate) fn program_nodes(text: &str) -> PyResult<String> {
    let program = parsed(text)?;
    let at = |node: Option<NodeId>| node.map(NodeId::index);
    let described = Nodes {
        nodes: program.nodes().iter().map(|&node| described_node(&program, node)).collect(),
        mask: at(program.mask()),
        score: at(program.score()),
        weight: at(program.weight()),
        slope: at(program.slope()),
        gradients: program.gradients().iter().map(|own| (own.load.index(), own.slope.index())).collect(),
    };
    serde_json::to_string(&described).map_err(|error| InputError::new_err(error.to_string()))
}

/// `Program::with_direct_gradients` of a text as JSON; None where the program stays as it is.
#[pyfunction]
pub(crate) fn program_direct(text: &str) -> PyResult<Option<String>> {
    let program = parsed(text)?;
    let made = program.with_direct_gradients().map_err(|error| InputError::new_err(error.to_string()))?;
    let Some((direct, loads)) = made else { return Ok(None) };
    let loads = loads.into_iter().filter_map(|load| {
        let Node::Load(array, indices) = program.nodes()[load.load.index()] else { return None };
        let decl = &program.arrays()[usize::from(array)];
        Some(Load {
            name: load.name,
            array: decl.name.clone(),
            is_by_distance: program.form(load.load) == GradientForm::Diagonal,
            axes: load.axes.iter().map(|axis| axis.name()).collect(),
            indices: indices.into_iter().flatten().map(NodeId::index).collect(),
        })
    });
    let described = DirectGradients { text: direct.text(), loads: loads.collect() };
    serde_json::to_string(&described).map(Some).map_err(|error| InputError::new_err(error.to_string()))
}

fn described_node(program: &Program, node: Node) -> (String, Vec<serde_json::Value>) {
    let at = |x: NodeId| x.index().into();
    match node {
        Node::Const(Const::I32(value)) => ("constant".into(), vec![value.into()]),
        Node::Const(Const::Bool(value)) => ("constant".into(), vec![value.into()]),
        // As text: JSON has no infinities.
        Node::Const(Const::F32(bits)) => ("float".into(), vec![f32::from_bits(bits).to_string().into()]),
        Node::Var(var) => ("variable".into(), vec![var.name().into()]),
        Node::Scalar(slot) => {
            ("scalar".into(), vec![program.scalars()[usize::from(slot)].name.clone().into()])
        }
        Node::Load(array, indices) => {
            let name = program.arrays()[usize::from(array)].name.clone().into();
            ("load".into(), [name].into_iter().chain(indices.into_iter().flatten().map(at)).collect())
        }
        Node::Unary(Unary::Neg, x) => ("neg".into(), vec![at(x)]),
        Node::Unary(op, x) => (op.name().into(), vec![at(x)]),
        Node::Binary(op, a, b) => (op.name().into(), vec![at(a), at(b)]),
        Node::Select(c, a, b) => ("select".into(), vec![at(c), at(a), at(b)]),
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
    let elements = elements_of(&program, &arrays);
    let inputs = inputs_of(&program, &elements, &arrays, &scalars)?;
    let outcome = |(s, [b, h, hk, q, k, sq, sk, off]): (f64, [i32; 8])| {
        let outcome = program.eval(&inputs, &Point { s, b, h, hk, q, k, sq, sk, off }, Precision::F64);
        (outcome.visible, outcome.score, outcome.slope)
    };
    Ok(points.into_iter().map(outcome).collect())
}

/// What a program's mask leaves of blocks, by ranges of values: 0 for nothing, 1 for a part, 2 for all; for
/// each sequence, head, block of queries and block of keys.
#[pyfunction]
pub(crate) fn program_tiles(
    text: &str,
    arrays: Vec<(Vec<u8>, Vec<usize>)>,
    scalars: Vec<f64>,
    sizes: (i32, i32),
    lengths: (i32, i32),
    block: (i32, i32),
) -> PyResult<Vec<u8>> {
    let ((batch, heads), (sq, sk), (rows, keys)) = (sizes, lengths, block);
    let program = parsed(text)?;
    let elements = elements_of(&program, &arrays);
    let inputs = inputs_of(&program, &elements, &arrays, &scalars)?;
    let steps = |end: i32, step: i32| {
        let starts = (0..end).step_by(step.max(1) as usize);
        starts.map(move |first| first..end.min(first.saturating_add(step.max(1))))
    };
    let mut states = Vec::new();
    for b in 0..batch {
        for h in 0..heads {
            for q in steps(sq, rows) {
                states.extend(steps(sk, keys).map(|k| {
                    let tile = Tile { b, h, hk: h, q: q.clone(), k, sq, sk, off: sk.wrapping_sub(sq) };
                    match program.tile_state(&inputs, &tile) {
                        TileState::Empty => 0,
                        TileState::Partial => 1,
                        TileState::Full => 2,
                    }
                }));
            }
        }
    }
    Ok(states)
}

fn elements_of(program: &Program, arrays: &[(Vec<u8>, Vec<usize>)]) -> Vec<Elements> {
    let decls = program.arrays().iter().zip(arrays);
    decls.map(|(decl, (bytes, _))| Elements::of(decl.element, bytes)).collect()
}

fn inputs_of<'a>(
    program: &Program,
    elements: &'a [Elements],
    arrays: &[(Vec<u8>, Vec<usize>)],
    scalars: &[f64],
) -> PyResult<Inputs<'a>> {
    let views = program.arrays().iter().zip(elements).zip(arrays);
    let views = views.map(|((decl, elements), (_, extents))| elements.view(decl.element, extents)).collect();
    let values = program.scalars().iter().zip(scalars);
    let values = values.map(|(decl, &value)| match decl.ty {
        Type::I32 => Value::I32(value as i32),
        Type::F32 | Type::Bool => Value::F32(value),
    });
    Inputs::new(program, views, values.collect()).map_err(|error| InputError::new_err(error.to_string()))
}
