//! A program's values for a row of queries at a time: a node is evaluated for one key and all queries of a
//! panel, what does not depend on the query for the first of them, and what does not depend on the key once
//! for a tile. In f32, as kernels do.

use std::collections::BTreeSet;

use fa_core::program::{
    ArrayData, ArrayView, Binary, Const, Deps, Element, Inputs, Node, NodeId, Point, Program, Type, Unary,
    Value, Var,
};

use super::functions;
use crate::simd::{Work, widest};

/// The nodes that some results need, each after its operands.
#[derive(Default)]
pub(super) struct Steps {
    /// Those that depend on neither the key nor the score.
    tile: Vec<NodeId>,
    /// Those of the others that depend on neither the query nor the score.
    key: Vec<NodeId>,
    /// The rest.
    pair: Vec<NodeId>,
}

impl Steps {
    pub(super) fn of(program: &Program, results: impl IntoIterator<Item = NodeId>) -> Steps {
        let (mut waiting, mut needed): (Vec<NodeId>, BTreeSet<NodeId>) =
            (results.into_iter().collect(), BTreeSet::new());
        while let Some(id) = waiting.pop() {
            if needed.insert(id) {
                waiting.extend(program.nodes()[id.index()].operands());
            }
        }
        let mut steps = Steps::default();
        for id in needed {
            let deps = program.deps(id);
            let [query, key, score] = [Deps::QUERY, Deps::KEY, Deps::SCORE].map(|part| deps.has(part));
            let list = match (query || score, key || score) {
                (_, false) => &mut steps.tile,
                (false, true) => &mut steps.key,
                (true, true) => &mut steps.pair,
            };
            list.push(id);
        }
        steps
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tile.is_empty() && self.key.is_empty() && self.pair.is_empty()
    }
}

/// The values of nodes for `width` queries.
pub(super) struct Lanes<'a> {
    pub(super) program: &'static Program,
    pub(super) inputs: &'a Inputs<'a>,
    width: usize,
    /// The first query and the key.
    at: Point,
    /// `[node][width]`: integers and truth values, 0 or 1.
    ints: Vec<i32>,
    /// `[node][width]`: numbers.
    floats: Vec<f32>,
    /// Where elements of an array are.
    offsets: Vec<i64>,
}

impl<'a> Lanes<'a> {
    pub(super) fn new(program: &'static Program, inputs: &'a Inputs<'a>, width: usize) -> Lanes<'a> {
        let len = program.nodes().len() * width;
        let (ints, floats, offsets) = (vec![0; len], vec![0.0; len], vec![0; width]);
        Lanes { program, inputs, width, at: Point::default(), ints, floats, offsets }
    }

    /// Goes to a tile whose first query is `at.q`.
    pub(super) fn enter(&mut self, steps: &Steps, at: Point) {
        self.at = at;
        let len = self.width;
        widest(Evaluate { lanes: self, nodes: &steps.tile, len });
    }

    /// Goes to the key `k`, with these scores.
    pub(super) fn go(&mut self, steps: &Steps, k: i32, scores: &[f32]) {
        self.at.k = k;
        if !steps.key.is_empty() {
            widest(Evaluate { lanes: self, nodes: &steps.key, len: 1 });
            for id in &steps.key {
                let row = id.index() * self.width..(id.index() + 1) * self.width;
                if self.program.ty(*id) == Type::F32 {
                    let first = self.floats[row.start];
                    self.floats[row].fill(first);
                } else {
                    let first = self.ints[row.start];
                    self.ints[row].fill(first);
                }
            }
        }
        for id in &steps.pair {
            if self.program.nodes()[id.index()] == Node::Var(Var::S) {
                self.floats[id.index() * self.width..][..scores.len()].copy_from_slice(scores);
            }
        }
        widest(Evaluate { lanes: self, nodes: &steps.pair, len: scores.len() });
    }

    /// The values of a number.
    pub(super) fn numbers(&self, id: NodeId) -> &[f32] {
        &self.floats[id.index() * self.width..][..self.width]
    }

    /// The values of an integer, or of a truth value as 0 and 1.
    pub(super) fn integers(&self, id: NodeId) -> &[i32] {
        &self.ints[id.index() * self.width..][..self.width]
    }
}

struct Evaluate<'s, 'a> {
    lanes: &'s mut Lanes<'a>,
    nodes: &'s [NodeId],
    /// Queries.
    len: usize,
}

impl Work for Evaluate<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for &id in self.nodes {
            let lanes = &mut *self.lanes;
            let (program, width, at) = (lanes.program, lanes.width, id.index() * lanes.width);
            let (known_ints, ints) = lanes.ints.split_at_mut(at);
            let (known_floats, floats) = lanes.floats.split_at_mut(at);
            let (ints, floats) = (&mut ints[..self.len], &mut floats[..self.len]);
            let i = |x: NodeId| &known_ints[x.index() * width..][..self.len];
            let f = |x: NodeId| &known_floats[x.index() * width..][..self.len];
            match program.nodes()[id.index()] {
                Node::Const(Const::I32(value)) => ints.fill(value),
                Node::Const(Const::F32(bits)) => floats.fill(f32::from_bits(bits)),
                Node::Const(Const::Bool(value)) => ints.fill(value.into()),
                // They are there already.
                Node::Var(Var::S) => {}
                Node::Var(Var::Q) => {
                    ints.iter_mut().zip(lanes.at.q..).for_each(|(to, query)| *to = query);
                }
                Node::Var(var) => ints.fill(value_of(var, &lanes.at)),
                Node::Scalar(place) => match lanes.inputs.scalars()[usize::from(place)] {
                    Value::I32(value) => ints.fill(value),
                    Value::F32(value) => floats.fill(value as f32),
                    Value::Bool(value) => ints.fill(value.into()),
                },
                Node::Load(array, indices) => {
                    let array = usize::from(array);
                    let view = &lanes.inputs.arrays()[array];
                    let offsets = &mut lanes.offsets[..self.len];
                    offsets.fill(0);
                    let is_bits = view.data.element() == Element::Bits;
                    let rank = program.arrays()[array].rank;
                    let mut bits: &[i32] = &[];
                    for (axis, index) in indices.into_iter().flatten().enumerate() {
                        let (index, last) = (i(index), view.extents[axis] - 1);
                        if is_bits && axis + 1 == rank {
                            bits = index;
                            continue;
                        }
                        let stride = view.strides[axis];
                        for (offset, &index) in offsets.iter_mut().zip(index) {
                            *offset += i64::from(index.min(last).max(0)) * stride;
                        }
                    }
                    load(view, rank, offsets, bits, ints, floats);
                }
                Node::Unary(op, x) => match program.ty(x) {
                    Type::F32 => numbers_of_one(op, f(x), ints, floats),
                    Type::Bool if op == Unary::Not => each(ints, i(x), |x| 1 - x),
                    Type::I32 | Type::Bool => integers_of_one(op, i(x), ints, floats),
                },
                Node::Binary(op, a, b) => match program.ty(a) {
                    Type::F32 => numbers_of_two(op, f(a), f(b), ints, floats),
                    Type::I32 => integers_of_two(op, i(a), i(b), ints),
                    Type::Bool => truths_of_two(op, i(a), i(b), ints),
                },
                Node::Select(condition, a, b) => {
                    let condition = i(condition);
                    if program.ty(id) == Type::F32 {
                        chosen(floats, f(a), f(b), condition);
                    } else {
                        chosen(ints, i(a), i(b), condition);
                    }
                }
            }
        }
    }
}

fn value_of(var: Var, at: &Point) -> i32 {
    match var {
        Var::B => at.b,
        Var::H => at.h,
        Var::Hk => at.hk,
        Var::Q => at.q,
        Var::K => at.k,
        Var::Sq => at.sq,
        Var::Sk => at.sk,
        Var::Off => at.off,
        Var::S => 0,
    }
}

#[inline(always)]
fn each<X: Copy, Y>(to: &mut [Y], x: &[X], of: impl Fn(X) -> Y) {
    for (to, &x) in to.iter_mut().zip(x) {
        *to = of(x);
    }
}

#[inline(always)]
fn both<X: Copy, Y>(to: &mut [Y], a: &[X], b: &[X], of: impl Fn(X, X) -> Y) {
    for ((to, &a), &b) in to.iter_mut().zip(a).zip(b) {
        *to = of(a, b);
    }
}

#[inline(always)]
fn chosen<X: Copy>(to: &mut [X], a: &[X], b: &[X], condition: &[i32]) {
    for (((to, &a), &b), &condition) in to.iter_mut().zip(a).zip(b).zip(condition) {
        *to = if condition != 0 { a } else { b };
    }
}

#[inline(always)]
fn load(
    view: &ArrayView<'_>,
    rank: usize,
    offsets: &[i64],
    bits: &[i32],
    ints: &mut [i32],
    floats: &mut [f32],
) {
    match view.data {
        ArrayData::F32(data) => each(floats, offsets, |at| data[at as usize]),
        ArrayData::F16(data) => each(floats, offsets, |at| half::f16::from_bits(data[at as usize]).to_f32()),
        ArrayData::Bf16(data) => {
            each(floats, offsets, |at| f32::from_bits(u32::from(data[at as usize]) << 16));
        }
        ArrayData::I32(data) => each(ints, offsets, |at| data[at as usize]),
        ArrayData::U8(data) => each(ints, offsets, |at| data[at as usize].into()),
        ArrayData::Bool(data) => each(ints, offsets, |at| (data[at as usize] != 0).into()),
        ArrayData::Bits(data) => {
            let (last, stride) = (view.extents[rank - 1] - 1, view.strides[rank - 1]);
            for ((to, &at), &index) in ints.iter_mut().zip(offsets).zip(bits) {
                let index = index.min(last).max(0);
                let word = data[(at + i64::from(index >> 5) * stride) as usize];
                *to = (word >> (index & 31) & 1) as i32;
            }
        }
    }
}

#[inline(always)]
fn numbers_of_one(op: Unary, x: &[f32], ints: &mut [i32], floats: &mut [f32]) {
    match op {
        Unary::Neg => each(floats, x, |x| -x),
        Unary::Not | Unary::ToF32 => floats.copy_from_slice(x),
        Unary::Abs => each(floats, x, f32::abs),
        Unary::Floor => each(floats, x, f32::floor),
        Unary::Exp => each(floats, x, functions::exp),
        Unary::Exp2 => each(floats, x, functions::exp2),
        Unary::Log => each(floats, x, f32::ln),
        Unary::Log2 => each(floats, x, f32::log2),
        Unary::Tanh => each(floats, x, functions::tanh),
        Unary::Sigmoid => each(floats, x, functions::sigmoid),
        Unary::Sqrt => each(floats, x, f32::sqrt),
        Unary::Rsqrt => each(floats, x, |x| 1.0 / x.sqrt()),
        Unary::Sin => each(floats, x, f32::sin),
        Unary::Cos => each(floats, x, f32::cos),
        Unary::ToI32 => each(ints, x, |x| x as i32),
    }
}

/// Of truths, 0 and 1, all but their negation.
#[inline(always)]
fn integers_of_one(op: Unary, x: &[i32], ints: &mut [i32], floats: &mut [f32]) {
    match op {
        Unary::Neg => each(ints, x, i32::wrapping_neg),
        Unary::Abs => each(ints, x, i32::wrapping_abs),
        Unary::Not => each(ints, x, |x| !x),
        Unary::ToF32 => each(floats, x, |x| x as f32),
        Unary::ToI32
        | Unary::Floor
        | Unary::Exp
        | Unary::Exp2
        | Unary::Log
        | Unary::Log2
        | Unary::Tanh
        | Unary::Sigmoid
        | Unary::Sqrt
        | Unary::Rsqrt
        | Unary::Sin
        | Unary::Cos => ints.copy_from_slice(x),
    }
}

#[inline(always)]
fn numbers_of_two(op: Binary, a: &[f32], b: &[f32], ints: &mut [i32], floats: &mut [f32]) {
    match op {
        Binary::Add => both(floats, a, b, |a, b| a + b),
        Binary::Sub => both(floats, a, b, |a, b| a - b),
        Binary::Mul => both(floats, a, b, |a, b| a * b),
        Binary::Div => both(floats, a, b, |a, b| a / b),
        Binary::Min => both(floats, a, b, |a, b| if a.is_nan() || a <= b { a } else { b }),
        Binary::Max => both(floats, a, b, |a, b| if a.is_nan() || a >= b { a } else { b }),
        Binary::Lt => both(ints, a, b, |a, b| (a < b).into()),
        Binary::Le => both(ints, a, b, |a, b| (a <= b).into()),
        Binary::Eq => both(ints, a, b, |a, b| (a == b).into()),
        Binary::Ne => both(ints, a, b, |a, b| (a != b).into()),
        Binary::FloorDiv
        | Binary::FloorMod
        | Binary::Shl
        | Binary::Shr
        | Binary::And
        | Binary::Or
        | Binary::Xor => floats.copy_from_slice(a),
    }
}

#[inline(always)]
fn integers_of_two(op: Binary, a: &[i32], b: &[i32], ints: &mut [i32]) {
    let fits = |amount: i32| (0..32).contains(&amount);
    match op {
        Binary::Add => both(ints, a, b, i32::wrapping_add),
        Binary::Sub => both(ints, a, b, i32::wrapping_sub),
        Binary::Mul => both(ints, a, b, i32::wrapping_mul),
        // Divisors are positive: constants when a program is made, scalars when it is called.
        Binary::Div | Binary::FloorDiv => both(ints, a, b, |a, b| a.div_euclid(b.max(1))),
        Binary::FloorMod => both(ints, a, b, |a, b| a.rem_euclid(b.max(1))),
        Binary::Shl => both(ints, a, b, |a, b| if fits(b) { a.wrapping_shl(b as u32) } else { 0 }),
        Binary::Shr => both(ints, a, b, |a, b| a >> (if fits(b) { b } else { 31 })),
        Binary::And => both(ints, a, b, |a, b| a & b),
        Binary::Or => both(ints, a, b, |a, b| a | b),
        Binary::Xor => both(ints, a, b, |a, b| a ^ b),
        Binary::Min => both(ints, a, b, i32::min),
        Binary::Max => both(ints, a, b, i32::max),
        Binary::Lt => both(ints, a, b, |a, b| (a < b).into()),
        Binary::Le => both(ints, a, b, |a, b| (a <= b).into()),
        Binary::Eq => both(ints, a, b, |a, b| (a == b).into()),
        Binary::Ne => both(ints, a, b, |a, b| (a != b).into()),
    }
}

#[inline(always)]
fn truths_of_two(op: Binary, a: &[i32], b: &[i32], ints: &mut [i32]) {
    match op {
        Binary::And | Binary::Mul | Binary::Min => both(ints, a, b, |a, b| a & b),
        Binary::Or | Binary::Max | Binary::Add => both(ints, a, b, |a, b| a | b),
        Binary::Xor | Binary::Ne | Binary::Sub => both(ints, a, b, |a, b| a ^ b),
        Binary::Eq => both(ints, a, b, |a, b| (a == b).into()),
        Binary::Lt => both(ints, a, b, |a, b| (1 - a) & b),
        Binary::Le => both(ints, a, b, |a, b| (1 - a) | b),
        Binary::Div | Binary::FloorDiv | Binary::FloorMod | Binary::Shl | Binary::Shr => {
            ints.copy_from_slice(a);
        }
    }
}
