//! The layout of the tensors of a call.

use fa_core::{Strides, TensorLayout};

/// The layout of the tensors of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The order of the axes.
    pub layout: TensorLayout,
    /// Elements between a row's end and the next row's start, a multiple of 8. They are NaN before and after.
    pub gap: usize,
    /// The axis along which K and V are broadcast: its stride is 0.
    pub shared: Option<Shared>,
}

/// An axis of K and V along which all indices are one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shared {
    /// One K and V for the whole batch.
    Batch,
    /// One key and value for all positions.
    Rows,
    /// One K and V for all heads.
    Heads,
}

impl Shared {
    /// Its name in records.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Shared::Batch => "batch",
            Shared::Rows => "rows",
            Shared::Heads => "heads",
        }
    }
}

impl Placement {
    /// Packed `[batch, seqlen, heads, dim]`.
    pub const PACKED: Placement = Placement::of(TensorLayout::Bshd, 0);

    /// Axes in this order, with this many elements between rows.
    pub const fn of(layout: TensorLayout, gap: usize) -> Placement {
        Placement { layout, gap, shared: None }
    }

    /// Strides of an input; those of K and V may be broadcast.
    pub(crate) fn input_strides(self, is_of_keys: bool, shape: [usize; 4]) -> Strides {
        let strides = self.strides(shape);
        match self.shared.filter(|_| is_of_keys) {
            None => strides,
            Some(Shared::Batch) => Strides { batch: 0, ..strides },
            Some(Shared::Rows) => Strides { seq: 0, ..strides },
            Some(Shared::Heads) => Strides { head: 0, ..strides },
        }
    }

    pub(crate) fn strides(self, [_, seqlen, heads, dim]: [usize; 4]) -> Strides {
        self.layout.strides(seqlen, heads, dim + self.gap)
    }

    pub(crate) fn len(self, [batch, seqlen, heads, dim]: [usize; 4]) -> usize {
        batch * seqlen * heads * (dim + self.gap)
    }
}
