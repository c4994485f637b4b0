//! The keys that a query sees, as intervals: by integers that are lines in `k`, piece by piece, and the sets
//! of keys for which conditions hold.

use std::ops::Range;

use super::eval::{Inputs, Point};
use super::node::{Binary, Node, NodeId, Unary};
use super::ops::{self, Precision, Value};
use super::types::{Deps, Type, Var};
use super::whole::Program;

/// The most pieces of an expression, and intervals of a condition, on the way to a row's intervals.
const MOST_PIECES: usize = 64;

/// The most intervals of a row.
pub const MAX_INTERVALS: usize = 2;

/// From `start` on, `slope * k + offset`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Piece {
    start: i64,
    slope: i64,
    offset: i64,
}

impl Piece {
    fn at(self, k: i64) -> i64 {
        self.slope * k + self.offset
    }
}

/// An expression over all keys.
#[derive(Clone, Debug)]
enum Over {
    /// The same for every key.
    One(Value),
    /// An integer, by pieces in order, the first from key 0.
    Pieces(Vec<Piece>),
    /// A condition: where it is true, in order and apart.
    Set(Vec<Range<i64>>),
}

impl Program {
    /// The keys that query `point.q` sees, in order and apart, where they are at most [`MAX_INTERVALS`]
    /// intervals and found without trying every key against the whole mask; `None` otherwise.
    pub fn row_intervals(&self, inputs: &Inputs<'_>, point: &Point) -> Option<Vec<Range<i32>>> {
        let keys = i64::from(point.sk);
        let everything = Vec::from_iter(std::iter::once(0..keys));
        let Some(mask) = self.mask() else {
            return Some(everything.iter().map(|set| set.start as i32..set.end as i32).collect());
        };
        let values = self.values(inputs, &Point { k: 0, ..*point }, Precision::F32);
        let mut over: Vec<Option<Over>> = Vec::with_capacity(mask.index() + 1);
        for (index, &value) in values.iter().enumerate().take(mask.index() + 1) {
            let id = NodeId(index as u16);
            let found = if self.deps(id).has(Deps::KEY) {
                let row = Row { program: self, inputs, keys, over: &over };
                row.node(id)
            } else {
                Some(Over::One(value))
            };
            over.push(found);
        }
        let set = match over.pop()?? {
            Over::One(value) => {
                if value.truth() {
                    everything
                } else {
                    Vec::new()
                }
            }
            Over::Set(set) => set,
            Over::Pieces(_) => return None,
        };
        let intervals: Vec<_> = set.into_iter().map(|set| set.start as i32..set.end as i32).collect();
        (intervals.len() <= MAX_INTERVALS).then_some(intervals)
    }
}

struct Row<'a> {
    program: &'a Program,
    inputs: &'a Inputs<'a>,
    keys: i64,
    over: &'a [Option<Over>],
}

impl Row<'_> {
    fn node(&self, id: NodeId) -> Option<Over> {
        let node = self.program.nodes()[id.index()];
        match node {
            Node::Var(Var::K) => Some(Over::Pieces(vec![Piece { start: 0, slope: 1, offset: 0 }])),
            Node::Unary(Unary::Not, x) if self.program.ty(x) == Type::Bool => {
                Some(Over::Set(self.without(&self.set(x)?)))
            }
            Node::Unary(Unary::Neg, x) if self.program.ty(x) == Type::I32 => {
                self.lines(&[x], |x| Some((x[0].slope.checked_neg()?, -x[0].offset)))
            }
            Node::Unary(Unary::Abs, x) if self.program.ty(x) == Type::I32 => {
                let zero = vec![Piece { start: 0, slope: 0, offset: 0 }];
                let pieces = self.pieces(x)?;
                let negative = self.below(&pieces, &zero, 0)?;
                let opposite =
                    pieces.iter().map(|p| Piece { slope: -p.slope, offset: -p.offset, ..*p }).collect();
                self.fitting(self.chosen(&negative, opposite, pieces)?)
            }
            Node::Binary(op, a, b) => self.binary(op, a, b, id),
            Node::Select(condition, a, b) => {
                let set = self.set(condition)?;
                if self.program.ty(a) == Type::Bool {
                    let (yes, no) = (self.set(a)?, self.set(b)?);
                    let taken = both(&set, &yes);
                    return self.bounded(either(&taken, &both(&self.without(&set), &no)));
                }
                self.fitting(self.chosen(&set, self.pieces(a)?, self.pieces(b)?)?)
            }
            Node::Const(_) | Node::Var(_) | Node::Scalar(_) | Node::Load(..) | Node::Unary(..) => {
                self.pointwise(id)
            }
        }
    }

    fn binary(&self, op: Binary, a: NodeId, b: NodeId, id: NodeId) -> Option<Over> {
        match self.program.ty(a) {
            Type::Bool => {
                let (x, y) = (self.set(a)?, self.set(b)?);
                let differ = either(&both(&x, &self.without(&y)), &both(&self.without(&x), &y));
                match op {
                    Binary::And => self.bounded(both(&x, &y)),
                    Binary::Or => self.bounded(either(&x, &y)),
                    Binary::Xor | Binary::Ne => self.bounded(differ),
                    Binary::Eq => self.bounded(self.without(&differ)),
                    Binary::Add
                    | Binary::Sub
                    | Binary::Mul
                    | Binary::Div
                    | Binary::FloorDiv
                    | Binary::FloorMod
                    | Binary::Shl
                    | Binary::Shr
                    | Binary::Min
                    | Binary::Max
                    | Binary::Lt
                    | Binary::Le => None,
                }
            }
            Type::I32 => self.integers(op, a, b, id),
            Type::F32 => self.pointwise(id),
        }
    }

    fn integers(&self, op: Binary, a: NodeId, b: NodeId, id: NodeId) -> Option<Over> {
        match op {
            Binary::Add => {
                self.lines(&[a, b], |x| Some((x[0].slope + x[1].slope, x[0].offset + x[1].offset)))
            }
            Binary::Sub => {
                self.lines(&[a, b], |x| Some((x[0].slope - x[1].slope, x[0].offset - x[1].offset)))
            }
            Binary::Mul => self.lines(&[a, b], |x| match (x[0].slope, x[1].slope) {
                (0, _) => Some((x[1].slope.checked_mul(x[0].offset)?, x[1].offset.checked_mul(x[0].offset)?)),
                (_, 0) => Some((x[0].slope.checked_mul(x[1].offset)?, x[0].offset.checked_mul(x[1].offset)?)),
                _ => None,
            }),
            Binary::FloorDiv => {
                self.quotients(&self.pieces(a)?, self.one(b)?.max(1)).or_else(|| self.pointwise(id))
            }
            Binary::FloorMod => self.rests(a, self.one(b)?.max(1)).or_else(|| self.pointwise(id)),
            Binary::Min | Binary::Max => {
                let (x, y) = (self.pieces(a)?, self.pieces(b)?);
                let first = self.below(&x, &y, 1)?;
                let (yes, no) = if op == Binary::Min { (x, y) } else { (y, x) };
                self.fitting(self.chosen(&first, yes, no)?)
            }
            Binary::Lt | Binary::Le | Binary::Eq | Binary::Ne => {
                let set = self.of_quotient(op, a, b).or_else(|| self.compared(op, a, b));
                set.map_or_else(|| self.pointwise(id), |set| self.bounded(set))
            }
            Binary::And | Binary::Or | Binary::Xor | Binary::Shl | Binary::Shr | Binary::Div => {
                self.pointwise(id)
            }
        }
    }

    fn compared(&self, op: Binary, a: NodeId, b: NodeId) -> Option<Vec<Range<i64>>> {
        let (x, y) = (self.pieces(a)?, self.pieces(b)?);
        if op == Binary::Lt {
            return self.below(&x, &y, 0);
        }
        let within = self.below(&x, &y, 1)?;
        if op == Binary::Le {
            return Some(within);
        }
        let same = both(&within, &self.without(&self.below(&x, &y, 0)?));
        Some(if op == Binary::Eq { same } else { self.without(&same) })
    }

    /// `x // d` compared with what is one for all keys, as a comparison of x: chunks may be many.
    fn of_quotient(&self, op: Binary, a: NodeId, b: NodeId) -> Option<Vec<Range<i64>>> {
        let quotient = |id: NodeId| {
            let Node::Binary(Binary::FloorDiv, x, divisor) = self.program.nodes()[id.index()] else {
                return None;
            };
            Some((self.pieces(x)?, self.one(divisor)?.max(1)))
        };
        let (is_left, value, (x, divisor)) = match (quotient(a), self.one(b)) {
            (Some(quotient), Some(value)) => (true, value, quotient),
            _ => (false, self.one(a)?, quotient(b)?),
        };
        // x // d < v where x < v d, and x // d <= v where x < (v + 1) d.
        let limit = |value: i64| vec![Piece { start: 0, slope: 0, offset: value }];
        let below = self.below(&x, &limit(value * divisor), 0)?;
        let within = self.below(&x, &limit((value + 1) * divisor), 0)?;
        if matches!(op, Binary::Eq | Binary::Ne) {
            let same = both(&within, &self.without(&below));
            return Some(if op == Binary::Eq { same } else { self.without(&same) });
        }
        Some(match (is_left, op == Binary::Lt) {
            (true, true) => below,
            (true, false) => within,
            (false, true) => self.without(&within),
            (false, false) => self.without(&below),
        })
    }

    /// The value of each key, where it changes seldom.
    fn pointwise(&self, id: NodeId) -> Option<Over> {
        let node = self.program.nodes()[id.index()];
        let operands: Vec<&Over> =
            node.operands().map(|x| self.over[x.index()].as_ref()).collect::<Option<_>>()?;
        let mut places = vec![0usize; operands.len()];
        let mut pieces: Vec<Piece> = Vec::new();
        let mut set: Vec<Range<i64>> = Vec::new();
        for k in 0..self.keys {
            let mut values = operands.iter().zip(&mut places).map(|(over, place)| value_at(over, k, place));
            let mut next = || values.next().unwrap_or(Value::I32(0));
            let value = match node {
                Node::Load(array, indices) => {
                    let array = usize::from(array);
                    let indices = indices.map(|x| x.map_or(0, |_| next().int()));
                    self.inputs.arrays()[array].load(self.program.arrays()[array].rank, indices)
                }
                Node::Unary(op, _) => ops::unary(op, next(), Precision::F32),
                Node::Binary(op, ..) => {
                    let first = next();
                    ops::binary(op, first, next(), Precision::F32)
                }
                Node::Const(_) | Node::Var(_) | Node::Scalar(_) | Node::Select(..) => return None,
            };
            match value {
                Value::I32(value) => {
                    if pieces.last().is_none_or(|last| last.offset != i64::from(value)) {
                        pieces.push(Piece { start: k, slope: 0, offset: value.into() });
                    }
                }
                Value::Bool(true) => match set.last_mut() {
                    Some(last) if last.end == k => last.end = k + 1,
                    _ => set.push(k..k + 1),
                },
                Value::Bool(false) => {}
                Value::F32(_) => return None,
            }
            if pieces.len() > MOST_PIECES || set.len() > MOST_PIECES {
                return None;
            }
        }
        Some(if self.program.ty(id) == Type::Bool { Over::Set(set) } else { Over::Pieces(pieces) })
    }

    /// An expression of pieces that is a line wherever its operands are.
    fn lines(&self, operands: &[NodeId], line: impl Fn(&[Piece]) -> Option<(i64, i64)>) -> Option<Over> {
        let pieces = operands.iter().map(|&x| self.pieces(x)).collect::<Option<Vec<_>>>()?;
        let mut all = Vec::new();
        for start in starts(&pieces) {
            let own: Vec<_> = pieces.iter().map(|pieces| piece_at(pieces, start)).collect();
            let (slope, offset) = line(&own)?;
            all.push(Piece { start, slope, offset });
        }
        self.fitting(all)
    }

    fn quotients(&self, pieces: &[Piece], divisor: i64) -> Option<Over> {
        let mut all = Vec::new();
        for (i, piece) in pieces.iter().enumerate() {
            let end = pieces.get(i + 1).map_or(self.keys, |next| next.start);
            let mut k = piece.start;
            while k < end {
                let value = piece.at(k).div_euclid(divisor);
                all.push(Piece { start: k, slope: 0, offset: value });
                if all.len() > MOST_PIECES {
                    return None;
                }
                k = match piece.slope {
                    0 => end,
                    // The first key of the next quotient.
                    slope if slope > 0 => {
                        ((value + 1) * divisor - piece.offset + slope - 1).div_euclid(slope).max(k + 1)
                    }
                    slope => ((piece.offset - value * divisor).div_euclid(-slope) + 1).max(k + 1),
                };
            }
        }
        self.fitting(all)
    }

    fn rests(&self, x: NodeId, divisor: i64) -> Option<Over> {
        let pieces = self.pieces(x)?;
        let Over::Pieces(quotients) = self.quotients(&pieces, divisor)? else { return None };
        let mut all = Vec::new();
        for start in starts(&[pieces.clone(), quotients.clone()]) {
            let (own, quotient) = (piece_at(&pieces, start), piece_at(&quotients, start));
            all.push(Piece { start, slope: own.slope, offset: own.offset - quotient.offset * divisor });
        }
        self.fitting(all)
    }

    /// Where `a < b + margin`.
    fn below(&self, a: &[Piece], b: &[Piece], margin: i64) -> Option<Vec<Range<i64>>> {
        let mut set: Vec<Range<i64>> = Vec::new();
        let starts = starts(&[a.to_vec(), b.to_vec()]);
        for (i, &start) in starts.iter().enumerate() {
            let end = starts.get(i + 1).copied().unwrap_or(self.keys);
            let (x, y) = (piece_at(a, start), piece_at(b, start));
            // slope * k < right
            let (slope, right) = (x.slope - y.slope, y.offset - x.offset + margin);
            let found = match slope {
                0 => {
                    if 0 < right {
                        start..end
                    } else {
                        start..start
                    }
                }
                slope if slope > 0 => start..(right + slope - 1).div_euclid(slope).clamp(start, end),
                slope => ((-right).div_euclid(-slope) + 1).clamp(start, end)..end,
            };
            if found.start < found.end {
                match set.last_mut() {
                    Some(last) if last.end == found.start => last.end = found.end,
                    _ => set.push(found),
                }
            }
            if set.len() > MOST_PIECES {
                return None;
            }
        }
        Some(set)
    }

    /// `yes` where the key is in `set`, else `no`.
    fn chosen(&self, set: &[Range<i64>], yes: Vec<Piece>, no: Vec<Piece>) -> Option<Vec<Piece>> {
        let mut edges = starts(&[yes.clone(), no.clone()]);
        edges.extend(set.iter().flat_map(|set| [set.start, set.end]).filter(|&edge| edge < self.keys));
        edges.sort_unstable();
        edges.dedup();
        let pieces = edges.into_iter().map(|start| {
            let inside = set.iter().any(|set| set.contains(&start));
            Piece { start, ..piece_at(if inside { &yes } else { &no }, start) }
        });
        Some(pieces.collect())
    }

    /// The pieces, if their values are i32 and they are not too many.
    fn fitting(&self, pieces: Vec<Piece>) -> Option<Over> {
        let fits = |x: i64| i32::try_from(x).is_ok();
        for (i, piece) in pieces.iter().enumerate() {
            let last = pieces.get(i + 1).map_or(self.keys, |next| next.start) - 1;
            if !fits(piece.slope) || !fits(piece.at(piece.start)) || !fits(piece.at(last)) {
                return None;
            }
        }
        (pieces.len() <= MOST_PIECES).then_some(Over::Pieces(pieces))
    }

    fn bounded(&self, set: Vec<Range<i64>>) -> Option<Over> {
        (set.len() <= MOST_PIECES).then_some(Over::Set(set))
    }

    fn one(&self, id: NodeId) -> Option<i64> {
        match self.over[id.index()] {
            Some(Over::One(Value::I32(value))) => Some(value.into()),
            Some(Over::One(Value::F32(_) | Value::Bool(_)) | Over::Pieces(_) | Over::Set(_)) | None => None,
        }
    }

    fn pieces(&self, id: NodeId) -> Option<Vec<Piece>> {
        match self.over[id.index()].as_ref()? {
            Over::One(Value::I32(value)) => Some(vec![Piece { start: 0, slope: 0, offset: (*value).into() }]),
            Over::Pieces(pieces) => Some(pieces.clone()),
            Over::One(Value::F32(_) | Value::Bool(_)) | Over::Set(_) => None,
        }
    }

    fn set(&self, id: NodeId) -> Option<Vec<Range<i64>>> {
        match self.over[id.index()].as_ref()? {
            Over::One(Value::Bool(true)) => Some(self.without(&[])),
            Over::One(Value::Bool(false)) => Some(Vec::new()),
            Over::Set(set) => Some(set.clone()),
            Over::One(Value::F32(_) | Value::I32(_)) | Over::Pieces(_) => None,
        }
    }

    /// The keys that are not in `set`.
    fn without(&self, set: &[Range<i64>]) -> Vec<Range<i64>> {
        let mut rest = Vec::new();
        let mut from = 0;
        for part in set {
            if from < part.start {
                rest.push(from..part.start);
            }
            from = part.end;
        }
        if from < self.keys {
            rest.push(from..self.keys);
        }
        rest
    }
}

fn value_at(over: &Over, k: i64, place: &mut usize) -> Value {
    match over {
        Over::One(value) => *value,
        Over::Pieces(pieces) => {
            while pieces.get(*place + 1).is_some_and(|next| next.start <= k) {
                *place += 1;
            }
            Value::I32(pieces[*place].at(k) as i32)
        }
        Over::Set(set) => {
            while set.get(*place).is_some_and(|part| part.end <= k) {
                *place += 1;
            }
            Value::Bool(set.get(*place).is_some_and(|part| part.contains(&k)))
        }
    }
}

/// Where a piece of any begins.
fn starts(pieces: &[Vec<Piece>]) -> Vec<i64> {
    let mut starts: Vec<_> = pieces.iter().flatten().map(|piece| piece.start).collect();
    starts.sort_unstable();
    starts.dedup();
    starts
}

fn piece_at(pieces: &[Piece], k: i64) -> Piece {
    pieces[pieces.partition_point(|piece| piece.start <= k).saturating_sub(1)]
}

fn both(a: &[Range<i64>], b: &[Range<i64>]) -> Vec<Range<i64>> {
    let mut all = Vec::new();
    for x in a {
        for y in b {
            let part = x.start.max(y.start)..x.end.min(y.end);
            if part.start < part.end {
                all.push(part);
            }
        }
    }
    all
}

fn either(a: &[Range<i64>], b: &[Range<i64>]) -> Vec<Range<i64>> {
    let mut parts: Vec<_> = a.iter().chain(b).cloned().collect();
    parts.sort_unstable_by_key(|part| part.start);
    let mut all: Vec<Range<i64>> = Vec::new();
    for part in parts {
        match all.last_mut() {
            Some(last) if part.start <= last.end => last.end = last.end.max(part.end),
            _ => all.push(part),
        }
    }
    all
}
