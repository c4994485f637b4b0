//! The layers around attention, in plain f32, each with its gradient. Matrices are row-major; rows are
//! tokens.

/// A parameter with its gradient and Adam's two moments.
pub(crate) struct Param {
    /// The values.
    pub value: Vec<f32>,
    /// Sum of gradients since the last step.
    pub grad: Vec<f32>,
    mean: Vec<f32>,
    square: Vec<f32>,
}

/// Adam's constants, as in torch's default but for the rate and the second decay.
const RATE: f32 = 3e-3;
const DECAYS: (f32, f32) = (0.9, 0.99);
const EPSILON: f32 = 1e-8;

impl Param {
    /// A parameter that starts as `value`.
    pub(crate) fn new(value: Vec<f32>) -> Param {
        let zeros = vec![0.0; value.len()];
        Param { grad: zeros.clone(), mean: zeros.clone(), square: zeros, value }
    }

    /// The `step`-th step of Adam (from 1 on); clears the gradient.
    pub(crate) fn step(&mut self, step: i32) {
        let correct = (1.0 - DECAYS.0.powi(step), 1.0 - DECAYS.1.powi(step));
        for i in 0..self.value.len() {
            let grad = std::mem::take(&mut self.grad[i]);
            self.mean[i] = DECAYS.0 * self.mean[i] + (1.0 - DECAYS.0) * grad;
            self.square[i] = DECAYS.1 * self.square[i] + (1.0 - DECAYS.1) * grad * grad;
            let root = (self.square[i] / correct.1).sqrt() + EPSILON;
            self.value[i] -= RATE * (self.mean[i] / correct.0) / root;
        }
    }
}

/// `x [rows, n_in] w [n_in, n_out]`.
pub(crate) fn matmul(x: &[f32], w: &[f32], n_in: usize, n_out: usize) -> Vec<f32> {
    let mut y = vec![0.0; x.len() / n_in * n_out];
    for (x, y) in x.chunks_exact(n_in).zip(y.chunks_exact_mut(n_out)) {
        for (x, w) in x.iter().zip(w.chunks_exact(n_out)) {
            for (y, w) in y.iter_mut().zip(w) {
                *y += x * w;
            }
        }
    }
    y
}

/// The gradient of [`matmul`]: that of `x` is returned, that of `w` is added to `w.grad`.
pub(crate) fn matmul_backward(x: &[f32], w: &mut Param, dy: &[f32], n_in: usize, n_out: usize) -> Vec<f32> {
    let mut dx = vec![0.0; x.len()];
    for ((x, dx), dy) in x.chunks_exact(n_in).zip(dx.chunks_exact_mut(n_in)).zip(dy.chunks_exact(n_out)) {
        for (i, (x, dx)) in x.iter().zip(dx).enumerate() {
            let row = i * n_out..(i + 1) * n_out;
            *dx = w.value[row.clone()].iter().zip(dy).map(|(w, dy)| w * dy).sum();
            for (dw, dy) in w.grad[row].iter_mut().zip(dy) {
                *dw += x * dy;
            }
        }
    }
    dx
}

/// Added to a variance before its root, as torch's layer norm has it.
const NORM_EPSILON: f32 = 1e-5;

/// Rows to mean 0 and variance 1, without scale and shift; and what each row was multiplied with.
pub(crate) fn norm(x: &[f32], width: usize) -> (Vec<f32>, Vec<f32>) {
    let mut y = x.to_vec();
    let factors = y.chunks_exact_mut(width).map(|row| {
        let mean = row.iter().sum::<f32>() / width as f32;
        row.iter_mut().for_each(|x| *x -= mean);
        let variance = row.iter().map(|x| x * x).sum::<f32>() / width as f32;
        let factor = 1.0 / (variance + NORM_EPSILON).sqrt();
        row.iter_mut().for_each(|x| *x *= factor);
        factor
    });
    let factors = factors.collect();
    (y, factors)
}

/// The gradient of [`norm`], from its outputs.
pub(crate) fn norm_backward(y: &[f32], factors: &[f32], dy: &[f32], width: usize) -> Vec<f32> {
    let mut dx = dy.to_vec();
    for ((y, dx), factor) in y.chunks_exact(width).zip(dx.chunks_exact_mut(width)).zip(factors) {
        let mean = dx.iter().sum::<f32>() / width as f32;
        let along = dx.iter().zip(y).map(|(dx, y)| dx * y).sum::<f32>() / width as f32;
        for (dx, y) in dx.iter_mut().zip(y) {
            *dx = factor * (*dx - mean - y * along);
        }
    }
    dx
}

/// `sqrt(2 / pi)` and the cubic term of the tanh form of GELU.
const GELU: (f32, f32) = (0.797_884_6, 0.044_715);

/// GELU in its tanh form.
pub(crate) fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + (GELU.0 * (x + GELU.1 * x * x * x)).tanh())
}

/// The slope of [`gelu`].
pub(crate) fn gelu_slope(x: f32) -> f32 {
    let t = (GELU.0 * (x + GELU.1 * x * x * x)).tanh();
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * GELU.0 * (1.0 + 3.0 * GELU.1 * x * x)
}

/// Mean cross-entropy of `logits [rows, classes]`, which become its gradient.
pub(crate) fn cross_entropy(logits: &mut [f32], targets: &[usize], classes: usize) -> f64 {
    let rows = targets.len();
    let mut loss = 0.0;
    for (row, &target) in logits.chunks_exact_mut(classes).zip(targets) {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let chosen = row[target] - max;
        row.iter_mut().for_each(|x| *x = (*x - max).exp());
        let sum: f32 = row.iter().sum();
        loss += f64::from(sum.ln() - chosen);
        row.iter_mut().for_each(|x| *x /= sum * rows as f32);
        row[target] -= 1.0 / rows as f32;
    }
    loss / rows as f64
}
