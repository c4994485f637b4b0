//! The header of a program for kernels: a struct whose values are made per tile, per row, per column and per
//! score, by what they depend on.
//!
//! Names are those of nodes (`v7`) and array slots; numbers are printed by their bits. No text of the user's
//! is printed.

use std::fmt::Write;

use super::affine::ScoreClass;
use super::cuda_names::{Rate, binary, cuda_type, unary};
use super::cuda_printer::{Printer, owner, suffix};
use super::cuda_tiles::{reads_pairs, tile_state};
use super::node::{Binary, Const, Node, NodeId, Unary};
use super::types::{Element, Var};
use super::whole::Program;
use crate::Dropout;

/// The name under which units include a program's header.
pub const HEADER: &str = "mods.cuh";

/// What the header of a program with weights has, by which device code knows them.
pub const WEIGHTS: &str = "struct Weights {};";

impl Program {
    /// The text of [`HEADER`]: the struct `Mods`, with the project's own names only.
    pub fn cuda(&self) -> String {
        let mut printer = Printer {
            program: self,
            counted: Vec::new(),
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
        functions.extend(self.weight().map(|node| ("weight".to_owned(), node)));
        match self.class() {
            Some(ScoreClass::Additive { addend }) => functions.push(("addend".to_owned(), addend)),
            Some(ScoreClass::Affine { gain, addend }) => {
                functions.extend([("gain".to_owned(), gain), ("addend".to_owned(), addend)]);
            }
            Some(ScoreClass::General) | None => {}
        }
        functions.extend(self.exponent().map(|node| ("exponent".to_owned(), node)));
        for (i, gradient) in self.gradients().iter().enumerate() {
            functions.push((format!("gradient_{i}"), gradient.slope));
        }
        functions
    }
}

impl Printer<'_> {
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
            if let Some(counted) = self.count_of(id) {
                self.counted.push(counted);
                continue;
            }
            for operand in node.operands() {
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

    fn print(&mut self) {
        let program = self.program;
        let class = program.class();
        let _ = write!(
            self.text,
            "// Printed from a program of {} nodes; do not edit.\n#pragma once\n\
             #include \"attn/spans.cuh\"\n\nnamespace fa {{\n\nstruct Mods {{\n",
            program.own_nodes()
        );
        let flags = [
            ("kMask", program.mask().is_some()),
            ("kMaskReadsPairs", reads_pairs(program)),
            ("kScore", program.score().is_some()),
            ("kAdditive", matches!(class, Some(ScoreClass::Additive { .. }))),
            ("kAffine", matches!(class, Some(ScoreClass::Additive { .. } | ScoreClass::Affine { .. }))),
        ];
        for (name, value) in flags {
            let _ = writeln!(self.text, "    static constexpr bool {name} = {value};");
        }
        for (name, run) in ["kQueryRun", "kKeyRun"].into_iter().zip(program.mask_runs()) {
            let _ = writeln!(self.text, "    static constexpr int {name} = {run};");
        }
        if program.weight().is_some() {
            let _ = writeln!(self.text, "    {WEIGHTS}");
        }
        if self.kept_bits().is_some() {
            self.text.push_str("    struct WeightsByBits {};\n");
        }
        if self.never_hides() {
            self.text.push_str("    struct NeverHides {};\n");
        }
        let _ = writeln!(self.text, "    static constexpr int kGradients = {};\n", program.gradients().len());
        self.text.push_str("    const ProgramParams& params;\n    int b, h, hk, sq, sk, off;\n");
        self.fields(Rate::Tile, "    ");
        for (name, index, rate) in [("Row", "q", Rate::Row), ("Column", "k", Rate::Column)] {
            let _ = writeln!(self.text, "    struct {name} {{\n        int {index};");
            self.fields(rate, "        ");
            for counted in &self.counted {
                let _ = writeln!(self.text, "        float c{};", counted.id.index());
            }
            self.text.push_str("    };\n");
        }
        self.text.push_str(
            "\n    __device__ __forceinline__ Mods(const ProgramParams& params, int b, int h, int hk, \
             int sq, int sk, int aligned)\n        : \
             params(params), b(b), h(h), hk(hk), sq(sq), sk(sk), off(aligned + params.offset) {\n",
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
            for counted in self.counted.clone() {
                let number = if rate == Rate::Row {
                    format!("static_cast<float>({})", self.count_at(counted.of, "q", "0"))
                } else {
                    format!("{}static_cast<float>(k)", if counted.by_key < 0 { "-" } else { "" })
                };
                let _ = writeln!(self.text, "        {own}.c{} = {number};", counted.id.index());
            }
            let _ = writeln!(self.text, "        return {own};\n    }}");
        }
        self.counts();
        let functions = program.functions();
        for (name, root) in &functions {
            self.function(name, *root);
        }
        // What a kernel may name in code that it does not reach.
        for (name, ty, takes, result) in [
            ("mask", "bool", "", "true"),
            ("score", "float", "float s, ", "s"),
            ("weight", "float", "", "1.f"),
            ("slope", "float", "float, ", "1.f"),
            ("gain", "float", "", "1.f"),
            ("addend", "float", "", "0.f"),
            ("exponent", "float", "", "0.f"),
        ] {
            if functions.iter().all(|(own, _)| own != name) {
                let _ = writeln!(
                    self.text,
                    "\n    __device__ __forceinline__ {ty} {name}({takes}const Row&, const Column&) const {{ \
                     return {result}; }}"
                );
            }
        }
        self.weights_by_bits();
        self.folded();
        if let Some(ahead) = program.ahead() {
            self.ahead(ahead);
        }
        self.text.push_str(&tile_state(program));
        self.text.push_str("};\n\n}  // namespace fa\n");
    }

    /// Whether no score can be -inf: what is added has neither elements of rows or keys, which may be, nor
    /// operations that lead there from numbers of a common size.
    fn never_hides(&self) -> bool {
        let Some(ScoreClass::Additive { addend }) = self.program.class() else { return false };
        let mut needed = vec![false; addend.index() + 1];
        needed[addend.index()] = true;
        (0..needed.len()).rev().all(|index| {
            if !needed[index] {
                return true;
            }
            let id = NodeId(index as u16);
            self.node(id).operands().for_each(|x| needed[x.index()] = true);
            match self.node(id) {
                Node::Const(value) => !matches!(value, Const::F32(bits) if !f32::from_bits(bits).is_finite()),
                Node::Load(..) => self.rate(id) == Rate::Tile,
                Node::Unary(op, _) => !matches!(op, Unary::Log | Unary::Log2 | Unary::Rsqrt),
                Node::Binary(op, ..) => op != Binary::Div,
                Node::Var(_) | Node::Scalar(_) | Node::Select(..) => true,
            }
        })
    }

    /// Of weights that dropout's bits choose: the load of a bit, and the two weights.
    fn kept_bits(&self) -> Option<(NodeId, usize, [NodeId; 2])> {
        let Node::Select(kept, yes, no) = self.node(self.program.weight()?) else { return None };
        let Node::Load(array, indices) = self.node(kept) else { return None };
        let array = usize::from(array);
        let mut others = indices.into_iter().flatten();
        let last = others.next_back()?;
        let is_own = self.program.arrays()[array].name == Dropout::BITS
            && self.program.arrays()[array].element == Element::Bits
            && self.node(last) == Node::Var(Var::K)
            && others.all(|index| matches!(self.rate(index), Rate::Tile | Rate::Row))
            && self.rate(kept) == Rate::Pair
            && [yes, no].into_iter().all(|weight| self.is_inline(weight));
        is_own.then_some((kept, array, [yes, no]))
    }

    /// What reads several of the bits at a time.
    fn weights_by_bits(&mut self) {
        let (bits, weight_of) = match self.kept_bits() {
            None => (
                "(const Row&, int) const { return 0; }".to_owned(),
                "(bool) const { return 1.f; }".to_owned(),
            ),
            Some((load, array, weights)) => {
                let axis = self.program.arrays()[array].rank - 1;
                let mut offsets: Vec<String> = self
                    .parts
                    .iter()
                    .filter(|part| part.load == load && part.rate != Rate::Column)
                    .map(|part| format!("{}o{}_{}", owner(part.rate), load.index(), suffix(part.rate)))
                    .collect();
                offsets.push(format!("word_offset<{axis}>(params.arrays[{array}], k)"));
                let [yes, no] = weights.map(|weight| self.value(weight, Rate::Pair));
                (
                    format!(
                        "(const Row& row, int k) const {{\n        return load_word(params.arrays[{array}], \
                         {}) >> bit_index<{axis}>(params.arrays[{array}], k);\n    }}",
                        offsets.join(" + ")
                    ),
                    format!("(bool kept) const {{ return kept ? {yes} : {no}; }}"),
                )
            }
        };
        let _ = writeln!(self.text, "\n    __device__ __forceinline__ u32 bits{bits}");
        let _ = writeln!(self.text, "\n    __device__ __forceinline__ float weight_of{weight_of}");
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
            for index in self.node(part.load).operands().filter(|&index| self.rate(index) == rate) {
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
                self.node(id).operands().for_each(|x| needed[x.index()] = true);
            }
        }
    }

    fn function(&mut self, name: &str, root: NodeId) {
        let ty = cuda_type(self.program.ty(root));
        let takes_score = !matches!(name, "mask" | "weight" | "gain" | "addend" | "exponent");
        let score = if takes_score { "float s, " } else { "" };
        let _ = writeln!(
            self.text,
            "\n    __device__ __forceinline__ {ty} {name}({score}const Row& row, \
             const Column& column) const {{"
        );
        self.body(root, None);
    }

    /// The body of a function of a score, or of a pair, which returns `root`; `given` is a parameter.
    pub(super) fn body(&mut self, root: NodeId, given: Option<NodeId>) {
        let mut needed = vec![false; self.used.len()];
        needed[root.index()] = true;
        for index in (0..needed.len()).rev() {
            let id = NodeId(index as u16);
            if needed[index] && !self.rate(id).is_kept() && given != Some(id) && !self.is_counted(id) {
                self.node(id).operands().for_each(|x| needed[x.index()] = true);
            }
        }
        for (index, needed) in needed.into_iter().enumerate() {
            let id = NodeId(index as u16);
            if needed && !self.rate(id).is_kept() && !self.is_inline(id) && given != Some(id) {
                let expression = self.expression(id, Rate::Score);
                let ty = cuda_type(self.program.ty(id));
                let _ = writeln!(self.text, "        const {ty} n{index} = {expression};");
            }
        }
        let rate = self.rate(root);
        let result = self.value(root, if rate.is_kept() { Rate::Score } else { rate });
        let _ = writeln!(self.text, "        return {result};\n    }}");
    }

    fn expression(&self, id: NodeId, at: Rate) -> String {
        if let Some(counted) = self.counted.iter().find(|counted| counted.id == id) {
            let sum = format!("row.c{0} + column.c{0}", id.index());
            return if counted.magnitude { format!("abs_of({sum})") } else { sum };
        }
        let value = |x: NodeId| self.value(x, at);
        match self.node(id) {
            Node::Const(_) | Node::Var(_) | Node::Scalar(_) => value(id),
            Node::Load(array, _) => self.load(id, usize::from(array), at),
            Node::Unary(op, x) => unary(op, self.program.ty(x), &value(x)),
            // The overflow of a finite addend would hide its key.
            Node::Binary(Binary::Mul, a, b) if self.is_log2e(a) || self.is_log2e(b) => {
                format!("multiply_towards_zero({}, {})", value(a), value(b))
            }
            Node::Binary(op, a, b) => {
                let constant = |node| if let Node::Const(value) = node { Some(value) } else { None };
                let divisor = constant(self.node(b))
                    .and_then(|value| if let Const::I32(value) = value { Some(value) } else { None });
                binary(op, self.program.ty(a), &value(a), &value(b), divisor)
            }
            Node::Select(c, a, b) => format!("{} ? {} : {}", value(c), value(a), value(b)),
        }
    }

    fn is_log2e(&self, id: NodeId) -> bool {
        self.node(id) == Node::Const(Const::F32(std::f32::consts::LOG2_E.to_bits()))
    }
}
