//! Gradients of arrays that a kernel sums where it computes the scores, and programs that have no others.

use super::affine::ScoreClass;
use super::error::{ProgramError, ProgramProblem, limit};
use super::forms::Axis;
use super::graph::Graph;
use super::limits::MAX_ARRAYS;
use super::node::{Const, Node, NodeId};
use super::types::{ArrayDecl, Deps, Element, Var};
use super::whole::{Program, copied_but};

/// A load that an array of its own replaces, of f32 and with an element for each value of `axes`.
#[derive(Clone, Debug, PartialEq)]
pub struct Direct {
    /// The name of the array in the new program.
    pub name: String,
    /// The load in the program that it was made of.
    pub load: NodeId,
    /// The variables that index it, in this order.
    pub axes: Vec<Var>,
}

impl Direct {
    /// The array of `program`, which it was made of, that the load reads.
    pub fn array(&self, program: &Program) -> Option<usize> {
        if let Node::Load(array, _) = program.nodes()[self.load.index()] { Some(array.into()) } else { None }
    }
}

impl Program {
    /// Whether the gradient of an array is summed where the scores are: the array is read once, at `b`, `h`
    /// or `hk`, `q` and `k`, each at most once.
    pub fn is_direct(&self, array: usize) -> bool {
        let mut loads = self.gradients().iter().filter(|gradient| gradient.array == array);
        match (loads.next(), loads.next()) {
            (None, _) => true,
            (Some(_), Some(_)) => false,
            (Some(gradient), None) => {
                let axes = self.axes(gradient.load);
                let count = |axis: Axis| axes.iter().filter(|&&own| own == axis).count();
                let plain = [Axis::Batch, Axis::Head, Axis::HeadKv, Axis::Query, Axis::Key];
                axes.iter().all(|&axis| plain.contains(&axis) && count(axis) == 1)
                    && count(Axis::Head) + count(Axis::HeadKv) <= 1
            }
        }
    }

    /// The array of 16 bits whose gradient is that of the score, by its place in [`Program::gradients`]: it
    /// is added to the score as it is, with an element for each query and key, those of keys side by side.
    pub fn added_array(&self) -> Option<usize> {
        if !matches!(self.class(), Some(ScoreClass::Additive { .. })) {
            return None;
        }
        self.gradients().iter().position(|gradient| {
            let axes = self.axes(gradient.load);
            let element = self.arrays()[gradient.array].element;
            matches!(element, Element::F16 | Element::Bf16)
                && self.nodes()[gradient.slope.index()] == Node::Const(Const::F32(1f32.to_bits()))
                && self.is_direct(gradient.array)
                && axes.contains(&Axis::Query)
                && axes.last() == Some(&Axis::Key)
        })
    }

    /// The program in which arrays of their own stand for the loads of arrays whose gradients are not direct,
    /// and what these hold: `name[axes]` is the load at these variables. None where all gradients are direct.
    ///
    /// # Errors
    /// An index that follows the score, and [`MAX_ARRAYS`].
    pub fn with_direct_gradients(&self) -> Result<Option<(Program, Vec<Direct>)>, ProgramError> {
        let others = self.gradients().iter().filter(|gradient| !self.is_direct(gradient.array));
        let loads: Vec<NodeId> = others.map(|gradient| gradient.load).collect();
        if loads.is_empty() {
            return Ok(None);
        }
        self.replaced(&loads).map(Some).map_err(|problem| ProgramError::new(problem, "", 0..0))
    }

    fn replaced(&self, loads: &[NodeId]) -> Result<(Program, Vec<Direct>), ProgramProblem> {
        let results = [self.mask(), self.score(), self.weight()];
        let kept = self.used(results.into_iter().flatten(), loads);
        let mut arrays = Vec::new();
        for (slot, decl) in self.arrays().iter().enumerate() {
            let is_read = |&(id, node): &(NodeId, Node)| {
                kept[id.index()]
                    && !loads.contains(&id)
                    && matches!(node, Node::Load(at, _) if usize::from(at) == slot)
            };
            if self.own().any(|one| is_read(&one)) {
                arrays.push(ArrayDecl { gradient: decl.gradient && self.is_direct(slot), ..decl.clone() });
            }
        }
        let mut made = Vec::new();
        for &load in loads {
            let Node::Load(array, _) = self.nodes()[load.index()] else { continue };
            let decl = &self.arrays()[usize::from(array)];
            let deps = self.deps(load);
            if deps.has(Deps::SCORE) {
                return Err(ProgramProblem::IndexOfScore { name: decl.name.clone() });
            }
            let axes =
                [(Deps::BATCH, Var::B), (Deps::HEAD, Var::H), (Deps::QUERY, Var::Q), (Deps::KEY, Var::K)];
            let axes: Vec<Var> =
                axes.into_iter().filter(|&(one, _)| deps.has(one)).map(|(_, var)| var).collect();
            let taken = |name: &String| {
                let of_arrays = self.arrays().iter().map(|array| &array.name);
                of_arrays.chain(self.scalars().iter().map(|scalar| &scalar.name)).any(|own| own == name)
            };
            let mut names = (made.len()..).map(|at| format!("fa_direct_{at}")).filter(|name| !taken(name));
            let name = names.next().unwrap_or_default();
            // An array has an axis, if only of one element.
            let rank = axes.len().max(1);
            let (own, element) = (name.clone(), Element::F32);
            arrays.push(ArrayDecl { name: own, element, rank, gradient: true, aligned: false });
            made.push(Direct { name, load, axes });
        }
        limit("arrays", MAX_ARRAYS, arrays.len())?;
        let mut graph = Graph::new(arrays, self.scalars().to_vec());
        let unused = graph.int(0)?;
        let mut replaced = vec![None; self.nodes().len()];
        for (at, direct) in made.iter().enumerate() {
            let axes: Result<Vec<_>, _> = direct.axes.iter().map(|&axis| graph.var(axis)).collect();
            let mut axes = axes?;
            if axes.is_empty() {
                // Of one element, which every head reads.
                axes.push(graph.var(Var::H)?);
            }
            let place = graph.arrays.len() - made.len() + at;
            replaced[direct.load.index()] = Some(graph.load(place, &axes)?);
        }
        let replaced = |id: NodeId, _| if kept[id.index()] { replaced[id.index()] } else { Some(unused) };
        let results = copied_but(self, &mut graph, replaced)?;
        Ok((Program::new(&graph, results)?, made))
    }

    /// Which own nodes `roots` need, where nothing of what the nodes of `ends` need is.
    pub(super) fn used(&self, roots: impl Iterator<Item = NodeId>, ends: &[NodeId]) -> Vec<bool> {
        let mut used = vec![false; self.nodes().len()];
        roots.for_each(|root| used[root.index()] = true);
        for index in (0..self.own_nodes()).rev() {
            if used[index] && !ends.iter().any(|end| end.index() == index) {
                self.nodes()[index].operands().for_each(|x| used[x.index()] = true);
            }
        }
        used
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Program {
        Program::parse(text).unwrap()
    }

    #[test]
    fn an_element_for_each_place_has_its_gradient_as_it_is() {
        for text in [
            "array t: f32[_, _, _, _] grad; score = s + t[b, h, q, k];",
            "array t: f16[_] grad; score = s * t[hk];",
            "array t: f32[_, _] grad; array c: i32[_]; mask = c[q] == c[k]; score = s + t[k, q];",
            "array t: f32[_]; score = s + t[q - k] + t[k - q];",
        ] {
            assert_eq!(of(text).with_direct_gradients().unwrap(), None, "{text}");
        }
    }

    #[test]
    fn an_array_of_16_bits_that_is_added_has_the_gradient_of_the_score() {
        for (text, expected) in [
            ("array t: bf16[_, _, _, _] grad; score = s + t[b, h, q, k];", Some("t")),
            ("array g: f16[_] grad; array t: f16[_, _] grad; score = s + g[h] + t[q, k];", Some("t")),
            ("array t: f32[_, _] grad; score = s + t[q, k];", None),
            ("array t: bf16[_, _] grad; score = s - t[q, k];", None),
            ("array t: bf16[_, _] grad; score = s + t[k, q];", None),
            ("array t: bf16[_, _] grad; score = s + t[h, k];", None),
            ("array t: bf16[_, _] grad; score = 2.0 * s + t[q, k];", None),
            ("array t: bf16[_, _]; score = s + t[q, k];", None),
        ] {
            let program = of(text);
            let array = program.added_array().map(|at| program.gradients()[at].array);
            let name = array.map(|array| program.arrays()[array].name.as_str());
            assert_eq!(name, expected, "{text}");
        }
    }

    #[test]
    fn other_loads_become_arrays_of_what_their_indices_follow() {
        let cases: [(&str, &str, &[&[Var]]); 5] = [
            (
                "array t: f32[_, _] grad; scalar n: i32; mask = k <= q; score = s + t[h, q - k + n];",
                "array fa_direct_0: f32[_, _, _] grad; scalar n: i32; mask = k <= q; \
                 score = s + fa_direct_0[h, q, k];",
                &[&[Var::H, Var::Q, Var::K]],
            ),
            (
                "array t: bf16[_, _, _, _] grad; score = s + t[0, h, q, k];",
                "array fa_direct_0: f32[_, _, _] grad; score = s + fa_direct_0[h, q, k];",
                &[&[Var::H, Var::Q, Var::K]],
            ),
            (
                "array t: f32[_] grad; array c: i32[_, _]; score = s + t[c[b, q]] * t[3];",
                "array fa_direct_0: f32[_, _] grad; array fa_direct_1: f32[_] grad; \
                 score = s + fa_direct_0[b, q] * fa_direct_1[h];",
                &[&[Var::B, Var::Q], &[]],
            ),
            (
                "array t: f32[_] grad; array c: i32[_]; mask = c[q] == c[k]; score = s + t[c[q]];",
                "array c: i32[_]; array fa_direct_0: f32[_] grad; mask = c[q] == c[k]; \
                 score = s + fa_direct_0[q];",
                &[&[Var::Q]],
            ),
            (
                "array t: f32[_] grad; score = select(t[7] < 0.0, s, s + t[hk // 2]);",
                "array t: f32[_]; array fa_direct_0: f32[_] grad; \
                 score = select(t[7] < 0.0, s, s + fa_direct_0[h]);",
                &[&[Var::H]],
            ),
        ];
        for (text, want, axes) in cases {
            let (made, loads) = of(text).with_direct_gradients().unwrap().unwrap();
            let found: Vec<&[Var]> = loads.iter().map(|load| &load.axes[..]).collect();
            assert_eq!(found, axes, "{text}");
            assert_eq!(made, of(want), "{text}");
            assert_eq!(made.with_direct_gradients().unwrap(), None);
        }
    }

    #[test]
    fn indices_that_follow_the_score_and_too_many_arrays_are_refused() {
        let error = of("array t: f32[_] grad; score = s + t[i32(s)];").with_direct_gradients().unwrap_err();
        assert!(error.to_string().contains("follows the score"), "{error}");
        let loads: Vec<_> = (0..=MAX_ARRAYS).map(|at| format!("t[q - k + {at}]")).collect();
        let text = format!("array t: f32[_] grad; score = s + {};", loads.join(" + "));
        let error = of(&text).with_direct_gradients().unwrap_err();
        assert!(error.to_string().contains("arrays"), "{error}");
    }
}
