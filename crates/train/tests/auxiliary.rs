//! The auxiliary loss of experts, as transformers adds it to the loss of a model whose `config.json` has
//! `output_router_logits`: golden values of `bench/peer/aux_golden.py`, which makes the same weights.

use std::path::Path;

use checkpoint::hf::HfFolder;
use kernels::Simd;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use spec::Run;
use spec::hf::HfConfig;
use spec::tensors::tensors;
use train::eval::{self, Batch, Evaluation};

const GOLDEN: &str = include_str!("data/auxiliary.json");
/// float32 beside float64: relative to the largest entry of a tensor.
const RELATIVE: f64 = 2e-5;
const LOSS: f64 = 2e-6;

/// Numbers of a tensor's name and an element's place, as the script makes them.
fn weights(name: &str, count: usize) -> Vec<f32> {
    let seed = name.bytes().fold(0u32, |seed, byte| seed.wrapping_mul(131).wrapping_add(u32::from(byte)));
    let norm = name.contains("norm");
    let scale = match () {
        () if norm => 18,
        () if name.ends_with("gate.weight") => 15,
        () => 16,
    };
    let number = |at: usize| {
        let bits = seed.wrapping_add((at as u32).wrapping_mul(2_654_435_761)).wrapping_mul(2_246_822_519) >> 16;
        (if norm { 1.0 } else { 0.0 }) + (bits as f32 - 32768.0) / (1u32 << scale) as f32
    };
    (0..count).map(number).collect()
}

/// A folder with the model of a case.
fn write(folder: &Path, config: &Value) -> HfConfig {
    let path = folder.join("config.json");
    std::fs::write(&path, config.to_string()).unwrap();
    let config = HfConfig::read(&path).unwrap();
    let all: Vec<(String, Vec<usize>, Vec<u8>)> = tensors(&config.model)
        .into_iter()
        .map(|t| {
            let values = weights(&t.name, t.real_rows * t.cols);
            let shape = if t.rows == 1 { vec![t.cols] } else { vec![t.real_rows, t.cols] };
            (t.name, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
        })
        .collect();
    let views = all
        .iter()
        .map(|(name, shape, data)| (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), data).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    config
}

struct Case {
    folder: tempfile::TempDir,
    config: HfConfig,
    batch: Batch,
    golden: Value,
}

impl Case {
    fn all() -> Vec<(String, Self)> {
        let golden: Value = serde_json::from_str(GOLDEN).unwrap();
        let cases = golden["cases"].as_object().unwrap();
        let case = |(name, golden): (&String, &Value)| {
            let folder = tempfile::tempdir().unwrap();
            let config = write(folder.path(), &golden["config"]);
            let text = serde_json::json!({ "input_ids": golden["input_ids"] }).to_string();
            let batch = Batch::parse(&text, "batch", config.model.vocab).unwrap();
            (name.clone(), Self { folder, config, batch, golden: golden.clone() })
        };
        cases.iter().map(case).collect()
    }

    fn evaluate(&self, sets: &[&str], grads: bool) -> Evaluation {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let run = Run::for_batch(&self.config.model, self.batch.rows(), self.batch.seq(), &sets, 1).unwrap();
        let weights = HfFolder::open(self.folder.path(), &self.config.model).unwrap();
        eval::evaluate(&run, &weights, &self.batch, Simd::detect(), grads).unwrap()
    }
}

fn close(what: &str, got: f64, want: f64, allowed: f64) {
    assert!((got - want).abs() <= allowed, "{what}: {got} for {want}, {:e} of {allowed:e}", (got - want).abs());
}

#[test]
fn the_loss_and_its_gradients_are_those_of_transformers() {
    let layouts: [&[&str]; 4] =
        [&[], &["layout.dp=2"], &["grid.tp=2", "layout.tp=2", "layout.pp=2"], &["grid.cp=2", "layout.cp=2"]];
    for (name, case) in Case::all() {
        let number = |key: &str| case.golden[key].as_f64().unwrap();
        for sets in layouts {
            let got = case.evaluate(sets, true);
            let label = format!("{name} {sets:?}");
            let auxiliary = got.auxiliary.unwrap();
            close(&format!("{label} auxiliary"), auxiliary, number("aux_loss"), LOSS);
            close(&format!("{label} loss"), got.loss, number("loss"), LOSS);
            close(&format!("{label} parts"), got.cross_entropy + 0.1 * auxiliary, got.loss, 1e-12);
            // Far from the cross-entropy alone.
            assert!(got.loss - got.cross_entropy > 0.1, "{label}");
            for grad in &got.grads {
                let want: Vec<f64> =
                    serde_json::from_value(case.golden["gradients"][&grad.tensor.name].clone()).unwrap();
                let [norm, largest, first, second] = want[..] else { panic!("four numbers") };
                let squares = grad.values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
                let label = format!("{label} {}", grad.tensor.name);
                close(&format!("{label} norm"), squares.sqrt(), norm, RELATIVE * norm);
                close(&format!("{label} first"), grad.values[0].into(), first, RELATIVE * largest);
                close(&format!("{label} second"), grad.values[1].into(), second, RELATIVE * largest);
            }
        }
    }
}

#[test]
fn the_auxiliary_loss_has_the_same_bits_under_every_layout() {
    for (name, case) in Case::all() {
        let bits = |sets: &[&str]| case.evaluate(sets, false).auxiliary.unwrap().to_bits();
        let one = bits(&["grid.tp=2"]);
        for sets in [&["layout.dp=4"][..], &["layout.tp=2"], &["layout.pp=2"], &["layout.dp=2", "layout.tp=2"]] {
            assert_eq!(bits(&[&["grid.tp=2"], sets].concat()), one, "{name} {sets:?}");
        }
    }
}

#[test]
fn it_can_be_set_and_switched_off() {
    for (name, case) in Case::all() {
        let plain = case.evaluate(&["model.aux_loss=0.0"], true);
        assert_eq!((plain.auxiliary, plain.loss), (None, plain.cross_entropy), "{name}");
        let stronger = case.evaluate(&["model.aux_loss=0.2"], true);
        close(&name, stronger.loss - stronger.cross_entropy, 0.2 * stronger.auxiliary.unwrap(), 1e-12);
        assert!(stronger.grad_norm != plain.grad_norm, "{name}");
        let layer = case.evaluate(&["model.aux_loss=0.2", "model.aux_scope=layer"], false);
        assert!(layer.auxiliary != stronger.auxiliary, "{name}");
        // A scope of single sequences, where it is asked for.
        let single = case.evaluate(&["grid.dp=4"], false);
        assert!(single.auxiliary != case.evaluate(&[], false).auxiliary, "{name}");
    }
    let dense = spec::Model { moe: None, ..Case::all()[0].1.config.model.clone() };
    let refused = Run::for_batch(&dense, 4, 8, &["model.aux_loss=0.1".into()], 1).unwrap_err().to_string();
    assert!(refused.contains("only experts have an auxiliary loss"), "{refused}");
}
