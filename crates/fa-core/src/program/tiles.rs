//! Which tiles of a mask are empty, which full: by ranges of values, without evaluating every pair.

use std::ops::Range;

use super::eval::Inputs;
use super::limits::MAX_RANK;
use super::node::{Node, NodeId};
use super::ops::Value;
use super::spans::{self, ANY_FLOAT, ANY_INT, ANY_TRUTH, Span};
use super::types::{Element, Type, Var};
use super::whole::Program;

/// What a tile of queries and keys has to see of a mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TileState {
    /// No query sees a key.
    Empty,
    /// Some may.
    Partial,
    /// Every query sees every key.
    Full,
}

impl TileState {
    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            TileState::Empty => "empty",
            TileState::Partial => "partial",
            TileState::Full => "full",
        }
    }
}

/// A tile of queries and keys of one sequence and head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tile {
    /// The sequence.
    pub b: i32,
    /// The query head.
    pub h: i32,
    /// The K/V head.
    pub hk: i32,
    /// Its queries; at least one.
    pub q: Range<i32>,
    /// Its keys; at least one.
    pub k: Range<i32>,
    /// Queries of the sequence.
    pub sq: i32,
    /// Keys of the sequence.
    pub sk: i32,
    /// What `off` is.
    pub off: i32,
}

/// The most elements of an array that a tile looks at; of larger parts it knows the element type alone.
pub const MAX_SCANNED: usize = 4096;

impl Program {
    /// What `tile` has to see of the mask. Empty and full are proven, and partial is what is not: of a mask
    /// that depends on more than ranges, tiles that are empty or full may count as partial.
    pub fn tile_state(&self, inputs: &Inputs<'_>, tile: &Tile) -> TileState {
        let scalar = |place| of_value(inputs.scalars()[place]);
        self.state(tile, &scalar, |_, array, indices| self.loaded(inputs, array, indices))
    }

    /// [`tile_state`](Program::tile_state) whatever the arrays hold; scalars in the order of the
    /// declarations. Of scalars that are not given, anything is possible.
    pub fn tile_state_of_any(&self, scalars: &[Option<Value>], tile: &Tile) -> TileState {
        let scalar = |place: usize| self.scalar_of_any(scalars, place);
        self.state(tile, &scalar, |_, array, _| any(self.arrays()[array].element))
    }

    /// The same where arrays that differ by blocks of queries and keys list blocks of which queries see a
    /// third: a guess of what they hold, the same for every tile.
    pub fn tile_state_by_guess(&self, tile: &Tile) -> TileState {
        let by_blocks: Vec<bool> =
            (0..self.nodes().len()).map(|at| self.loads_by_blocks(NodeId(at as u16))).collect();
        let scalar = |place: usize| self.scalar_of_any(&[], place);
        self.state(tile, &scalar, |load, array, indices| {
            let element = self.arrays()[array].element;
            if by_blocks[load] { guessed(element, indices) } else { any(element) }
        })
    }

    fn scalar_of_any(&self, scalars: &[Option<Value>], place: usize) -> Span {
        match (scalars.get(place).copied().flatten(), &self.scalars()[place]) {
            (Some(value), _) => of_value(value),
            (None, decl) if decl.positive => Span::Int(1, i32::MAX.into()),
            (None, decl) => {
                if decl.ty == Type::I32 {
                    ANY_INT
                } else {
                    ANY_FLOAT
                }
            }
        }
    }

    fn state(
        &self,
        tile: &Tile,
        scalar: &dyn Fn(usize) -> Span,
        load: impl Fn(usize, usize, [Span; MAX_RANK]) -> Span,
    ) -> TileState {
        let Some(mask) = self.mask() else { return TileState::Full };
        let mut spans: Vec<Span> = Vec::with_capacity(mask.index() + 1);
        for (index, &node) in self.nodes()[..=mask.index()].iter().enumerate() {
            let at = |x: NodeId| spans[x.index()];
            let span = match node {
                Node::Const(value) => Span::of(value),
                Node::Var(var) => variable(var, tile),
                Node::Scalar(place) => scalar(usize::from(place)),
                Node::Load(array, indices) => {
                    let indices = indices.map(|x| x.map_or(Span::Int(0, 0), at));
                    load(index, usize::from(array), indices)
                }
                Node::Unary(op, x) => spans::unary(op, at(x)),
                Node::Binary(op, a, b) => spans::binary(op, at(a), at(b)),
                Node::Select(c, a, b) => match at(c) {
                    Span::Truth(true, false) => at(a),
                    Span::Truth(false, true) => at(b),
                    Span::Truth(..) | Span::Int(..) | Span::Float(..) => at(a).or(at(b)),
                },
            };
            debug_assert!(matches!(
                (span, self.ty(NodeId(index as u16))),
                (Span::Int(..), Type::I32) | (Span::Float(..), Type::F32) | (Span::Truth(..), Type::Bool)
            ));
            spans.push(span);
        }
        match spans[mask.index()] {
            Span::Truth(false, _) => TileState::Empty,
            Span::Truth(true, false) => TileState::Full,
            Span::Truth(true, true) | Span::Int(..) | Span::Float(..) => TileState::Partial,
        }
    }

    /// What an array holds where indices lie in ranges.
    fn loaded(&self, inputs: &Inputs<'_>, array: usize, indices: [Span; MAX_RANK]) -> Span {
        let decl = &self.arrays()[array];
        let view = inputs.arrays()[array];
        let mut ranges = [(0, 0); MAX_RANK];
        let mut elements = 1usize;
        for axis in 0..decl.rank {
            let Span::Int(low, high) = indices[axis] else { return ANY_TRUTH };
            let last = i64::from(view.extents[axis]) - 1;
            let (low, high) = (low.clamp(0, last), high.clamp(0, last));
            ranges[axis] = (low as i32, high as i32);
            elements = elements.saturating_mul((high - low + 1) as usize);
        }
        if elements > MAX_SCANNED {
            return any(decl.element);
        }
        let mut found: Option<Span> = None;
        let [first, second, third, last] = ranges.map(|(low, high)| low..=high);
        for a in first {
            for b in second.clone() {
                for c in third.clone() {
                    for d in last.clone() {
                        let element = of_value(view.load(decl.rank, [a, b, c, d]));
                        found = Some(found.map_or(element, |found| found.or(element)));
                    }
                }
            }
        }
        found.unwrap_or(ANY_TRUTH)
    }
}

/// What a list of blocks holds in a part of it, where it is drawn: 0, or in a third of its elements 2, true
/// and false of truth values.
fn guessed(element: Element, indices: [Span; MAX_RANK]) -> Span {
    let mut ranges = [(0, 0); MAX_RANK];
    let mut elements = 1usize;
    for (range, index) in ranges.iter_mut().zip(indices) {
        let Span::Int(low, high) = index else { return any(element) };
        *range = (low, high);
        elements = elements.saturating_mul(usize::try_from(high - low + 1).unwrap_or(usize::MAX));
    }
    if elements > MAX_SCANNED {
        return any(element);
    }
    let (mut seen, mut unseen) = (false, false);
    let [first, second, third, last] = ranges.map(|(low, high)| low..=high);
    for a in first {
        for b in second.clone() {
            for c in third.clone() {
                for d in last.clone() {
                    let mixed = [a, b, c, d].iter().fold(0u64, |sum, &x| {
                        let sum = (sum ^ x as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                        sum ^ sum >> 29
                    });
                    if mixed % 3 == 0 { seen = true } else { unseen = true }
                }
            }
        }
    }
    match element {
        Element::Bool | Element::Bits => Span::Truth(seen, unseen),
        Element::U8 | Element::I32 => Span::Int(if unseen { 0 } else { 2 }, if seen { 2 } else { 0 }),
        Element::F32 | Element::F16 | Element::Bf16 => any(element),
    }
}

/// Anything that an element may be.
fn any(element: Element) -> Span {
    match element {
        Element::F32 | Element::F16 | Element::Bf16 => ANY_FLOAT,
        Element::I32 => ANY_INT,
        Element::U8 => Span::Int(0, 255),
        Element::Bool | Element::Bits => ANY_TRUTH,
    }
}

fn of_value(value: Value) -> Span {
    match value {
        Value::I32(value) => Span::Int(value.into(), value.into()),
        Value::F32(value) => Span::number(value),
        Value::Bool(value) => Span::Truth(value, !value),
    }
}

fn variable(var: Var, tile: &Tile) -> Span {
    let one = |value: i32| Span::Int(value.into(), value.into());
    let range = |range: &Range<i32>| Span::Int(range.start.into(), i64::from(range.end) - 1);
    match var {
        Var::S => ANY_FLOAT,
        Var::B => one(tile.b),
        Var::H => one(tile.h),
        Var::Hk => one(tile.hk),
        Var::Q => range(&tile.q),
        Var::K => range(&tile.k),
        Var::Sq => one(tile.sq),
        Var::Sk => one(tile.sk),
        Var::Off => one(tile.off),
    }
}
