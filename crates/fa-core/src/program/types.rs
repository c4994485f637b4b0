//! What a program's expressions are made of: types, variables, and the arrays and scalars of the caller.

use std::fmt;

use crate::Dtype;

/// The type of an expression.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Type {
    /// A 32-bit integer; arithmetic wraps.
    I32,
    /// A binary32 number.
    F32,
    /// A truth value.
    Bool,
}

impl Type {
    /// The name in texts.
    pub const fn name(self) -> &'static str {
        match self {
            Type::I32 => "i32",
            Type::F32 => "f32",
            Type::Bool => "bool",
        }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The element type of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// IEEE binary32.
    F32,
    /// IEEE binary16, loaded as f32.
    F16,
    /// bfloat16, loaded as f32.
    Bf16,
    /// 32-bit integers.
    I32,
    /// Bytes, loaded as i32 from 0 to 255.
    U8,
    /// Bytes, loaded as whether they are other than 0.
    Bool,
    /// Bits of 32-bit words along the last axis, the lowest first, loaded as truth values.
    Bits,
}

impl Element {
    /// Every element type.
    pub const ALL: [Element; 7] =
        [Element::F32, Element::F16, Element::Bf16, Element::I32, Element::U8, Element::Bool, Element::Bits];

    /// The name in texts.
    pub const fn name(self) -> &'static str {
        match self {
            Element::F32 => "f32",
            Element::F16 => "f16",
            Element::Bf16 => "bf16",
            Element::I32 => "i32",
            Element::U8 => "u8",
            Element::Bool => "bool",
            Element::Bits => "bits",
        }
    }

    /// The type of a loaded element.
    pub const fn loaded(self) -> Type {
        match self {
            Element::F32 | Element::F16 | Element::Bf16 => Type::F32,
            Element::I32 | Element::U8 => Type::I32,
            Element::Bool | Element::Bits => Type::Bool,
        }
    }

    /// The type of 16 bits that it is; `None` for any other.
    pub const fn narrow(self) -> Option<Dtype> {
        match self {
            Element::F16 => Some(Dtype::F16),
            Element::Bf16 => Some(Dtype::Bf16),
            Element::F32 | Element::I32 | Element::U8 | Element::Bool | Element::Bits => None,
        }
    }

    /// Bytes of what strides count: an element, or a word of 32 bits.
    pub const fn bytes(self) -> usize {
        match self {
            Element::F32 | Element::I32 | Element::Bits => 4,
            Element::F16 | Element::Bf16 => 2,
            Element::U8 | Element::Bool => 1,
        }
    }

    pub(super) fn of_name(name: &str) -> Option<Element> {
        Element::ALL.into_iter().find(|element| element.name() == name)
    }
}

/// A variable of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Var {
    /// The scaled score; score programs only.
    S,
    /// The sequence of the batch.
    B,
    /// The query head.
    H,
    /// The K/V head.
    Hk,
    /// The query's index in its sequence.
    Q,
    /// The key's index in its sequence.
    K,
    /// The sequence's queries.
    Sq,
    /// The sequence's keys.
    Sk,
    /// `sk - sq` plus the mask's offset: a query is aligned with key `q + off`.
    Off,
}

impl Var {
    /// Every variable.
    pub const ALL: [Var; 9] = [Var::S, Var::B, Var::H, Var::Hk, Var::Q, Var::K, Var::Sq, Var::Sk, Var::Off];

    /// The name in texts.
    pub const fn name(self) -> &'static str {
        match self {
            Var::S => "s",
            Var::B => "b",
            Var::H => "h",
            Var::Hk => "hk",
            Var::Q => "q",
            Var::K => "k",
            Var::Sq => "sq",
            Var::Sk => "sk",
            Var::Off => "off",
        }
    }

    /// Its type.
    pub const fn ty(self) -> Type {
        match self {
            Var::S => Type::F32,
            Var::B | Var::H | Var::Hk | Var::Q | Var::K | Var::Sq | Var::Sk | Var::Off => Type::I32,
        }
    }
}

/// An array that a program reads.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ArrayDecl {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub element: Element,
    /// Its axes: 1 to 4.
    pub rank: usize,
    /// Whether the backward computes its gradient.
    pub gradient: bool,
    /// Whether rows, of its last axis, have an element for each key, one behind the other, and begin on
    /// multiples of [`ALIGNED_BYTES`]: kernels need not find where they begin. Another array is refused where
    /// a kernel is launched.
    pub aligned: bool,
}

/// What the rows of an aligned array begin on multiples of.
pub const ALIGNED_BYTES: u64 = 16;

/// A run-time value of a program: other values compile nothing.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ScalarDecl {
    /// Its name.
    pub name: String,
    /// [`Type::I32`] or [`Type::F32`].
    pub ty: Type,
    /// Whether it divides, and has to be positive.
    pub positive: bool,
}

/// What the values of expressions depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Deps(u8);

impl Deps {
    /// Constants and run-time scalars.
    pub const NONE: Deps = Deps(0);
    /// The sequence, and its lengths.
    pub const BATCH: Deps = Deps(1);
    /// The head.
    pub const HEAD: Deps = Deps(2);
    /// The query.
    pub const QUERY: Deps = Deps(4);
    /// The key.
    pub const KEY: Deps = Deps(8);
    /// The score.
    pub const SCORE: Deps = Deps(16);

    /// What either depends on.
    #[must_use]
    pub const fn with(self, other: Deps) -> Deps {
        Deps(self.0 | other.0)
    }

    /// Whether it includes all of `other`.
    pub const fn has(self, other: Deps) -> bool {
        self.0 & other.0 == other.0
    }

    pub(super) const fn of_var(var: Var) -> Deps {
        match var {
            Var::S => Deps::SCORE,
            Var::B | Var::Sq | Var::Sk | Var::Off => Deps::BATCH,
            Var::H | Var::Hk => Deps::HEAD,
            Var::Q => Deps::QUERY,
            Var::K => Deps::KEY,
        }
    }
}
