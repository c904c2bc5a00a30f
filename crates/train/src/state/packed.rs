//! Weights that stay packed as right operands of products while they are what they are.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use kernels::{Ctx, Mat, Packed, Right};
use program::packed::{Form, Use};
use spec::tensors::{Cut, Role};

use super::{ChunkState, Held};

/// A stored matrix in the flat vector, and the form in which products use it.
type Key = (usize, usize, Form);

/// Panels by what they are of. Each knows the version of the bucket that it was made of ([`super::Flat::version`]): others
/// are not used.
#[derive(Debug, Default)]
pub struct PackedWeights {
    kept: BTreeMap<Key, (u64, Packed)>,
    /// Panels of weights that were released, by length.
    spare: HashMap<usize, Vec<Packed>>,
    /// A deliberate fault: what was packed once is never packed again.
    pub stale: bool,
}

impl PackedWeights {
    /// Lets go of what lies in `at`.
    pub(super) fn release(&mut self, at: &Range<usize>) {
        let Self { kept, spare, .. } = self;
        let gone: Vec<Key> = kept.keys().filter(|key| at.contains(&key.0)).copied().collect();
        for key in gone {
            if let Some((_, panels)) = kept.remove(&key) {
                spare.entry(key.1 - key.0).or_default().push(panels);
            }
        }
    }
}

/// The operand of a stored matrix.
fn operand(w: Mat<'_>, form: Form) -> Mat<'_> {
    match form {
        Form::Forward => w.t(),
        Form::Input => w,
    }
}

/// The stored matrices of a tensor that products use: of all hosted cells as one where their outputs stand side by side.
fn matrices(held: &Held, role: Role, form: Form) -> Vec<(Range<usize>, usize)> {
    let cells = held.slices.len();
    let cols = match held.tensor.cut {
        Cut::Cols => held.slice_len / held.tensor.rows,
        _ => held.tensor.cols,
    };
    let whole = form == Form::Forward && held.tensor.cut == Cut::Rows && role != Role::LmHead;
    if whole { vec![(held.at.clone(), cols)] } else { (0..cells).map(|i| (held.slice(i), cols)).collect() }
}

impl ChunkState {
    /// Packs the weights `uses`, unless they are.
    pub fn pack(&mut self, ctx: &Ctx, uses: impl Iterator<Item = Use>) {
        for (layer, role, form) in uses {
            let held = self.held(layer, if role == Role::LmHead { self.head_role() } else { role });
            for (at, cols) in matrices(held, role, form) {
                let version = self.params.version(&at);
                let key = (at.start, at.end, form);
                let PackedWeights { kept, spare, stale } = &mut self.packed;
                let (made_of, panels) = kept.entry(key).or_insert_with(|| {
                    let again = spare.get_mut(&at.len()).and_then(Vec::pop);
                    (0, again.unwrap_or_default())
                });
                if *made_of == version || (*stale && *made_of > 0) {
                    continue;
                }
                let w = Mat::new(&self.params[at.clone()], at.len() / cols, cols);
                panels.pack(ctx, operand(w, form));
                *made_of = version;
            }
        }
    }

    /// The matrix at `at`, stored with `cols` columns, as a right operand: packed where it was kept.
    pub fn right(&self, at: Range<usize>, cols: usize, form: Form) -> Right<'_> {
        if let Some((made_of, panels)) = self.packed.kept.get(&(at.start, at.end, form))
            && (*made_of == self.params.version(&at) || self.packed.stale)
        {
            return panels.into();
        }
        operand(Mat::new(&self.params[at.clone()], at.len() / cols, cols), form).into()
    }

    /// [`ChunkState::right`] of all hosted cells of a tensor, whose outputs stand side by side.
    pub fn right_whole(&self, layer: usize, role: Role, form: Form) -> Right<'_> {
        let held = self.held(layer, role);
        self.right(held.at.clone(), held.tensor.cols, form)
    }

    /// [`ChunkState::right`] of hosted slice number `i` of a tensor, stored with `cols` columns.
    pub fn right_slice(&self, (layer, role): (usize, Role), i: usize, cols: usize, form: Form) -> Right<'_> {
        self.right(self.held(layer, role).slice(i), cols, form)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::Place;
    use spec::Run;

    fn state(sets: &[&str]) -> ChunkState {
        let text = "[model]\npreset = \"tiny\"\n[data]\nsource = \"synthetic\"\n[train]\nsteps = 1\nbatch = 8\nseq = 32\n[grid]\ndp = 4\ntp = 2\n";
        let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
        let run = Run::parse(text, "test", &sets, 1).unwrap();
        let place = Place::new(&run.model, &run.grid, &run.layout, run.train.seq, 0);
        ChunkState::new(&run, &place, 0)
    }

    fn is_packed(right: Right) -> bool {
        matches!(right, Right::Packed(_))
    }

    /// Whoever writes to a bucket, whatever for: what was packed of it is not used any more, and packed again.
    #[test]
    fn panels_are_those_of_the_weights_as_they_are() {
        let (ctx, of) = (Ctx::new(kernels::Simd::detect(), 1), (0, Role::Gate, Form::Forward));
        let mut state = state(&[]);
        assert!(!is_packed(state.right_whole(0, Role::Gate, Form::Forward)), "nothing is packed yet");
        state.pack(&ctx, [of, (0, Role::Gate, Form::Input), (0, Role::LmHead, Form::Forward)].into_iter());
        assert!(is_packed(state.right_whole(0, Role::Gate, Form::Forward)));
        let held = state.held(0, Role::Gate).clone();
        assert!((0..held.slices.len()).all(|i| is_packed(state.right(held.slice(i), held.tensor.cols, Form::Input))));
        let head = state.held(0, state.head_role()).clone();
        assert!(is_packed(state.right(head.slice(0), head.tensor.cols, Form::Forward)));

        state.params[held.at.start..held.at.start + 1][0] = 3.0;
        assert!(!is_packed(state.right_whole(0, Role::Gate, Form::Forward)), "the weight has changed");
        assert!(is_packed(state.right(head.slice(0), head.tensor.cols, Form::Forward)), "another bucket");
        state.pack(&ctx, [of].into_iter());
        let x = vec![1.0; held.tensor.cols];
        let product = |right: Right| {
            let mut y = vec![0.0; right.shape().1];
            let width = y.len();
            kernels::product(
                &ctx,
                Mat::new(&x, 1, x.len()),
                right,
                kernels::MatMut::new(&mut y, 1, width),
                kernels::Acc::Store,
            );
            y
        };
        let plain = Mat::new(&state.params[held.at.clone()], held.at.len() / x.len(), x.len());
        assert!(is_packed(state.right_whole(0, Role::Gate, Form::Forward)));
        assert_eq!(product(state.right_whole(0, Role::Gate, Form::Forward)), product(plain.t().into()));
    }

    /// Released panels go with their weights, and their memory is used again.
    #[test]
    fn released_panels_are_gone() {
        let ctx = Ctx::new(kernels::Simd::detect(), 1);
        let mut state = state(&["layout.dp=2", "layout.zero=3", "grid.accumulate=reduced"]);
        let bucket = state.find(program::Bucket::Layer(0)).unwrap();
        let len = state.buckets[bucket].plan.at.len();
        let gather = |state: &mut ChunkState| {
            state.gathered.add(len);
            state.put_gathered(bucket, vec![1.0; len]);
            state.pack(&ctx, [(0, Role::Down, Form::Forward)].into_iter());
        };
        gather(&mut state);
        let panels = state.packed.kept.len();
        state.release(bucket);
        assert!(state.packed.kept.is_empty() && state.packed.spare.values().map(Vec::len).sum::<usize>() == panels);
        gather(&mut state);
        assert!(state.packed.kept.len() == panels && state.packed.spare.values().all(Vec::is_empty));
    }
}
