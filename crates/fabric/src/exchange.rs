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
    /// # Errors
    /// Those of [`Endpoint`]; `Argument` if there is not one of each per member.
    pub fn all_to_all(&self, group: &Group, send: &[&[f32]], recv: &mut [Vec<f32>]) -> Result<(), FabricError> {
        if recv.len() != send.len() {
            let what = format!("{} parts to send and {} to receive", send.len(), recv.len());
            return self.run(group, Operation::AllToAll, 0, |task, _| Err(task.argument(what)));
        }
        let mut spare: Vec<_> = recv.iter_mut().map(std::mem::take).collect();
        // Whatever is there is overwritten: only what is missing is filled first.
        let room = &mut |member: usize, len| {
            let mut buffer = std::mem::take(&mut spare[member]);
            buffer.resize(len, 0.0);
            buffer
        };
        let came = self.all_to_all_into(group, send, room, &mut || false)?;
        recv.iter_mut().zip(came).for_each(|(recv, came)| *recv = came);
        Ok(())
    }

    /// [`Endpoint::all_to_all`] into buffers that `room` makes, for what a member sends and of its length; by member.
    ///
    /// While another member has not come yet, `meanwhile` is called again and again until it says that it has nothing to do:
    /// a little work that can wait until somebody has to.
    ///
    /// In step s every member sends to the one s places up and receives from the one s places down, block by block, so
    /// that both directions are busy and no member hears many at once.
    ///
    /// # Errors
    /// Those of [`Endpoint`]; `Argument` if there is not one to send per member.
    pub fn all_to_all_into(
        &self,
        group: &Group,
        send: &[&[f32]],
        room: &mut dyn FnMut(usize, usize) -> Vec<f32>,
        meanwhile: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<Vec<f32>>, FabricError> {
        let all = send.iter().map(|part| size_of_val(*part)).sum();
        self.run(group, Operation::AllToAll, all, |task, inner| {
            let (me, members) = (task.me, group.len());
            if send.len() != members {
                return Err(task.argument(format!("{} parts to send for {members} members", send.len())));
            }
            let mut recv = vec![Vec::new(); members];
            recv[me] = room(me, send[me].len());
            recv[me].copy_from_slice(send[me]);
            let size = inner.mail.block(BLOCK, 1);
            for step in 1..members {
                let (to, from) = ((me + step) % members, (me + members - step) % members);
                inner.mail.send(task, to, DIRECT, &[&(send[to].len() as u64).to_le_bytes()])?;
                while !inner.mail.is_here(task, from, DIRECT)? && meanwhile() {}
                let mut count = [0; COUNT_BYTES];
                inner.mail.recv_into(task, from, DIRECT, &mut count)?;
                let expected = u64::from_le_bytes(count) as usize;
                recv[from] = room(from, expected);
                for i in 0..send[to].len().max(expected).div_ceil(size) {
                    if let Some(part) = block(send[to].len(), size, i) {
                        inner.mail.send(task, to, DIRECT, &[bytes(&send[to][part])])?;
                    }
                    if let Some(part) = block(expected, size, i) {
                        inner.mail.recv_into(task, from, DIRECT, bytes_mut(&mut recv[from][part]))?;
                    }
                }
            }
            Ok(recv)
        })
    }
}
