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
    /// [`Error::Ranks`] for a rank that is none; [`Error::Refused`] for gradients of a decode, and of a ring
    /// with sinks.
    pub fn program(&self, rank: usize, pass: Pass) -> Result<Program, Error> {
        if rank >= self.world() {
            let need = format!("0 to {}", self.world() - 1);
            return Err(Error::Ranks { name: "rank", value: rank, need });
        }
        let refuse = |what: &str, instead: &str| Error::Refused {
            scheme: self.scheme().name(),
            world: self.world(),
            what: what.to_owned(),
            instead: instead.to_owned(),
        };
        match (self.scheme(), pass.is_backward()) {
            (Scheme::Decode, true) => return Err(refuse("gradients", "use gather, ulysses or ring")),
            (Scheme::Ring, true) if self.problem().score.sinks => {
                return Err(refuse("gradients of sinks", "use gather or ulysses"));
            }
            _ => {}
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
