//! Numbers that grow by one along a tile, in a program's header: a first number and steps.

use std::fmt::Write;

use super::cuda_names::{Rate, binary, unary};
use super::cuda_printer::{Counted, Printer};
use super::node::{Binary, Node, NodeId, Unary};
use super::types::{Type, Var};

impl Printer<'_> {
    /// A conversion that is a first number and steps.
    pub(super) fn count_of(&self, id: NodeId) -> Option<Counted> {
        let Node::Unary(Unary::ToF32, whole) = self.node(id) else { return None };
        if self.rate(id) != Rate::Pair || self.program.ty(whole) != Type::I32 {
            return None;
        }
        let (of, magnitude) = match self.node(whole) {
            Node::Unary(Unary::Abs, x) => (x, true),
            Node::Const(_)
            | Node::Var(_)
            | Node::Scalar(_)
            | Node::Load(..)
            | Node::Unary(..)
            | Node::Binary(..)
            | Node::Select(..) => (whole, false),
        };
        let (by_query, by_key) = self.steps(of, 8)?;
        (by_query.abs() == 1 && by_key.abs() == 1).then_some(Counted { id, of, magnitude, by_query, by_key })
    }

    /// What an integer grows by with the query, and with the key, if that is the same everywhere.
    fn steps(&self, id: NodeId, nested: u32) -> Option<(i32, i32)> {
        let nested = nested.checked_sub(1)?;
        match self.node(id) {
            Node::Const(_) | Node::Scalar(_) => Some((0, 0)),
            Node::Var(Var::Q) => Some((1, 0)),
            Node::Var(Var::K) => Some((0, 1)),
            Node::Var(_) => Some((0, 0)),
            Node::Unary(Unary::Neg, x) => {
                let (q, k) = self.steps(x, nested)?;
                Some((-q, -k))
            }
            Node::Binary(op @ (Binary::Add | Binary::Sub), a, b) => {
                let sign = if op == Binary::Add { 1 } else { -1 };
                let (a, b) = (self.steps(a, nested)?, self.steps(b, nested)?);
                Some((a.0 + sign * b.0, a.1 + sign * b.1))
            }
            Node::Unary(..) | Node::Binary(..) | Node::Load(..) | Node::Select(..) => None,
        }
    }

    /// An integer of these operations at a query and a key.
    pub(super) fn count_at(&self, id: NodeId, query: &str, key: &str) -> String {
        match self.node(id) {
            Node::Var(Var::Q) => query.to_owned(),
            Node::Var(Var::K) => key.to_owned(),
            Node::Unary(op, x) => unary(op, Type::I32, &self.count_at(x, query, key)),
            Node::Binary(op, a, b) => {
                binary(op, Type::I32, &self.count_at(a, query, key), &self.count_at(b, query, key), None)
            }
            Node::Const(_) | Node::Var(_) | Node::Scalar(_) | Node::Load(..) | Node::Select(..) => {
                self.value(id, Rate::Tile)
            }
        }
    }

    /// Rows and columns that have the first numbers and steps of what is counted along a tile.
    pub(super) fn counts(&mut self) {
        if self.counted.is_empty() {
            return;
        }
        self.text
            .push_str("\n    // Numbers that grow by one along a tile, from its first key or query on.\n");
        self.text.push_str("    struct Counts {};\n");
        for (name, index, is_row) in [("Row", "q", true), ("Column", "k", false)] {
            let own = name.to_lowercase();
            // From the other's first it is the number, from one's own first the step.
            let _ = writeln!(
                self.text,
                "    template <bool Steps>\n    __device__ __forceinline__ {name} {own}_from(int {index}, \
                 int first) const {{\n        {name} {own} = this->{own}({index});"
            );
            for counted in self.counted.clone() {
                let (query, key) = if is_row { (index, "first") } else { ("first", index) };
                let number = self.count_at(counted.of, query, key);
                let step = if is_row { counted.by_query } else { counted.by_key };
                let sign = if step < 0 { "-" } else { "" };
                let _ = writeln!(
                    self.text,
                    "        {own}.c{} = Steps ? {sign}static_cast<float>({index} - first) : \
                     static_cast<float>({number});",
                    counted.id.index()
                );
            }
            let _ = writeln!(self.text, "        return {own};\n    }}");
        }
    }

    /// An exponent that is a product of what is counted along a tile and a factor that all of a tile's scores
    /// share: the number, the factor, and whether the product is negated.
    fn counted_product(&self) -> Option<(NodeId, NodeId, bool)> {
        let exponent = self.program.exponent()?;
        let (product, negated) = match self.node(exponent) {
            Node::Unary(Unary::Neg, x) => (x, true),
            Node::Unary(..)
            | Node::Binary(..)
            | Node::Select(..)
            | Node::Load(..)
            | Node::Const(_)
            | Node::Var(_)
            | Node::Scalar(_) => (exponent, false),
        };
        let Node::Binary(Binary::Mul, a, b) = self.node(product) else { return None };
        [(a, b), (b, a)].into_iter().find_map(|(number, factor)| {
            let is_counted = self.counted.iter().any(|own| own.id == number && !own.magnitude);
            (is_counted && self.rate(factor) == Rate::Tile).then_some((number, factor, negated))
        })
    }

    /// Such an exponent by the products of its factor with the first number and with the step: an operation
    /// less for each score. What the first product is rounded by is left where the number is small. Factors
    /// of at most 8 are taken, for which that is at most 2e-4 of a probability.
    pub(super) fn folded(&mut self) {
        let Some((number, factor, negated)) = self.counted_product() else { return };
        let number = number.index();
        let factor = self.value(factor, Rate::Score);
        let sign = if negated { "-" } else { "" };
        let _ = writeln!(
            self.text,
            "\n    // The exponent by products with a first number and a step, where the factor is so\n    \
             // small that what the first is rounded by has no influence.\n    \
             __device__ __forceinline__ bool folds() const {{ return abs_of({factor}) <= 8.f; }}\n    \
             template <bool Transposed>\n    \
             __device__ __forceinline__ float folded(const Row& row, const Column& column) const {{\n        \
             const float first = Transposed ? column.c{number} : row.c{number};\n        \
             const float step = Transposed ? row.c{number} : column.c{number};\n        \
             const float factor = {sign}{factor};\n        \
             return fmaf(step, factor, first * factor);\n    }}"
        );
    }
}
