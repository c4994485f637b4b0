//! Batches of sequences of different lengths at which kernels fail.

use fa_core::{Alibi, Family, KernelSpec, TensorLayout};

use crate::case::{Case, problem};
use crate::extras::{Batch, Lie};
use crate::proof::Placing;

/// Lengths of the sequences of one batch, queries and keys: longer than a tile and shorter, none on either
/// side, one query, more keys than queries.
pub const LENGTHS: [(usize, usize); 7] =
    [(300, 300), (77, 77), (0, 0), (129, 129), (1, 300), (40, 0), (200, 513)];

/// A batch with what else a case has.
#[derive(Clone, Debug)]
pub(crate) struct Trying {
    batch: Batch,
    heads: (usize, usize),
    placing: Placing,
    /// Whether head dims are less than the kernel's.
    pads: bool,
    alibi: Alibi,
}

/// What a kernel that reads lengths on the device is tried on.
pub(crate) fn batches(spec: &KernelSpec) -> Vec<Trying> {
    let is_paged = spec.reads.paged;
    // Boxes of TMA hold eight keys and more.
    let by_boxes = spec.kernel.family() == Family::Sm90 && !spec.gathers_pages();
    let keys = |lie: Lie, page: usize| match is_paged {
        true if by_boxes && !page.is_multiple_of(8) => Lie::Paged(8 * page),
        true => Lie::Paged(page),
        false => lie,
    };
    let plain = |sequences: Vec<(usize, usize)>, heads, q, k, slack| Trying {
        batch: Batch { sequences, q, k, slack },
        heads,
        placing: Placing::PACKED,
        pads: false,
        alibi: Alibi::PerHead,
    };
    // Fewer rows than sequences.
    let short = (0..40).map(|i| (i % 7 / 6, i * 7 % 23)).collect();
    let decode = vec![(1, 300), (1, 1), (1, 513), (1, 0), (1, 64)];
    let mut all = vec![
        plain(LENGTHS.to_vec(), (4, 2), Lie::Packed, keys(Lie::Packed, 16), 5),
        plain(vec![(300, 300)], (2, 2), Lie::Packed, keys(Lie::Packed, 64), 0),
        plain(vec![(0, 0); 3], (2, 1), Lie::Packed, keys(Lie::Packed, 16), 0),
        plain(short, (2, 1), Lie::Packed, keys(Lie::Packed, 1), 3),
        plain(decode, (8, 1), Lie::Padded, keys(Lie::Padded, 128), 0),
    ];
    let sequences = vec![(70, 133), (300, 40), (0, 9), (128, 128)];
    all.push(Trying {
        placing: Placing { layout: TensorLayout::Bhsd, gap: 8 },
        alibi: Alibi::PerSequenceHead,
        ..plain(sequences.clone(), (2, 1), Lie::Padded, keys(Lie::Padded, 7), 2)
    });
    all.push(Trying {
        pads: true,
        ..plain(sequences, (2, 2), Lie::PackedUsed, keys(Lie::PackedUsed, 48), 9)
    });
    all
}

impl Trying {
    /// For a kernel of `spec`.
    pub(crate) fn case(&self, spec: &KernelSpec) -> Case {
        let mut problem = problem(spec, self.batch.lengths(), self.heads);
        if self.pads {
            problem.head_dim -= 8;
            problem.head_dim_v -= 8;
        }
        problem.score.alibi = problem.score.alibi.map(|_| self.alibi);
        Case { problem, placing: self.placing, extras: self.batch.extras(&problem) }
    }
}
