//! Gradients of a program's arrays that kernels do not sum: an array with an element for each place, which
//! the host gathers, stands for each of their loads, and the host adds up its gradient.

use super::direct::Direct;
use super::eval::Inputs;
use super::intern::Interned;
use super::places::Places;
use crate::{Extras, Pass, Problem};

/// The program of a backward with arrays of its own, and what they stand for.
#[derive(Clone, Debug)]
pub struct DirectGradients {
    own: Interned,
    made: Interned,
    loads: Vec<Direct>,
    places: Places,
}

/// The array of the posed program at a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PosedArray {
    /// That of the own program at this slot.
    Own(usize),
    /// What stands for the load at this place of [`DirectGradients::loads`].
    Gathered(usize),
}

/// What stands for a load.
#[derive(Clone, Debug)]
pub struct Gathered {
    /// Its extents, packed.
    pub extents: Vec<usize>,
    /// Its elements.
    pub values: Vec<f32>,
}

impl DirectGradients {
    /// The problem that a kernel computes in place of `problem`, and what it needs of the host; `None` where
    /// kernels sum all gradients, for a forward, and where arrays cannot stand for the loads, which binding
    /// a kernel refuses.
    pub fn of(problem: &Problem, pass: Pass) -> Option<(Problem, DirectGradients)> {
        let own = problem.score.program.filter(|_| pass.is_backward())?;
        let (made, loads) = own.with_direct_gradients().ok()??;
        let made = made.intern().ok()?;
        let posed = problem.with_score(problem.score.with_program(Some(made)));
        Some((posed, DirectGradients { own, made, loads, places: Places::of(problem) }))
    }

    /// The program of the problem that it was made of.
    pub fn own(&self) -> &Interned {
        &self.own
    }

    /// The program that a kernel computes.
    pub fn made(&self) -> &Interned {
        &self.made
    }

    /// The loads for which arrays stand.
    pub fn loads(&self) -> &[Direct] {
        &self.loads
    }

    /// Whether a kernel sums the gradient of the posed program's array at `slot`.
    pub fn is_summed(&self, slot: usize) -> bool {
        self.made.arrays()[slot].gradient
    }

    /// The slots of the own program's arrays that the host reads.
    pub fn read(&self) -> Vec<bool> {
        self.own.arrays_of(&self.loads)
    }

    /// The places of a call of these lengths.
    pub fn places<F>(&self, extras: &Extras<&[i32], F>) -> Places {
        self.places.clone().with_lengths(extras)
    }

    /// What stands for a load.
    pub fn gather(&self, load: &Direct, inputs: &Inputs<'_>, places: &Places) -> Gathered {
        Gathered { extents: places.extents(load), values: self.own.gathered(load, inputs, places) }
    }

    /// What the arrays of the posed program are, in their order.
    pub fn arrays(&self) -> impl Iterator<Item = PosedArray> + '_ {
        let place = |name: &str| self.own.arrays().iter().position(|own| own.name == name);
        let stands = |name: &str| self.loads.iter().position(|load| load.name == name);
        self.made.arrays().iter().map(move |decl| match stands(&decl.name) {
            Some(at) => PosedArray::Gathered(at),
            None => PosedArray::Own(place(&decl.name).unwrap_or(0)),
        })
    }

    /// The gradient of the own program's array at `slot` by those of what stands for its loads, of which
    /// there may be none; `None` where a kernel sums it, or the array has no gradient.
    pub fn sums(
        &self,
        slot: usize,
        inputs: &Inputs<'_>,
        places: &Places,
        gradient_of: impl Fn(usize) -> Option<Vec<f32>>,
    ) -> Option<Vec<f32>> {
        let decl = &self.own.arrays()[slot];
        let is_own = |load: &Direct| load.array(&self.own) == Some(slot);
        let mut summed = self.made.arrays().iter().filter(|made| made.gradient);
        if !decl.gradient || summed.any(|made| made.name == decl.name) {
            return None;
        }
        let extents = &inputs.arrays()[slot].extents[..decl.rank];
        let mut sums = vec![0.0; extents.iter().map(|&extent| extent.max(0) as usize).product()];
        for (at, load) in self.loads.iter().enumerate().filter(|(_, load)| is_own(load)) {
            if let Some(gradient) = gradient_of(at) {
                self.own.scatter(load, inputs, places, &gradient, &mut sums);
            }
        }
        Some(sums.into_iter().map(|sum| sum as f32).collect())
    }
}
