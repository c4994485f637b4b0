//! A whole program: its nodes in one order, its results, and what follows from them.

use std::hash::{Hash, Hasher};

use super::affine::{self, ScoreClass};
use super::derive::{self, Gradient};
use super::error::{ProgramError, ProgramProblem, limit};
use super::graph::{self, Graph};
use super::limits::{MAX_ARRAYS, MAX_NODES, MAX_SCALARS};
use super::node::{Binary, Node, NodeId, Unary};
use super::ops::Value;
use super::print;
use super::types::{ArrayDecl, Deps, ScalarDecl, Type, Var};

/// A mask, a modification of scores, weights of probabilities, or several of these. Equal if the canonical
/// texts are.
#[derive(Clone)]
pub struct Program {
    pub(super) graph: Graph,
    /// How many nodes are the program's own; its derivatives follow.
    own: usize,
    mask: Option<NodeId>,
    score: Option<NodeId>,
    weight: Option<NodeId>,
    slope: Option<NodeId>,
    class: Option<ScoreClass>,
    exponent: Option<NodeId>,
    gradients: Vec<Gradient>,
    pub(super) text: String,
    hash: u64,
}

/// The nodes that are a program's results.
#[derive(Clone, Copy, Default)]
pub(super) struct Results {
    pub(super) mask: Option<NodeId>,
    pub(super) score: Option<NodeId>,
    pub(super) weight: Option<NodeId>,
}

impl Program {
    /// Both programs in one: the mask is where both are true, the score of `other` takes that of `self`, and
    /// weights are multiplied. An array or scalar that both name is one.
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

    /// What probabilities are multiplied by once the softmax has normalised them, as dropout does; `None`
    /// where the program leaves them as they are.
    pub fn weight(&self) -> Option<NodeId> {
        self.weight
    }

    /// d score / d s; `None` where the program leaves scores as they are.
    pub fn slope(&self) -> Option<NodeId> {
        self.slope
    }

    /// How the modified score depends on the score; `None` where the program leaves scores as they are.
    pub fn class(&self) -> Option<ScoreClass> {
        self.class
    }

    /// What an additive program adds to scores as exponents of 2; `None` for other programs.
    pub fn exponent(&self) -> Option<NodeId> {
        self.exponent
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
    pub(super) fn new(
        graph: &Graph,
        Results { mask, score, weight }: Results,
    ) -> Result<Program, ProgramProblem> {
        let mut graph = graph.clone();
        let (mask, score) = hidden(&mut graph, mask, score)?;
        let (mut graph, [mask, score, weight]) = canonical(&graph, [mask, score, weight])?;
        let own = graph.nodes.len();
        limit("nodes", MAX_NODES, own)?;
        let text = print::text(&graph, [("mask", mask), ("score", score), ("weight", weight)]);
        if let Some(weight) = weight {
            refuse_gradients(&graph, weight)?;
        }
        let derived = score.map(|score| derive::derivatives(&mut graph, score)).transpose()?;
        let (slope, gradients) =
            derived.map_or((None, Vec::new()), |(slope, gradients)| (Some(slope), gradients));
        let class = score.map(|score| affine::class(&mut graph, score)).transpose()?;
        let exponent = match class {
            Some(ScoreClass::Additive { addend }) => Some(affine::in_exponents(&mut graph, addend)?),
            Some(ScoreClass::Affine { .. } | ScoreClass::General) | None => None,
        };
        graph.finish();
        let hash = graph::fnv(text.as_bytes());
        Ok(Program { graph, own, mask, score, weight, slope, class, exponent, gradients, text, hash })
    }

    /// The program in which the rows of array `slot` are aligned.
    pub(super) fn aligned(&self, slot: usize) -> Result<Program, ProgramProblem> {
        let mut arrays = self.graph.arrays.clone();
        arrays[slot].aligned = true;
        let mut graph = Graph::new(arrays, self.graph.scalars.clone());
        let s = graph.var(Var::S)?;
        let results = copied(self, &mut graph, s)?;
        Program::new(&graph, results)
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
        let first = copied(self, &mut graph, s)?;
        let second = copied(other, &mut graph, first.score.unwrap_or(s))?;
        let mut both = |op, a: Option<NodeId>, b: Option<NodeId>| match (a, b) {
            (Some(a), Some(b)) => graph.binary(op, a, b).map(Some),
            (a, b) => Ok(a.or(b)),
        };
        let mask = both(Binary::And, first.mask, second.mask)?;
        let weight = both(Binary::Mul, first.weight, second.weight)?;
        Program::new(&graph, Results { mask, score: second.score.or(first.score), weight })
    }
}

/// Weights have no derivatives: an array that they read and that wants a gradient would miss a part of it.
fn refuse_gradients(graph: &Graph, weight: NodeId) -> Result<(), ProgramProblem> {
    let mut needed = vec![false; weight.index() + 1];
    needed[weight.index()] = true;
    for index in (0..needed.len()).rev() {
        if !needed[index] {
            continue;
        }
        let node = graph.nodes[index];
        if let Node::Load(array, _) = node
            && let decl = &graph.arrays[usize::from(array)]
            && decl.gradient
        {
            return Err(ProgramProblem::GradientInWeight { name: decl.name.clone() });
        }
        node.operands().for_each(|operand| needed[operand.index()] = true);
    }
    Ok(())
}

/// `program`'s own nodes in `graph`, whose arrays and scalars include its own, with `s` as the score.
pub(super) fn copied(program: &Program, graph: &mut Graph, s: NodeId) -> Result<Results, ProgramProblem> {
    copied_but(program, graph, |_, node| (node == Node::Var(Var::S)).then_some(s))
}

/// `program`'s own nodes in `graph`, whose arrays and scalars include its own. `replaced`: the node of
/// `graph` that stands for one of them.
pub(super) fn copied_but(
    program: &Program,
    graph: &mut Graph,
    replaced: impl Fn(NodeId, Node) -> Option<NodeId>,
) -> Result<Results, ProgramProblem> {
    let places = copied_nodes(program, graph, replaced)?;
    let at = |x: NodeId| places[x.index()];
    Ok(Results { mask: program.mask.map(at), score: program.score.map(at), weight: program.weight.map(at) })
}

/// The nodes of `graph` that are `program`'s own, as [`copied_but`] makes them.
pub(super) fn copied_nodes(
    program: &Program,
    graph: &mut Graph,
    replaced: impl Fn(NodeId, Node) -> Option<NodeId>,
) -> Result<Vec<NodeId>, ProgramProblem> {
    let mut places: Vec<NodeId> = Vec::with_capacity(program.own);
    for (id, node) in program.own() {
        let at = |x: NodeId| places[x.index()];
        if let Some(there) = replaced(id, node) {
            places.push(there);
            continue;
        }
        places.push(match node {
            Node::Const(value) => graph.value(Value::of(value))?,
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
    Ok(places)
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
                node.operands().filter(|operand| places[operand.index()].is_none()).collect();
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
