//! Checkpoints cut otherwise, compared and averaged, against the state that they were made of.

mod common;

use checkpoint::{Checkpoint, CheckpointError, Difference, Kind, mean, write_tensors};
use common::{NoSync, State, bits};

#[test]
fn other_slices_hold_the_same_state_and_come_back() {
    let state = State::new(2, 8);
    let folder = tempfile::tempdir().unwrap();
    let from = Checkpoint::open(&state.save(&folder.path().join("a"), 3)).unwrap();
    let recut = |tp: usize, name: &str, from: &Checkpoint| {
        let meta = checkpoint::Meta { tp, digest: None, ..from.meta().clone() };
        let mut source = |tensor, kind| from.read_tensor(tensor, kind);
        let path =
            write_tensors::<CheckpointError>(&NoSync, &folder.path().join(name), &state.tensors, &meta, &mut source);
        Checkpoint::open(&path.unwrap()).unwrap()
    };
    let one = recut(1, "b", &from);
    assert!(one.verify().good());
    assert_ne!(one.meta().digest, from.meta().digest, "slices are part of the digest");
    assert_eq!(from.diff(&one, &mut |differs| panic!("{differs:?}")).unwrap(), 3 * state.tensors.len());
    let back = recut(2, "c", &one);
    assert_eq!(back.meta().digest, from.meta().digest);
}

#[test]
fn a_difference_is_counted_measured_and_placed() {
    let mut state = State::new(2, 8);
    state.slices.iter_mut().for_each(|(.., values)| values.iter_mut().for_each(|v| *v = (v.to_bits() % 97) as f32));
    let folder = tempfile::tempdir().unwrap();
    let a = Checkpoint::open(&state.save(&folder.path().join("a"), 3)).unwrap();
    let slice = state.slices.iter_mut().find(|(_, kind, slice, _)| *kind == Kind::Moment1 && *slice == 1).unwrap();
    let name = state.tensors[slice.0].name.clone();
    slice.3[5] += 0.5;
    slice.3[70] -= 2.0;
    let b = Checkpoint::open(&state.save(&folder.path().join("b"), 3)).unwrap();
    let mut found = Vec::new();
    a.diff(&b, &mut |differs| found.push(differs)).unwrap();
    assert_eq!((found.len(), &found[0].name, found[0].kind), (1, &name, Kind::Moment1));
    let Difference::Values { count: 2, max_abs: 2.0, first: (_, 5, x, y), .. } = found[0].difference else {
        panic!("{found:?}")
    };
    assert_eq!(y - x, 0.5);
}

#[test]
fn the_mean_is_taken_in_float64() {
    let folder = tempfile::tempdir().unwrap();
    let all: Vec<Checkpoint> = [1e8_f32, 1.0, -1e8]
        .iter()
        .enumerate()
        .map(|(i, value)| {
            let mut state = State::new(2, 8);
            state.slices.iter_mut().for_each(|(.., values)| values.fill(*value));
            Checkpoint::open(&state.save(&folder.path().join(i.to_string()), 1)).unwrap()
        })
        .collect();
    let name = all[0].tensors()[0].name.clone();
    let mean = mean(&all, &name).unwrap();
    // In float32 the 1 would be lost.
    assert_eq!(bits(&mean), vec![(1.0_f32 / 3.0).to_bits(); mean.len()]);
}
