//! The shapes that the kernels are measured by, fixed so that results can be compared over time.

use std::collections::BTreeMap;
use std::str::FromStr;

use fa_core::{Dtype, Family, Mask, Problem};

/// A fixed list of shapes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marks {
    /// mma.sync kernels beside FlashAttention 2: bf16, head dims 64 and 128, 16k tokens, 1k to 16k long
    Sm80,
    /// wgmma kernels beside all peers: bf16, head dims 64, 128, 256, 192-128, 16k tokens, 512 to 16k long; and f16 causal
    Sm90,
    /// Gradients by mma.sync kernels beside FlashAttention 2: as sm80
    Sm80Bwd,
    /// Gradients by wgmma kernels beside all peers: the bf16 shapes of sm90
    Sm90Bwd,
}

/// A shape to measure.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// The problem.
    pub problem: Problem,
    /// Rows are summed up by this.
    pub group: &'static str,
    /// Rates that others published or measured for this shape on an H100, in TFLOP/s.
    pub recorded: BTreeMap<String, f64>,
}

impl Wanted {
    /// A shape with nothing to go with it.
    pub fn new(problem: Problem, group: &'static str) -> Wanted {
        Wanted { problem, group, recorded: BTreeMap::new() }
    }
}

/// Positions of all sequences together in most rows.
pub const TOKENS: usize = 16384;

/// Query heads and K/V heads by head dims: 2048 columns, or what models with that head dim have.
const HEADS: [(usize, usize, usize); 4] = [(64, 64, 32), (128, 128, 16), (256, 256, 8), (192, 128, 16)];

/// f16, causal, B = 4, 32 heads, head dim 128: what TileGym's cuTile kernel reaches on an H100 (tileiras 13.4, the best of
/// five tiles) by sequence length.
const CUTILE: [(usize, f64); 5] =
    [(1024, 322.0), (2048, 433.0), (4096, 483.0), (8192, 487.0), (16384, 495.0)];

impl Marks {
    /// All of them.
    pub const ALL: [Marks; 4] = [Marks::Sm80, Marks::Sm90, Marks::Sm80Bwd, Marks::Sm90Bwd];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Marks::Sm80 => "sm80",
            Marks::Sm90 => "sm90",
            Marks::Sm80Bwd => "sm80-bwd",
            Marks::Sm90Bwd => "sm90-bwd",
        }
    }

    /// What is measured, in a line.
    pub const fn about(self) -> &'static str {
        match self {
            Marks::Sm80 => {
                "mma.sync kernels beside FlashAttention 2: bf16, head dims 64 and 128, 16k tokens, 1k to 16k long"
            }
            Marks::Sm90 => {
                "wgmma kernels beside all peers: bf16, head dims 64, 128, 256, 192-128, 16k tokens, 512 to 16k long; and \
                 f16 causal"
            }
            Marks::Sm80Bwd => "Gradients by mma.sync kernels beside FlashAttention 2: as sm80",
            Marks::Sm90Bwd => "Gradients by wgmma kernels beside all peers: the bf16 shapes of sm90",
        }
    }

    /// The kernels that are measured.
    pub const fn family(self) -> Family {
        match self {
            Marks::Sm80 | Marks::Sm80Bwd => Family::Sm80,
            Marks::Sm90 | Marks::Sm90Bwd => Family::Sm90,
        }
    }

    /// Whether gradients are measured.
    pub const fn backward(self) -> bool {
        matches!(self, Marks::Sm80Bwd | Marks::Sm90Bwd)
    }

    /// The peers that are asked; all, if empty.
    pub fn peers(self) -> Vec<String> {
        match self {
            // Also made of mma.sync; the others use what only newer GPUs have.
            Marks::Sm80 | Marks::Sm80Bwd => vec!["fa2".to_owned()],
            Marks::Sm90 | Marks::Sm90Bwd => Vec::new(),
        }
    }

    /// The shapes.
    pub fn shapes(self) -> Vec<Wanted> {
        let (dims, shortest): (&[_], usize) = match self {
            Marks::Sm80 | Marks::Sm80Bwd => (&HEADS[..2], 1024),
            Marks::Sm90 | Marks::Sm90Bwd => (&HEADS, 512),
        };
        let mut shapes = Vec::new();
        for &(head_dim, head_dim_v, heads) in dims {
            for mask in [Mask::FULL, Mask::CAUSAL] {
                let mut seqlen = shortest;
                while seqlen <= TOKENS {
                    let square = Problem::square(TOKENS / seqlen, seqlen, heads, head_dim, mask, Dtype::Bf16);
                    shapes.push(Wanted::new(Problem { head_dim_v, ..square }, "bf16, 16k tokens"));
                    seqlen *= 2;
                }
            }
        }
        if self == Marks::Sm90 {
            shapes.extend(CUTILE.map(|(seqlen, rate)| Wanted {
                problem: Problem::square(4, seqlen, 32, 128, Mask::CAUSAL, Dtype::F16),
                group: "f16, batch 4",
                recorded: BTreeMap::from([("cutile".to_owned(), rate)]),
            }));
        }
        shapes
    }
}

impl FromStr for Marks {
    type Err = String;

    fn from_str(text: &str) -> Result<Marks, String> {
        let names = Marks::ALL.map(Marks::name).join(", ");
        let found = Marks::ALL.into_iter().find(|marks| marks.name() == text);
        found.ok_or_else(|| format!("there are no marks '{text}': use one of {names}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_marks_are_the_agreed_shapes() {
        assert_eq!(Marks::Sm80.shapes().len(), 2 * 2 * 5);
        let shapes = Marks::Sm90.shapes();
        assert_eq!(shapes.len(), 4 * 2 * 6 + 5);
        assert_eq!(Marks::Sm80Bwd.shapes(), Marks::Sm80.shapes());
        assert_eq!(Marks::Sm90Bwd.shapes(), shapes[..48]);
        for shape in &shapes[..48] {
            assert_eq!(shape.problem.batch * shape.problem.seqlen_q, TOKENS);
            shape.problem.check().expect("a valid problem");
        }
    }
}
