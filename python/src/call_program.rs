//! A call's own mask and change of scores: its programs joined, with the arrays and scalars that they read.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

use fa_core::program::{ArrayData, ArrayView, Element, Inputs, Interned, MAX_INTERNED, Program, Type, Value};
use fa_kernels::launch::{RawArray, RawProgram};
use pyo3::prelude::*;

use crate::dlpack::{self, Place, View, elsewhere};
use crate::error::InputError;
use crate::programs::parsed;
use crate::slices::floats_mut;

/// A call's programs as Python has them: the texts, in the order in which they change scores, then arrays and
/// scalars by name. Another array or scalar than those declared is an error.
pub(crate) type Programs<'py> = (Vec<String>, Vec<(String, Bound<'py, PyAny>)>, Vec<(String, f64)>);

/// The joined program, with what it reads in the order of its declarations.
pub(crate) struct CallProgram<'py> {
    pub program: Interned,
    arrays: Vec<View<'py>>,
    scalars: Vec<Value>,
    /// Where the gradients of arrays go, packed in f32 or in 16 bits.
    gradients: Vec<Option<View<'py>>>,
}

/// Joined programs by their texts: parsing takes longer than a small call.
static JOINED: LazyLock<Mutex<HashMap<Vec<String>, Interned>>> = LazyLock::new(Mutex::default);

/// The program of these texts.
pub(crate) fn joined(texts: &[String]) -> PyResult<Option<Interned>> {
    let Some((first, others)) = texts.split_first() else { return Ok(None) };
    let mut kept = JOINED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(program) = kept.get(texts) {
        return Ok(Some(*program));
    }
    let mut program: Program = parsed(first)?;
    for text in others {
        program = program.with(&parsed(text)?).map_err(|error| InputError::new_err(error.to_string()))?;
    }
    let program = program.intern().map_err(|error| InputError::new_err(error.to_string()))?;
    // Several spellings are one program.
    if kept.len() >= MAX_INTERNED {
        kept.clear();
    }
    kept.insert(texts.to_vec(), program);
    Ok(Some(program))
}

impl<'py> CallProgram<'py> {
    /// The programs of a call, checked.
    ///
    /// # Errors
    /// Texts that are no programs, and arrays and scalars that are not theirs.
    pub(crate) fn of(
        (texts, arrays, scalars): Programs<'py>,
        stream: Option<u64>,
    ) -> PyResult<Option<CallProgram<'py>>> {
        let views = arrays.iter().map(|(name, object)| Ok((name.clone(), View::of(name, object, stream)?)));
        CallProgram::of_views(&texts, views.collect::<PyResult<_>>()?, &scalars)
    }

    /// [`CallProgram::of`] with its arrays as they lie.
    pub(crate) fn of_views(
        texts: &[String],
        mut arrays: Vec<(String, View<'py>)>,
        scalars: &[(String, f64)],
    ) -> PyResult<Option<CallProgram<'py>>> {
        let Some(program) = joined(texts)? else { return Ok(None) };
        let given = arrays.len();
        let mut of_calls = Vec::new();
        for decl in program.arrays() {
            taken("array", &decl.name, &arrays)?;
            let at = arrays.iter().position(|(name, _)| *name == decl.name).unwrap_or(0);
            let (_, view) = arrays.swap_remove(at);
            check_array(&decl.name, (decl.element, decl.rank), &view)?;
            of_calls.push(view);
        }
        let mut values = Vec::new();
        for decl in program.scalars() {
            let value = *taken("scalar", &decl.name, scalars)?;
            values.push(scalar(&decl.name, decl.ty, decl.positive, value)?);
        }
        let declared = (program.arrays().len(), program.scalars().len());
        if declared != (given, scalars.len()) {
            return Err(InputError::new_err(format!(
                "the program reads {} arrays and {} scalars, and the call has {} and {}",
                declared.0,
                declared.1,
                given,
                scalars.len()
            )));
        }
        let gradients = of_calls.iter().map(|_| None).collect();
        Ok(Some(CallProgram { program, arrays: of_calls, scalars: values, gradients }))
    }

    /// The values of the program's scalars.
    pub(crate) fn scalars(&self) -> &[Value] {
        &self.scalars
    }

    /// Names the arrays to which gradients are written, by the names of those whose gradients they are.
    ///
    /// # Errors
    /// Arrays that are not packed, of the shape and in f32 or the array's 16 bits, and
    /// names of arrays that the text marks with no `grad`.
    pub(crate) fn want(
        &mut self,
        gradients: Vec<(String, Bound<'py, PyAny>)>,
        stream: Option<u64>,
    ) -> PyResult<()> {
        let views = gradients.into_iter().map(|(name, object)| {
            let view = View::of(&name, &object, stream)?;
            Ok((name, view))
        });
        self.want_views(views.collect::<PyResult<Vec<_>>>()?)
    }

    /// [`CallProgram::want`] with the arrays as they lie.
    pub(crate) fn want_views(
        &mut self,
        gradients: impl IntoIterator<Item = (String, View<'py>)>,
    ) -> PyResult<()> {
        for (name, view) in gradients {
            let slot = self.program.arrays().iter().position(|decl| decl.gradient && decl.name == name);
            let Some(slot) = slot else {
                let message = format!("the program has no array `{name}` with a gradient");
                return Err(InputError::new_err(message));
            };
            let array = &self.arrays[slot];
            // Kernels write those of 16 bits in their type.
            let is_narrow = view.place != Place::Cpu
                && view.dtype == array.dtype
                && matches!(view.dtype, dlpack::Type::F16 | dlpack::Type::Bf16);
            if !(is_narrow || view.dtype == dlpack::Type::F32)
                || !view.is_contiguous()
                || view.shape() != array.shape()
            {
                return Err(InputError::new_err(format!(
                    "the gradient of `{name}` must be float32, on a GPU also of an f16 or bf16 array's type, \
                     contiguous and of the shape {:?}",
                    array.shape()
                )));
            }
            self.gradients[slot] = Some(view);
        }
        Ok(())
    }

    /// Checks that all lies where Q does.
    ///
    /// # Errors
    /// The array that lies elsewhere.
    pub(crate) fn check_place(&self, place: Place) -> PyResult<()> {
        let gradients = self.gradients.iter().map(Option::as_ref);
        for (decl, (array, gradient)) in self.program.arrays().iter().zip(self.arrays.iter().zip(gradients)) {
            if [Some(array), gradient].into_iter().flatten().any(|view| view.place != place) {
                return Err(elsewhere(&decl.name, place));
            }
        }
        Ok(())
    }

    /// The inputs of `program`, which is this or what is left of it, in the CPU's memory.
    ///
    /// # Errors
    /// Negative strides, and what the program refuses.
    pub(crate) fn inputs(&self, program: Interned) -> PyResult<Inputs<'_>> {
        let mut arrays = Vec::new();
        for (decl, view) in self.program.arrays().iter().zip(&self.arrays) {
            let Some(len) = view.span() else {
                let message = format!("{} has the strides {:?}: copy the array", decl.name, view.strides());
                return Err(InputError::new_err(message));
            };
            // SAFETY: the elements of the view are of this type and reach as far.
            let data = unsafe {
                match decl.element {
                    Element::F32 => ArrayData::F32(elements(view, len)),
                    Element::F16 => ArrayData::F16(elements(view, len)),
                    Element::Bf16 => ArrayData::Bf16(elements(view, len)),
                    Element::I32 => ArrayData::I32(elements(view, len)),
                    Element::U8 => ArrayData::U8(elements(view, len)),
                    Element::Bool => ArrayData::Bool(elements(view, len)),
                    Element::Bits => ArrayData::Bits(elements(view, len)),
                }
            };
            let (strides, extents) = layout(decl.element, view);
            arrays.push(ArrayView { data, strides, extents });
        }
        Inputs::new(&program, arrays, self.scalars.clone())
            .map_err(|error| InputError::new_err(error.to_string()))
    }

    /// Whether a gradient is to be written.
    pub(crate) fn wants_gradients(&self) -> bool {
        self.gradients.iter().any(Option::is_some)
    }

    /// Copies gradients in the order of declarations to where they go.
    ///
    /// # Errors
    /// Arrays that cannot be written.
    pub(crate) fn write_gradients(&self, found: &[Vec<f32>]) -> PyResult<()> {
        for (decl, (gradient, found)) in self.program.arrays().iter().zip(self.gradients.iter().zip(found)) {
            if let Some(view) = gradient {
                floats_mut(&decl.name, view)?.copy_from_slice(found);
            }
        }
        Ok(())
    }

    /// Its inputs in a GPU's memory.
    pub(crate) fn raw(&self) -> RawProgram {
        let mut raw = RawProgram::default();
        let arrays = self.program.arrays().iter().zip(&self.arrays).zip(&self.gradients);
        for (slot, ((decl, view), gradient)) in arrays.enumerate() {
            let (strides, extents) = layout(decl.element, view);
            raw.arrays[slot] = RawArray { address: view.address(), strides, extents };
            raw.gradients[slot] = gradient.as_ref().map_or(0, View::address);
            raw.is_narrow[slot] = gradient.as_ref().is_some_and(|view| view.dtype != dlpack::Type::F32);
        }
        for (to, value) in raw.scalars.iter_mut().zip(&self.scalars) {
            *to = match *value {
                Value::I32(value) => value as u32,
                Value::F32(value) => (value as f32).to_bits(),
                Value::Bool(value) => u32::from(value),
            };
        }
        raw
    }
}

fn taken<'a, T>(what: &str, name: &str, given: &'a [(String, T)]) -> PyResult<&'a T> {
    given.iter().find(|(own, _)| own == name).map(|(_, value)| value).ok_or_else(|| {
        let have: Vec<_> = given.iter().map(|(own, _)| own.as_str()).collect();
        let have = if have.is_empty() { "none".to_owned() } else { have.join(", ") };
        InputError::new_err(format!("the program reads the {what} `{name}`: the call has {have}"))
    })
}

/// Strides and extents by axis: a word of bits is 32 indices.
fn layout(element: Element, view: &View<'_>) -> ([i64; 4], [i32; 4]) {
    let (mut strides, mut extents) = ([0; 4], [1; 4]);
    let axes = view.shape().len();
    for (axis, (&len, &stride)) in view.shape().iter().zip(view.strides()).enumerate().take(4) {
        let per_item = if element == Element::Bits && axis + 1 == axes { 32 } else { 1 };
        extents[axis] = i32::try_from(len.saturating_mul(per_item)).unwrap_or(i32::MAX);
        strides[axis] = if len == 1 { 0 } else { stride };
    }
    (strides, extents)
}

fn check_array(name: &str, (element, rank): (Element, usize), view: &View<'_>) -> PyResult<()> {
    let fits = match element {
        Element::F32 => view.is_of(2, 32),
        Element::F16 => view.is_of(2, 16),
        Element::Bf16 => view.dtype == dlpack::Type::Bf16,
        Element::I32 => view.is_of(0, 32),
        Element::U8 => view.is_of(1, 8),
        Element::Bool => view.is_of(6, 8) || view.is_of(1, 8),
        Element::Bits => view.is_of(0, 32) || view.is_of(1, 32),
    };
    if !fits {
        return Err(InputError::new_err(format!(
            "the array `{name}` holds {} and the program reads {}: convert it",
            view.type_name(),
            element.name()
        )));
    }
    if view.shape().len() != rank {
        return Err(InputError::new_err(format!(
            "the array `{name}` has the shape {:?} and the program reads {rank} axes",
            view.shape()
        )));
    }
    if let Some(axis) = view.shape().iter().position(|&len| len == 0) {
        let message = format!("the array `{name}` has no element along axis {axis}: there is none to read");
        return Err(InputError::new_err(message));
    }
    Ok(())
}

fn scalar(name: &str, ty: Type, positive: bool, value: f64) -> PyResult<Value> {
    let wrong =
        |need: &str| InputError::new_err(format!("the scalar `{name}` is {value}: it must be {need}"));
    match ty {
        Type::F32 => Ok(Value::F32(f64::from(value as f32))),
        Type::I32 | Type::Bool => {
            if value.fract() != 0.0 || !(f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&value) {
                return Err(wrong("an integer of 32 bits"));
            }
            if positive && value <= 0.0 {
                return Err(wrong("positive, it divides"));
            }
            Ok(Value::I32(value as i32))
        }
    }
}

/// # Safety
/// `view` is of elements of as many bytes as `T`, in the CPU's memory, and reaches `len` of them.
unsafe fn elements<'a, T>(view: &'a View<'_>, len: usize) -> &'a [T] {
    if len == 0 || view.data.is_null() {
        return &[];
    }
    // SAFETY: as the caller says.
    unsafe { std::slice::from_raw_parts(view.data.cast(), len) }
}
