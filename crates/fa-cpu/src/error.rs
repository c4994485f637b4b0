//! Errors of the CPU implementations.

use fa_core::{AppendError, Dtype, ProblemError, counted};

/// Why an attention call was refused. Nothing has been written when one is returned.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CpuError {
    /// The problem itself is not valid.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// What is to be appended is not valid.
    #[error(transparent)]
    Append(#[from] AppendError),
    /// A tensor's shape is not what the problem says.
    #[error("{tensor} is [batch, seqlen, heads, dim] = {got:?}, the problem needs {need:?}")]
    Shape {
        /// The tensor.
        tensor: &'static str,
        /// Its (batch, seqlen, heads, dim).
        got: [usize; 4],
        /// The problem's.
        need: [usize; 4],
    },
    /// A tensor's elements are of another type than the problem's.
    #[error("tensors hold {}, the problem's dtype is {need}", .got.map_or("f64", Dtype::name))]
    Dtype {
        /// The tensors' type; `None` for f64.
        got: Option<Dtype>,
        /// The problem's.
        need: Dtype,
    },
    /// K and V are codes, and the problem's are not.
    #[error("K and V hold codes, the problem's kv_dtype is {need}: it must be e4m3, int8, int4 or e5m2")]
    Codes {
        /// The problem's type of K and V.
        need: Dtype,
    },
    /// Shape and strides reach outside the storage.
    #[error("{tensor} reaches element {last}, its storage holds {len}")]
    OutOfBounds {
        /// The tensor.
        tensor: &'static str,
        /// Offset of an element that the shape and strides reach (negative: before the start).
        last: i128,
        /// Elements in the storage.
        len: usize,
    },
    /// Two elements of an output would share storage.
    #[error(
        "{tensor} is written, so no two of its elements may share storage: strides {strides:?} do not allow \
         it"
    )]
    Overlap {
        /// The tensor.
        tensor: &'static str,
        /// (batch, seq, head, dim) strides in elements.
        strides: [i64; 4],
    },
    /// A flat buffer has the wrong length.
    #[error("{buffer} holds {got} values, the problem needs {need}")]
    Length {
        /// The buffer.
        buffer: &'static str,
        /// Its length.
        got: usize,
        /// The length needed.
        need: usize,
    },
    /// One of the extras is missing, or was given although the problem does not name it.
    #[error(
        "{name} {}",
        if *asked { "is missing: the problem names it" } else { "is given, but the problem does not name it" }
    )]
    Extra {
        /// The field of [`crate::Extras`].
        name: &'static str,
        /// Whether the problem names it.
        asked: bool,
    },
    /// A sink leaves nothing to any key.
    #[error(
        "sinks[{index}] is inf: it would take all of the head's probability; give a finite logit, or -inf \
         for none"
    )]
    Sink {
        /// The query head.
        index: usize,
    },
    /// A descale is negative, infinite or NaN.
    #[error("{name}[{index}] = {value}: a descale is a finite number of 0 or more; move a sign to the codes")]
    Descale {
        /// The field of [`crate::Extras`].
        name: &'static str,
        /// The element.
        index: usize,
        /// Its value.
        value: f32,
    },
    /// Starts of packed sequences descend.
    #[error("{name}[{index}] = {before} and {name}[{}] = {after}: starts must not descend", index + 1)]
    Descending {
        /// The field of [`crate::Extras`].
        name: &'static str,
        /// The sequence that ends before it starts.
        index: usize,
        /// Its start.
        before: i32,
        /// Its end.
        after: i32,
    },
    /// A start or a length points outside the rows that there are.
    #[error("{name}[{index}] = {value}: it must be from 0 to {limit}")]
    Beyond {
        /// The field of [`crate::Extras`].
        name: &'static str,
        /// The entry.
        index: usize,
        /// Its value.
        value: i32,
        /// The rows that there are.
        limit: usize,
    },
    /// A packed sequence is longer than the problem's bound.
    #[error("{name} gives sequence {sequence} {len} rows, the problem's bound is {max}")]
    TooLong {
        /// The field of [`crate::Extras`].
        name: &'static str,
        /// The sequence.
        sequence: usize,
        /// Its rows.
        len: usize,
        /// The bound.
        max: usize,
    },
    /// A page in use does not exist.
    #[error(
        "entry {entry} of sequence {sequence} in the page table is {page}: the cache has {}",
        counted(*.pages, "page")
    )]
    Page {
        /// The sequence.
        sequence: usize,
        /// The entry of its row.
        entry: usize,
        /// Its value.
        page: i32,
        /// Pages of the cache.
        pages: usize,
    },
    /// Memory does not hold the list of the sequences: of a broadcast tensor there may be more than its
    /// memory says.
    #[error(
        "{sequences} sequences are listed in {bytes} bytes, which the system does not give: split the batch"
    )]
    Memory {
        /// How many there are.
        sequences: usize,
        /// What their list takes; `usize::MAX` beyond.
        bytes: usize,
    },
    /// Arrays or scalars that are not those of the problem's program.
    #[error(transparent)]
    Program(#[from] fa_core::program::InputError),
    /// Gradients of keys that begin with their values were asked for.
    #[error(
        "a latent problem has no backward: train on the heads before absorption (DeepSeek's 192-128), of \
         which K and V are projections of the latents"
    )]
    LatentBackward,
    /// Gradients of keys that lie in pages were asked for.
    #[error("keys and values lie in pages, which the backward does not take: pack or pad them")]
    PagedBackward,
    /// Scale and soft cap leave no room for scores in f32.
    #[error(
        "softmax_scale = {scale:?}{}: the tiled implementation computes scores in f32, for which {} may be \
         at most {:e} (the reference takes any)",
        softcap.map_or(String::new(), |cap| format!(" and softcap = {cap:?}")),
        softcap.map_or("it", |_| "softmax_scale / softcap (of a softcap from 1.2e-38 to 2.3e38)"),
        limit
    )]
    Range {
        /// The softmax scale.
        scale: f64,
        /// The soft cap, if there is one.
        softcap: Option<f64>,
        /// The largest factor on products.
        limit: f32,
    },
    /// An instruction set was asked for that this CPU does not have.
    #[error("this CPU has no {wanted}: the best it has is {best}")]
    Isa {
        /// The one asked for.
        wanted: crate::simd::Isa,
        /// The one that would be chosen.
        best: crate::simd::Isa,
    },
}
