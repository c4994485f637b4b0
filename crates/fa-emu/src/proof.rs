//! Proofs of kernels on problems: inputs, the oracle's results, and the outcome of an emulated pass.
//!
//! Values are judged by the rule of [`fa_cpu::compare`], as on a GPU.

use fa_core::program::OwnedInputs;
use fa_core::quantize::Codes;
use fa_core::{DescaleForm, Dtype, Pass, Problem, TensorLayout};
use fa_cpu::batch::Batch;
use fa_cpu::check::{k_shape, out_shape, q_shape, v_shape};
use fa_cpu::compare::{Comparison, compare, compare_lse};
use fa_cpu::{Arguments, Element, KvRef, OwnedExtras, TensorRef, reference};
use fa_lab::codes::{kinds, spread};
use fa_lab::judge::codes;
use fa_lab::random::Random;
use half::{bf16, f16};

use crate::call::{Call, Given};
use crate::case::Case;
use crate::compiler::hash;
use crate::error::Error;
use crate::extras::with_mods;
use crate::options::Options;
use crate::outcome::Outcome;
use crate::placement::Placement;
use crate::unit::Unit;

/// A problem with inputs and the oracle's results: made once, compared with many runs.
#[derive(Clone, Debug)]
pub struct Trial {
    problem: Problem,
    pass: Pass,
    placement: Placement,
    extras: OwnedExtras,
    program: Option<OwnedInputs>,
    /// Of queries and of keys: whether each row belongs to a sequence; empty where all do.
    rows: [Vec<bool>; 2],
    /// q, k, v and, of a backward, out and dout.
    inputs: Vec<Values>,
    lse: Vec<f32>,
    expected: Vec<Expected>,
    expected_lse: Vec<f64>,
    /// What LSEs may differ by beyond their tolerance.
    lse_noise: f64,
    expected_dsinks: Option<ExpectedSinks>,
    /// Of each array of the program; `None` for those without a gradient.
    expected_darrays: Vec<Option<ExpectedSinks>>,
}

/// The elements of a tensor.
#[derive(Clone, Debug)]
enum Values {
    /// The bits of 16.
    Halves(Vec<u16>),
    /// Bytes of codes.
    Codes(Vec<u8>),
}

/// Expected gradients of the sinks, or of an array.
#[derive(Clone, Debug)]
struct ExpectedSinks {
    exact: Vec<f64>,
    low: Vec<f32>,
    noise: f64,
}

/// An expected output.
#[derive(Clone, Debug)]
struct Expected {
    name: &'static str,
    shape: [usize; 4],
    exact: Vec<f64>,
    low: Vec<u16>,
    /// Noise of f32 arithmetic where terms cancel.
    noise: f64,
}

/// The judged outcome of a run.
#[derive(Clone, Debug)]
pub struct Proof {
    /// Findings, counters, outputs.
    pub outcome: Outcome,
    /// Each output by name against the oracle; none when the pass did not end.
    pub values: Vec<(&'static str, Comparison)>,
    /// Outputs with writes between rows.
    pub stray: Vec<&'static str>,
    /// A hash of the outputs' bits.
    pub bits: String,
}

impl Proof {
    /// Whether there are no findings and all values are within tolerance.
    pub fn passed(&self) -> bool {
        self.faults().is_empty()
    }

    /// All faults, as text.
    pub fn faults(&self) -> Vec<String> {
        let mut faults: Vec<String> = self.outcome.findings.iter().map(ToString::to_string).collect();
        if let Some(launch) = self.outcome.launches.iter().find(|launch| !launch.finished)
            && faults.is_empty()
        {
            faults.push(format!("{} did not end", launch.entry));
        }
        if self.outcome.page_faults > 0 {
            let count = self.outcome.page_faults;
            faults.push(format!("page faults: {count} pages were taken for none, and all of them exist"));
        }
        let far = self.values.iter().filter(|(_, found)| !found.passed());
        faults.extend(far.map(|(name, found)| format!("wrong values: {name}: {found}")));
        faults.extend(
            self.stray.iter().map(|name| format!("stray writes: {name} is written between its rows")),
        );
        faults
    }
}

impl Trial {
    /// Reproducible, roughly normal inputs of `problem`, whose sequences have equal lengths, with the
    /// oracle's results.
    ///
    /// # Panics
    /// On a dtype that kernels do not take.
    pub fn new(problem: &Problem, pass: Pass, placement: Placement) -> Trial {
        Trial::with(problem, pass, placement, &with_mods(OwnedExtras::NONE, problem))
    }

    /// The same with lengths, pages, slopes and sinks.
    ///
    /// # Panics
    /// On a dtype that kernels do not take, and on extras that do not fit the problem.
    pub fn with(problem: &Problem, pass: Pass, placement: Placement, extras: &OwnedExtras) -> Trial {
        Trial::with_inputs(problem, pass, placement, extras, OwnedInputs::drawn(problem, 1))
    }

    /// The same with these arrays and scalars of the problem's program.
    ///
    /// # Panics
    /// As [`Trial::with`], and on inputs that do not fit the program.
    pub fn with_inputs(
        problem: &Problem,
        pass: Pass,
        placement: Placement,
        extras: &OwnedExtras,
        program: Option<OwnedInputs>,
    ) -> Trial {
        let beside = (extras, program);
        match problem.types.wide() {
            Dtype::F16 => Trial::of(problem, pass, placement, beside, &normal::<f16>(problem)),
            Dtype::Bf16 => Trial::of(problem, pass, placement, beside, &normal::<bf16>(problem)),
            dtype @ (Dtype::F32 | Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2) => {
                panic!("kernels take 16-bit types, not {dtype}")
            }
        }
    }

    /// The same of given values: q, k, v and dout, packed `[batch, seqlen, heads, dim]`, as bits. (A forward
    /// reads no dout.) Those of tensors of codes are the numbers of codes.
    ///
    /// # Panics
    /// On a dtype that kernels do not take, and on values and extras that do not fit the problem.
    pub fn of_values(
        problem: &Problem,
        pass: Pass,
        placement: Placement,
        extras: &OwnedExtras,
        values: &[Vec<u16>; 4],
    ) -> Trial {
        let values = values.each_ref();
        let beside = (extras, OwnedInputs::drawn(problem, 1));
        match problem.types.wide() {
            Dtype::F16 => Trial::of(problem, pass, placement, beside, &values.map(|own| of_bits::<f16>(own))),
            Dtype::Bf16 => {
                Trial::of(problem, pass, placement, beside, &values.map(|own| of_bits::<bf16>(own)))
            }
            dtype @ (Dtype::F32 | Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2) => {
                panic!("kernels take 16-bit types, not {dtype}")
            }
        }
    }

    /// A case of the list that GPUs are validated on, or a random one, with the same values in the same
    /// layout. `None` for tensors with huge strides, and for a dtype that kernels do not take.
    ///
    /// # Panics
    /// Where the case's sequences do not fit its problem.
    pub fn of_case(case: &fa_lab::grid::Case) -> Option<Trial> {
        let (values, extras) = case.bits()?;
        let placement = Case::of_grid(case)?.placement;
        Some(Trial::of_values(&case.problem, case.pass, placement, &extras, &values))
    }

    fn of<T: Half>(
        problem: &Problem,
        pass: Pass,
        placement: Placement,
        (extras, program): (&OwnedExtras, Option<OwnedInputs>),
        host: &[Vec<T>; 4],
    ) -> Trial {
        let shapes = shapes(problem);
        let inputs = program.as_ref().zip(problem.score.program);
        let inputs = inputs.map(|(given, own)| given.view(&own).expect("the inputs are the program's"));
        let own = Arguments { extras: extras.view(), program: inputs.as_ref(), ..Arguments::default() };
        let of_forward = Arguments { extras: fa_cpu::Extras { dlse: None, ..own.extras }, ..own };
        let rows = rows(problem, &own.extras);
        if problem.types.kv.is_code() {
            let call = (own, program.clone());
            return Trial::of_codes(problem, placement, extras, call, host, rows);
        }
        let view = |i: usize, name| {
            TensorRef::packed(name, &host[i], shapes[i], TensorLayout::Bshd).expect("as long as its shape")
        };
        let (q, k, v, dout) = (view(0, "q"), view(1, "k"), view(2, "v"), view(3, "dout"));
        let fits = "the tensors are the problem's";
        let low = reference::low_precision::forward_extras(problem, of_forward, &q, &k, &v).expect(fits);
        let placed = |values: &[T], i: usize| {
            let of_keys = matches!(i, 1 | 2);
            let bits: Vec<u16> = values.iter().map(|value| value.bits()).collect();
            let rows = &rows[usize::from(of_keys)];
            Values::Halves(place(&bits, POISON, (shapes[i], of_keys), placement, rows))
        };
        let bits = |values: &[T]| values.iter().map(|value| value.bits()).collect();
        let expected =
            |name, shape, exact, low: &[T], noise| Expected { name, shape, exact, low: bits(low), noise };
        let mut trial = Trial {
            problem: *problem,
            pass,
            placement,
            extras: extras.clone(),
            program: program.clone(),
            inputs: (0..3).map(|i| placed(&host[i], i)).collect(),
            lse: Vec::new(),
            expected: Vec::new(),
            expected_lse: Vec::new(),
            lse_noise: 0.0,
            expected_dsinks: None,
            expected_darrays: Vec::new(),
            rows: [Vec::new(), Vec::new()],
        };
        if pass == Pass::Forward {
            let exact = reference::forward_extras(problem, of_forward, &q, &k, &v).expect(fits);
            trial.expected = vec![expected("out", shapes[3], exact.out, &low.out, exact.out_noise)];
            trial.expected_lse = exact.lse;
        } else {
            trial.inputs.extend([placed(&low.out, 3), placed(&host[3], 3)]);
            let exact = reference::backward_extras(problem, own, &q, &k, &v, &dout).expect(fits);
            let of_low = reference::low_precision::backward_extras(problem, own, &q, &k, &v, &dout);
            let of_low = of_low.expect(fits);
            trial.expected = vec![
                expected("dq", shapes[0], exact.dq, &of_low.dq, exact.dq_noise),
                expected("dk", shapes[1], exact.dk, &of_low.dk, exact.dk_noise),
                expected("dv", shapes[2], exact.dv, &of_low.dv, exact.dv_noise),
            ];
            trial.lse = low.lse.iter().map(|lse| lse.to_f32()).collect();
            let arrays = exact.darrays.into_iter().zip(of_low.darrays).zip(exact.darrays_noise);
            trial.expected_darrays = arrays
                .map(|((exact, low), noise)| {
                    (!exact.is_empty()).then_some(ExpectedSinks { exact, low, noise })
                })
                .collect();
            trial.expected_dsinks = problem.score.sinks.then_some(ExpectedSinks {
                exact: exact.dsinks,
                low: of_low.dsinks,
                noise: exact.dsinks_noise,
            });
        }
        trial.rows = rows;
        trial
    }

    /// A forward over codes, whose numbers are given. Descales of rows that belong to no sequence are NaN.
    fn of_codes<T: Half>(
        problem: &Problem,
        placement: Placement,
        extras: &OwnedExtras,
        (arguments, program): (Arguments<'_>, Option<OwnedInputs>),
        host: &[Vec<T>; 4],
        rows: [Vec<bool>; 2],
    ) -> Trial {
        let shapes = shapes(problem);
        let kinds = kinds(problem);
        let bits = [0, 1, 2].map(|i| {
            let of = |codes: Codes| {
                let values: Vec<f32> = host[i].iter().map(|value| value.to_f32()).collect();
                codes.pack(&values, 1.0).collect()
            };
            kinds[i].map_or_else(Vec::<u8>::new, of)
        });
        let fits = "the tensors are the problem's";
        let view = |i: usize, name| {
            TensorRef::packed(name, &bits[i], shapes[i], TensorLayout::Bshd).expect("as long as its shape")
        };
        let q = match kinds[0] {
            Some(_) => KvRef::Codes(view(0, "q")),
            None => KvRef::Same(TensorRef::packed("q", &host[0], shapes[0], TensorLayout::Bshd).expect(fits)),
        };
        let (exact, low) = codes::expected(problem, arguments, q, [view(1, "k"), view(2, "v")]).expect(fits);
        let placed = |i: usize| {
            let of = ((shapes[i], i > 0), placement, &rows[usize::from(i > 0)]);
            match kinds[i] {
                Some(_) => Values::Codes(place(&bits[i], u8::MAX, of.0, of.1, of.2)),
                None => {
                    let halves: Vec<u16> = host[i].iter().map(|value| value.bits()).collect();
                    Values::Halves(place(&halves, POISON, of.0, of.1, of.2))
                }
            }
        };
        let inputs = (0..3).map(placed).collect();
        let mut extras = extras.clone();
        for (form, descales) in
            [(problem.descales.k, &mut extras.k_descale), (problem.descales.v, &mut extras.v_descale)]
        {
            if let (DescaleForm::TokenHead, Some(descales)) = (form, descales) {
                let of_rows = descales.chunks_mut(problem.heads_kv).zip(&rows[1]);
                of_rows.filter(|(_, own)| !**own).for_each(|(row, _)| row.fill(f32::NAN));
            }
        }
        let low = low.out.iter().map(|value| value.bits()).collect();
        let (exact, lse, lse_noise, noise) = (exact.out, exact.lse, exact.lse_noise, exact.out_noise);
        Trial {
            problem: *problem,
            pass: Pass::Forward,
            placement,
            extras,
            program,
            inputs,
            lse: Vec::new(),
            expected: vec![Expected { name: "out", shape: shapes[3], exact, low, noise }],
            expected_lse: lse,
            lse_noise,
            expected_dsinks: None,
            expected_darrays: Vec::new(),
            rows,
        }
    }

    /// The problem.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Runs `unit` on the inputs and judges its outputs.
    ///
    /// # Errors
    /// Those of [`Unit::run`].
    pub fn run(&self, unit: &Unit, options: &Options) -> Result<Proof, Error> {
        let shapes: Vec<[usize; 4]> = {
            let [q, k, v, out] = [q_shape, k_shape, v_shape, out_shape].map(|of| of(&self.problem));
            if self.pass == Pass::Forward { vec![q, k, v] } else { vec![q, k, v, out, out] }
        };
        let strides = |i: usize| self.placement.input_strides(matches!(i, 1 | 2), shapes[i]);
        let mut tensors: Vec<Given> = Vec::new();
        for (i, values) in self.inputs.iter().enumerate() {
            tensors.push(match values {
                Values::Halves(bits) => Given::Input(bits, strides(i)),
                Values::Codes(bits) => Given::Codes(bits, strides(i)),
            });
        }
        let outputs = self.expected.iter().map(|own| own.shape);
        tensors.extend(
            outputs.map(|shape| Given::Output(self.placement.len(shape), self.placement.strides(shape))),
        );
        let lse = (self.pass != Pass::Forward).then_some(&self.lse[..]);
        let rows = [&self.rows[0][..], &self.rows[1][..]];
        let program = self.program.as_ref();
        let call = Call { tensors, lse, extras: &self.extras, program, rows };
        let outcome = unit.run(&self.problem, &call, options)?;
        Ok(match self.problem.types.wide() {
            Dtype::F16 => self.judge::<f16>(outcome),
            Dtype::Bf16 => self.judge::<bf16>(outcome),
            dtype @ (Dtype::F32 | Dtype::E4m3 | Dtype::Int8 | Dtype::Int4 | Dtype::E5m2) => {
                unreachable!("no unit computes in {dtype}")
            }
        })
    }

    fn judge<T: Half>(&self, outcome: Outcome) -> Proof {
        let (mut values, mut stray) = (Vec::new(), Vec::new());
        let finished = outcome.launches.iter().all(|launch| launch.finished);
        for (own, bits) in self.expected.iter().zip(&outcome.outputs).filter(|_| finished) {
            let (packed, clean) = gather::<T>(bits, own.shape, self.placement);
            if !clean {
                stray.push(own.name);
            }
            let low: Vec<T> = own.low.iter().map(|&bits| T::of_bits(bits)).collect();
            let found = compare(own.shape, self.problem.types.wide(), &packed, &own.exact, Some(&low));
            values.push((own.name, found.expect("of the same shape").allowing(own.noise)));
        }
        if finished && self.pass == Pass::Forward {
            let [batch, seqlen, heads, _] = q_shape(&self.problem);
            let shape = [batch, heads, seqlen];
            let found = compare_lse(shape, self.problem.types.wide(), &outcome.lse, &self.expected_lse);
            values.push(("lse", found.expect("of the same shape").allowing(self.lse_noise)));
        }
        if let Some(own) = self.expected_dsinks.as_ref().filter(|_| finished) {
            let shape = [1, 1, self.problem.heads_q, 1];
            let dtype = self.problem.types.q;
            let found = compare(shape, dtype, &outcome.dsinks, &own.exact, Some(&own.low));
            values.push(("dsinks", found.expect("of the same shape").allowing(own.noise)));
        }
        let arrays = self.expected_darrays.iter().zip(&outcome.darrays).filter(|_| finished);
        for (own, found) in arrays.filter_map(|(own, found)| Some((own.as_ref()?, found))) {
            let shape = [1, 1, own.exact.len(), 1];
            let found = compare(shape, self.problem.types.q, found, &own.exact, Some(&own.low));
            values.push(("darray", found.expect("of the same shape").allowing(own.noise)));
        }
        let texts: Vec<String> = outcome
            .outputs
            .iter()
            .map(|words| words.iter().map(|word| format!("{word:04x}")).collect())
            .collect();
        let bits = hash(&texts.iter().map(String::as_str).collect::<Vec<_>>());
        Proof { outcome, values, stray, bits }
    }
}

/// A 16-bit type by its bits.
trait Half: Element {
    fn bits(self) -> u16;
    fn of_bits(bits: u16) -> Self;
}

impl Half for f16 {
    fn bits(self) -> u16 {
        self.to_bits()
    }
    fn of_bits(bits: u16) -> f16 {
        f16::from_bits(bits)
    }
}

impl Half for bf16 {
    fn bits(self) -> u16 {
        self.to_bits()
    }
    fn of_bits(bits: u16) -> bf16 {
        bf16::from_bits(bits)
    }
}

/// Shapes of q, k, v and out.
fn shapes(problem: &Problem) -> [[usize; 4]; 4] {
    [q_shape(problem), k_shape(problem), v_shape(problem), out_shape(problem)]
}

/// Of queries and of keys, whether each row `[batch, seqlen]` belongs to a sequence; empty where all do.
fn rows(problem: &Problem, extras: &fa_cpu::Extras<'_>) -> [Vec<bool>; 2] {
    if problem.lengths.is_uniform() {
        return [Vec::new(), Vec::new()];
    }
    let plain = problem.with_score(problem.score.with_program(None));
    let batch = Batch::new(&plain, extras).expect("the extras are the problem's");
    let [q, k] = [q_shape(problem), k_shape(problem)];
    let mut rows = [vec![false; q[0] * q[1]], vec![false; k[0] * k[1]]];
    for (index, sequence) in batch.sequences.iter().enumerate() {
        for row in 0..sequence.q.len {
            rows[0][sequence.q.batch * q[1] + sequence.q.first + row] = true;
        }
        for row in 0..sequence.k.len {
            let (entry, at) = batch.key(index, row);
            rows[1][entry * k[1] + at] = true;
        }
    }
    rows
}

fn of_bits<T: Half>(bits: &[u16]) -> Vec<T> {
    bits.iter().map(|&bits| T::of_bits(bits)).collect()
}

/// Roughly normal values; of tensors of codes the numbers of codes.
fn normal<T: Half>(problem: &Problem) -> [Vec<T>; 4] {
    let shapes = shapes(problem);
    let [q, k, v] = kinds(problem);
    let kinds = [q, k, v, None];
    [0, 1, 2, 3].map(|i| {
        let number = |value: f32| match kinds[i] {
            Some(codes) => codes.decode(codes.encode(value * spread(codes))),
            None => value,
        };
        let mut random = Random::new(i as u64 + 1);
        let numbers = shapes[i].iter().product::<usize>() * kinds[i].map_or(1, Codes::per_byte);
        (0..numbers).map(|_| T::from_f32(number(random.normal()))).collect()
    })
}

/// Indices into a shape, in packed order.
fn positions([batch, seqlen, heads, dim]: [usize; 4]) -> impl Iterator<Item = [usize; 4]> {
    (0..batch * seqlen * heads * dim)
        .map(move |i| [i / (seqlen * heads * dim), i / (heads * dim) % seqlen, i / dim % heads, i % dim])
}

/// NaN in every 16-bit type.
const POISON: u16 = 0xffff;

/// Values by their bits in their layout; NaN, `poison`, between rows and in rows that belong to no sequence.
fn place<B: Copy>(
    values: &[B],
    poison: B,
    (shape, of_keys): ([usize; 4], bool),
    placement: Placement,
    rows: &[bool],
) -> Vec<B> {
    let strides = placement.input_strides(of_keys, shape);
    let mut placed = vec![poison; placement.len(shape)];
    for ([b, s, h, d], value) in positions(shape).zip(values) {
        if rows.get(b * shape[1] + s).is_none_or(|&own| own) {
            placed[strides.offset(b, s, h, d) as usize] = *value;
        }
    }
    placed
}

/// An output, packed, and whether the memory between its rows is unchanged.
fn gather<T: Half>(bits: &[u16], shape: [usize; 4], placement: Placement) -> (Vec<T>, bool) {
    let strides = placement.strides(shape);
    let mut inside = vec![false; bits.len()];
    let packed = positions(shape).map(|[b, s, h, d]| {
        let at = strides.offset(b, s, h, d) as usize;
        inside[at] = true;
        T::of_bits(bits[at])
    });
    let packed = packed.collect();
    let clean = bits.iter().zip(&inside).all(|(&bits, &inside)| inside || bits == POISON);
    (packed, clean)
}
