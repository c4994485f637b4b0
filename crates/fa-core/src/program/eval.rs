//! Values of a program on the CPU.

use super::limits::MAX_RANK;
use super::node::{Node, NodeId};
use super::ops::{self, Precision, Value};
use super::types::{ArrayDecl, Deps, Element, Type, Var};
use super::whole::Program;

/// The elements of an array, by its element type.
#[derive(Clone, Copy, Debug)]
pub enum ArrayData<'a> {
    /// f32.
    F32(&'a [f32]),
    /// The bits of f16.
    F16(&'a [u16]),
    /// The bits of bf16.
    Bf16(&'a [u16]),
    /// i32.
    I32(&'a [i32]),
    /// Bytes.
    U8(&'a [u8]),
    /// Bytes that are true if not 0.
    Bool(&'a [u8]),
    /// Words of bits along the last axis, the lowest first.
    Bits(&'a [u32]),
}

impl ArrayData<'_> {
    /// The element type.
    pub fn element(&self) -> Element {
        match self {
            ArrayData::F32(_) => Element::F32,
            ArrayData::F16(_) => Element::F16,
            ArrayData::Bf16(_) => Element::Bf16,
            ArrayData::I32(_) => Element::I32,
            ArrayData::U8(_) => Element::U8,
            ArrayData::Bool(_) => Element::Bool,
            ArrayData::Bits(_) => Element::Bits,
        }
    }

    fn len(&self) -> usize {
        match self {
            ArrayData::F32(data) => data.len(),
            ArrayData::F16(data) | ArrayData::Bf16(data) => data.len(),
            ArrayData::I32(data) => data.len(),
            ArrayData::U8(data) | ArrayData::Bool(data) => data.len(),
            ArrayData::Bits(data) => data.len(),
        }
    }
}

/// An array of the caller: any strides, 0 among them. Axes beyond the rank have extent 1.
#[derive(Clone, Copy, Debug)]
pub struct ArrayView<'a> {
    /// The elements, from the one at index 0 of every axis.
    pub data: ArrayData<'a>,
    /// Elements from one index of an axis to the next; of bits, words, and along the last axis from one word
    /// to the next.
    pub strides: [i64; MAX_RANK],
    /// Indices of each axis; of bits, bits along the last.
    pub extents: [i32; MAX_RANK],
}

impl<'a> ArrayView<'a> {
    /// A view of contiguous elements; `extents`: the indices of each axis that the program declares.
    pub fn contiguous(data: ArrayData<'a>, extents: &[usize]) -> ArrayView<'a> {
        let mut view = ArrayView { data, strides: [0; MAX_RANK], extents: [1; MAX_RANK] };
        let mut stride = 1i64;
        for (axis, &extent) in extents.iter().enumerate().take(MAX_RANK).rev() {
            view.strides[axis] = stride;
            view.extents[axis] = i32::try_from(extent).unwrap_or(i32::MAX);
            let last_of_bits = data.element() == Element::Bits && axis + 1 == extents.len();
            let items = if last_of_bits { extent.div_ceil(32) } else { extent };
            stride = stride.saturating_mul(i64::try_from(items).unwrap_or(i64::MAX));
        }
        view
    }

    /// The element at `indices`, each clamped to its axis.
    pub(super) fn load(&self, rank: usize, indices: [i32; MAX_RANK]) -> Value {
        let mut offset = 0;
        let mut bit = 0;
        for (axis, index) in indices.into_iter().enumerate().take(rank) {
            let index = index.min(self.extents[axis] - 1).max(0);
            let is_bit = axis + 1 == rank && self.data.element() == Element::Bits;
            bit = if is_bit { index & 31 } else { bit };
            offset += i64::from(if is_bit { index >> 5 } else { index }) * self.strides[axis];
        }
        let at = offset as usize;
        match self.data {
            ArrayData::F32(data) => Value::F32(data[at].into()),
            ArrayData::F16(data) => Value::F32(f16_to_f64(data[at])),
            ArrayData::Bf16(data) => Value::F32(f32::from_bits(u32::from(data[at]) << 16).into()),
            ArrayData::I32(data) => Value::I32(data[at]),
            ArrayData::U8(data) => Value::I32(data[at].into()),
            ArrayData::Bool(data) => Value::Bool(data[at] != 0),
            ArrayData::Bits(data) => Value::Bool(data[at] >> bit & 1 == 1),
        }
    }
}

/// What a call gives a program: its arrays and scalars, in the order of its declarations.
#[derive(Clone, Debug)]
pub struct Inputs<'a> {
    arrays: Vec<ArrayView<'a>>,
    scalars: Vec<Value>,
}

/// What does not fit a program's declarations.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InputError {
    /// Other than as many as it declares.
    #[error("the program takes {takes} {what} ({names}), not {given}")]
    Count {
        /// `arrays` or `scalars`.
        what: &'static str,
        /// How many it takes.
        takes: usize,
        /// Their names.
        names: String,
        /// How many are given.
        given: usize,
    },
    /// Another element type.
    #[error("the array `{name}` is of {takes}, not {given}")]
    Element {
        /// The array.
        name: String,
        /// Its element type.
        takes: &'static str,
        /// The one given.
        given: &'static str,
    },
    /// Indices along axes that the program does not declare.
    #[error("the array `{name}` has {given} axes, the program declares {takes}")]
    Axes {
        /// The array.
        name: String,
        /// The axes that it is declared with.
        takes: usize,
        /// Those that it has.
        given: usize,
    },
    /// An array without elements: there is none to which an index could be clamped.
    #[error("the array `{name}` has no element along axis {axis}")]
    Empty {
        /// The array.
        name: String,
        /// The axis.
        axis: usize,
    },
    /// Strides that lead out of the elements.
    #[error("the array `{name}` reaches element {reaches} of {there}")]
    Outside {
        /// The array.
        name: String,
        /// The furthest, or first, element.
        reaches: i64,
        /// How many there are.
        there: usize,
    },
    /// A value of another type.
    #[error("the scalar `{name}` is of {takes}")]
    Scalar {
        /// The scalar.
        name: String,
        /// Its type.
        takes: Type,
    },
    /// A divisor that is not positive.
    #[error("the scalar `{name}` divides, and has to be positive, not {value}")]
    Divisor {
        /// The scalar.
        name: String,
        /// Its value.
        value: i32,
    },
}

impl<'a> Inputs<'a> {
    /// The arrays and scalars of a call, checked against the program's declarations.
    ///
    /// # Errors
    /// What does not fit.
    pub fn new(
        program: &Program,
        arrays: Vec<ArrayView<'a>>,
        scalars: Vec<Value>,
    ) -> Result<Inputs<'a>, InputError> {
        let names = program.arrays().iter().map(|array| array.name.as_str()).collect();
        check_count("arrays", names, arrays.len())?;
        let names = program.scalars().iter().map(|scalar| scalar.name.as_str()).collect();
        check_count("scalars", names, scalars.len())?;
        for (decl, array) in program.arrays().iter().zip(&arrays) {
            check_array(decl, array)?;
        }
        for (decl, &value) in program.scalars().iter().zip(&scalars) {
            let name = || decl.name.clone();
            match (decl.ty, value) {
                (Type::I32, Value::I32(value)) if decl.positive && value <= 0 => {
                    return Err(InputError::Divisor { name: name(), value });
                }
                (Type::I32, Value::I32(_)) | (Type::F32, Value::F32(_)) => {}
                (Type::I32 | Type::F32 | Type::Bool, Value::I32(_) | Value::F32(_) | Value::Bool(_)) => {
                    return Err(InputError::Scalar { name: name(), takes: decl.ty });
                }
            }
        }
        Ok(Inputs { arrays, scalars })
    }

    /// Checks that they are those of `program`.
    ///
    /// # Errors
    /// As [`Inputs::new`].
    pub fn check(&self, program: &Program) -> Result<(), InputError> {
        Inputs::new(program, self.arrays.clone(), self.scalars.clone()).map(|_| ())
    }

    /// The arrays, in the order of the program's declarations.
    pub fn arrays(&self) -> &[ArrayView<'a>] {
        &self.arrays
    }

    /// The scalars, likewise.
    pub fn scalars(&self) -> &[Value] {
        &self.scalars
    }
}

fn check_count(what: &'static str, names: Vec<&str>, given: usize) -> Result<(), InputError> {
    if names.len() == given {
        return Ok(());
    }
    Err(InputError::Count { what, takes: names.len(), names: names.join(", "), given })
}

fn check_array(decl: &ArrayDecl, array: &ArrayView<'_>) -> Result<(), InputError> {
    let name = || decl.name.clone();
    if array.data.element() != decl.element {
        let (takes, given) = (decl.element.name(), array.data.element().name());
        return Err(InputError::Element { name: name(), takes, given });
    }
    if let Some(last) = array.extents.iter().rposition(|&extent| extent > 1).filter(|&axis| axis >= decl.rank)
    {
        return Err(InputError::Axes { name: name(), takes: decl.rank, given: last + 1 });
    }
    let (mut first, mut last) = (0i64, 0i64);
    for axis in 0..decl.rank {
        if array.extents[axis] < 1 {
            return Err(InputError::Empty { name: name(), axis });
        }
        let is_bits = decl.element == Element::Bits && axis + 1 == decl.rank;
        let steps = i64::from(array.extents[axis] - 1) >> (if is_bits { 5 } else { 0 });
        let reach = steps.saturating_mul(array.strides[axis]);
        (first, last) = (first.saturating_add(reach.min(0)), last.saturating_add(reach.max(0)));
    }
    let there = array.data.len();
    let reaches = if first < 0 { first } else { last };
    if first < 0 || last >= there as i64 {
        return Err(InputError::Outside { name: name(), reaches, there });
    }
    Ok(())
}

/// Where a program is evaluated.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// The scaled score.
    pub s: f64,
    /// The sequence.
    pub b: i32,
    /// The query head.
    pub h: i32,
    /// The K/V head.
    pub hk: i32,
    /// The query.
    pub q: i32,
    /// The key.
    pub k: i32,
    /// Queries of the sequence.
    pub sq: i32,
    /// Keys of the sequence.
    pub sk: i32,
    /// What `off` is: `sk - sq` plus the mask's offset.
    pub off: i32,
}

impl Point {
    fn value(&self, var: Var) -> Value {
        match var {
            Var::S => Value::F32(self.s),
            Var::B => Value::I32(self.b),
            Var::H => Value::I32(self.h),
            Var::Hk => Value::I32(self.hk),
            Var::Q => Value::I32(self.q),
            Var::K => Value::I32(self.k),
            Var::Sq => Value::I32(self.sq),
            Var::Sk => Value::I32(self.sk),
            Var::Off => Value::I32(self.off),
        }
    }
}

/// What a program says of one score.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Whether the key is visible; true without a mask.
    pub visible: bool,
    /// The modified score; `s` without one.
    pub score: f64,
    /// What its probability is multiplied by; 1 without weights.
    pub weight: f64,
    /// d score / d s.
    pub slope: f64,
    /// d score / d load, for each of [`Program::gradients`].
    pub gradients: Vec<f64>,
}

impl Program {
    /// The value of every node at `point`.
    pub fn values(&self, inputs: &Inputs<'_>, point: &Point, precision: Precision) -> Vec<Value> {
        let mut values = Vec::with_capacity(self.nodes().len());
        for &node in self.nodes() {
            let value = self.value(node, &values, inputs, point, precision);
            values.push(value);
        }
        values
    }

    /// The value of a node whose operands have theirs.
    fn value(
        &self,
        node: Node,
        values: &[Value],
        inputs: &Inputs<'_>,
        point: &Point,
        precision: Precision,
    ) -> Value {
        let at = |x: NodeId| values[x.index()];
        match node {
            Node::Const(value) => Value::of(value),
            Node::Var(var) => point.value(var),
            Node::Scalar(scalar) => inputs.scalars[usize::from(scalar)],
            Node::Load(array, indices) => {
                let array = usize::from(array);
                let indices = indices.map(|x| x.map_or(0, |x| at(x).int()));
                inputs.arrays[array].load(self.arrays()[array].rank, indices)
            }
            Node::Unary(op, x) => ops::unary(op, at(x), precision),
            Node::Binary(op, a, b) => ops::binary(op, at(a), at(b), precision),
            Node::Select(c, a, b) => at(if at(c).truth() { a } else { b }),
        }
    }

    /// What the program says of one score.
    pub fn eval(&self, inputs: &Inputs<'_>, point: &Point, precision: Precision) -> Outcome {
        let values = self.values(inputs, point, precision);
        let at = |x: NodeId| values[x.index()];
        Outcome {
            visible: self.mask().is_none_or(|mask| at(mask).truth()),
            score: self.score().map_or(point.s, |score| at(score).float()),
            weight: self.weight().map_or(1.0, |weight| at(weight).float()),
            slope: self.slope().map_or(1.0, |slope| at(slope).float()),
            gradients: self.gradients().iter().map(|gradient| at(gradient.slope).float()).collect(),
        }
    }
}

/// The values of a program along the keys of a query: what depends on neither the key nor the score is made
/// once.
#[derive(Clone, Debug)]
pub struct RowValues<'a> {
    program: &'a Program,
    inputs: &'a Inputs<'a>,
    precision: Precision,
    point: Point,
    values: Vec<Value>,
    /// The nodes that depend on the key or the score.
    varying: Vec<NodeId>,
}

impl<'a> RowValues<'a> {
    /// Those of query `point.q`.
    pub fn new(
        program: &'a Program,
        inputs: &'a Inputs<'a>,
        point: &Point,
        precision: Precision,
    ) -> RowValues<'a> {
        RowValues::of(program, inputs, point, precision, &vec![true; program.nodes().len()])
    }

    /// [`RowValues::new`] of the nodes that are used, with those that they need: others keep the value of
    /// the first key.
    pub(super) fn of(
        program: &'a Program,
        inputs: &'a Inputs<'a>,
        point: &Point,
        precision: Precision,
        used: &[bool],
    ) -> RowValues<'a> {
        let values = program.values(inputs, point, precision);
        let nodes = (0..values.len()).map(|index| NodeId(index as u16));
        let varies = |&node: &NodeId| {
            let deps = program.deps(node);
            used[node.index()] && (deps.has(Deps::KEY) || deps.has(Deps::SCORE))
        };
        RowValues {
            program,
            inputs,
            precision,
            point: *point,
            values,
            varying: nodes.filter(varies).collect(),
        }
    }

    /// The value of every node at key `k` and the score `s`.
    pub fn at(&mut self, k: i32, s: f64) -> &[Value] {
        (self.point.k, self.point.s) = (k, s);
        for &node in &self.varying {
            let own = self.program.nodes()[node.index()];
            self.values[node.index()] =
                self.program.value(own, &self.values, self.inputs, &self.point, self.precision);
        }
        &self.values
    }

    /// Whether the key of the last [`at`](RowValues::at) is visible.
    pub fn visible(&self) -> bool {
        self.program.mask().is_none_or(|mask| self.values[mask.index()].truth())
    }

    /// What its score becomes.
    pub fn score(&self) -> f64 {
        self.program.score().map_or(self.point.s, |score| self.values[score.index()].float())
    }

    /// What its probability is multiplied by.
    pub fn weight(&self) -> f64 {
        self.program.weight().map_or(1.0, |weight| self.values[weight.index()].float())
    }

    /// The derivative of its score by `s`.
    pub fn slope(&self) -> f64 {
        self.program.slope().map_or(1.0, |slope| self.values[slope.index()].float())
    }
}

fn f16_to_f64(bits: u16) -> f64 {
    let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    let magnitude = match exponent {
        0 => mantissa * 2f64.powi(-24),
        31 if mantissa == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        _ => (1024.0 + mantissa) * 2f64.powi(exponent - 25),
    };
    if bits >> 15 == 1 { -magnitude } else { magnitude }
}
