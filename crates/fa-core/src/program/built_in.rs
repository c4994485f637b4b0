//! Programs that are what kernels have code of their own for: bands around a diagonal, and soft caps.

use super::error::ProgramError;
use super::graph::Graph;
use super::node::{Binary, Const, Node, NodeId, Unary};
use super::ops::Value;
use super::types::{Type, Var};
use super::whole::{Program, Results, copied_nodes};
use crate::Mask;

/// A mask that sees the keys from `low` to `high` places right of a query's diagonal, `None` for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Band {
    /// The first key that is seen.
    pub low: Option<i64>,
    /// The last key that is seen.
    pub high: Option<i64>,
    /// Whether query `q` has its diagonal at key `q + off`; else at key `q`.
    pub aligned: bool,
}

impl Band {
    /// The mask that sees the same where diagonals lie `offset` keys right of the bottom-right alignment;
    /// `None` for a band without keys. One that does not hold its diagonal lies around another.
    pub(crate) fn mask(&self, offset: i64) -> Option<Mask> {
        let shift = match (self.low, self.high) {
            (Some(low), _) if low > 0 => low,
            (_, Some(high)) if high < 0 => high,
            (Some(_) | None, Some(_) | None) => 0,
        };
        let side = |limit: Option<i64>| limit.map(u32::try_from).transpose().ok();
        let left = side(self.low.map(|low| shift - low))?;
        let right = side(self.high.map(|high| high - shift))?;
        Some(Mask::band(left, right).with_offset(offset + shift))
    }
}

/// Limits of a band below this have no sum that wraps at the lengths that tensors have.
const MOST: i64 = 1 << 29;

/// Comparisons of a band, and operations within one another in each.
const MOST_COMPARED: usize = 64;
const MOST_NESTED: usize = 12;

/// `q * queries + k * keys + off * offsets + constant`.
#[derive(Clone, Copy)]
struct Line {
    queries: i64,
    keys: i64,
    offsets: i64,
    constant: i64,
}

impl Line {
    const ZERO: Line = Line { queries: 0, keys: 0, offsets: 0, constant: 0 };

    fn plus(self, other: Line, times: i64) -> Option<Line> {
        let sum = Line {
            queries: self.queries + times * other.queries,
            keys: self.keys + times * other.keys,
            offsets: self.offsets + times * other.offsets,
            constant: self.constant + times * other.constant,
        };
        let all = [sum.queries, sum.keys, sum.offsets];
        (all.iter().all(|x| x.abs() <= 1) && sum.constant.abs() < MOST).then_some(sum)
    }
}

impl Program {
    /// The cap where the score is `cap * tanh(s / cap)`, with these values of the scalars.
    pub(crate) fn softcap(&self, scalars: &[Value]) -> Option<f64> {
        let Node::Binary(Binary::Mul, a, b) = self.node(self.score()?) else { return None };
        let tanh = |x: NodeId| {
            if let Node::Unary(Unary::Tanh, of) = self.node(x) { Some(of) } else { None }
        };
        let (cap, of) = match (tanh(a), tanh(b)) {
            (Some(of), None) => (self.number(b, scalars)?, of),
            (None, Some(of)) => (self.number(a, scalars)?, of),
            (Some(_), Some(_)) | (None, None) => return None,
        };
        let is_score = |x: NodeId| self.node(x) == Node::Var(Var::S);
        let Node::Binary(op, x, y) = self.node(of) else { return None };
        let same = if op == Binary::Div {
            is_score(x) && self.number(y, scalars)? == cap
        } else if op == Binary::Mul && (is_score(x) || is_score(y)) {
            // A reciprocal is rounded to f32.
            let by = self.number(if is_score(x) { y } else { x }, scalars)?;
            (by * cap - 1.0).abs() < 1e-6
        } else {
            false
        };
        (same && cap.is_normal() && cap > 0.0).then_some(cap)
    }

    /// The band where the mask is one, with these values of the scalars: comparisons of `k - q`, or of
    /// `k - q - off`, with numbers, joined by `and`. One of chunks is a band beside them
    /// ([`Program::in_chunks`]).
    pub(crate) fn band(&self, scalars: &[Value]) -> Option<Band> {
        let mut band: Option<Band> = None;
        let mut in_chunks = false;
        let mut waiting = vec![self.mask()?];
        for _ in 0..MOST_COMPARED {
            let Some(id) = waiting.pop() else {
                return match (band, in_chunks) {
                    (Some(band), _) => Some(band),
                    // Every key, whatever the diagonal.
                    (None, false) => Some(Band { aligned: true, ..Band::default() }),
                    (None, true) => None,
                };
            };
            let Node::Binary(op, a, b) = self.node(id) else { return None };
            if op == Binary::And {
                waiting.extend([a, b]);
                continue;
            }
            if self.is_chunk(id) {
                in_chunks = true;
                continue;
            }
            if !matches!(op, Binary::Lt | Binary::Le) || self.ty(a) != Type::I32 {
                return None;
            }
            let (strict, limit) = (i64::from(op == Binary::Lt), self.line(b, scalars, MOST_NESTED)?);
            if let Node::Unary(Unary::Abs, x) = self.node(a) {
                // |x| <= b is x <= b and -x <= b.
                let x = self.line(x, scalars, MOST_NESTED)?;
                for x in [x, Line::ZERO.plus(x, -1)?] {
                    narrow(&mut band, x.plus(limit, -1)?, strict)?;
                }
            } else {
                narrow(&mut band, self.line(a, scalars, MOST_NESTED)?.plus(limit, -1)?, strict)?;
            }
        }
        None
    }

    /// The parts of the mask that say which chunk of keys a query sees, joined by `and` with the others.
    fn in_chunks(&self) -> Vec<NodeId> {
        let (mut found, mut waiting) = (Vec::new(), Vec::from_iter(self.mask()));
        while let Some(id) = waiting.pop() {
            if let Node::Binary(Binary::And, a, b) = self.node(id) {
                waiting.extend([b, a]);
            } else if self.is_chunk(id) {
                found.push(id);
            }
        }
        found
    }

    /// Whether a truth value is that a key lies in a query's chunk, or not before it: `q // c == k // c`,
    /// `q // c <= k // c`, `q - q % c <= k` or `q // c * c <= k`, also of `q + off` in place of `q`.
    fn is_chunk(&self, id: NodeId) -> bool {
        let Node::Binary(op @ (Binary::Eq | Binary::Le), a, b) = self.node(id) else { return false };
        if let (Some((x, size)), Some((y, other))) = (self.chunk(a), self.chunk(b)) {
            let swapped = op == Binary::Eq && self.is_key(x) && self.is_query(y);
            return size == other && (swapped || self.is_query(x) && self.is_key(y));
        }
        op == Binary::Le && self.begins_chunk(a) && self.is_key(b)
    }

    /// Of `x // c` both.
    fn chunk(&self, id: NodeId) -> Option<(NodeId, NodeId)> {
        let Node::Binary(Binary::FloorDiv, x, size) = self.node(id) else { return None };
        self.is_number(size).then_some((x, size))
    }

    fn begins_chunk(&self, id: NodeId) -> bool {
        if let Node::Binary(Binary::Mul, a, b) = self.node(id) {
            let of = |x, y| self.chunk(x).is_some_and(|(x, size)| self.is_query(x) && size == y);
            return of(a, b) || of(b, a);
        }
        let Node::Binary(Binary::Sub, x, rest) = self.node(id) else { return false };
        let Node::Binary(Binary::FloorMod, of, size) = self.node(rest) else { return false };
        x == of && self.is_query(x) && self.is_number(size)
    }

    fn is_query(&self, id: NodeId) -> bool {
        let is = |x: NodeId, var| self.node(x) == Node::Var(var);
        if let Node::Binary(Binary::Add, a, b) = self.node(id) {
            return is(a, Var::Q) && is(b, Var::Off) || is(a, Var::Off) && is(b, Var::Q);
        }
        is(id, Var::Q)
    }

    fn is_key(&self, id: NodeId) -> bool {
        self.node(id) == Node::Var(Var::K)
    }

    fn is_number(&self, id: NodeId) -> bool {
        matches!(self.node(id), Node::Const(_) | Node::Scalar(_))
    }

    /// Whether results that stay beside a band name `off`.
    pub(crate) fn counts_from_diagonal(&self) -> bool {
        let mut needed = vec![false; self.nodes().len()];
        for root in [self.score(), self.weight()].into_iter().flatten().chain(self.in_chunks()) {
            needed[root.index()] = true;
        }
        (0..needed.len()).rev().any(|index| {
            let node = self.nodes()[index];
            if needed[index] {
                node.operands().for_each(|x| needed[x.index()] = true);
            }
            needed[index] && node == Node::Var(Var::Off)
        })
    }

    /// The same without the band of its mask, its score or both, with the same arrays and scalars; `None`
    /// where nothing is left.
    ///
    /// # Errors
    /// The limits, which the whole program is within.
    pub(crate) fn without(&self, band: bool, score: bool) -> Result<Option<Program>, ProgramError> {
        let made = || {
            let mut graph = Graph::new(self.arrays().to_vec(), self.scalars().to_vec());
            // The score is itself in the copy.
            let places = copied_nodes(self, &mut graph, |_, _| None)?;
            let at = |x: NodeId| places[x.index()];
            let mut mask = self.mask().map(at).filter(|_| !band);
            for chunk in self.in_chunks().into_iter().filter(|_| band).map(at) {
                mask = Some(mask.map_or(Ok(chunk), |mask| graph.binary(Binary::And, mask, chunk))?);
            }
            let left = Results {
                mask,
                score: self.score().map(at).filter(|_| !score),
                weight: self.weight().map(at),
            };
            if left.mask.or(left.score).or(left.weight).is_none() {
                return Ok(None);
            }
            Program::new(&graph, left).map(Some)
        };
        made().map_err(|problem| ProgramError::new(problem, "", 0..0))
    }

    fn node(&self, id: NodeId) -> Node {
        self.nodes()[id.index()]
    }

    fn number(&self, id: NodeId, scalars: &[Value]) -> Option<f64> {
        if let Node::Const(Const::F32(bits)) = self.node(id) {
            return Some(f32::from_bits(bits).into());
        }
        let Node::Scalar(scalar) = self.node(id) else { return None };
        if let Value::F32(value) = *scalars.get(usize::from(scalar))? { Some(value) } else { None }
    }

    fn line(&self, id: NodeId, scalars: &[Value], nested: usize) -> Option<Line> {
        let nested = nested.checked_sub(1)?;
        let number = |constant: i32| Line::ZERO.plus(Line { constant: constant.into(), ..Line::ZERO }, 1);
        match self.node(id) {
            Node::Const(value) => {
                if let Const::I32(value) = value {
                    number(value)
                } else {
                    None
                }
            }
            Node::Scalar(scalar) => {
                if let Value::I32(value) = *scalars.get(usize::from(scalar))? {
                    number(value)
                } else {
                    None
                }
            }
            Node::Var(Var::Q) => Some(Line { queries: 1, ..Line::ZERO }),
            Node::Var(Var::K) => Some(Line { keys: 1, ..Line::ZERO }),
            Node::Var(Var::Off) => Some(Line { offsets: 1, ..Line::ZERO }),
            Node::Unary(Unary::Neg, x) => Line::ZERO.plus(self.line(x, scalars, nested)?, -1),
            Node::Binary(op @ (Binary::Add | Binary::Sub), a, b) => {
                let times = if op == Binary::Add { 1 } else { -1 };
                self.line(a, scalars, nested)?.plus(self.line(b, scalars, nested)?, times)
            }
            Node::Var(_) | Node::Unary(..) | Node::Binary(..) | Node::Load(..) | Node::Select(..) => None,
        }
    }
}

/// Narrows a band to where `line <= 0`, or with `strict` of 1 `line < 0`.
fn narrow(band: &mut Option<Band>, line: Line, strict: i64) -> Option<()> {
    // That an index is not negative says nothing; sums of two may wrap.
    let is_index = matches!((line.queries, line.keys, line.offsets), (0, 0, 0) | (-1, 0, 0) | (0, -1, 0));
    if is_index && line.constant + strict <= 0 {
        return Some(());
    }
    // k - q - offsets + constant + strict <= 0, or the same of q - k.
    if line.keys == 0 || line.queries != -line.keys || line.offsets * line.keys > 0 {
        return None;
    }
    let aligned = line.offsets != 0;
    let own = band.get_or_insert(Band { aligned, ..Band::default() });
    if own.aligned != aligned {
        return None;
    }
    if line.keys == 1 {
        let limit = -line.constant - strict;
        own.high = Some(own.high.map_or(limit, |high| high.min(limit)));
    } else {
        let limit = line.constant + strict;
        own.low = Some(own.low.map_or(limit, |low| low.max(limit)));
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::super::eval::{Inputs, Point};
    use super::super::ops::Precision;
    use super::*;

    fn parsed(text: &str) -> Program {
        Program::parse(text).unwrap()
    }

    #[test]
    fn soft_caps_are_recognised_by_their_values() {
        let cap = |text: &str, scalars: &[Value]| parsed(text).softcap(scalars);
        assert_eq!(cap("30.0 * tanh(s / 30.0)", &[]), Some(30.0));
        assert_eq!(cap("tanh(s * 0.0625) * 16.0", &[]), Some(16.0));
        let scalar = "scalar c: f32; score = c * tanh(s / c);";
        assert_eq!(cap(scalar, &[Value::F32(15.0)]), Some(15.0));
        assert_eq!(cap(scalar, &[Value::F32(-15.0)]), None);
        assert_eq!(cap(scalar, &[Value::F32(f64::INFINITY)]), None);
        for text in [
            "30.0 * tanh(s / 20.0)",
            "30.0 * tanh(s)",
            "30.0 * tanh((s + 1.0) / 30.0)",
            "30.0 * tanh(s / 30.0) + 1.0",
            "s * tanh(s / 30.0)",
            "tanh(s) * tanh(s)",
        ] {
            assert_eq!(cap(text, &[]), None, "{text}");
        }
    }

    /// The mask of fa that sees what a band does.
    fn mask_of(band: Band, queries: i64, keys: i64) -> Option<Mask> {
        band.mask(if band.aligned { 0 } else { queries - keys })
    }

    #[test]
    fn bands_see_what_their_masks_see() {
        let scalars = [Value::I32(5)];
        let mut found = 0;
        for text in [
            "k <= q",
            "q >= k and q - k < 5",
            "k <= q + off",
            "scalar w: i32; mask = 0 <= q + off - k and q + off - k < w;",
            "scalar w: i32; mask = abs(q - k) <= w;",
            "abs(k - q - off) < 4",
            "k < q",
            "k - q <= 3 and q - k <= 2 and k <= q + 1",
            "not (k > q)",
            "k <= q - 7",
            "3 <= k - q and k - q - off + off < 6",
            "k - q - off > 2",
            "k < q - 2 and k > q",
            "k >= 0",
            "k >= 0 and q > -3 and k <= q + off",
            // No bands.
            "k <= 2 * q",
            "k <= q and k < 3",
            "k <= q or k < 3",
            "k <= q and k <= q + off",
            "k == q",
            "k >= 1",
            "k >= 1 and k <= q",
            "k <= q - off",
            "k < sk",
            "q // 2 >= k // 2",
        ] {
            let program = parsed(text);
            let own = &scalars[..program.scalars().len()];
            let Some(band) = program.band(own) else { continue };
            found += 1;
            let inputs = Inputs::new(&program, Vec::new(), own.to_vec()).unwrap();
            for (queries, keys) in [(1, 1), (9, 9), (5, 12), (12, 5)] {
                let Some(mask) = mask_of(band, queries, keys) else {
                    assert!(band.high < band.low, "{text}: {band:?}");
                    continue;
                };
                for q in 0..queries {
                    for k in 0..keys {
                        let at = Point {
                            q: q as i32,
                            k: k as i32,
                            sq: queries as i32,
                            sk: keys as i32,
                            off: (keys - queries) as i32,
                            ..Point::default()
                        };
                        let sees = program.eval(&inputs, &at, Precision::F64).visible;
                        let got = mask.visible(q as usize, k as usize, queries as usize, keys as usize);
                        assert_eq!(got, sees, "{text}: {band:?} {mask}, query {q} of {queries}, key {k}");
                    }
                }
            }
        }
        assert_eq!(found, 15);
    }

    #[test]
    fn bands_of_chunks_leave_the_chunks() {
        let scalars = [Value::I32(7)];
        for (text, left) in [
            ("q // 7 == k // 7 and k <= q", "q // 7 == k // 7"),
            ("k <= q and k // 7 == q // 7", "k // 7 == q // 7"),
            ("k <= q + off and (q + off) // 7 == k // 7", "(q + off) // 7 == k // 7"),
            ("(q - q % 7) <= k and k <= q", "q - q % 7 <= k"),
            ("k >= q // 7 * 7 and q >= k and q - k < 5", "q // 7 * 7 <= k"),
            ("q // 7 <= k // 7 and k <= q", "q // 7 <= k // 7"),
            ("scalar c: i32; mask = q // c == k // c and k <= q;", "scalar c: i32; mask = q // c == k // c;"),
            ("k <= q and q // 7 == k // 7 and q // 8 == k // 8", "q // 7 == k // 7 and q // 8 == k // 8"),
        ] {
            let program = parsed(text);
            let own = &scalars[..program.scalars().len()];
            let mask = mask_of(program.band(own).unwrap(), 40, 40).unwrap();
            let rest = program.without(true, false).unwrap().unwrap();
            assert_eq!(rest, parsed(left), "{text}");
            let inputs = Inputs::new(&program, Vec::new(), own.to_vec()).unwrap();
            for (q, k) in (0..40).flat_map(|q| (0..40).map(move |k| (q, k))) {
                let at = Point { q, k, sq: 40, sk: 40, ..Point::default() };
                let sees = |own: &Program| own.eval(&inputs, &at, Precision::F64).visible;
                let seen = mask.visible(q as usize, k as usize, 40, 40) && sees(&rest);
                assert_eq!(seen, sees(&program), "{text}: query {q}, key {k}");
            }
        }
        for text in [
            "q // 7 == k // 7",
            "q // 7 == k // 8 and k <= q",
            "k // 7 <= q // 7 and k <= q",
            "q // 7 != k // 7 and k <= q",
            "q - q % 7 <= k - 1 and k <= q",
            "q - k % 7 <= k and k <= q",
            "(q + 1) // 7 == k // 7 and k <= q",
            "(q // 7 == k // 7 or k < 3) and k <= q",
        ] {
            assert!(parsed(text).band(&[]).is_none(), "{text}");
        }
    }

    #[test]
    fn what_is_left_keeps_its_arrays() {
        let text = "array a: f32[_]; scalar c: f32; mask = k <= q and a[k] > 0.0; score = c * tanh(s / c);";
        let program = parsed(text);
        let left = program.without(false, true).unwrap().unwrap();
        assert_eq!((left.arrays(), left.scalars()), (program.arrays(), program.scalars()));
        assert!(left.score().is_none() && left.mask().is_some());
        assert!(program.without(true, true).unwrap().is_none());
        assert!(parsed("mask = k <= q; score = s + f32(off);").counts_from_diagonal());
        assert!(!parsed("mask = k <= q + off; score = s + 1.0;").counts_from_diagonal());
        assert!(parsed("k <= q and (q + off) // 4 == k // 4").counts_from_diagonal());
    }
}
