//! What arrays hold that stand for loads ([`Direct`]), and where their gradients go: by the interpreter.

use super::direct::Direct;
use super::eval::{Inputs, Point, RowValues};
use super::forms::GradientForm;
use super::node::Node;
use super::ops::{Precision, Value};
use super::types::Var;
use super::whole::Program;
use crate::{Extras, Problem};

/// The scores of a call: what [`Direct`] arrays are indexed by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    heads: usize,
    group: usize,
    /// The most of a sequence.
    queries: usize,
    keys: usize,
    offset: i64,
    /// Queries and keys of each sequence.
    sequences: Vec<[usize; 2]>,
}

impl Places {
    /// Those of a problem. Where sequences differ in length, each is as long as the longest may be until
    /// [`Places::with_lengths`].
    pub fn of(problem: &Problem) -> Places {
        let lengths = &problem.lengths;
        let (queries, keys) = (lengths.max_q(), lengths.max_k());
        Places {
            heads: problem.heads_q,
            group: problem.group_size().max(1),
            queries,
            keys,
            offset: problem.mask.offset,
            sequences: vec![[queries, keys]; lengths.sequences()],
        }
    }

    /// Those of the lengths that a call's extras name, as kernels read them: of starts and lengths in use
    /// beyond the problem's bounds as much as lies within.
    pub fn with_lengths<F>(mut self, extras: &Extras<&[i32], F>) -> Places {
        let sides = [
            (self.queries, extras.cu_seqlens_q, extras.seqused_q),
            (self.keys, extras.cu_seqlens_k, extras.seqused_k),
        ];
        for (side, (most, starts, used)) in sides.into_iter().enumerate() {
            for (at, sequence) in self.sequences.iter_mut().enumerate() {
                let pair = starts.and_then(|starts| Some([*starts.get(at)?, *starts.get(at + 1)?]));
                let own = pair.map_or(most, |[from, to]| within(to.saturating_sub(from), most));
                sequence[side] = used.and_then(|used| used.get(at)).map_or(own, |&used| within(used, own));
            }
        }
        self
    }

    /// The extents of the array that stands for a load.
    pub fn extents(&self, load: &Direct) -> Vec<usize> {
        let axes: Vec<usize> = load.axes.iter().map(|&axis| self.len(axis)).collect();
        // An array has an axis, if only of one element.
        if axes.is_empty() { vec![1] } else { axes }
    }

    fn len(&self, axis: Var) -> usize {
        match axis {
            Var::B => self.sequences.len(),
            Var::H => self.heads,
            Var::Q => self.queries,
            Var::K => self.keys,
            // What no direct array is indexed by.
            Var::S | Var::Hk | Var::Sq | Var::Sk | Var::Off => 1,
        }
    }
}

fn within(len: i32, most: usize) -> usize {
    usize::try_from(len).unwrap_or(0).min(most)
}

impl Program {
    /// Which arrays of the program the loads read, by themselves and by their indices.
    pub fn arrays_of(&self, loads: &[Direct]) -> Vec<bool> {
        let used = self.used(loads.iter().map(|load| load.load), &[]);
        let mut read = vec![false; self.arrays().len()];
        for (&node, _) in self.nodes().iter().zip(used).filter(|(_, used)| *used) {
            if let Node::Load(array, _) = node {
                read[usize::from(array)] = true;
            }
        }
        read
    }

    /// The elements of the array that stands for `load`, packed.
    pub fn gathered(&self, load: &Direct, inputs: &Inputs<'_>, places: &Places) -> Vec<f32> {
        let mut found = Vec::with_capacity(places.extents(load).iter().product());
        let of = |values: &[Value]| values[load.load.index()].float() as f32;
        if self.is_by_distance(load) {
            let (queries, keys) = (places.queries, places.keys);
            places.heads(load, |point, _| {
                let line = self.by_distances(inputs, point, places, of);
                // The elements of a row are neighbours, from the highest distance on.
                for row in line.windows(keys.max(1)).take(queries) {
                    found.extend(row.iter().rev());
                }
            });
        } else {
            self.visit(load, inputs, places, |values, _| found.push(of(values)));
        }
        found
    }

    /// Adds the gradient of the array that stands for `load`, packed, to that of the array that it reads,
    /// packed too. The sums are always made in one order.
    pub fn scatter(
        &self,
        load: &Direct,
        inputs: &Inputs<'_>,
        places: &Places,
        gradient: &[f32],
        to: &mut [f64],
    ) {
        let Node::Load(array, indices) = self.nodes()[load.load.index()] else { return };
        let extents = inputs.arrays()[usize::from(array)].extents;
        let place = |values: &[Value]| {
            let mut at = 0;
            for (index, &extent) in indices.iter().flatten().zip(&extents) {
                let index = values[index.index()].int().min(extent - 1).max(0);
                at = at * extent.max(0) as usize + index as usize;
            }
            at
        };
        let mut gradient = gradient.iter();
        if self.is_by_distance(load) {
            let (queries, keys) = (places.queries, places.keys);
            places.heads(load, |point, within| {
                let mut sums = vec![0.0; (queries + keys).saturating_sub(1)];
                for q in 0..queries {
                    let own = gradient.by_ref().take(keys).enumerate();
                    for (k, &value) in own.filter(|&(k, _)| q < within[0] && k < within[1]) {
                        sums[q + keys - 1 - k] += f64::from(value);
                    }
                }
                for (at, sum) in self.by_distances(inputs, point, places, place).into_iter().zip(sums) {
                    if let Some(to) = to.get_mut(at) {
                        *to += sum;
                    }
                }
            });
        } else {
            self.visit(load, inputs, places, |values, is_there| {
                let own = gradient.next().filter(|_| is_there);
                if let (Some(to), Some(&own)) = (to.get_mut(place(values)), own) {
                    *to += f64::from(own);
                }
            });
        }
    }

    /// Whether a load follows the distance of the query and the key.
    fn is_by_distance(&self, load: &Direct) -> bool {
        self.form(load.load) == GradientForm::Diagonal
    }

    /// What `of` makes of the values at each distance, from the lowest on.
    fn by_distances<T>(
        &self,
        inputs: &Inputs<'_>,
        point: Point,
        places: &Places,
        of: impl Fn(&[Value]) -> T,
    ) -> Vec<T> {
        let (queries, keys) = (places.queries as i32, places.keys as i32);
        if queries == 0 || keys == 0 {
            return Vec::new();
        }
        let at = |distance: i32| Point { q: distance.max(0), k: (-distance).max(0), ..point };
        (1 - keys..queries).map(|distance| of(&self.values(inputs, &at(distance), Precision::F32))).collect()
    }

    /// The values of what a load needs at each place of its array, in its order, and whether a sequence has
    /// that place.
    fn visit(
        &self,
        load: &Direct,
        inputs: &Inputs<'_>,
        places: &Places,
        mut see: impl FnMut(&[Value], bool),
    ) {
        let used = self.used(std::iter::once(load.load), &[]);
        let range = |axis: Var| 0..if load.axes.contains(&axis) { places.len(axis) } else { 1 };
        places.heads(load, |point, within| {
            for q in range(Var::Q) {
                let at = Point { q: q as i32, ..point };
                let mut row = RowValues::of(self, inputs, &at, Precision::F32, &used);
                for k in range(Var::K) {
                    see(row.at(k as i32, 0.0), q < within[0].max(1) && k < within[1].max(1));
                }
            }
        });
    }
}

impl Places {
    /// Calls `each` for every sequence and head that a load follows, with as many queries and keys as those
    /// whose gradients count: of a load that follows no sequence all, which sequences share.
    fn heads(&self, load: &Direct, mut each: impl FnMut(Point, [usize; 2])) {
        let range = |axis: Var| 0..if load.axes.contains(&axis) { self.len(axis) } else { 1 };
        for b in range(Var::B) {
            let own = self.sequences.get(b).copied().unwrap_or_default();
            let within = if load.axes.contains(&Var::B) { own } else { [self.queries, self.keys] };
            let off = own[1] as i64 - own[0] as i64 + self.offset;
            for h in range(Var::H) {
                let point = Point {
                    b: b as i32,
                    h: h as i32,
                    hk: (h / self.group) as i32,
                    sq: own[0] as i32,
                    sk: own[1] as i32,
                    off: off as i32,
                    ..Point::default()
                };
                each(point, within);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::eval::{ArrayData, ArrayView};
    use super::*;
    use crate::{Dtype, Lengths, Mask};

    #[test]
    fn loads_are_gathered_and_their_gradients_added_up() {
        let text = "array t: f32[_, _] grad; array c: i32[_]; score = s + t[hk, q - k + 2] * t[c[q], 1];";
        let program = Program::parse(text).unwrap();
        let problem =
            Problem::square(1, 3, 4, 64, Mask::FULL, Dtype::Bf16).with_lengths(Lengths::uniform(1, 3, 4));
        let places = Places::of(&problem);
        let table: Vec<f32> = (0..20).map(|i| i as f32).collect();
        let array = ArrayView::contiguous(ArrayData::F32(&table), &[4, 5]);
        let other = ArrayView::contiguous(ArrayData::I32(&[3, -9, 99]), &[3]);
        let inputs = Inputs::new(&program, vec![other, array], Vec::new()).unwrap();
        let (_, loads) = program.with_direct_gradients().unwrap().unwrap();
        assert_eq!(loads.len(), 2);
        for load in &loads {
            let found = program.gathered(load, &inputs, &places);
            let extents = places.extents(load);
            let gradient: Vec<f32> = (0..found.len()).map(|i| 1.0 + i as f32).collect();
            let mut sums = vec![0.0; 20];
            program.scatter(load, &inputs, &places, &gradient, &mut sums);
            let mut want = vec![0.0; 20];
            if load.axes == [Var::Q] {
                assert_eq!(extents, [3]);
                assert_eq!(found, [16.0, 1.0, 16.0]);
                (want[16], want[1]) = (1.0 + 3.0, 2.0);
            } else {
                assert_eq!(extents, [4, 3, 4]);
                for (at, (&value, own)) in found.iter().zip(gradient).enumerate() {
                    let (h, q, k) = (at / 12, at / 4 % 3, at % 4);
                    let index = h * 5 + (q + 2).saturating_sub(k).min(4);
                    assert_eq!(value, index as f32);
                    want[index] += f64::from(own);
                }
            }
            assert_eq!(sums, want);
        }
    }

    #[test]
    fn places_of_packed_sequences_are_those_that_they_have() {
        let text = "array t: f32[_] grad; array c: i32[_]; array u: f32[_]; \
                    score = s + t[q - k + off + 4 * b] + u[c[k]];";
        let program = Program::parse(text).unwrap();
        let lengths = Lengths::packed(3, 5, 6, 3, 4);
        let problem = Problem::square(1, 3, 1, 64, Mask::FULL, Dtype::Bf16).with_lengths(lengths);
        // 2 queries of 4 keys, none of 1, 3 of 1, of which one is in use.
        let starts = [&[0, 2, 2, 5][..], &[0, 4, 5, 6]];
        let extras = Extras {
            cu_seqlens_q: Some(starts[0]),
            cu_seqlens_k: Some(starts[1]),
            seqused_q: Some(&[2, 9, 1][..]),
            ..Extras::<&[i32], &[f32]>::NONE
        };
        let places = Places::of(&problem).with_lengths(&extras);
        assert_eq!(places.sequences, [[2, 4], [0, 1], [1, 1]]);
        let table: Vec<f32> = (0..16).map(|i| i as f32).collect();
        let (of_f32, words) = (ArrayView::contiguous(ArrayData::F32(&table), &[16]), [0; 4]);
        let index = ArrayView::contiguous(ArrayData::I32(&words), &[4]);
        let inputs = Inputs::new(&program, vec![index, of_f32, of_f32], Vec::new()).unwrap();
        let (_, loads) = program.with_direct_gradients().unwrap().unwrap();
        assert_eq!(program.arrays_of(&loads), [false, true, false]);
        let load = &loads[0];
        assert_eq!((&load.axes[..], places.extents(load)), (&[Var::B, Var::Q, Var::K][..], vec![3, 3, 4]));
        let found = program.gathered(load, &inputs, &places);
        assert_eq!(found[..8], [2.0, 1.0, 0.0, 0.0, 3.0, 2.0, 1.0, 0.0]);
        assert_eq!(found[24], 8.0);
        let gradient: Vec<f32> = (0..36).map(|i| 1.0 + i as f32).collect();
        let mut sums = vec![0.0; 16];
        program.scatter(load, &inputs, &places, &gradient, &mut sums);
        let mut want = vec![0.0; 16];
        (want[0], want[1], want[2], want[3], want[8]) = (3.0 + 4.0 + 8.0, 2.0 + 7.0, 1.0 + 6.0, 5.0, 25.0);
        assert_eq!(sums, want);
    }
}
