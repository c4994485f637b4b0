//! Loads of arrays in a program's header: their addresses in parts, and what is read ahead of the scores.

use std::fmt::Write;

use super::ahead::{Ahead, AheadForm};
use super::cuda_names::{Rate, element};
use super::cuda_printer::{Part, Printer, owner, suffix};
use super::node::{Node, NodeId};
use super::types::Element;

impl Printer<'_> {
    /// The parts of the address of a load that is made for each score.
    pub(super) fn find_parts(&mut self, load: NodeId, array: usize, indices: &[Option<NodeId>]) {
        let rates: Vec<_> = indices.iter().flatten().map(|&index| self.rate(index)).collect();
        let is_bits = self.program.arrays()[array].element == Element::Bits;
        for rate in [Rate::Tile, Rate::Row, Rate::Column] {
            if rates.contains(&rate) {
                let bits = is_bits && rates.last() == Some(&rate);
                self.parts.push(Part { load, rate, bits });
            }
        }
    }

    /// What reads the elements of a load before the scores are there, and the score by one of them.
    pub(super) fn ahead(&mut self, Ahead { load, form, bytes }: Ahead) {
        let (Node::Load(array, _), Some(score)) = (self.node(load), self.program.score()) else { return };
        let decl = &self.program.arrays()[usize::from(array)];
        let (form, step) = match form {
            AheadForm::Keys => ("Keys", 1),
            AheadForm::Distances { by_query: true } => ("Distances", 1),
            AheadForm::Distances { by_query: false } => ("Distances", -1),
        };
        let value = match decl.element {
            Element::F16 => "unpack_low<Dtype::F16>(bits)",
            Element::Bf16 => "unpack_low<Dtype::Bf16>(bits)",
            Element::F32 | Element::I32 | Element::U8 | Element::Bool | Element::Bits => {
                "float_of_bits(bits)"
            }
        };
        let offsets: Vec<String> = self
            .parts
            .iter()
            .filter(|part| part.load == load && part.rate != Rate::Column)
            .map(|part| format!("{}o{}_{}", owner(part.rate), load.index(), suffix(part.rate)))
            .collect();
        let offset = if offsets.is_empty() { "0".to_owned() } else { offsets.join(" + ") };
        let _ = write!(
            self.text,
            "\n    // What is read before the scores are there.\n    \
             static constexpr AheadForm kAhead = AheadForm::{form};\n    \
             static constexpr int kAheadBytes = {bytes}, kAheadAxis = {}, kAheadStep = {step};\n    \
             __device__ __forceinline__ const ProgramArray& ahead_array() const {{ return \
             params.arrays[{array}]; }}\n    \
             __device__ __forceinline__ i64 ahead_offset(const Row& row) const {{ return {offset}; }}\n    \
             __device__ __forceinline__ static float ahead_value(u32 bits) {{ return {value}; }}\n    \
             __device__ __forceinline__ int ahead_index(const Row& row, const Column& column) const {{\n",
            decl.rank - 1
        );
        if let Some(last) = self.node(load).operands().last() {
            self.body(last, None);
        }
        if decl.aligned {
            self.text.push_str("    struct AlignedRows {};\n");
        }
        let _ = writeln!(
            self.text,
            "    __device__ __forceinline__ float score(float s, const Row& row, const Column& column, float \
             n{}) const {{",
            load.index()
        );
        self.body(score, Some(load));
        if let Some(exponent) = self.program.exponent() {
            let _ = writeln!(
                self.text,
                "    __device__ __forceinline__ float exponent(const Row& row, const Column& column, float \
                 n{}) const {{",
                load.index()
            );
            self.body(exponent, Some(load));
        }
    }

    pub(super) fn load(&self, id: NodeId, array: usize, at: Rate) -> String {
        let rate = self.rate(id);
        let bits = self.program.arrays()[array].element == Element::Bits;
        let last = self.node(id).operands().last().map(|index| self.rate(index));
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
    pub(super) fn offset(&self, load: NodeId, rate: Rate, at: Rate) -> String {
        self.offsets(load, at, |index| {
            let own = self.rate(index);
            own == rate || (!rate.is_kept() && !own.is_kept())
        })
    }

    pub(super) fn all_offsets(&self, load: NodeId, at: Rate) -> String {
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

    pub(super) fn bit(&self, load: NodeId, at: Rate) -> String {
        let Node::Load(array, _) = self.node(load) else { return String::new() };
        let axis = self.program.arrays()[usize::from(array)].rank - 1;
        let index = self.node(load).operands().last().map_or_else(String::new, |x| self.value(x, at));
        format!("bit_index<{axis}>(params.arrays[{array}], {index})")
    }
}
