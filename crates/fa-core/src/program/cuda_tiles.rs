//! The function of a mask's header that says which tiles are empty and which full.

use std::fmt::Write;

use super::cuda_names::{element, literal, scalar_of};
use super::node::{Binary, Node, NodeId, Unary};
use super::types::{Deps, Element, Type, Var};
use super::whole::Program;

/// `tile_state`: the mask by ranges of values, in the order of its nodes.
pub(super) fn tile_state(program: &Program) -> String {
    let mut text =
        "\n    // Of the queries from first_q to last_q and the keys from first_k to last_k.\n    \
                        __device__ __forceinline__ TileState tile_state(int first_q, int last_q, \
                        int first_k, int last_k) const {\n"
            .to_owned();
    let Some(mask) = program.mask() else {
        text.push_str("        return {true, true};\n    }\n");
        return text;
    };
    for id in needed(program, mask) {
        let index = id.index();
        let ty = match program.ty(id) {
            Type::I32 => "IntSpan",
            Type::F32 => "FloatSpan",
            Type::Bool => "TruthSpan",
        };
        let _ = writeln!(text, "        const {ty} r{index} = {};", span(program, id));
    }
    let root = mask.index();
    let _ = writeln!(text, "        return {{r{root}.yes, !r{root}.no}};\n    }}");
    text
}

/// Whether the mask reads an array whose elements differ by query and key, and not by blocks of these.
pub(super) fn reads_pairs(program: &Program) -> bool {
    program.mask().is_some_and(|mask| {
        needed(program, mask).any(|id| {
            let deps = program.deps(id);
            matches!(program.nodes()[id.index()], Node::Load(..))
                && deps.has(Deps::QUERY)
                && deps.has(Deps::KEY)
                && !program.loads_by_blocks(id)
        })
    })
}

impl Program {
    /// Whether the mask depends on what arrays hold.
    pub fn mask_reads_arrays(&self) -> bool {
        let is_load = |id: NodeId| matches!(self.nodes()[id.index()], Node::Load(..));
        self.mask().is_some_and(|mask| needed(self, mask).any(is_load))
    }
}

/// The nodes that `root` is made of, in their order.
fn needed(program: &Program, root: NodeId) -> impl Iterator<Item = NodeId> {
    let mut needed = vec![false; root.index() + 1];
    needed[root.index()] = true;
    for index in (0..=root.index()).rev() {
        if needed[index] {
            program.nodes()[index].operands().for_each(|x| needed[x.index()] = true);
        }
    }
    (0..needed.len()).filter(move |&index| needed[index]).map(|index| NodeId(index as u16))
}

fn span(program: &Program, id: NodeId) -> String {
    let at = |x: NodeId| format!("r{}", x.index());
    match program.nodes()[id.index()] {
        Node::Var(Var::Q) => "{first_q, last_q}".to_owned(),
        Node::Var(Var::K) => "{first_k, last_k}".to_owned(),
        Node::Var(var @ (Var::S | Var::B | Var::H | Var::Hk | Var::Sq | Var::Sk | Var::Off)) => {
            format!("span_of({})", var.name())
        }
        Node::Const(value) => format!("span_of({})", literal(value)),
        Node::Scalar(scalar) => format!("span_of({})", scalar_of(scalar, program.ty(id))),
        Node::Load(array, indices) => {
            let decl = &program.arrays()[usize::from(array)];
            let indices = indices.map(|x| x.map_or_else(|| "{0, 0}".to_owned(), at));
            let (any, bits) = match decl.element {
                Element::F32 | Element::F16 | Element::Bf16 => ("any_float()", false),
                Element::I32 => ("any_int()", false),
                Element::U8 => ("IntSpan{0, 255}", false),
                Element::Bool => ("TruthSpan{true, true}", false),
                Element::Bits => ("TruthSpan{true, true}", true),
            };
            let load = element(decl.element);
            let bit = if bits { ", bit" } else { "" };
            format!(
                "span_load(params.arrays[{array}], {{{}}}, {}, {bits}, {any}, [&](i64 offset, int bit) {{ \
                     return load_{load}(params.arrays[{array}], offset{bit}); }})",
                indices.join(", "),
                decl.rank
            )
        }
        Node::Unary(op, x) => format!("{}({})", unary(op), at(x)),
        Node::Binary(op, a, b) => format!("{}({}, {})", binary(op), at(a), at(b)),
        Node::Select(c, a, b) => format!("span_select({}, {}, {})", at(c), at(a), at(b)),
    }
}

fn unary(op: Unary) -> &'static str {
    match op {
        Unary::Neg => "span_negate",
        Unary::Not => "span_not",
        Unary::Abs => "span_abs",
        Unary::Floor => "span_floor",
        Unary::Exp => "span_exp",
        Unary::Exp2 => "span_exp2",
        Unary::Log => "span_log",
        Unary::Log2 => "span_log2",
        Unary::Tanh => "span_tanh",
        Unary::Sigmoid => "span_sigmoid",
        Unary::Sqrt => "span_sqrt",
        Unary::Rsqrt => "span_rsqrt",
        Unary::Sin | Unary::Cos => "span_wave",
        Unary::ToF32 => "span_float",
        Unary::ToI32 => "span_int",
    }
}

fn binary(op: Binary) -> &'static str {
    match op {
        Binary::Add => "span_add",
        Binary::Sub => "span_subtract",
        Binary::Mul => "span_multiply",
        Binary::Div => "span_divide",
        Binary::FloorDiv => "span_floor_divide",
        Binary::FloorMod => "span_floor_modulo",
        Binary::Shl => "span_shift_left",
        Binary::Shr => "span_shift_right",
        Binary::And => "span_and",
        Binary::Or => "span_or_both",
        Binary::Xor => "span_xor",
        Binary::Min => "span_min",
        Binary::Max => "span_max",
        Binary::Lt => "span_less",
        Binary::Le => "span_less_equal",
        Binary::Eq => "span_equal",
        Binary::Ne => "span_not_equal",
    }
}
