//! Masks, biases and programs of a call: the program that computes them all, and the tensors that it reads.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

use candle_core::{DType, Result, Tensor};
use fa_core::program::{self, ArrayDecl, BiasElement, Element, Interned, MAX_RANK, Standard, Type, Value};
use fa_core::{Dropout, Lengths};

use crate::error::{Error, refused, same_device};
use crate::options::Options;

/// A call's program, and what it reads in the order of its declarations.
#[derive(Clone, Debug)]
pub(crate) struct ProgramCall {
    pub(crate) program: Interned,
    pub(crate) arrays: Vec<Tensor>,
    pub(crate) scalars: Vec<Value>,
}

impl ProgramCall {
    /// The one that mask, bias and program of a call make; `None` where it has none of them.
    pub(crate) fn new(
        options: &Options<'_>,
        lengths: &Lengths,
        heads: usize,
        q: &Tensor,
    ) -> Result<Option<ProgramCall>> {
        let shape = [lengths.sequences(), heads, lengths.max_q(), lengths.max_k()];
        // Without a score there is nothing to change, and an array without elements is none.
        if shape.contains(&0) {
            return Ok(None);
        }
        let mask = options.mask.map(|mask| Term::mask(mask, shape, q)).transpose()?;
        let bias = options.bias.map(|bias| Term::bias(bias, shape, q)).transpose()?;
        let dropout = options.dropout.map(|dropout| Term::dropout(dropout, shape, q)).transpose()?;
        let terms: Vec<Term> = mask.into_iter().chain(bias).chain(dropout).collect();
        let Some(program) = composed(options.program.map(|program| program.own), &terms)? else {
            return Ok(None);
        };
        let mut given: Vec<(&str, &Tensor)> =
            terms.iter().map(|term| (term.kind.name(), &term.tensor)).collect();
        let own = options.program;
        for (name, tensor) in own.iter().flat_map(|own| &own.arrays) {
            if given.iter().any(|(had, _)| had == name) {
                let problem = "is the name of the mask or of the bias: call the program's array otherwise";
                return Err(input(name, problem.to_owned()));
            }
            given.push((name, tensor));
        }
        let mut scalars: Vec<(&str, f64)> =
            own.iter().flat_map(|own| &own.scalars).map(|(name, value)| (&**name, *value)).collect();
        scalars.extend(options.dropout.map(|dropout| (Dropout::FACTOR, dropout.factor().into())));
        known("array", given.iter().map(|(name, _)| *name), program.arrays().iter().map(|own| &*own.name))?;
        known(
            "scalar",
            scalars.iter().map(|(name, _)| *name),
            program.scalars().iter().map(|own| &*own.name),
        )?;
        let arrays = program.arrays().iter().map(|decl| {
            let found = given.iter().find(|(name, _)| *name == decl.name);
            let (_, tensor) =
                found.ok_or_else(|| input(&decl.name, "is missing: give it by with_array".into()))?;
            array(decl, tensor, q)
        });
        let arrays = arrays.collect::<Result<_>>()?;
        let scalars = program.scalars().iter().map(|decl| {
            let found = scalars.iter().find(|(name, _)| *name == decl.name);
            let (_, value) =
                found.ok_or_else(|| input(&decl.name, "is missing: give it by with_scalar".into()))?;
            scalar(&decl.name, decl.ty, *value, decl.positive)
        });
        Ok(Some(ProgramCall { program, arrays, scalars: scalars.collect::<Result<_>>()? }))
    }

    /// The same with what is left of its program, which reads the same.
    pub(crate) fn left(self, program: Option<Interned>) -> Option<ProgramCall> {
        program.map(|program| ProgramCall { program, ..self })
    }

    /// The scalars as a launch takes them.
    #[cfg(feature = "cuda")]
    pub(crate) fn scalar_bits(&self) -> [u32; program::MAX_SCALARS] {
        let mut bits = [0; program::MAX_SCALARS];
        for (to, value) in bits.iter_mut().zip(&self.scalars) {
            *to = match *value {
                Value::I32(value) => value as u32,
                Value::F32(value) => (value as f32).to_bits(),
                Value::Bool(value) => value.into(),
            };
        }
        bits
    }

    /// The arrays that require a gradient, by their places.
    pub(crate) fn tracked(&self) -> impl Iterator<Item = usize> {
        let decls = self.program.get().arrays().iter();
        let wanted = decls.zip(&self.arrays).enumerate();
        wanted.filter(|(_, (decl, tensor))| decl.gradient && tensor.track_op()).map(|(slot, _)| slot)
    }
}

/// Strides of an array and indices of its axes, as kernels take them.
pub(crate) fn axes(element: Element, tensor: &Tensor) -> Result<([i64; MAX_RANK], [i32; MAX_RANK])> {
    let (mut strides, mut extents) = ([0; MAX_RANK], [1; MAX_RANK]);
    let rank = tensor.rank();
    for (axis, (&stride, &len)) in tensor.stride().iter().zip(tensor.dims()).enumerate() {
        let bits = if element == Element::Bits && axis + 1 == rank { 32 } else { 1 };
        let extent = len.checked_mul(bits).and_then(|len| i32::try_from(len).ok());
        extents[axis] = extent.ok_or_else(|| {
            let (name, limit) = ("an axis of a program's array", i32::MAX as usize);
            refused(fa_core::ProblemError::TooLong { name, value: len, limit })
        })?;
        strides[axis] = stride as i64;
    }
    Ok((strides, extents))
}

/// A mask or a bias: what the program makes of it, and its tensor with four axes.
struct Term {
    kind: Kind,
    tensor: Tensor,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    /// Other than 0 where a key is visible; which of its first three axes all of several share.
    Mask([bool; 3]),
    /// A mask that is added.
    Added(BiasElement),
    Bias(BiasElement, bool),
    Dropout,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Mask(_) | Kind::Added(_) => "fa_mask",
            Kind::Bias(..) => "fa_bias",
            Kind::Dropout => Dropout::BITS,
        }
    }

    fn text(self) -> String {
        match self {
            // Kernels look at a mask once for all heads, sequences or queries that share it.
            Kind::Mask(shared) => {
                let at = |axis: usize, name: &'static str| if shared[axis] { "0" } else { name };
                let [b, h, q] = [at(0, "b"), at(1, "h"), at(2, "q")];
                format!("array fa_mask: bool[_, _, _, _]; mask = fa_mask[{b}, {h}, {q}, k];")
            }
            Kind::Added(element) => {
                let element = element.element().name();
                format!("array fa_mask: {element}[_, _, _, _]; score = s + fa_mask[b, h, q, k];")
            }
            Kind::Bias(element, gradient) => Standard::Bias { element, gradient }.text(),
            Kind::Dropout => Standard::Dropout.text(),
        }
    }
}

impl Term {
    fn mask(mask: &Tensor, shape: [usize; 4], q: &Tensor) -> Result<Term> {
        if mask.track_op() {
            let instead = "give `mask.detach()`, or the tensor as `bias`";
            return Err(Error::NoGradient { tensor: "mask", instead }.into());
        }
        let tensor = broadcast("mask", mask, shape, q)?;
        if tensor.dtype() == DType::U8 {
            let shared = std::array::from_fn(|axis| tensor.dims()[axis] == 1 && shape[axis] > 1);
            return Ok(Term { kind: Kind::Mask(shared), tensor });
        }
        let need = "u8, 0 where a key is hidden, as comparisons are, or a float type, which is added";
        let (element, tensor) = floats("mask", tensor, need)?;
        Ok(Term { kind: Kind::Added(element), tensor })
    }

    fn bias(bias: &Tensor, shape: [usize; 4], q: &Tensor) -> Result<Term> {
        let tensor = broadcast("bias", bias, shape, q)?;
        let (element, tensor) = floats("bias", tensor, "f32, f16 or bf16")?;
        Ok(Term { kind: Kind::Bias(element, bias.track_op()), tensor })
    }
}

impl Term {
    fn dropout(dropout: Dropout, [b, h, queries, keys]: [usize; 4], q: &Tensor) -> Result<Term> {
        if !q.device().is_cpu() {
            let instead = "move q, k and v to the CPU, or drop the output";
            return Err(Error::DropoutOnGpu { instead }.into());
        }
        let words = keys.div_ceil(32);
        let mut bits = vec![0u32; b * h * queries * words];
        dropout.kept().fill(queries, words, &mut bits);
        let tensor = Tensor::from_vec(bits, (b, h, queries, words), q.device())?;
        Ok(Term { kind: Kind::Dropout, tensor })
    }
}

/// The tensor with four axes, the first of 1 where it has fewer. An axis of 1 stays one.
fn broadcast(name: &'static str, tensor: &Tensor, shape: [usize; 4], q: &Tensor) -> Result<Tensor> {
    same_device(name, tensor, q)?;
    let (dims, [b, h, q, k]) = (tensor.dims(), shape);
    let wrong = || {
        let need = format!("(batch {b}, heads {h}, queries {q}, keys {k}), each of them or 1");
        Error::Shape { tensor: name, shape: dims.to_vec(), need }
    };
    let missing = shape.len().checked_sub(dims.len()).ok_or_else(wrong)?;
    let fits = dims.iter().zip(&shape[missing..]).all(|(len, need)| *len == 1 || len == need);
    if !fits {
        return Err(wrong().into());
    }
    (0..missing).try_fold(tensor.clone(), |tensor, _| tensor.unsqueeze(0))
}

fn floats(name: &'static str, tensor: Tensor, need: &str) -> Result<(BiasElement, Tensor)> {
    let got = tensor.dtype();
    let found =
        [(DType::F32, BiasElement::F32), (DType::F16, BiasElement::F16), (DType::BF16, BiasElement::Bf16)];
    if let Some((_, element)) = found.into_iter().find(|(dtype, _)| *dtype == got) {
        return Ok((element, tensor));
    }
    if got == DType::F64 {
        return Ok((BiasElement::F32, tensor.to_dtype(DType::F32)?));
    }
    Err(Error::Dtype { tensor: name, got, need: need.to_owned() }.into())
}

/// The program of the user's own and of these terms, in this order. It is composed when it first comes.
fn composed(own: Option<Interned>, terms: &[Term]) -> Result<Option<Interned>> {
    type Key = (Option<Interned>, Vec<Kind>);
    static KNOWN: LazyLock<Mutex<HashMap<Key, Interned>>> = LazyLock::new(Mutex::default);
    if terms.is_empty() {
        return Ok(own);
    }
    let key = (own, terms.iter().map(|term| term.kind).collect::<Vec<_>>());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(program) = known.get(&key) {
        return Ok(Some(*program));
    }
    let mut whole = own.map(|own| own.get().clone());
    for kind in &key.1 {
        let term = program::Program::parse(&kind.text()).map_err(refused)?;
        whole = Some(whole.map_or(Ok(term.clone()), |whole| whole.with(&term)).map_err(refused)?);
    }
    let Some(whole) = whole else { return Ok(None) };
    let program = whole.intern().map_err(refused)?;
    known.insert(key, program);
    Ok(Some(program))
}

/// Each name that is given is one of those that the program reads.
fn known<'a>(
    what: &str,
    mut given: impl Iterator<Item = &'a str>,
    reads: impl Iterator<Item = &'a str>,
) -> Result<()> {
    let reads: Vec<&str> = reads.collect();
    match given.find(|name| !reads.contains(name)) {
        Some(name) if reads.is_empty() => Err(input(name, format!("is no {what} of it: it has none"))),
        Some(name) => Err(input(name, format!("is no {what} of it: there are {}", reads.join(", ")))),
        None => Ok(()),
    }
}

/// A tensor as the program's array, in its own element type.
fn array(decl: &ArrayDecl, tensor: &Tensor, q: &Tensor) -> Result<Tensor> {
    let wrong = |problem: String| Err(input(&decl.name, problem));
    if tensor.track_op() && !decl.gradient {
        let name = decl.name.as_str();
        return wrong(format!(
            "requires a gradient: declare it with `grad`, or give it by `{name}.detach()`"
        ));
    }
    if !tensor.device().same_device(q.device()) {
        return wrong(format!(
            "is on {:?} and q on {:?}: move it by `to_device`",
            tensor.device(),
            q.device()
        ));
    }
    if tensor.rank() != decl.rank {
        return wrong(format!("has the shape {:?}: it is declared with {} axes", tensor.dims(), decl.rank));
    }
    let got = tensor.dtype();
    let need = match decl.element {
        Element::F32 if matches!(got, DType::F16 | DType::BF16 | DType::F64) => {
            return tensor.to_dtype(DType::F32);
        }
        // The CPU reads slices of the type itself; a GPU reads words.
        Element::I32 if got == DType::U32 && tensor.device().is_cpu() => return tensor.to_dtype(DType::I32),
        Element::I32 if got == DType::U32 => return Ok(tensor.clone()),
        Element::F32 => DType::F32,
        Element::F16 => DType::F16,
        Element::Bf16 => DType::BF16,
        Element::I32 => DType::I32,
        Element::U8 | Element::Bool => DType::U8,
        Element::Bits => DType::U32,
    };
    if got != need {
        let element = decl.element.name();
        return wrong(format!(
            "holds {got:?}: an array of {element} takes {need:?}, convert it by `to_dtype`"
        ));
    }
    Ok(tensor.clone())
}

/// A number as the program's scalar.
fn scalar(name: &str, ty: Type, value: f64, positive: bool) -> Result<Value> {
    match ty {
        Type::F32 => Ok(Value::F32(f64::from(value as f32))),
        Type::I32 | Type::Bool => {
            if value.fract() != 0.0 || value < f64::from(i32::MIN) || value > f64::from(i32::MAX) {
                return Err(input(name, format!("is {value}: it must be an i32")));
            }
            if positive && value <= 0.0 {
                return Err(input(name, format!("is {value}: it divides, and must be positive")));
            }
            Ok(Value::I32(value as i32))
        }
    }
}

fn input(name: &str, problem: String) -> candle_core::Error {
    Error::ProgramInput { name: name.to_owned(), problem }.into()
}
