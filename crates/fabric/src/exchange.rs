//! `all_to_all`: every member has something for every other, of any size each.

use crate::bits::{bytes, bytes_mut};
use crate::endpoint::Endpoint;
use crate::error::FabricError;
use crate::frame::Operation;
use crate::options::Group;
use crate::plan::block;
use crate::route::DIRECT;

/// Numbers in a block.
const BLOCK: usize = 64 << 10;
/// Bytes of the count that goes ahead of the numbers.
const COUNT_BYTES: usize = 8;

impl Endpoint {
    /// `send[m]` to member m for every m; what member m had for this one replaces `recv[m]`. Sizes are free, nothing
    /// included, and need not be known to the receiver: a count goes ahead.
    ///
    /// In step s every member sends to the one s places up and receives from the one s places down, block by block, so
    /// that both directions are busy and no member hears many at once.
    ///
    /// # Errors
    /// Those of [`Endpoint`]; `Argument` if there is not one of each per member.
    pub fn all_to_all(&self, group: &Group, send: &[&[f32]], recv: &mut [Vec<f32>]) -> Result<(), FabricError> {
        let all = send.iter().map(|part| size_of_val(*part)).sum();
        self.run(group, Operation::AllToAll, all, |task, inner| {
            let (me, members) = (task.me, group.len());
            if send.len() != members || recv.len() != members {
                let what = format!("{} parts to send and {} to receive for {members}", send.len(), recv.len());
                return Err(task.argument(what));
            }
            recv[me].clear();
            recv[me].extend_from_slice(send[me]);
            let size = inner.mail.block(BLOCK, 1);
            for step in 1..members {
                let (to, from) = ((me + step) % members, (me + members - step) % members);
                inner.mail.send(task, to, DIRECT, &[&(send[to].len() as u64).to_le_bytes()])?;
                let mut count = [0; COUNT_BYTES];
                inner.mail.recv_into(task, from, DIRECT, &mut count)?;
                let expected = u64::from_le_bytes(count) as usize;
                // Whatever is there is overwritten: only what is missing is filled first.
                recv[from].resize(expected, 0.0);
                for i in 0..send[to].len().max(expected).div_ceil(size) {
                    if let Some(part) = block(send[to].len(), size, i) {
                        inner.mail.send(task, to, DIRECT, &[bytes(&send[to][part])])?;
                    }
                    if let Some(part) = block(expected, size, i) {
                        inner.mail.recv_into(task, from, DIRECT, bytes_mut(&mut recv[from][part]))?;
                    }
                }
            }
            Ok(())
        })
    }
}
