//! Write and verify throughput for 400 MB of state: `throughput [folder]`.

use std::path::PathBuf;
use std::time::Instant;

use checkpoint::{Checkpoint, DigestBuilder, Kind, Meta, PieceRef, chunk_hashes, commit, write_pieces};
use spec::tensors::{Cut, Home, Role, Tensor};

/// Bytes of state: 8 layers x 3 kinds x 4096 x 1024 values.
const LAYERS: usize = 8;
const ROWS: usize = 4096;
const COLS: usize = 1024;

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
    let report = |what: &str, start: Instant| {
        let seconds = start.elapsed().as_secs_f64();
        println!("{what:<24} {:>6.0} ms {:>8.2} GB/s", seconds * 1e3, bytes / 1e9 / seconds);
    };
    println!("{:.0} MB in {}", bytes / 1e6, root.display());

    let mut pieces = Vec::new();
    for tensor in 0..LAYERS {
        pieces.extend(Kind::ALL.map(|kind| PieceRef { tensor, kind, slice: 0, elements: 0..data.len(), data: &data }));
    }
    let start = Instant::now();
    let mut builder = DigestBuilder::new(&tensors, 1, 1);
    for piece in &pieces {
        builder.put(piece.tensor, piece.kind, 0, 0, &chunk_hashes(piece.data))?;
    }
    let digest = builder.finish(0)?;
    report("digest", start);

    let start = Instant::now();
    let files = write_pieces(&root, 1, &tensors, 1, &pieces)?;
    report("write, sync", start);
    let definition = "throughput".into();
    let (cursor, digest) = (0, Some(digest.to_string()));
    let meta = Meta { step: 1, cursor, definition, numerics_version: 1, tp: 1, digest, taken_unix_ms: None };
    let start = Instant::now();
    let folder = commit(&root, &tensors, &meta, files)?;
    report("commit", start);

    let start = Instant::now();
    let checkpoint = Checkpoint::open(&folder)?;
    report("open", start);
    let start = Instant::now();
    let mut out = vec![0.0; data.len()];
    for piece in &pieces {
        checkpoint.read(piece.tensor, piece.kind, 0, piece.elements.clone(), &mut out)?;
    }
    report("read", start);
    let start = Instant::now();
    assert!(checkpoint.verify().good());
    report("verify", start);
    checkpoint::discard(&root, 1)?;
    std::fs::remove_dir(&root)?;
    Ok(())
}
