//! How messages of ranks travel between host memories.

use crate::error::Error;

/// Moves bytes between the host memories of ranks.
pub trait HostTransport {
    /// This rank.
    fn rank(&self) -> usize;

    /// Ranks.
    fn world(&self) -> usize;

    /// Sends messages (to whom, and bytes) and receives others (from whom, and how many bytes), all at once;
    /// between two ranks messages arrive in the order of sending.
    ///
    /// # Errors
    /// [`Error::PeerLost`], [`Error::Mismatch`], [`Error::Deadline`].
    fn exchange(
        &mut self,
        sends: Vec<(usize, Vec<u8>)>,
        recvs: &[(usize, usize)],
    ) -> Result<Vec<Vec<u8>>, Error>;

    /// Compares `text` with that of every other rank.
    ///
    /// # Errors
    /// [`Error::Mismatch`] with the first rank that has another, and as [`HostTransport::exchange`].
    fn agree(&mut self, text: &str) -> Result<(), Error>;

    /// Tells the other ranks that this one has failed, and why: what they wait for does not come.
    fn fail(&mut self, why: &str);
}
