//! Arrays and scalars of a program that are tensors of a file, found by their names.

use fa_core::program::{
    ArrayDecl, ArrayView, Element, Interned, OwnedArray, OwnedData, OwnedInputs, Type, Value,
};
use fa_core::{Dropout, Extra, Problem};
use half::{bf16, f16};
use safetensors::Dtype;

use crate::safetensors::{TensorFile, Truth};
use crate::term::failure::InputError;

/// Names of a file's tensors that are something else, or whose gradient would be.
const TAKEN: [&str; 15] = [
    "v",
    "kv",
    "indices",
    "topk_length",
    "dout",
    "out",
    "lse",
    "dq",
    "dk",
    "dv",
    "dsinks",
    "cache_seqlens",
    "k_new",
    "v_new",
    "cu_seqlens_k_new",
];

/// What the program of `problem` reads, from tensors of its names; dropout's from its seed. A scalar is a
/// tensor of one element, unless it is `known`, by its place.
///
/// # Errors
/// Tensors that are not there, of another type or rank, or without elements, and names that a file uses
/// otherwise.
pub(crate) fn read(
    file: &TensorFile,
    program: Interned,
    problem: &Problem,
    known: &[Option<Value>],
) -> Result<OwnedInputs, InputError> {
    let extras = Extra::ALL.map(Extra::name);
    let arrays = program.arrays().iter().map(|decl| decl.name.as_str());
    for name in arrays.chain(program.scalars().iter().map(|decl| decl.name.as_str())) {
        if TAKEN.contains(&name) || extras.contains(&name) || name.starts_with("rotary_") {
            let message =
                format!("the program calls an array `{name}`, which is another tensor of a file: rename it");
            return Err(InputError::Usage(message));
        }
    }
    let dropout = problem.score.dropout;
    let arrays = program.arrays().iter().map(|decl| match dropout {
        Some(dropout) if decl.name == Dropout::BITS => Ok(dropout.bits(problem)),
        _ => array(file, decl),
    });
    let arrays = arrays.collect::<Result<_, _>>()?;
    let scalars = program.scalars().iter().enumerate().map(|(slot, decl)| match dropout {
        Some(dropout) if decl.name == Dropout::FACTOR => Ok(Value::F32(dropout.factor().into())),
        _ => known.get(slot).copied().flatten().map_or_else(|| scalar(file, &decl.name, decl.ty), Ok),
    });
    let inputs = OwnedInputs { arrays, scalars: scalars.collect::<Result<_, _>>()? };
    inputs
        .view(&program)
        .map_err(|error| InputError::Usage(format!("{}: {error}", file.path().display())))?;
    Ok(inputs)
}

fn array(file: &TensorFile, decl: &ArrayDecl) -> Result<OwnedArray, InputError> {
    let name = decl.name.as_str();
    let mut shape = file.entry(name)?.shape.clone();
    if shape.len() != decl.rank {
        let need = format!("the program declares it with {} axes", decl.rank);
        return Err(InputError::Shape { name: name.to_owned(), got: shape, need });
    }
    let data = match decl.element {
        Element::F32 => OwnedData::F32(file.read(name)?),
        Element::F16 => OwnedData::F16(file.read::<f16>(name)?.into_iter().map(f16::to_bits).collect()),
        Element::Bf16 => OwnedData::Bf16(file.read::<bf16>(name)?.into_iter().map(bf16::to_bits).collect()),
        Element::I32 => OwnedData::I32(file.read(name)?),
        Element::U8 => OwnedData::U8(file.read(name)?),
        Element::Bool => {
            OwnedData::Bool(file.read::<Truth>(name)?.into_iter().map(|Truth(byte)| byte).collect())
        }
        Element::Bits => {
            if let Some(words) = shape.last_mut() {
                *words = words.saturating_mul(32);
            }
            OwnedData::Bits(file.read(name)?)
        }
    };
    if let Some(&extent) = shape.iter().find(|&&extent| i32::try_from(extent).is_err()) {
        let need = format!("{extent} is more than the {} indices that an axis may have", i32::MAX);
        return Err(InputError::Shape { name: name.to_owned(), got: shape, need });
    }
    let ArrayView { strides, extents, .. } = ArrayView::contiguous(data.view(), &shape);
    Ok(OwnedArray { data, strides, extents })
}

fn scalar(file: &TensorFile, name: &str, ty: Type) -> Result<Value, InputError> {
    let entry = file.entry(name)?;
    if entry.shape.iter().product::<usize>() != 1 {
        let need = "a scalar of the program is a tensor of one element".to_owned();
        return Err(InputError::Shape { name: name.to_owned(), got: entry.shape.clone(), need });
    }
    match (ty, entry.dtype == Dtype::F64) {
        (Type::F32, true) => Ok(Value::F32(f64::from(file.read::<f64>(name)?[0] as f32))),
        (Type::F32, false) => Ok(Value::F32(f64::from(file.read::<f32>(name)?[0]))),
        (Type::I32 | Type::Bool, _) => Ok(Value::I32(file.read::<i32>(name)?[0])),
    }
}
