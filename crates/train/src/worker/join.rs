//! Into the fabric of a world.

use control::wire::{FabricSpec, FromRank, ToRank};
use fabric::{Endpoint, FabricError, FabricOptions, ShmWorld, TcpListenerHandle};
use spec::Run;

use super::ear::Ear;
use super::unclear;
use super::voice::Voice;
use crate::comm::fabric_options;
use crate::error::TrainError;

/// Connects as `rank` of `world` in world `generation`.
///
/// # Errors
/// The fabric's; `Aborted` if the world is over before all have come.
pub fn join(
    run: &Run,
    (generation, rank, world): (u64, u32, u32),
    fabric: &FabricSpec,
    ear: &mut Ear,
    voice: &Voice,
) -> Result<Endpoint, TrainError> {
    let options = FabricOptions { wall: ear.pulse().wall.clone(), ..fabric_options(run, generation) };
    let (token, bind) = match fabric {
        FabricSpec::Shm(path) => return Ok(ShmWorld::attach_path(path, rank, world, &options)?),
        FabricSpec::Tcp { token, bind } => (token, bind),
        FabricSpec::Keyed { .. } => return Err(unclear(&"a world without its token")),
    };
    let (handle, address) = TcpListenerHandle::bind(*bind)?;
    voice.say(&FromRank::Listening { generation, address: address.to_string() });
    let addresses = loop {
        if let Some(reason) = ear.over(generation) {
            return Err(FabricError::Aborted { reason }.into());
        }
        match ear.next() {
            ToRank::Addresses { generation: of, addresses } if of == generation => break addresses,
            word @ ToRank::Assign(_) => {
                // The next world: this one is over, as the ear knows.
                ear.put_back(word);
                let reason = ear.over(generation).unwrap_or_default();
                return Err(FabricError::Aborted { reason }.into());
            }
            _ => {}
        }
    };
    let addresses = addresses.iter().map(|a| a.parse()).collect::<Result<Vec<_>, _>>().map_err(|e| unclear(&e))?;
    Ok(handle.connect_unless(rank, &addresses, token, &options, &|| ear.over(generation))?)
}
