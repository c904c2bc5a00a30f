//! Write and verify throughput for 400 MB of state: `throughput [folder]`.

use std::path::{Path, PathBuf};
use std::time::Instant;

use checkpoint::{Checkpoint, DigestBuilder, Kind, Meta, PieceRef, chunk_hashes, commit, write_pieces};
use spec::tensors::{Cut, Home, Role, Tensor};

/// Bytes of state: 8 layers x 3 kinds x 4096 x 1024 values.
const LAYERS: usize = 8;
const ROWS: usize = 4096;
const COLS: usize = 1024;
/// The best of so many is shown.
const ROUNDS: usize = 5;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = std::env::args().nth(1).map_or_else(std::env::temp_dir, PathBuf::from).join("checkpoint-throughput");
    let tensors: Vec<Tensor> = (0..LAYERS)
        .map(|layer| Tensor {
            name: format!("model.layers.{layer}.mlp.up_proj.weight"),
            role: Role::Up,
            home: Home::Layer(layer),
            rows: ROWS,
            cols: COLS,
            real_rows: ROWS,
            cut: Cut::Rows,
            init_std: None,
        })
        .collect();
    let data: Vec<f32> = (0..ROWS * COLS).map(|i| (i as f32).sin()).collect();
    let bytes = (LAYERS * Kind::ALL.len() * data.len() * 4) as f64;
    println!("{:.0} MB in {}", bytes / 1e6, root.display());

    let mut pieces = Vec::new();
    for tensor in 0..LAYERS {
        pieces.extend(Kind::ALL.map(|kind| PieceRef { tensor, kind, slice: 0, elements: 0..data.len(), data: &data }));
    }
    let mut best: Vec<(&str, f64)> = Vec::new();
    for _ in 0..ROUNDS {
        for (i, (what, seconds)) in round(&root, &tensors, &pieces)?.into_iter().enumerate() {
            match best.get_mut(i) {
                Some(known) => known.1 = known.1.min(seconds),
                None => best.push((what, seconds)),
            }
        }
    }
    for (what, seconds) in best {
        println!("{what:<12} {:>6.0} ms {:>8.2} GB/s", seconds * 1e3, bytes / 1e9 / seconds);
    }
    std::fs::remove_dir(&root)?;
    Ok(())
}

/// Seconds of each part of one round.
fn round(
    root: &Path,
    tensors: &[Tensor],
    pieces: &[PieceRef<'_>],
) -> Result<Vec<(&'static str, f64)>, Box<dyn std::error::Error>> {
    let mut times = Vec::new();
    let mut start = Instant::now();
    let mut lap = |what| {
        times.push((what, start.elapsed().as_secs_f64()));
        start = Instant::now();
    };
    let mut builder = DigestBuilder::new(tensors, 1, 1);
    for piece in pieces {
        builder.put(piece.tensor, piece.kind, 0, 0, &chunk_hashes(piece.data))?;
    }
    let digest = Some(builder.finish(0)?.to_string());
    lap("digest");
    let files = write_pieces(root, 1, tensors, 1, pieces)?;
    lap("write, sync");
    let definition = "throughput".into();
    let meta = Meta {
        validations: None,
        step: 1,
        cursor: 0,
        definition,
        numerics_version: 1,
        tp: 1,
        digest,
        taken_unix_ms: None,
        checked: None,
        unseen: None,
    };
    let folder = commit(root, tensors, &meta, files)?;
    lap("commit");
    let checkpoint = Checkpoint::open(&folder)?;
    lap("open");
    let mut out = vec![0.0; ROWS * COLS];
    for piece in pieces {
        checkpoint.read(piece.tensor, piece.kind, 0, piece.elements.clone(), &mut out)?;
    }
    lap("read");
    assert!(checkpoint.verify().good());
    lap("verify");
    checkpoint::discard(root, 1)?;
    Ok(times)
}
