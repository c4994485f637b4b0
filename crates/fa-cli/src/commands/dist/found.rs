//! What a rank computed, and how it compares.

use fa_cpu::Element;

use super::jobs::Answer;

/// O, LSE, dQ, dK and dV of some rows, packed.
pub(super) struct Found<T> {
    pub out: Vec<T>,
    pub lse: Vec<f32>,
    /// Empty where there is no backward.
    pub gradients: Vec<Vec<T>>,
    /// The gradient of the sinks, of which each rank has a part; empty where there are none.
    pub dsinks: Vec<f32>,
    /// The gradients of a program's arrays, which every rank has of the whole.
    pub darrays: Vec<Vec<f32>>,
}

fn same<T: Element>(one: &[T], other: &[T]) -> bool {
    let bits = |value: &T| value.to_f32().to_bits();
    one.len() == other.len() && one.iter().zip(other).all(|(a, b)| bits(a) == bits(b))
}

impl<T: Element> Found<T> {
    /// The first tensor with other bits.
    fn differs(&self, other: &Found<T>) -> Option<&'static str> {
        let gradients = self.gradients.iter().zip(&other.gradients).zip(["dQ", "dK", "dV"]);
        let mut tensors = vec![("O", same(&self.out, &other.out)), ("LSE", same(&self.lse, &other.lse))];
        tensors.extend(gradients.map(|((own, other), name)| (name, same(own, other))));
        tensors.push(("dsinks", same(&self.dsinks, &other.dsinks)));
        let arrays = self.darrays.iter().zip(&other.darrays);
        tensors.extend(arrays.map(|(own, other)| ("a gradient of an array", same(own, other))));
        tensors.into_iter().find(|(_, same)| !same).map(|(name, _)| name)
    }

    /// Puts into `answer` how this rank's rows compare with `one` process's.
    pub(super) fn judge(&self, one: &Found<T>, answer: &mut Answer) {
        answer.same_bits = Some(same(&self.out, &one.out) && same(&self.lse, &one.lse));
        answer.errors.push(worst(&self.out, &one.out));
        answer.errors.extend(self.gradients.iter().zip(&one.gradients).map(|(own, one)| worst(own, one)));
        answer.errors.extend(self.darrays.iter().zip(&one.darrays).map(|(own, one)| worst(own, one)));
        answer.dsinks = [self.dsinks.clone(), one.dsinks.clone()];
    }
}

/// Runs `repeat` times; the first run's results. All ranks run as often, whatever they find.
pub(super) fn repeated<T: Element, E>(
    repeat: usize,
    answer: &mut Answer,
    mut run: impl FnMut(usize) -> Result<Found<T>, E>,
) -> Result<Found<T>, E> {
    let first = run(1)?;
    for number in 2..=repeat {
        if let (Some(tensor), None) = (run(number)?.differs(&first), &answer.differs) {
            answer.differs = Some(format!("run {number}: {tensor}"));
        }
    }
    Ok(first)
}

/// The largest difference over the largest value; NaN anywhere is infinite.
pub(super) fn worst<T: Element>(found: &[T], want: &[T]) -> f64 {
    let largest = want.iter().map(|value| value.to_f64().abs()).fold(1e-30, f64::max);
    let differences = found.iter().zip(want).map(|(a, b)| (a.to_f64() - b.to_f64()).abs());
    let worst = differences.map(|d| if d.is_nan() { f64::INFINITY } else { d }).fold(0.0, f64::max);
    if found.len() == want.len() { worst / largest } else { f64::INFINITY }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(values: [f32; 3]) -> Found<f32> {
        let [out, lse, dk] = values.map(|value| vec![1.0, value]);
        Found { out, lse, gradients: vec![vec![2.0], dk], dsinks: Vec::new(), darrays: Vec::new() }
    }

    #[test]
    fn the_first_run_that_differs_is_named_and_all_runs_run() {
        let cases = [
            ([0.0; 3], None),
            ([0.0, 0.0, 1.0], Some("run 3: dK")),
            ([0.0, f32::NAN, 1.0], Some("run 3: LSE")),
            ([-0.0, 0.0, 0.0], Some("run 3: O")),
        ];
        for (third, want) in cases {
            let (mut answer, mut runs) = (Answer::of(0, 0), Vec::new());
            let first = repeated(5, &mut answer, |number| {
                runs.push(number);
                Ok::<_, ()>(found(if number >= 3 { third } else { [0.0; 3] }))
            });
            assert_eq!((answer.differs.as_deref(), runs), (want, vec![1, 2, 3, 4, 5]));
            assert_eq!(first.unwrap().out, [1.0, 0.0]);
        }
    }

    #[test]
    fn rows_are_judged_beside_one_process() {
        let one = found([0.0; 3]);
        let cases = [([0.0; 3], true, [0.0, 0.0, 0.0]), ([0.5, 0.0, 0.25], false, [0.5, 0.0, 0.25])];
        for (own, same, errors) in cases {
            let mut answer = Answer::of(0, 0);
            found(own).judge(&one, &mut answer);
            assert_eq!((answer.same_bits, answer.errors.as_slice()), (Some(same), &errors[..]));
        }
        let mut answer = Answer::of(0, 0);
        found([f32::NAN, 0.0, 0.0]).judge(&one, &mut answer);
        assert_eq!(answer.errors[0], f64::INFINITY);
    }
}
