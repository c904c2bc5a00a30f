//! What a transport is: one non-blocking, ordered byte stream to and from each peer.

use crate::options::RankId;
use std::io::IoSlice;
use std::time::Duration;

/// The stream to a peer has ended; the text says how it was noticed.
#[derive(Clone, Debug)]
pub(crate) struct LinkDown(pub String);

/// One rank's streams. Reads and writes come from one thread at a time; `wake` from any.
pub(crate) trait Link: Send + Sync {
    /// The largest piece of a payload that is summed and written at once.
    fn step_bytes(&self) -> usize;

    /// Takes a prefix of the concatenation of `pieces` for `peer`; 0 if there is no room now.
    fn write(&self, peer: RankId, pieces: &[IoSlice<'_>]) -> Result<usize, LinkDown>;

    /// Fills a prefix of `into` with what came from `peer`; 0 if nothing is there now.
    fn read(&self, peer: RankId, into: &mut [u8]) -> Result<usize, LinkDown>;

    /// Shows the next bytes from `peer` where they lie, once: at most `limit`, a multiple of
    /// 4. How many; 0 if nothing is there now.
    fn show(&self, peer: RankId, limit: usize, see: &mut dyn FnMut(&[u8])) -> Result<usize, LinkDown>;

    /// Call before looking for work: what happens after it cuts [`Link::wait`] short.
    fn ticket(&self) -> u32;

    /// Sleeps until something may have changed, at most `limit`. `full` is the peer that
    /// had no room for a write.
    fn wait(&self, ticket: u32, full: Option<RankId>, limit: Duration);

    /// Cuts a wait under way short.
    fn wake(&self);
}
