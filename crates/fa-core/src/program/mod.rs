//! Masks and modifications of scores of the user's own: typed expressions as data.
//!
//! A [`Program`] is parsed from text. It says which keys a query sees (`mask`), what a scaled score becomes
//! (`score`), or both; it reads arrays and run-time scalars of the caller. Kernels get it as a generated
//! header ([`Program::cuda`]); the CPU evaluates it ([`Program::eval`]).
//!
//! ```
//! use fa_core::program::Program;
//!
//! // ALiBi, within a window of a run-time size.
//! let program = Program::parse(
//!     "array slope: f32[_];  scalar w: i32;
//!      let distance = q + off - k;
//!      mask = 0 <= distance < w;
//!      score = s - slope[h] * distance;",
//! )?;
//! assert_eq!(program.arrays()[0].rank, 1);
//! // The canonical text is the program: equal texts are equal programs.
//! assert_eq!(Program::parse(program.text())?, program);
//! # Ok::<(), fa_core::program::ProgramError>(())
//! ```
//!
//! The language is in `docs/programs.md`. No text of the user's reaches a compiler: the header is printed
//! from the nodes with names of its own, and every load clamps its indices to its array.

mod affine;
mod cuda;
mod cuda_tiles;
mod derive;
mod error;
mod eval;
mod forms;
mod graph;
mod intern;
mod lex;
mod ops;
mod owned;
mod parse;
mod print;
mod rows;
mod spans;
mod tiles;
mod types;

use std::hash::{Hash, Hasher};

pub use affine::ScoreClass;
pub use cuda::{HEADER, Operations};
pub use error::{ProgramError, ProgramProblem};
pub use eval::{ArrayData, ArrayView, InputError, Inputs, Outcome, Point};
pub use forms::{Axis, GradientForm};
pub use graph::{Binary, Const, Node, NodeId, Unary};
pub use intern::{Interned, MAX_INTERNED, TableFull};
pub use ops::{Precision, Value};
pub use owned::{OwnedArray, OwnedData, OwnedInputs};
pub use rows::MAX_INTERVALS;
pub use tiles::{MAX_SCANNED, Tile, TileState};
pub use types::{ArrayDecl, Deps, Element, ScalarDecl, Type, Var};

use graph::Graph;

/// The most operations, operands and constants of a program, shared ones once; derivatives don't count.
pub const MAX_NODES: usize = 256;

/// The most arrays of a program.
pub const MAX_ARRAYS: usize = 8;

/// The most run-time scalars of a program.
pub const MAX_SCALARS: usize = 8;

/// The most axes of an array.
pub const MAX_RANK: usize = 4;

/// The deepest nesting of a text's parentheses, calls and signs.
pub const MAX_NESTING: usize = 64;

/// The longest text, in bytes.
pub const MAX_TEXT: usize = 1 << 16;

/// The longest name, in characters.
pub const MAX_NAME: usize = 64;

/// A mask, a modification of scores, or both. Equal if the canonical texts are.
#[derive(Clone)]
pub struct Program {
    graph: Graph,
    /// How many nodes are the program's own; its derivatives follow.
    own: usize,
    mask: Option<NodeId>,
    score: Option<NodeId>,
    slope: Option<NodeId>,
    class: Option<ScoreClass>,
    gradients: Vec<Gradient>,
    text: String,
    hash: u64,
}

/// The derivative of the score by one load of an array that wants a gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gradient {
    /// The array, by its place in [`Program::arrays`].
    pub array: usize,
    /// The load.
    pub load: NodeId,
    /// d score / d load.
    pub slope: NodeId,
}

impl Program {
    /// A program from its text.
    ///
    /// # Errors
    /// What is wrong, and where.
    pub fn parse(text: &str) -> Result<Program, ProgramError> {
        parse::parse(text)
    }

    /// Both programs in one: the mask is where both are true, the score of `other` takes that of `self`. An
    /// array or scalar that both name is one.
    ///
    /// # Errors
    /// [`ProgramProblem::Conflict`] where they declare a name differently, and the limits.
    pub fn with(&self, other: &Program) -> Result<Program, ProgramError> {
        self.joined(other).map_err(|problem| ProgramError::new(problem, "", 0..0))
    }

    /// The arrays that it reads, by name. Slot `i` of a launch's parameters is array `i`.
    pub fn arrays(&self) -> &[ArrayDecl] {
        &self.graph.arrays
    }

    /// The run-time scalars, by name. Slot `i` of a launch's parameters is scalar `i`.
    pub fn scalars(&self) -> &[ScalarDecl] {
        &self.graph.scalars
    }

    /// Its nodes, operands first; those of derivatives are last.
    pub fn nodes(&self) -> &[Node] {
        &self.graph.nodes
    }

    /// The nodes that are its own, not derivatives', with what they are named by.
    pub fn own(&self) -> impl Iterator<Item = (NodeId, Node)> + '_ {
        self.nodes()[..self.own].iter().enumerate().map(|(index, &node)| (NodeId(index as u16), node))
    }

    /// How many of [`nodes`](Program::nodes) are its own, not derivatives'.
    pub fn own_nodes(&self) -> usize {
        self.own
    }

    /// The type of a node.
    pub fn ty(&self, node: NodeId) -> Type {
        self.graph.ty(node)
    }

    /// What a node depends on.
    pub fn deps(&self, node: NodeId) -> Deps {
        self.graph.deps[node.index()]
    }

    /// Whether a key is visible; `None` where the program has no mask.
    pub fn mask(&self) -> Option<NodeId> {
        self.mask
    }

    /// The modified score; `None` where the program leaves scores as they are.
    pub fn score(&self) -> Option<NodeId> {
        self.score
    }

    /// d score / d s; `None` where the program leaves scores as they are.
    pub fn slope(&self) -> Option<NodeId> {
        self.slope
    }

    /// How the modified score depends on the score; `None` where the program leaves scores as they are.
    pub fn class(&self) -> Option<ScoreClass> {
        self.class
    }

    /// The derivatives by the loads of arrays that want a gradient.
    pub fn gradients(&self) -> &[Gradient] {
        &self.gradients
    }

    /// The canonical text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// A hash of the canonical text, the same on every machine.
    pub fn hash64(&self) -> u64 {
        self.hash
    }

    /// The program of these results: nodes that nothing uses left out, in one order.
    fn new(graph: &Graph, mask: Option<NodeId>, score: Option<NodeId>) -> Result<Program, ProgramProblem> {
        let mut graph = graph.clone();
        let (mask, score) = hidden(&mut graph, mask, score)?;
        let (mut graph, [mask, score]) = canonical(&graph, [mask, score])?;
        let own = graph.nodes.len();
        limit("nodes", MAX_NODES, own)?;
        let text = print::text(&graph, mask, score);
        let derived = score.map(|score| derive::derivatives(&mut graph, score)).transpose()?;
        let (slope, gradients) =
            derived.map_or((None, Vec::new()), |(slope, gradients)| (Some(slope), gradients));
        let class = score.map(|score| affine::class(&mut graph, score)).transpose()?;
        let hash = graph::fnv(text.as_bytes());
        Ok(Program { graph, own, mask, score, slope, class, gradients, text, hash })
    }

    fn joined(&self, other: &Program) -> Result<Program, ProgramProblem> {
        let mut graph = Graph::new(self.graph.arrays.clone(), self.graph.scalars.clone());
        let conflict = |name: &str| ProgramProblem::Conflict { name: name.to_owned() };
        for decl in other.arrays() {
            match graph.arrays.iter().find(|own| own.name == decl.name) {
                Some(own) if own == decl => {}
                Some(_) => return Err(conflict(&decl.name)),
                None => graph.arrays.push(decl.clone()),
            }
        }
        for decl in other.scalars() {
            match graph.scalars.iter_mut().find(|own| own.name == decl.name) {
                Some(own) if own.ty == decl.ty => own.positive |= decl.positive,
                Some(_) => return Err(conflict(&decl.name)),
                None => graph.scalars.push(decl.clone()),
            }
        }
        let names: Vec<_> = graph.arrays.iter().map(|array| &array.name).collect();
        if let Some(both) = graph.scalars.iter().find(|scalar| names.contains(&&scalar.name)) {
            return Err(conflict(&both.name));
        }
        limit("arrays", MAX_ARRAYS, graph.arrays.len())?;
        limit("scalars", MAX_SCALARS, graph.scalars.len())?;
        let s = graph.var(Var::S)?;
        let (first_mask, first_score) = copied(self, &mut graph, s)?;
        let (second_mask, second_score) = copied(other, &mut graph, first_score.unwrap_or(s))?;
        let mask = match (first_mask, second_mask) {
            (Some(a), Some(b)) => Some(graph.binary(Binary::And, a, b)?),
            (a, b) => a.or(b),
        };
        Program::new(&graph, mask, second_score.or(first_score))
    }
}

/// `program`'s own nodes in `graph`, whose arrays and scalars include its own, with `s` as the score.
fn copied(
    program: &Program,
    graph: &mut Graph,
    s: NodeId,
) -> Result<(Option<NodeId>, Option<NodeId>), ProgramProblem> {
    let mut places: Vec<NodeId> = Vec::with_capacity(program.own);
    for &node in &program.graph.nodes[..program.own] {
        let at = |x: NodeId| places[x.index()];
        places.push(match node {
            Node::Const(value) => graph.value(Value::of(value))?,
            Node::Var(Var::S) => s,
            Node::Var(var) => graph.var(var)?,
            Node::Scalar(scalar) => {
                let name = &program.scalars()[usize::from(scalar)].name;
                let place = graph.scalars.iter().position(|own| own.name == *name).unwrap_or(0);
                graph.scalar(place)?
            }
            Node::Load(array, indices) => {
                let name = &program.arrays()[usize::from(array)].name;
                let place = graph.arrays.iter().position(|own| own.name == *name).unwrap_or(0);
                let indices: Vec<_> = indices.into_iter().flatten().map(at).collect();
                graph.load(place, &indices)?
            }
            Node::Unary(op, x) => graph.unary(op, at(x))?,
            Node::Binary(op, a, b) => graph.binary(op, at(a), at(b))?,
            Node::Select(c, a, b) => graph.select(at(c), at(a), at(b))?,
        });
    }
    let at = |x: NodeId| places[x.index()];
    Ok((program.mask.map(at), program.score.map(at)))
}

/// Moves what sets scores to -inf into the mask: `select(c, x, -inf)` is `x` where the key is visible. A
/// score that is `s` is none.
fn hidden(
    graph: &mut Graph,
    mut mask: Option<NodeId>,
    mut score: Option<NodeId>,
) -> Result<(Option<NodeId>, Option<NodeId>), ProgramProblem> {
    let minus_infinity = graph.float(f32::NEG_INFINITY)?;
    while let Some(root) = score
        && let Node::Select(condition, yes, no) = graph.nodes[root.index()]
        && !graph.deps[condition.index()].has(Deps::SCORE)
        && (yes == minus_infinity || no == minus_infinity)
    {
        let (visible, value) =
            if no == minus_infinity { (condition, yes) } else { (graph.unary(Unary::Not, condition)?, no) };
        mask = Some(mask.map_or(Ok(visible), |mask| graph.binary(Binary::And, mask, visible))?);
        score = Some(value);
    }
    if let Some(root) = score
        && graph.nodes[root.index()] == Node::Var(Var::S)
        && mask.is_some()
    {
        score = None;
    }
    Ok((mask, score))
}

/// The nodes that `results` need, in the order of a walk from them, with declarations by name.
fn canonical<const N: usize>(
    graph: &Graph,
    results: [Option<NodeId>; N],
) -> Result<(Graph, [Option<NodeId>; N]), ProgramProblem> {
    let (mut arrays, mut scalars) = (graph.arrays.clone(), graph.scalars.clone());
    arrays.sort_by(|a, b| a.name.cmp(&b.name));
    scalars.sort_by(|a, b| a.name.cmp(&b.name));
    for scalar in &mut scalars {
        scalar.positive = false;
    }
    let mut new = Graph::new(arrays, scalars);
    let mut places: Vec<Option<NodeId>> = vec![None; graph.nodes.len()];
    for root in results.into_iter().flatten() {
        // Without recursion: a chain of operations may be as deep as it is long.
        let mut waiting = vec![root];
        while let Some(&id) = waiting.last() {
            if places[id.index()].is_some() {
                waiting.pop();
                continue;
            }
            let node = graph.nodes[id.index()];
            let missing: Vec<_> =
                Graph::operands(node).filter(|operand| places[operand.index()].is_none()).collect();
            if missing.is_empty() {
                waiting.pop();
                places[id.index()] = Some(new.moved(graph, node, &places)?);
            } else {
                waiting.extend(missing.into_iter().rev());
            }
        }
    }
    Ok((new, results.map(|root| root.and_then(|root| places[root.index()]))))
}

fn limit(what: &'static str, most: usize, given: usize) -> Result<(), ProgramProblem> {
    if given > most { Err(ProgramProblem::Limit { what, most, given }) } else { Ok(()) }
}

impl PartialEq for Program {
    fn eq(&self, other: &Program) -> bool {
        self.text == other.text
    }
}

impl Eq for Program {}

impl Hash for Program {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl std::fmt::Debug for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Program").field(&self.text).finish()
    }
}

impl std::fmt::Display for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::str::FromStr for Program {
    type Err = ProgramError;

    fn from_str(text: &str) -> Result<Program, ProgramError> {
        Program::parse(text)
    }
}
