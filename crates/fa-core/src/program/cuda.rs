//! The header of a program for kernels: a struct whose values are made per tile, per row, per column and per
//! score, by what they depend on.
//!
//! Names are those of nodes (`v7`) and array slots; numbers are printed by their bits. No text of the user's
//! is printed.

use std::fmt::Write;

use super::Program;
use super::affine::ScoreClass;
use super::graph::{Binary, Const, Graph, Node, NodeId, Unary};
use super::types::{Deps, Element, Type, Var};

/// The name under which units include a program's header.
pub const HEADER: &str = "mods.cuh";

/// How often a value is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rate {
    /// Once per tile.
    Tile,
    /// Once per query.
    Row,
    /// Once per key.
    Column,
    /// For each query and key, before their score is there.
    Pair,
    /// For each score.
    Score,
}

impl Rate {
    fn of(deps: Deps) -> Rate {
        match (deps.has(Deps::SCORE), deps.has(Deps::QUERY), deps.has(Deps::KEY)) {
            (true, ..) => Rate::Score,
            (_, true, true) => Rate::Pair,
            (_, true, false) => Rate::Row,
            (_, false, true) => Rate::Column,
            (_, false, false) => Rate::Tile,
        }
    }

    const fn is_kept(self) -> bool {
        matches!(self, Rate::Tile | Rate::Row | Rate::Column)
    }
}

/// The part of an address that is made at a lower rate than its load: `o7_row`.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Part {
    load: NodeId,
    rate: Rate,
    bits: bool,
}

pub(super) struct Printer<'a> {
    pub(super) program: &'a Program,
    /// Whether a node is needed by a result.
    used: Vec<bool>,
    /// Whether it is kept in a struct: made at its rate, used at another.
    kept: Vec<bool>,
    parts: Vec<Part>,
    text: String,
}

impl Program {
    /// The text of [`HEADER`]: the struct `Mods`, with the project's own names only.
    pub fn cuda(&self) -> String {
        let mut printer = Printer {
            program: self,
            used: vec![false; self.nodes().len()],
            kept: vec![false; self.nodes().len()],
            parts: Vec::new(),
            text: String::new(),
        };
        printer.find_used();
        printer.print();
        printer.text
    }

    /// What `Mods` computes: the method, and the node that it returns.
    fn functions(&self) -> Vec<(String, NodeId)> {
        let mut functions = Vec::new();
        functions.extend(self.mask().map(|node| ("mask".to_owned(), node)));
        functions.extend(self.score().map(|node| ("score".to_owned(), node)));
        functions.extend(self.slope().map(|node| ("slope".to_owned(), node)));
        match self.class() {
            Some(ScoreClass::Additive { addend }) => functions.push(("addend".to_owned(), addend)),
            Some(ScoreClass::Affine { gain, addend }) => {
                functions.extend([("gain".to_owned(), gain), ("addend".to_owned(), addend)]);
            }
            Some(ScoreClass::General) | None => {}
        }
        for (i, gradient) in self.gradients().iter().enumerate() {
            functions.push((format!("gradient_{i}"), gradient.slope));
        }
        functions
    }
}

/// How many operations and loads a result takes, by how often they are made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Operations {
    /// Once per tile.
    pub tile: usize,
    /// Once per query.
    pub row: usize,
    /// Once per key.
    pub column: usize,
    /// For each query and key, without the score.
    pub pair: usize,
    /// For each score.
    pub score: usize,
}

impl Program {
    /// What the result `root` takes.
    pub fn operations(&self, root: NodeId) -> Operations {
        let mut needed = vec![false; root.index() + 1];
        needed[root.index()] = true;
        let mut count = Operations::default();
        for index in (0..=root.index()).rev() {
            let id = NodeId(index as u16);
            let node = self.nodes()[index];
            if !needed[index] || matches!(node, Node::Const(_) | Node::Var(_) | Node::Scalar(_)) {
                continue;
            }
            Graph::operands(node).for_each(|x| needed[x.index()] = true);
            match Rate::of(self.deps(id)) {
                Rate::Tile => count.tile += 1,
                Rate::Row => count.row += 1,
                Rate::Column => count.column += 1,
                Rate::Pair => count.pair += 1,
                Rate::Score => count.score += 1,
            }
        }
        count
    }
}

impl Printer<'_> {
    fn rate(&self, node: NodeId) -> Rate {
        Rate::of(self.program.deps(node))
    }

    pub(super) fn node(&self, id: NodeId) -> Node {
        self.program.nodes()[id.index()]
    }

    /// Constants, variables and scalars are written where they are used.
    fn is_inline(&self, id: NodeId) -> bool {
        matches!(self.node(id), Node::Const(_) | Node::Var(_) | Node::Scalar(_))
    }

    fn find_used(&mut self) {
        for (_, root) in self.program.functions() {
            self.used[root.index()] = true;
            self.kept[root.index()] |= self.rate(root).is_kept() && !self.is_inline(root);
        }
        for index in (0..self.used.len()).rev() {
            if !self.used[index] {
                continue;
            }
            let id = NodeId(index as u16);
            let rate = self.rate(id);
            let node = self.node(id);
            for operand in Graph::operands(node) {
                self.used[operand.index()] = true;
                let own = self.rate(operand);
                let in_part = matches!(node, Node::Load(..)) && !rate.is_kept();
                self.kept[operand.index()] |=
                    own.is_kept() && own != rate && !self.is_inline(operand) && !in_part;
            }
            if let Node::Load(array, indices) = node
                && !rate.is_kept()
            {
                self.find_parts(id, usize::from(array), &indices);
            }
        }
    }

    /// The parts of the address of a load that is made for each score.
    fn find_parts(&mut self, load: NodeId, array: usize, indices: &[Option<NodeId>]) {
        let rates: Vec<_> = indices.iter().flatten().map(|&index| self.rate(index)).collect();
        let is_bits = self.program.arrays()[array].element == Element::Bits;
        for rate in [Rate::Tile, Rate::Row, Rate::Column] {
            if rates.contains(&rate) {
                let bits = is_bits && rates.last() == Some(&rate);
                self.parts.push(Part { load, rate, bits });
            }
        }
    }

    fn print(&mut self) {
        let program = self.program;
        let class = program.class();
        let _ = write!(
            self.text,
            "// Printed from a program of {} nodes; do not edit.\n#pragma once\n#include \"attn/spans.cuh\"\n\n\
             namespace fa {{\n\nstruct Mods {{\n",
            program.own_nodes()
        );
        let flags = [
            ("kMask", program.mask().is_some()),
            ("kScore", program.score().is_some()),
            ("kAdditive", matches!(class, Some(ScoreClass::Additive { .. }))),
            ("kAffine", matches!(class, Some(ScoreClass::Additive { .. } | ScoreClass::Affine { .. }))),
        ];
        for (name, value) in flags {
            let _ = writeln!(self.text, "    static constexpr bool {name} = {value};");
        }
        let _ = writeln!(self.text, "    static constexpr int kGradients = {};\n", program.gradients().len());
        self.text.push_str("    const ProgramParams& params;\n    int b, h, hk, sq, sk, off;\n");
        self.fields(Rate::Tile, "    ");
        for (name, index, rate) in [("Row", "q", Rate::Row), ("Column", "k", Rate::Column)] {
            let _ = writeln!(self.text, "    struct {name} {{\n        int {index};");
            self.fields(rate, "        ");
            self.text.push_str("    };\n");
        }
        self.text.push_str(
            "\n    __device__ __forceinline__ Mods(const ProgramParams& params, int b, int h, int hk, int sq, \
             int sk, int off)\n        : params(params), b(b), h(h), hk(hk), sq(sq), sk(sk), off(off) {\n",
        );
        self.makes(Rate::Tile);
        self.text.push_str("    }\n");
        for (name, index, rate) in [("Row", "q", Rate::Row), ("Column", "k", Rate::Column)] {
            let own = name.to_lowercase();
            let _ = writeln!(
                self.text,
                "\n    __device__ __forceinline__ {name} {own}(int {index}) const {{\n        {name} \
                 {own};\n        {own}.{index} = {index};"
            );
            self.makes(rate);
            let _ = writeln!(self.text, "        return {own};\n    }}");
        }
        let functions = program.functions();
        for (name, root) in &functions {
            self.function(name, *root);
        }
        // What a kernel may name in code that it does not reach.
        for (name, ty, takes, result) in [
            ("mask", "bool", "", "true"),
            ("score", "float", "float s, ", "s"),
            ("slope", "float", "float, ", "1.f"),
            ("gain", "float", "", "1.f"),
            ("addend", "float", "", "0.f"),
        ] {
            if functions.iter().all(|(own, _)| own != name) {
                let _ = writeln!(
                    self.text,
                    "\n    __device__ __forceinline__ {ty} {name}({takes}const Row&, const Column&) const {{ \
                     return {result}; }}"
                );
            }
        }
        self.text.push_str(&self.tile_state());
        self.text.push_str("};\n\n}  // namespace fa\n");
    }

    fn fields(&mut self, rate: Rate, indent: &str) {
        for index in 0..self.used.len() {
            let id = NodeId(index as u16);
            if self.kept[index] && self.rate(id) == rate {
                let _ = writeln!(self.text, "{indent}{} v{index};", cuda_type(self.program.ty(id)));
            }
        }
        for part in self.parts.iter().filter(|part| part.rate == rate) {
            let index = part.load.index();
            let _ = writeln!(self.text, "{indent}i64 o{index}_{};", suffix(rate));
            if part.bits {
                let _ = writeln!(self.text, "{indent}int bit{index};");
            }
        }
    }

    /// The nodes of one rate, which is a struct's, in order: those that are kept to fields.
    fn makes(&mut self, rate: Rate) {
        // A part needs the nodes of its rate, and comes after all of them.
        let needed = self.reachable(rate);
        for (index, needed) in needed.into_iter().enumerate() {
            let id = NodeId(index as u16);
            if !needed || self.rate(id) != rate || self.is_inline(id) {
                continue;
            }
            let expression = self.expression(id, rate);
            if self.kept[index] {
                let _ = writeln!(self.text, "        {}v{index} = {expression};", owner(rate));
                let ty = cuda_type(self.program.ty(id));
                let _ = writeln!(self.text, "        const {ty} n{index} = {}v{index};", owner(rate));
            } else {
                let ty = cuda_type(self.program.ty(id));
                let _ = writeln!(self.text, "        const {ty} n{index} = {expression};");
            }
        }
        for part in self.parts.clone().into_iter().filter(|part| part.rate == rate) {
            let index = part.load.index();
            let offset = self.offset(part.load, rate, rate);
            let _ = writeln!(self.text, "        {}o{index}_{} = {offset};", owner(rate), suffix(rate));
            if part.bits {
                let bit = self.bit(part.load, rate);
                let _ = writeln!(self.text, "        {}bit{index} = {bit};", owner(rate));
            }
        }
    }

    /// The nodes that what is kept of a rate needs, of this rate.
    fn reachable(&self, rate: Rate) -> Vec<bool> {
        let count = self.used.len();
        let mut needed: Vec<bool> =
            (0..count).map(|i| self.kept[i] && self.rate(NodeId(i as u16)) == rate).collect();
        for part in self.parts.iter().filter(|part| part.rate == rate) {
            for index in Graph::operands(self.node(part.load)).filter(|&index| self.rate(index) == rate) {
                needed[index.index()] = true;
            }
        }
        self.close(&mut needed, rate);
        needed
    }

    /// Adds the operands at `rate` of what is needed at `rate`.
    fn close(&self, needed: &mut [bool], rate: Rate) {
        for index in (0..needed.len()).rev() {
            let id = NodeId(index as u16);
            if needed[index] && self.rate(id) == rate {
                Graph::operands(self.node(id)).for_each(|x| needed[x.index()] = true);
            }
        }
    }

    fn function(&mut self, name: &str, root: NodeId) {
        let rate = self.rate(root);
        let ty = cuda_type(self.program.ty(root));
        let takes_score = !matches!(name, "mask" | "gain" | "addend");
        let score = if takes_score { "float s, " } else { "" };
        let _ = writeln!(
            self.text,
            "\n    __device__ __forceinline__ {ty} {name}({score}const Row& row, const Column& column) const {{"
        );
        let mut needed = vec![false; self.used.len()];
        needed[root.index()] = true;
        self.close(&mut needed, Rate::Score);
        self.close(&mut needed, Rate::Pair);
        for (index, needed) in needed.into_iter().enumerate() {
            let id = NodeId(index as u16);
            if needed && !self.rate(id).is_kept() && !self.is_inline(id) {
                let expression = self.expression(id, Rate::Score);
                let ty = cuda_type(self.program.ty(id));
                let _ = writeln!(self.text, "        const {ty} n{index} = {expression};");
            }
        }
        let result = self.value(root, if rate.is_kept() { Rate::Score } else { rate });
        let _ = writeln!(self.text, "        return {result};\n    }}");
    }

    /// A node's value as code at `rate` names it.
    fn value(&self, id: NodeId, at: Rate) -> String {
        let index = id.index();
        match self.node(id) {
            Node::Const(value) => literal(value),
            Node::Scalar(scalar) => {
                let cast = if self.program.ty(id) == Type::F32 { "float_of_bits" } else { "int" };
                format!("{cast}(params.scalars[{scalar}])")
            }
            Node::Var(var) => variable(var, at),
            Node::Load(..) | Node::Unary(..) | Node::Binary(..) | Node::Select(..) => {
                let own = self.rate(id);
                if own.is_kept() && own != at {
                    format!("{}v{index}", owner(own))
                } else {
                    format!("n{index}")
                }
            }
        }
    }

    /// A constant, a scalar or a variable of the tile.
    pub(super) fn exact(&self, id: NodeId) -> String {
        self.value(id, Rate::Tile)
    }

    fn expression(&self, id: NodeId, at: Rate) -> String {
        let value = |x: NodeId| self.value(x, at);
        match self.node(id) {
            Node::Const(_) | Node::Var(_) | Node::Scalar(_) => value(id),
            Node::Load(array, _) => self.load(id, usize::from(array), at),
            Node::Unary(op, x) => unary(op, self.program.ty(x), &value(x)),
            Node::Binary(op, a, b) => {
                let constant = |node| if let Node::Const(value) = node { Some(value) } else { None };
                let divisor = constant(self.node(b))
                    .and_then(|value| if let Const::I32(value) = value { Some(value) } else { None });
                binary(op, self.program.ty(a), &value(a), &value(b), divisor)
            }
            Node::Select(c, a, b) => format!("{} ? {} : {}", value(c), value(a), value(b)),
        }
    }

    fn load(&self, id: NodeId, array: usize, at: Rate) -> String {
        let rate = self.rate(id);
        let bits = self.program.arrays()[array].element == Element::Bits;
        let last = Graph::operands(self.node(id)).last().map(|index| self.rate(index));
        let mut offsets = Vec::new();
        let mut bit = String::new();
        if rate.is_kept() {
            offsets.push(self.all_offsets(id, at));
        } else {
            for part in self.parts.iter().filter(|part| part.load == id) {
                offsets.push(format!("{}o{}_{}", owner(part.rate), id.index(), suffix(part.rate)));
                if part.bits {
                    bit = format!("{}bit{}", owner(part.rate), id.index());
                }
            }
            let own = self.offset(id, rate, at);
            if !own.is_empty() {
                offsets.push(own);
            }
        }
        if bits && bit.is_empty() {
            bit = self.bit(id, last.map_or(at, |_| at));
        }
        let element = element(self.program.arrays()[array].element);
        let bit = if bits { format!(", {bit}") } else { String::new() };
        format!("load_{element}(params.arrays[{array}], {}{bit})", offsets.join(" + "))
    }

    /// The sum of the offsets of the indices that are made at `rate`; for a load of scores, of the rest.
    fn offset(&self, load: NodeId, rate: Rate, at: Rate) -> String {
        self.offsets(load, at, |index| {
            let own = self.rate(index);
            own == rate || (!rate.is_kept() && !own.is_kept())
        })
    }

    fn all_offsets(&self, load: NodeId, at: Rate) -> String {
        self.offsets(load, at, |_| true)
    }

    fn offsets(&self, load: NodeId, at: Rate, takes: impl Fn(NodeId) -> bool) -> String {
        let Node::Load(array, indices) = self.node(load) else { return String::new() };
        let decl = &self.program.arrays()[usize::from(array)];
        let mut terms = Vec::new();
        for (axis, index) in indices.iter().enumerate().filter_map(|(axis, index)| Some((axis, (*index)?))) {
            if takes(index) {
                let is_bit = decl.element == Element::Bits && axis + 1 == decl.rank;
                let function = if is_bit { "word_offset" } else { "axis_offset" };
                terms.push(format!("{function}<{axis}>(params.arrays[{array}], {})", self.value(index, at)));
            }
        }
        terms.join(" + ")
    }

    fn bit(&self, load: NodeId, at: Rate) -> String {
        let Node::Load(array, _) = self.node(load) else { return String::new() };
        let axis = self.program.arrays()[usize::from(array)].rank - 1;
        let index = Graph::operands(self.node(load)).last().map_or_else(String::new, |x| self.value(x, at));
        format!("bit_index<{axis}>(params.arrays[{array}], {index})")
    }
}

const fn suffix(rate: Rate) -> &'static str {
    match rate {
        Rate::Tile => "tile",
        Rate::Row => "row",
        Rate::Column => "column",
        Rate::Pair | Rate::Score => "score",
    }
}

const fn owner(rate: Rate) -> &'static str {
    match rate {
        Rate::Row => "row.",
        Rate::Column => "column.",
        Rate::Tile | Rate::Pair | Rate::Score => "",
    }
}

const fn cuda_type(ty: Type) -> &'static str {
    match ty {
        Type::I32 => "int",
        Type::F32 => "float",
        Type::Bool => "bool",
    }
}

pub(super) const fn element(element: Element) -> &'static str {
    match element {
        Element::F32 => "f32",
        Element::F16 => "f16",
        Element::Bf16 => "bf16",
        Element::I32 => "i32",
        Element::U8 => "u8",
        Element::Bool => "bool",
        Element::Bits => "bit",
    }
}

fn variable(var: Var, at: Rate) -> String {
    match (var, at) {
        (Var::Q, Rate::Pair | Rate::Score) => "row.q".to_owned(),
        (Var::K, Rate::Pair | Rate::Score) => "column.k".to_owned(),
        _ => var.name().to_owned(),
    }
}

fn literal(value: Const) -> String {
    match value {
        Const::I32(i32::MIN) => "(-2147483647 - 1)".to_owned(),
        Const::I32(value) if value < 0 => format!("({value})"),
        Const::I32(value) => value.to_string(),
        Const::F32(bits) => format!("float_of_bits({bits:#010x}u)"),
        Const::Bool(value) => value.to_string(),
    }
}

fn unary(op: Unary, ty: Type, x: &str) -> String {
    let function = match (op, ty) {
        (Unary::Neg, Type::I32) => "mods_negate",
        (Unary::Neg, _) => return format!("-{x}"),
        (Unary::Not, Type::Bool) => return format!("!{x}"),
        (Unary::Not, _) => return format!("~{x}"),
        (Unary::ToI32, Type::Bool) => return format!("{x} ? 1 : 0"),
        (Unary::ToF32, Type::Bool) => return format!("{x} ? 1.f : 0.f"),
        (Unary::ToF32, _) => return format!("static_cast<float>({x})"),
        (Unary::ToI32, _) => "int_of_float",
        (Unary::Abs, Type::I32) => "mods_abs",
        (Unary::Abs, _) => "abs_of",
        (Unary::Floor, _) => "floor_of",
        (Unary::Exp, _) => "mods_exp",
        (Unary::Exp2, _) => "exp2_approx",
        (Unary::Log, _) => "mods_log",
        (Unary::Log2, _) => "log2_approx",
        (Unary::Tanh, _) => "mods_tanh",
        (Unary::Sigmoid, _) => "mods_sigmoid",
        (Unary::Sqrt, _) => "sqrt_approx",
        (Unary::Rsqrt, _) => "rsqrt_approx",
        (Unary::Sin, _) => "mods_sin",
        (Unary::Cos, _) => "mods_cos",
    };
    format!("{function}({x})")
}

fn binary(op: Binary, ty: Type, a: &str, b: &str, divisor: Option<i32>) -> String {
    let power = divisor.filter(|&divisor| divisor > 0 && divisor & (divisor - 1) == 0);
    let function = match (op, ty) {
        (Binary::Add, Type::I32) => "mods_add",
        (Binary::Sub, Type::I32) => "mods_subtract",
        (Binary::Mul, Type::I32) => "mods_multiply",
        (Binary::FloorDiv, _) => match power {
            Some(divisor) => return format!("{a} >> {}", divisor.trailing_zeros()),
            None => "floor_divide",
        },
        (Binary::FloorMod, _) => match power {
            Some(divisor) => return format!("{a} & {}", divisor - 1),
            None => "floor_modulo",
        },
        (Binary::Shl, _) => "shift_left",
        (Binary::Shr, _) => "shift_right",
        (Binary::Min, Type::I32) => "min_of",
        (Binary::Max, Type::I32) => "max_of",
        (Binary::Min, _) => "min_or_nan",
        (Binary::Max, _) => "max_or_nan",
        (Binary::Div, _) => "divide",
        (
            Binary::Add
            | Binary::Sub
            | Binary::Mul
            | Binary::And
            | Binary::Or
            | Binary::Xor
            | Binary::Lt
            | Binary::Le
            | Binary::Eq
            | Binary::Ne,
            _,
        ) => return format!("{a} {} {b}", op.name()),
    };
    format!("{function}({a}, {b})")
}
