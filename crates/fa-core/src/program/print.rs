//! The canonical text of a program.

use std::fmt::Write;

use super::graph::Graph;
use super::node::{Binary, Const, Node, NodeId, Unary};
use super::syntax::{Level, above, is_reserved};
use super::types::Type;

/// Declarations, a `let` for each operation that is used more than once, and the results by their names.
pub(super) fn text(graph: &Graph, results: [(&str, Option<NodeId>); 3]) -> String {
    let mut uses = vec![0; graph.nodes.len()];
    let operands = graph.nodes.iter().flat_map(|&node| node.operands());
    for x in operands.chain(results.into_iter().filter_map(|(_, node)| node)) {
        uses[x.index()] += 1;
    }
    let mut text = String::new();
    for array in &graph.arrays {
        let axes = vec!["_"; array.rank].join(", ");
        let gradient = if array.gradient { " grad" } else { "" };
        let aligned = if array.aligned { " aligned" } else { "" };
        let (name, element) = (&array.name, array.element.name());
        let _ = writeln!(text, "array {name}: {element}[{axes}]{gradient}{aligned};");
    }
    for scalar in &graph.scalars {
        let _ = writeln!(text, "scalar {}: {};", scalar.name, scalar.ty);
    }
    let taken = |name: &String| {
        is_reserved(name)
            || graph.arrays.iter().any(|array| array.name == *name)
            || graph.scalars.iter().any(|scalar| scalar.name == *name)
    };
    let mut names = (0..).map(|i| format!("t{i}")).filter(|name| !taken(name));
    let mut printer = Printer { graph, shown: Vec::with_capacity(graph.nodes.len()) };
    for (i, &node) in graph.nodes.iter().enumerate() {
        let (expression, level) = printer.expression(node);
        let is_leaf = matches!(node, Node::Const(_) | Node::Var(_) | Node::Scalar(_));
        if uses[i] > 1 && !is_leaf {
            let name = names.next().unwrap_or_default();
            let _ = writeln!(text, "let {name} = {expression};");
            printer.shown.push((name, Level::Power));
        } else {
            printer.shown.push((expression, level));
        }
    }
    for (result, node) in results {
        if let Some(node) = node {
            let _ = writeln!(text, "{result} = {};", printer.shown[node.index()].0);
        }
    }
    text
}

/// The longest text of one expression.
const LONGEST: usize = 400;

/// A node as one expression, without names for what it uses more than once; `..` where it is long.
pub(super) fn expression(graph: &Graph, node: NodeId) -> String {
    let mut printer = Printer { graph, shown: Vec::new() };
    for &own in &graph.nodes[..=node.index()] {
        let (text, level) = printer.expression(own);
        let text = if text.len() > LONGEST { "..".to_owned() } else { text };
        printer.shown.push((text, level));
    }
    printer.shown[node.index()].0.clone()
}

struct Printer<'a> {
    graph: &'a Graph,
    /// Each node's text, and how tightly its outermost operator binds.
    shown: Vec<(String, Level)>,
}

impl Printer<'_> {
    fn expression(&self, node: Node) -> (String, Level) {
        let whole = |x: NodeId| self.shown[x.index()].0.as_str();
        match node {
            Node::Const(value) => constant(value),
            Node::Var(var) => (var.name().to_owned(), Level::Power),
            Node::Scalar(scalar) => (self.graph.scalars[usize::from(scalar)].name.clone(), Level::Power),
            Node::Load(array, indices) => {
                let indices: Vec<_> = indices.into_iter().flatten().map(whole).collect();
                let name = &self.graph.arrays[usize::from(array)].name;
                (format!("{name}[{}]", indices.join(", ")), Level::Power)
            }
            Node::Unary(op @ (Unary::Neg | Unary::Not), x) => {
                // A sign before a number would be part of the number.
                let least = if self.graph.constant(x).is_some() { Level::Power } else { Level::Sign };
                (format!("{}{}", op.name(), self.within(x, least)), Level::Sign)
            }
            Node::Unary(op, x) => (format!("{}({})", op.name(), whole(x)), Level::Power),
            Node::Binary(op @ (Binary::Min | Binary::Max), a, b) => {
                (format!("{}({}, {})", op.name(), whole(a), whole(b)), Level::Power)
            }
            Node::Binary(op, a, b) => {
                let boolean = self.graph.ty(a) == Type::Bool;
                let (name, level) = level(op, boolean);
                let (left, right) = if level == Level::Comparison {
                    (Level::BitOr, Level::BitOr)
                } else {
                    (level, above(level))
                };
                (format!("{} {name} {}", self.within(a, left), self.within(b, right)), level)
            }
            Node::Select(c, a, b) => {
                (format!("select({}, {}, {})", whole(c), whole(a), whole(b)), Level::Power)
            }
        }
    }

    /// An operand, in parentheses if it binds less tightly than `least`.
    fn within(&self, x: NodeId, least: Level) -> String {
        let (text, level) = &self.shown[x.index()];
        if *level < least { format!("({text})") } else { text.clone() }
    }
}

fn constant(value: Const) -> (String, Level) {
    let text = match value {
        Const::I32(value) => value.to_string(),
        Const::Bool(value) => value.to_string(),
        Const::F32(bits) => {
            let value = f32::from_bits(bits);
            if value.is_nan() { "nan".to_owned() } else { format!("{value:?}") }
        }
    };
    let level = if text.starts_with('-') { Level::Sign } else { Level::Power };
    (text, level)
}

fn level(op: Binary, boolean: bool) -> (&'static str, Level) {
    let level = match op {
        Binary::Or if boolean => return ("or", Level::Or),
        Binary::And if boolean => return ("and", Level::And),
        Binary::Or => Level::BitOr,
        Binary::And => Level::BitAnd,
        Binary::Xor => Level::BitXor,
        Binary::Lt | Binary::Le | Binary::Eq | Binary::Ne => Level::Comparison,
        Binary::Shl | Binary::Shr => Level::Shift,
        Binary::Add | Binary::Sub => Level::Sum,
        Binary::Mul | Binary::Div | Binary::FloorDiv | Binary::FloorMod => Level::Product,
        Binary::Min | Binary::Max => Level::Power,
    };
    (op.name(), level)
}
