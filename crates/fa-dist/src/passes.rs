//! The program of a rank for a pass.

use fa_core::Pass;

use crate::error::Error;
use crate::plan::{Scheme, ShardPlan};
use crate::program::Program;
use crate::schemes;

impl ShardPlan {
    /// What `rank` does for a pass.
    ///
    /// # Errors
    /// [`Error::Ranks`] for a rank that is none; [`Error::Refused`] for gradients of a decode.
    pub fn program(&self, rank: usize, pass: Pass) -> Result<Program, Error> {
        if rank >= self.world() {
            let need = format!("0 to {}", self.world() - 1);
            return Err(Error::Ranks { name: "rank", value: rank, need });
        }
        if self.scheme() == Scheme::Decode && pass.is_backward() {
            return Err(Error::Refused {
                scheme: self.scheme().name(),
                world: self.world(),
                what: "gradients".to_owned(),
                instead: "use gather, ulysses or ring".to_owned(),
            });
        }
        Ok(match (self.scheme(), pass.is_backward()) {
            (Scheme::Gather, false) => schemes::gather::forward(self, rank),
            (Scheme::Gather, true) => schemes::gather::backward(self, rank),
            (Scheme::Ulysses, false) => schemes::ulysses::forward(self, rank),
            (Scheme::Ulysses, true) => schemes::ulysses::backward(self, rank),
            (Scheme::Ring, false) => schemes::ring::forward(self, rank),
            (Scheme::Ring, true) => schemes::ring::backward(self, rank),
            (Scheme::Decode, _) => schemes::decode::forward(self, rank),
        })
    }
}
