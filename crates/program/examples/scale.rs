//! How long lowering and checking take at the size of a large run.
//!
//! `cargo run --release -p lockstep-program --example scale -- [ranks]` (a multiple of 128)

use std::time::Instant;

use program::{Mode, check, lower_all_parts};
use spec::layout::LayoutRequest;
use spec::{Grid, Layout, Model, Pin, Recompute, Schedule, Transport};

fn main() {
    let ranks: usize = std::env::args().nth(1).map_or(512, |n| n.parse().expect("a number of ranks"));
    // The shape of Llama 3 405B (arXiv 2407.21783, table 3) on tp 8 x pp 16.
    let model = Model {
        hidden: 16_384,
        layers: 126,
        heads: 128,
        kv_heads: 8,
        head_dim: 128,
        ffn: 53_248,
        vocab: 128_256,
        rope_theta: 500_000.0,
        norm_eps: 1e-5,
        qk_norm: false,
        tied: false,
        init_std: 0.02,
        moe: None,
    };
    let (dp, seq) = (ranks / 128, 8192);
    let grid = Grid::new(&model, 16 * dp, seq, 1, Some(dp), 8).expect("a valid grid");
    for (schedule, vpp) in [(Schedule::OneFOneB, None), (Schedule::Interleaved, Some(7))] {
        let request = LayoutRequest {
            dp,
            cp: 1,
            ep: None,
            tp: 8,
            pp: 16,
            vpp,
            schedule,
            orders: None,
            recompute: Recompute::None,
            recompute_layers: None,
            zero: 1,
            shard: None,
            reshard: spec::Reshard::Always,
            mirror: None,
            offload: spec::Offload::None,
            offload_folder: None,
            keep_packed: false,
            tp_overlap: true,
            tp_pairs: false,
            threads: None,
            transport: Transport::Tcp,
            pin: Pin::Off,
            cells: None,
            stages: None,
            exchange_timeout_ms: 30_000,
            ranks_per_host: None,
        };
        let layout = Layout::resolve(&request, &grid, &model, 1).expect("a valid layout");
        let start = Instant::now();
        let programs = lower_all_parts(&model, &grid, &layout, seq, Mode::Train);
        let lowered = start.elapsed();
        let report = check(&programs, &model, &grid, &layout, seq, Mode::Train).expect("sound lists");
        let checked = start.elapsed() - lowered;
        let instructions: usize = programs.iter().map(|p| p.instrs.len()).sum();
        println!(
            "{} ranks, {layout}: {instructions} instructions, lower {lowered:.3?}, check {checked:.3?}, {:.1}% idle",
            layout.world(),
            100.0 * report.bubble
        );
    }
}
