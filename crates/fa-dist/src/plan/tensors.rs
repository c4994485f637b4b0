//! The caller's tensors: the shape of each rank's shards.

use fa_core::{Problem, TensorLayout};
use fa_cpu::check;

use super::{Scheme, ShardPlan};
use crate::program::{Buffer, Cell, Shape};

impl ShardPlan {
    /// Shape of the shard of a tensor that the caller has, `[batch, rows, heads, dim]`.
    pub fn shape(&self, rank: usize, buffer: Buffer) -> Shape {
        let [batch, ..] = check::q_shape(&self.problem);
        let queries = if self.scheme == Scheme::Decode { 0 } else { rank };
        let (queries, keys) = (self.queries.rows(queries), self.keys.rows(rank));
        let Problem { heads_q, heads_kv, head_dim, head_dim_v, .. } = self.problem;
        let own =
            |rows, heads, dim| Shape { batch, rows, heads, dim, cell: Cell::Own, order: TensorLayout::Bshd };
        if let (true, Buffer::K | Buffer::V) = (self.is_cache(), buffer) {
            // In elements of codes, of which a byte may have two.
            let of = if buffer == Buffer::K { check::k_shape } else { check::v_shape };
            let [batch, _, heads, dim] = of(&self.problem);
            return Shape { batch, ..own(keys, heads, dim) };
        }
        match buffer {
            Buffer::Q | Buffer::Dq => own(queries, heads_q, head_dim),
            Buffer::K | Buffer::Dk => own(keys, heads_kv, head_dim),
            Buffer::V | Buffer::Dv => own(keys, heads_kv, head_dim_v),
            Buffer::Out | Buffer::Dout => own(queries, heads_q, head_dim_v),
            Buffer::Lse | Buffer::Dlse => {
                Shape { cell: Cell::F32, order: TensorLayout::Bhsd, ..own(queries, heads_q, 1) }
            }
            Buffer::Dsinks => {
                Shape { batch: 1, cell: Cell::F32, order: TensorLayout::Bhsd, ..own(1, heads_q, 1) }
            }
            Buffer::Darray(array) => {
                let found = self.arrays.iter().find(|own| own.array == array);
                let rows = found.map_or(0, |own| own.extents.iter().product());
                Shape { batch: 1, cell: Cell::F32, order: TensorLayout::Bhsd, ..own(rows, 1, 1) }
            }
            Buffer::Scratch(_) => own(0, 0, 0),
        }
    }

    /// The caller's tensors of a pass, as shards of `rank`.
    pub(crate) fn tensors(&self, rank: usize, backward: bool) -> Vec<(Buffer, Shape)> {
        let forward = [Buffer::Q, Buffer::K, Buffer::V, Buffer::Out, Buffer::Lse];
        let gradients = [Buffer::Dout, Buffer::Dq, Buffer::Dk, Buffer::Dv];
        let sinks = [Buffer::Dsinks];
        let sinks = sinks.iter().filter(|_| self.problem.score.sinks);
        let dlse = [Buffer::Dlse];
        let dlse = dlse.iter().filter(|_| self.has_dlse);
        let arrays: Vec<Buffer> = self.arrays.iter().map(|own| Buffer::Darray(own.array)).collect();
        let gradients = gradients.iter().chain(sinks).chain(dlse).chain(&arrays).filter(|_| backward);
        forward.iter().chain(gradients).map(|&buffer| (buffer, self.shape(rank, buffer))).collect()
    }
}
