//! The tensors of a call on host memory.

use fa_core::Strides;
use fa_core::program::OwnedInputs;
use fa_cpu::OwnedExtras;

/// One tensor of a call, as elements of 16 bits or bytes of codes.
#[derive(Clone, Copy, Debug)]
pub enum Given<'a> {
    /// An input.
    Input(&'a [u16], Strides),
    /// An input of codes.
    Codes(&'a [u8], Strides),
    /// An output of this many elements.
    Output(usize, Strides),
}

impl Given<'_> {
    /// Bytes of an element.
    pub(crate) fn element_bytes(&self) -> usize {
        match self {
            Given::Input(..) | Given::Output(..) => 2,
            Given::Codes(..) => 1,
        }
    }
}

/// The tensors of a call.
#[derive(Clone, Debug)]
pub struct Call<'a> {
    /// In the order of the library's arguments: q, k, v, out; of a backward also dout, dq, dk, dv.
    pub tensors: Vec<Given<'a>>,
    /// LSE, an input of a backward.
    pub lse: Option<&'a [f32]>,
    /// The extras that the problem needs.
    pub extras: &'a OwnedExtras,
    /// The arrays and scalars of the problem's program.
    pub program: Option<&'a OwnedInputs>,
    /// For the tensors of queries and for those of keys: whether each row `[batch, seqlen]` belongs to a
    /// sequence. Other rows must not be touched. Empty where all rows belong to one.
    pub rows: [&'a [bool]; 2],
}

impl<'a> Call<'a> {
    /// A call of a batch of equal lengths, without slopes and sinks.
    pub(crate) fn dense(tensors: Vec<Given<'a>>, lse: Option<&'a [f32]>) -> Call<'a> {
        Call { tensors, lse, extras: &OwnedExtras::NONE, program: None, rows: [&[], &[]] }
    }
}
