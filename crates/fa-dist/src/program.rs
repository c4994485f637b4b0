//! What a rank does, as data: transfers, products and sums over named buffers.
//!
//! The program of a rank is made once. The CPU and a GPU interpret the same steps (`run.rs`), the cost
//! model simulates them ([`crate::cost`]), and the tests of this crate execute them on sets of (query, key)
//! pairs.

use std::ops::Range;

use fa_core::{Dtype, Problem, TensorLayout};

/// A tensor of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Buffer {
    /// The rank's queries.
    Q,
    /// The rank's keys.
    K,
    /// The rank's values.
    V,
    /// O of the rank's queries.
    Out,
    /// LSE of the rank's queries.
    Lse,
    /// Gradient of O.
    Dout,
    /// Gradient of the LSE.
    Dlse,
    /// Gradient of Q.
    Dq,
    /// Gradient of K.
    Dk,
    /// Gradient of V.
    Dv,
    /// Gradient of the sinks, over the rows and heads that the rank computes: its head is a query head.
    Dsinks,
    /// Gradient of an array of the problem's program, by its number there: of the whole, packed.
    Darray(usize),
    /// Memory of the program, by its number in [`Program::scratch`].
    Scratch(usize),
}

/// The element type of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cell {
    /// The problem's own type.
    Own,
    /// f32.
    F32,
}

impl Cell {
    /// Bytes of an element.
    pub const fn bytes(self, own: Dtype) -> usize {
        match self {
            Cell::Own => own.bytes(),
            Cell::F32 => 4,
        }
    }
}

/// A buffer's shape: `[batch, rows, heads, dim]`, in memory in this order or heads before rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Independent sequences.
    pub batch: usize,
    /// Rows of a sequence.
    pub rows: usize,
    /// Heads.
    pub heads: usize,
    /// Elements of a row of a head; 1 for LSE.
    pub dim: usize,
    /// Element type.
    pub cell: Cell,
    /// Whether heads come before rows.
    pub order: TensorLayout,
}

impl Shape {
    /// Elements.
    pub fn elements(&self) -> usize {
        self.batch * self.rows * self.heads * self.dim
    }
}

/// Some rows of some heads of a buffer, in all sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// The buffer.
    pub buffer: Buffer,
    /// Rows.
    pub rows: Range<usize>,
    /// Heads.
    pub heads: Range<usize>,
}

impl View {
    /// A view.
    pub fn of(buffer: Buffer, rows: &Range<usize>, heads: &Range<usize>) -> View {
        View { buffer, rows: rows.clone(), heads: heads.clone() }
    }

    /// Whether both have an element in common.
    fn meets(&self, other: &View) -> bool {
        let meet = |a: &Range<usize>, b: &Range<usize>| a.start.max(b.start) < a.end.min(b.end);
        self.buffer == other.buffer && meet(&self.rows, &other.rows) && meet(&self.heads, &other.heads)
    }
}

/// What the queries of a call of a kernel see: its problem, and which heads and rows of the whole it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// The kernel's problem.
    pub problem: Problem,
    /// Query heads of the whole problem.
    pub heads: Range<usize>,
    /// Where its packed sequences begin, queries and keys, where the plan knows it.
    pub starts: Option<[Vec<i32>; 2]>,
    /// Scalars of its program by name: what variables are in the whole, or begin at.
    pub places: Vec<(&'static str, i32)>,
    /// Arrays of its program of which it has its own elements alone, by their numbers in the whole's program.
    pub arrays: Vec<(usize, Window)>,
}

/// Axes of an array; those beyond its rank have one index.
pub const AXES: usize = 4;

/// A box of an array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// Indices of the array's axes.
    pub extents: [usize; AXES],
    /// Those of the box.
    pub ranges: [Range<usize>; AXES],
}

impl Window {
    /// All of an array.
    pub fn whole(extents: [usize; AXES]) -> Window {
        Window { extents, ranges: extents.map(|extent| 0..extent) }
    }

    /// Elements.
    pub fn elements(&self) -> usize {
        self.ranges.iter().map(Range::len).product()
    }

    /// Whether both have an element in common.
    pub(crate) fn meets(&self, other: &Window) -> bool {
        let mut pairs = self.ranges.iter().zip(&other.ranges);
        pairs.all(|(a, b)| a.start.max(b.start) < a.end.min(b.end))
    }

    /// The same box of an array with as few axes as say where it is: axes that are whole are one with those
    /// before them, so that a row of the last axis is as long a stretch without gaps as there is.
    pub(crate) fn merged(&self) -> Window {
        let mut axes: Vec<(usize, Range<usize>)> =
            self.extents.iter().copied().zip(self.ranges.iter().cloned()).collect();
        for axis in (1..AXES).rev() {
            let (extent, range) = axes[axis].clone();
            if range != (0..extent) {
                continue;
            }
            let (before, of) = axes[axis - 1].clone();
            axes[axis - 1] = (before * extent, of.start * extent..of.end * extent);
            axes.remove(axis);
        }
        while axes.len() < AXES {
            axes.insert(0, (1, 0..1));
        }
        let extents = std::array::from_fn(|axis| axes[axis].0);
        Window { extents, ranges: std::array::from_fn(|axis| axes[axis].1.clone()) }
    }

    /// The stretches without gaps: elements before each in the box, packed, and in the array, and its own.
    pub(crate) fn stretches(&self) -> Vec<(usize, usize, usize)> {
        let Window { extents: [_, b, c, d], ranges: [first, second, third, last] } = self.merged();
        let (mut packed, len, mut all) = (0, last.len(), Vec::new());
        for i in first {
            for j in second.clone() {
                for k in third.clone() {
                    all.push((packed, ((i * b + j) * c + k) * d + last.start, len));
                    packed += len;
                }
            }
        }
        all
    }
}

/// One thing that a rank does.
// Of a program's hundred steps half are backwards.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// Adds up in f32, in the order given, and rounds once; without parts it writes zeros. One part is a
    /// copy.
    Sum {
        /// What is added up.
        parts: Vec<View>,
        /// The sum.
        to: View,
    },
    /// Writes -inf: the LSE of rows that see nothing.
    Nothing {
        /// Where.
        to: View,
    },
    /// O and LSE of some rows over some keys.
    Forward {
        /// Its problem.
        part: Part,
        /// Q.
        q: View,
        /// K.
        k: View,
        /// V.
        v: View,
        /// O.
        out: View,
        /// LSE, packed.
        lse: View,
    },
    /// Gradients of some rows and keys, from O and LSE over all keys.
    Backward {
        /// Its problem.
        part: Part,
        /// Q, K, V, O, LSE (packed) and dO.
        inputs: [View; 6],
        /// dQ, dK and dV.
        outputs: [View; 3],
        /// The gradient of its heads' sinks over its rows.
        dsinks: Option<Box<View>>,
        /// The gradient of the LSE, packed, where it has one.
        dlse: Option<Box<View>>,
        /// The gradients of arrays that its scores read, by their numbers in the whole's program: each of
        /// what the part has of the array, packed.
        darrays: Vec<(usize, View)>,
    },
    /// Combines O and LSE over different keys.
    Merge {
        /// O and LSE (packed) of each part.
        parts: Vec<[View; 2]>,
        /// O.
        out: View,
        /// LSE, packed.
        lse: View,
        /// Whether the sinks join the result.
        sinks: bool,
    },
    /// Copies a box of an array, packed in f32, to its place in the array.
    Place {
        /// The box.
        from: View,
        /// The array.
        to: View,
        /// Where the box is.
        window: Window,
    },
    /// Sends and receives, all at once; also to the rank itself. Between two ranks messages arrive in the
    /// order of sending.
    Exchange {
        /// To whom, and what.
        sends: Vec<(usize, View)>,
        /// From whom, and where to.
        recvs: Vec<(usize, View)>,
    },
}

impl Op {
    /// The name in tables of times.
    pub const fn name(&self) -> &'static str {
        match self {
            Op::Sum { .. } => "sum",
            Op::Nothing { .. } => "fill",
            Op::Forward { .. } => "forward",
            Op::Backward { .. } => "backward",
            Op::Merge { .. } => "merge",
            Op::Place { .. } => "place",
            Op::Exchange { .. } => "exchange",
        }
    }

    /// What it reads.
    pub fn reads(&self) -> Vec<&View> {
        match self {
            Op::Sum { parts, .. } => parts.iter().collect(),
            Op::Nothing { .. } => Vec::new(),
            Op::Forward { q, k, v, .. } => vec![q, k, v],
            Op::Backward { inputs, dlse, .. } => inputs.iter().chain(dlse.as_deref()).collect(),
            Op::Merge { parts, .. } => parts.iter().flatten().collect(),
            Op::Place { from, .. } => vec![from],
            Op::Exchange { sends, .. } => sends.iter().map(|(_, view)| view).collect(),
        }
    }

    /// What it writes.
    pub fn writes(&self) -> Vec<&View> {
        match self {
            Op::Sum { to, .. } | Op::Nothing { to } | Op::Place { to, .. } => vec![to],
            Op::Forward { out, lse, .. } | Op::Merge { out, lse, .. } => vec![out, lse],
            Op::Backward { outputs, dsinks, darrays, .. } => {
                let darrays = darrays.iter().map(|(_, view)| view);
                outputs.iter().chain(dsinks.as_deref()).chain(darrays).collect()
            }
            Op::Exchange { recvs, .. } => recvs.iter().map(|(_, view)| view).collect(),
        }
    }
}

/// A queue of a rank: steps of one queue run in order, those of two side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// The caller's stream.
    Compute,
    /// The stream of copies and transfers.
    Transfer,
}

/// An op, its queue, and what it waits for in the other queue.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Its queue.
    pub lane: Lane,
    /// The step of the other queue that has to be done before, by its number.
    pub after: Option<usize>,
    /// What is done.
    pub op: Op,
}

/// The steps of one rank for one pass, in an order in which they can be run one by one.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// The rank.
    pub rank: usize,
    /// Ranks.
    pub world: usize,
    /// Element type of the problem.
    pub dtype: Dtype,
    /// The caller's tensors that the pass has, as this rank's shards.
    pub tensors: Vec<(Buffer, Shape)>,
    /// The program's own memory.
    pub scratch: Vec<Shape>,
    /// Numbers of those that lie right behind the one before: messages of both may be one.
    pub joined: Vec<usize>,
    /// What is done.
    pub steps: Vec<Step>,
}

/// A part of a buffer without gaps: bytes from `offset` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The other rank.
    pub peer: usize,
    /// The buffer, one of the program's own.
    pub buffer: Buffer,
    /// Bytes before it.
    pub offset: usize,
    /// Its bytes.
    pub bytes: usize,
}

impl Program {
    /// A buffer's shape.
    ///
    /// # Panics
    /// For a buffer that the pass does not have, which no program names.
    pub fn shape(&self, buffer: Buffer) -> Shape {
        match buffer {
            Buffer::Scratch(number) => self.scratch[number],
            Buffer::Q
            | Buffer::K
            | Buffer::V
            | Buffer::Out
            | Buffer::Lse
            | Buffer::Dout
            | Buffer::Dlse
            | Buffer::Dq
            | Buffer::Dk
            | Buffer::Dv
            | Buffer::Dsinks
            | Buffer::Darray(_) => {
                let own = self.tensors.iter().find(|(own, _)| *own == buffer);
                own.unwrap_or_else(|| panic!("the pass has no {buffer:?}")).1
            }
        }
    }

    /// Bytes of the program's own memory.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch.iter().map(|shape| shape.elements() * shape.cell.bytes(self.dtype)).sum()
    }

    /// Bytes that a view has.
    pub fn bytes(&self, view: &View) -> usize {
        let shape = self.shape(view.buffer);
        shape.batch * view.rows.len() * view.heads.len() * shape.dim * shape.cell.bytes(self.dtype)
    }

    /// The messages of a view: one for each stretch without gaps. Sender and receiver cut alike, as their
    /// buffers are of one order.
    pub fn pieces(&self, peer: usize, view: &View) -> Vec<Piece> {
        let Shape { batch, rows, heads, dim, cell, order } = self.shape(view.buffer);
        let width = dim * cell.bytes(self.dtype);
        let piece = |row: usize, bytes: usize| Piece {
            peer,
            buffer: view.buffer,
            offset: row * width,
            bytes: bytes * width,
        };
        let (first, count) = (view.rows.start, view.rows.len());
        match order {
            TensorLayout::Bhsd => (0..batch)
                .flat_map(|b| view.heads.clone().map(move |h| (b * heads + h) * rows + first))
                .map(|row| piece(row, count))
                .collect(),
            TensorLayout::Bshd => {
                debug_assert_eq!(view.heads, 0..heads, "rows of some heads have gaps");
                (0..batch).map(|b| piece((b * rows + first) * heads, count * heads)).collect()
            }
        }
    }

    /// Bytes that this rank receives from others.
    pub fn received(&self) -> usize {
        let of = |step: &Step| match &step.op {
            Op::Exchange { recvs, .. } => {
                let others = recvs.iter().filter(|(peer, _)| *peer != self.rank);
                others.map(|(_, view)| self.bytes(view)).sum()
            }
            Op::Sum { .. }
            | Op::Nothing { .. }
            | Op::Forward { .. }
            | Op::Backward { .. }
            | Op::Merge { .. }
            | Op::Place { .. } => 0,
        };
        self.steps.iter().map(of).sum()
    }
}

/// Makes a program, and finds what each step has to wait for.
pub(crate) struct Builder {
    program: Program,
}

impl Builder {
    pub(crate) fn new((rank, world): (usize, usize), dtype: Dtype, tensors: Vec<(Buffer, Shape)>) -> Builder {
        let (scratch, joined, steps) = (Vec::new(), Vec::new(), Vec::new());
        Builder { program: Program { rank, world, dtype, tensors, scratch, joined, steps } }
    }

    /// New memory of the program.
    pub(crate) fn scratch(&mut self, shape: Shape) -> Buffer {
        self.program.scratch.push(shape);
        Buffer::Scratch(self.program.scratch.len() - 1)
    }

    /// New memory of the program, right behind the last.
    pub(crate) fn behind(&mut self, shape: Shape) -> Buffer {
        self.program.joined.push(self.program.scratch.len());
        self.scratch(shape)
    }

    /// Gives new memory another number of rows.
    pub(crate) fn resize(&mut self, number: usize, rows: usize) {
        self.program.scratch[number].rows = rows;
    }

    pub(crate) fn shape(&self, buffer: Buffer) -> Shape {
        self.program.shape(buffer)
    }

    /// All of a buffer.
    pub(crate) fn whole(&self, buffer: Buffer) -> View {
        let shape = self.shape(buffer);
        View { buffer, rows: 0..shape.rows, heads: 0..shape.heads }
    }

    /// Appends a step, unless it has nothing to do: after the last step of the other queue that writes what
    /// it touches, or reads what it writes.
    pub(crate) fn push(&mut self, lane: Lane, op: Op) {
        if op.writes().iter().chain(&op.reads()).all(|view| view.rows.is_empty() || view.heads.is_empty()) {
            return;
        }
        let conflicts = |earlier: &Step| {
            let (reads, writes) = (op.reads(), op.writes());
            let meets = |ours: &[&View], theirs: &[&View]| {
                ours.iter().any(|own| theirs.iter().any(|other| own.meets(other)))
            };
            let (their_reads, their_writes) = (earlier.op.reads(), earlier.op.writes());
            meets(&reads, &their_writes) || meets(&writes, &their_writes) || meets(&writes, &their_reads)
        };
        let mut before = self.program.steps.iter().enumerate().rev();
        let after = before.find(|(_, step)| step.lane != lane && conflicts(step)).map(|(index, _)| index);
        self.program.steps.push(Step { lane, after, op });
    }

    pub(crate) fn copy(&mut self, lane: Lane, from: View, to: View) {
        self.push(lane, Op::Sum { parts: vec![from], to });
    }

    pub(crate) fn finish(self) -> Program {
        self.program
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Elements go where their indices say, and a box is in as few stretches as there can be.
    #[test]
    fn boxes_of_arrays_are_stretches_of_their_elements() {
        for (extents, ranges, count) in [
            ([2, 3, 4, 5], [0..2, 0..3, 0..4, 0..5], 1),
            ([2, 3, 4, 5], [0..2, 1..3, 0..4, 0..5], 2),
            ([2, 3, 4, 5], [1..2, 1..3, 2..4, 1..5], 4),
            ([7, 1, 1, 1], [2..5, 0..1, 0..1, 0..1], 1),
            ([3, 8, 1, 1], [0..3, 2..6, 0..1, 0..1], 3),
            ([1, 3, 1, 6], [0..1, 1..2, 0..1, 0..6], 1),
        ] {
            let window = Window { extents, ranges };
            let [a, b, c, d] = window.ranges.clone();
            let mut want = Vec::new();
            for i in a {
                for j in b.clone() {
                    for k in c.clone() {
                        want.extend(
                            d.clone().map(|l| ((i * extents[1] + j) * extents[2] + k) * extents[3] + l),
                        );
                    }
                }
            }
            let stretches = window.stretches();
            let found: Vec<usize> = stretches.iter().flat_map(|(_, to, len)| *to..to + len).collect();
            assert_eq!((found, stretches.len()), (want, count), "{window:?}");
            let ends: Vec<usize> = stretches.iter().map(|(from, _, len)| from + len).collect();
            assert_eq!(ends.last(), Some(&window.elements()));
        }
    }
}
