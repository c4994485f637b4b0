//! Masks and modifications of scores of the user's own: typed expressions as data.
//!
//! A [`Program`] is parsed from text. It says which keys a query sees (`mask`), what a scaled score becomes
//! (`score`), or both; it reads arrays and run-time scalars of the caller. Kernels get it as a generated
//! header ([`Program::cuda`]); the CPU evaluates it ([`Program::eval`]).
//!
//! ```
//! use fa_core::program::Program;
//!
//! // ALiBi, within a window of a run-time size.
//! let program = Program::parse(
//!     "array slope: f32[_];  scalar w: i32;
//!      let distance = q + off - k;
//!      mask = 0 <= distance < w;
//!      score = s - slope[h] * distance;",
//! )?;
//! assert_eq!(program.arrays()[0].rank, 1);
//! // The canonical text is the program: equal texts are equal programs.
//! assert_eq!(Program::parse(program.text())?, program);
//! # Ok::<(), fa_core::program::ProgramError>(())
//! ```
//!
//! The language is in `docs/programs.md`. No text of the user's reaches a compiler: the header is printed
//! from the nodes with names of its own, and every load clamps its indices to its array.

mod affine;
mod ahead;
mod built_in;
mod cuda;
mod cuda_counts;
mod cuda_loads;
mod cuda_names;
mod cuda_printer;
mod cuda_tiles;
mod derive;
mod direct;
mod dropped;
mod error;
mod eval;
mod forms;
mod gathered;
mod graph;
mod intern;
mod lex;
mod limits;
mod node;
mod operations;
mod ops;
mod owned;
mod parse;
mod places;
mod print;
mod rows;
mod runs;
mod spans;
mod standard;
mod syntax;
mod tiles;
mod types;
mod whole;

pub use affine::ScoreClass;
pub use ahead::{Ahead, AheadForm};
pub use cuda::{HEADER, WEIGHTS};
pub use derive::Gradient;
pub use direct::Direct;
pub use error::{ProgramError, ProgramProblem};
pub use eval::{ArrayData, ArrayView, InputError, Inputs, Outcome, Point, RowValues};
pub use forms::{Axis, GradientForm};
pub use gathered::{DirectGradients, Gathered, PosedArray};
pub use intern::{Interned, MAX_INTERNED, TableFull};
pub use limits::{MAX_ARRAYS, MAX_NAME, MAX_NESTING, MAX_NODES, MAX_RANK, MAX_SCALARS, MAX_TEXT};
pub use node::{Binary, Const, Node, NodeId, Unary};
pub use operations::Operations;
pub use ops::{Precision, Value};
pub use owned::{OwnedArray, OwnedData, OwnedInputs};
pub use places::Places;
pub use rows::MAX_INTERVALS;
pub use standard::{BiasElement, Standard};
pub use tiles::{MAX_SCANNED, Tile, TileState};
pub use types::{ALIGNED_BYTES, ArrayDecl, Deps, Element, ScalarDecl, Type, Var};
pub use whole::Program;
