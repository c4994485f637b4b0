//! The expected results of problems whose K and V, or Q as well, are codes.

use fa_core::quantize::Codes;
use fa_core::{DescaleForm, Descales, Dtype, Problem, ScoreMod, TensorLayout, Types};
use fa_cpu::batch::Batch;
use fa_cpu::check;
use fa_cpu::reference::fp8::{self, Accumulation};
use fa_cpu::reference::{self, low_precision};
use fa_cpu::{Arguments, CpuError, Element, Extras, KvRef, TensorRef};

/// The f64 result, and the same formula in the kernels' precision.
pub type Expected<T> = (reference::Forward, low_precision::LowForward<T>);

/// Keys of a tile of the kernel that fp8 results are held to: whichever a kernel has, its error is much the
/// same.
const TILE_N: usize = 128;

/// The expected results of a forward over K and V in codes beside a Q of type `T`, or one of fp8 with O of
/// type `T`. The low-precision ones of fp8 are a kernel's, and the tolerance of those is the noise.
///
/// # Errors
/// Tensors that do not fit the problem.
pub fn expected<T: Element>(
    problem: &Problem,
    arguments: Arguments<'_>,
    q: KvRef<'_, T>,
    [k, v]: [TensorRef<'_, u8>; 2],
) -> Result<Expected<T>, CpuError> {
    match q {
        KvRef::Codes(q) => {
            let bits: [KvRef<'_, T>; 3] = [q, k, v].map(KvRef::Codes);
            let exact = reference::forward_extras(problem, arguments, bits[0], bits[1], bits[2])?;
            let how = Accumulation::exact(TILE_N);
            let kernel = fp8::as_kernel(problem, arguments, &q, &k, &v, how)?;
            let out_noise = kernel.tolerance(&exact.out).max(exact.out_noise);
            let lse_noise = kernel.lse_tolerance();
            let low = low_precision::LowForward { out: T::narrowed(&kernel.out), lse: kernel.lse };
            Ok((reference::Forward { out_noise, lse_noise, ..exact }, low))
        }
        KvRef::Same(q) => {
            let exact = of_converted(problem, arguments, &q, [&k, &v], false)?;
            let low = low_precision::forward_extras(problem, arguments, &q, &k, &v)?;
            if !is_rounded(problem, problem.descales.k) && !is_rounded(problem, problem.descales.v) {
                return Ok((exact, low));
            }
            // Some kernels round such rows to Q's type, others apply their descale to scores and
            // probabilities: the noise is twice what lies between, of which half is for their other errors.
            let rounded = of_converted(problem, arguments, &q, [&k, &v], true)?;
            let between = |one: &[f64], other: &[f64]| {
                let differences = one.iter().zip(other).map(|(a, b)| (a - b).abs());
                differences.filter(|difference| difference.is_finite()).fold(0.0, f64::max)
            };
            let out_noise = exact.out_noise + 2.0 * between(&exact.out, &rounded.out);
            let lse_noise = 2.0 * between(&exact.lse, &rounded.lse);
            Ok((reference::Forward { out_noise, lse_noise, ..exact }, low))
        }
    }
}

/// Whether a kernel may apply descales of this form before it rounds to Q's type: of rows, and of latents,
/// whose rows have those of K and of V.
fn is_rounded(problem: &Problem, form: DescaleForm) -> bool {
    let both = [problem.descales.k, problem.descales.v].iter().all(|&form| form != DescaleForm::None);
    form == DescaleForm::TokenHead || problem.latent && both
}

/// The f64 result on the numbers of codes: exact, or where `rounds` as elements of Q's type where
/// [`is_rounded`] says so.
fn of_converted<T: Element>(
    problem: &Problem,
    arguments: Arguments<'_>,
    q: &TensorRef<'_, T>,
    sides: [&TensorRef<'_, u8>; 2],
    rounds: bool,
) -> Result<reference::Forward, CpuError> {
    let descales = problem.descales;
    let plain = problem.with_types(Types::same(Dtype::F32)).with_descales(Descales::NONE);
    let given = arguments.extras;
    let extras = Extras { k_descale: None, v_descale: None, ..given };
    let rows = Extras { alibi_slopes: None, sinks: None, dlse: None, ..extras };
    let batch = Batch::new(&plain.with_score(ScoreMod::NONE), &rows)?;
    let codes = Codes::of(problem.types.kv).expect("K and V are codes");
    let [k, v] = [(descales.k, given.k_descale), (descales.v, given.v_descale)];
    let [k_numbers, v_numbers] = [(k, sides[0]), (v, sides[1])].map(|((form, values), bits)| {
        let [outer, inner, heads, bytes] = bits.shape();
        let dim = bytes * codes.per_byte();
        let mut numbers = vec![0f32; outer * inner * heads * dim];
        for (sequence, own) in batch.sequences.iter().enumerate() {
            for (entry, at) in (0..own.k.len).map(|key| batch.key(sequence, key)) {
                for head in 0..heads {
                    let row = (entry * inner + at) * heads + head;
                    let descale = values.map_or(1.0, |values| match form {
                        DescaleForm::None => 1.0,
                        DescaleForm::Head => values[head],
                        DescaleForm::SequenceHead => values[sequence * heads + head],
                        DescaleForm::TokenHead => values[row],
                    });
                    for (column, number) in numbers[row * dim..(row + 1) * dim].iter_mut().enumerate() {
                        let (byte, index) = (column / codes.per_byte(), column % codes.per_byte());
                        let value = codes.number(bits.at(entry, at, head, byte), index) * descale;
                        let is_rounded = rounds && is_rounded(problem, form);
                        *number = if is_rounded { T::from_f32(value).to_f32() } else { value };
                    }
                }
            }
        }
        numbers
    });
    let [batches, queries, heads, dim] = q.shape();
    let places = (0..batches * queries * heads * dim).map(|i| {
        let (row, column) = (i / dim, i % dim);
        q.at(row / heads / queries, row / heads % queries, row % heads, column).to_f32()
    });
    let q_numbers: Vec<f32> = places.collect();
    let view = |name, values, shape| TensorRef::packed(name, values, shape, TensorLayout::Bshd);
    let q = view("q", &q_numbers, q.shape())?;
    let k = view("k", &k_numbers, check::k_shape(&plain))?;
    let v = view("v", &v_numbers, check::v_shape(&plain))?;
    reference::forward_extras(&plain, Arguments { extras, ..arguments }, &q, &k, &v)
}
