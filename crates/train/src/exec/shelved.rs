//! What layers keep for backward, to the file and back: see [`program::shelf`].

use program::shelf::Move;

use super::Executor;
use crate::error::TrainError;

impl Executor<'_> {
    /// One move.
    pub(super) fn shelve(&mut self, step: Move) -> Result<(), TrainError> {
        let Self { shelf: Some(shelf), memory, kept, counts, .. } = self else { return Ok(()) };
        let bytes = |buffers: &[Vec<f32>]| buffers.iter().map(|b| 4 * b.len() as u64).sum::<u64>();
        // What was on its way to the file has left memory.
        let written = shelf.written()?;
        *kept -= bytes(&written);
        written.into_iter().for_each(|buffer| memory.pool.give(buffer));
        match step {
            Move::Store(key) => shelf.store(key, memory.put_away(key)),
            Move::Want(key) => {
                let pool = &mut memory.pool;
                let take = |(len, loose): &(usize, bool)| if *loose { pool.take_loose(*len) } else { pool.take(*len) };
                let buffers: Vec<_> = shelf.lens(key).iter().map(take).collect();
                *kept += bytes(&buffers);
                counts.peak_kept = counts.peak_kept.max(*kept);
                shelf.want(key, buffers)
            }
            Move::Take(key) => {
                let buffers = shelf.take(key)?;
                memory.put_back(key, buffers);
                Ok(())
            }
        }
    }
}
