//! Against an independent implementation: logits, loss, gradients and three optimizer steps of tiny Hugging Face
//! models, also split over ranks. Tolerance: ten times the error that the reference's own float32 run has.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use checkpoint::hf::HfFolder;
use kernels::Simd;
use program::Mode;
use safetensors::SafeTensors;
use spec::Run;
use spec::hf::HfConfig;
use train::eval::{self, Batch, Whole};
use train::exec::Outcome;

/// The natural float32 errors that a case states.
struct Natural {
    case: &'static str,
    logits: f64,
    loss: f64,
    /// Relative to the largest entry of the tensor.
    grads: f64,
    /// Relative.
    norm: f64,
    /// 99.9 % of the parameters after three steps.
    parameters: f64,
    /// Its heads can be split in two.
    splits: bool,
}

impl Natural {
    /// The layouts that the case can have.
    fn layouts(&self, all: &[&[&'static str]]) -> Vec<Vec<&'static str>> {
        let fits = |sets: &&&[&str]| self.splits || !sets.contains(&"layout.tp=2");
        all.iter().filter(fits).map(|sets| sets.to_vec()).collect()
    }
}

const CASES: [Natural; 5] = [
    Natural {
        case: "llama_gqa",
        logits: 4.8e-6,
        loss: 7.5e-7,
        grads: 2.2e-6,
        norm: 1.0e-6,
        parameters: 2.0e-7,
        splits: true,
    },
    Natural {
        case: "llama_tied",
        logits: 1.9e-6,
        loss: 7.0e-7,
        grads: 3.5e-6,
        norm: 1.4e-5,
        parameters: 5.3e-7,
        splits: false,
    },
    Natural {
        case: "llama_packed",
        logits: 4.1e-6,
        loss: 8.0e-7,
        grads: 3.6e-6,
        norm: 1.5e-7,
        parameters: 2.0e-7,
        splits: true,
    },
    Natural {
        case: "mixtral",
        logits: 5.3e-6,
        loss: 4.6e-7,
        grads: 2.4e-6,
        norm: 2.6e-7,
        parameters: 1.4e-7,
        splits: true,
    },
    Natural {
        case: "mixtral_aux",
        logits: 5.3e-6,
        loss: 8.4e-7,
        grads: 2.3e-6,
        norm: 1.1e-6,
        parameters: 1.6e-7,
        splits: true,
    },
];
/// How many times the natural error is allowed.
const TIMES: f64 = 10.0;

const LAYOUTS: [&[&str]; 6] = [
    &[],
    &["grid.tp=2", "layout.tp=2"],
    &["layout.pp=2"],
    &["layout.dp=2"],
    &["grid.cp=2", "layout.cp=2"],
    &["grid.cp=4", "layout.cp=2", "layout.pp=2"],
];

fn folder(case: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/golden").join(case);
    if !path.exists() {
        println!("skipped: {} is not there", path.display());
        return None;
    }
    Some(path)
}

fn read(path: &Path) -> Vec<(String, Vec<f32>)> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let floats = |data: &[u8]| data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    file.tensors().into_iter().map(|(name, view)| (name, floats(view.data()))).collect()
}

fn largest_difference(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max)
}

/// Prints the share of the allowance that was used.
fn within(what: &str, error: f64, allowed: f64) {
    println!("{what}: {error:.2e} of {allowed:.2e} allowed ({:.0} %)", 100.0 * error / allowed);
    assert!(error <= allowed, "{what}: {error:e} > {allowed:e}");
}

struct Case {
    path: PathBuf,
    config: HfConfig,
    batch: Batch,
}

impl Case {
    fn open(name: &str) -> Option<Self> {
        let path = folder(name)?;
        let config = HfConfig::read(&path.join("config.json")).unwrap();
        let text = std::fs::read_to_string(path.join("batch.json")).unwrap();
        let batch = Batch::parse(&text, "batch.json", config.model.vocab).unwrap();
        Some(Self { path, config, batch })
    }

    fn run(&self, sets: &[&str]) -> Run {
        let sets: Vec<String> = sets.iter().map(|s| s.to_string()).collect();
        Run::for_batch(&self.config.model, self.batch.rows(), self.batch.seq(), &sets, 1).unwrap()
    }
}

#[test]
fn logits_loss_and_gradients() {
    for natural in CASES {
        let name = natural.case;
        let Some(case) = Case::open(name) else { return };
        let expected = read(&case.path.join("expected.safetensors"));
        let find = |key: &str| &expected.iter().find(|(n, _)| n == key).unwrap_or_else(|| panic!("{key}")).1;
        let weights = HfFolder::open(&case.path, &case.config.model).unwrap();
        for sets in natural.layouts(&LAYOUTS) {
            let run = case.run(&sets);
            let got = eval::evaluate(&run, &weights, &case.batch, Simd::detect(), true).unwrap();
            let label = format!("{name} {}", run.layout);
            within(&format!("{label} logits"), largest_difference(&got.logits, find("logits")), TIMES * natural.logits);
            // With an auxiliary loss there are three numbers.
            let losses = [("loss", Some(got.loss)), ("loss_ce", Some(got.cross_entropy)), ("loss_aux", got.auxiliary)];
            for (key, got) in losses {
                let want = expected.iter().find(|(n, _)| n == key).map(|(_, values)| f64::from(values[0]));
                if let (Some(want), Some(got)) = (want, got) {
                    within(&format!("{label} {key}"), (got - want).abs(), TIMES * natural.loss);
                }
            }
            let mut worst: f64 = 0.0;
            for grad in &got.grads {
                let want = find(&format!("grad.{}", grad.tensor.name));
                let scale = want.iter().fold(0f32, |m, v| m.max(v.abs()));
                worst = worst.max(largest_difference(&grad.values, want) / f64::from(scale));
            }
            within(&format!("{label} gradients"), worst, TIMES * natural.grads);
        }
    }
}

/// Trains `steps` on the case's batch; (losses, gradient norms, parameters).
fn adamw(case: &Case, sets: &[&str], steps: u64) -> (Vec<f64>, Vec<f64>, Vec<Whole>) {
    let optimizer =
        ["train.steps=3", "train.lr=1e-3", "train.schedule=constant", "train.weight_decay=0.1", "train.eps=1e-8"];
    let run = case.run(&[&optimizer[..], sets].concat());
    let weights = HfFolder::open(&case.path, &case.config.model).unwrap();
    let all = Mutex::new(eval::whole_tensors(&run.model));
    let curves = eval::on_ranks(&run, &weights, Simd::detect(), |executor| {
        let program = program::lower(&run, executor.place.rank, Mode::Train);
        let mut curve = (Vec::new(), Vec::new());
        for step in 1..=steps {
            let load = |unit| Ok(case.batch.tokens(run.grid.sequences(unit)));
            let Outcome::Step(decision) = executor.run(&program, Mode::Train, step, &load)? else { panic!("a step") };
            let aux = run.model.moe.as_ref().map_or(0.0, |moe| moe.aux_loss * decision.aux);
            curve.0.push(decision.loss + aux);
            curve.1.push(decision.grad_norm);
        }
        eval::put_state(executor, &mut all.lock().unwrap(), eval::Of::Parameters);
        Ok(curve)
    });
    let (losses, norms) = curves.unwrap().swap_remove(0);
    (losses, norms, all.into_inner().unwrap())
}

#[test]
fn three_adamw_steps() {
    for natural in CASES {
        let name = natural.case;
        let Some(case) = Case::open(name) else { return };
        let facts: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(case.path.join("adamw.json")).unwrap()).unwrap();
        let expected = read(&case.path.join("after3.safetensors"));
        let layouts = [
            &[][..],
            &["grid.tp=2", "layout.tp=2"],
            &["layout.pp=2"],
            &["layout.dp=2", "layout.zero=1"],
            &["grid.cp=2", "layout.cp=2", "layout.zero=1"],
        ];
        for sets in natural.layouts(&layouts) {
            let (losses, norms, parameters) = adamw(&case, &sets, 3);
            for (i, step) in facts["steps_float64"].as_array().unwrap().iter().enumerate() {
                let (loss, norm) = (step["loss"].as_f64().unwrap(), step["grad_norm"].as_f64().unwrap());
                within(
                    &format!("{name} {sets:?} loss of step {}", i + 1),
                    (losses[i] - loss).abs(),
                    TIMES * natural.loss,
                );
                within(
                    &format!("{name} {sets:?} norm of step {}", i + 1),
                    (norms[i] - norm).abs() / norm,
                    TIMES * natural.norm,
                );
            }
            let mut errors = Vec::new();
            for whole in &parameters {
                let want = &expected.iter().find(|(n, _)| *n == whole.tensor.name).unwrap().1;
                errors.extend(whole.values.iter().zip(want).map(|(a, b)| f64::from((a - b).abs())));
            }
            errors.sort_by(f64::total_cmp);
            let quantile = errors[errors.len() * 999 / 1000];
            within(&format!("{name} {sets:?} parameters (99.9 %)"), quantile, TIMES * natural.parameters);
            let far = errors.iter().filter(|e| **e > 1e-6).count();
            assert!(far * 500 < errors.len(), "{far} of {} parameters are off by more than 1e-6", errors.len());
        }
    }
}
