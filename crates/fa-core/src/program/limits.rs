//! The limits of programs.

/// The most operations, operands and constants of a program, shared ones once; derivatives don't count.
pub const MAX_NODES: usize = 256;

/// The most arrays of a program.
pub const MAX_ARRAYS: usize = 16;

/// The most run-time scalars of a program.
pub const MAX_SCALARS: usize = 8;

/// The most axes of an array.
pub const MAX_RANK: usize = 4;

/// The deepest nesting of a text's parentheses, calls and signs.
pub const MAX_NESTING: usize = 64;

/// The longest text, in bytes.
pub const MAX_TEXT: usize = 1 << 16;

/// The longest name, in characters.
pub const MAX_NAME: usize = 64;
