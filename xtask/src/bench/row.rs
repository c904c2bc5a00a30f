//! One row of the bench: samples of both sides, and what they come to.

use super::ours::Sample;
use super::stats::{agree, median, ratio, spread};

/// All samples of a shape and mode.
#[derive(Debug, Default)]
pub struct Row {
    /// The shape.
    pub shape: &'static str,
    /// The mode.
    pub mode: &'static str,
    /// Our rounds.
    pub ours: Vec<Sample>,
    /// Our rounds on one rank with one thread, each after the one of `ours` at its place.
    pub one: Vec<Sample>,
    /// Our loss on the peer's weights and tokens.
    pub loss: Option<f64>,
    /// What the peer ran.
    pub peers: Vec<PeerRows>,
    /// Why the sides must not be compared.
    pub refused: Option<String>,
    /// What failed.
    pub notes: Vec<String>,
}

/// The rounds of one variant of the peer.
#[derive(Debug, Default)]
pub struct PeerRows {
    /// The variant.
    pub variant: &'static str,
    /// Its loss on the weights and tokens, before any update.
    pub loss: f64,
    /// Its rounds.
    pub samples: Vec<Sample>,
}

/// One number of a row beside the peer's.
#[derive(Debug, Clone, PartialEq)]
pub struct Measurement {
    /// Its name.
    pub metric: String,
    /// Its unit.
    pub unit: &'static str,
    /// Ours.
    pub value: Option<f64>,
    /// Theirs.
    pub peer: Option<f64>,
    /// Ours over theirs.
    pub ratio: Option<f64>,
}

type Field = fn(&Sample) -> f64;
const TOKENS: Field = |sample| sample.tokens_per_s;
const PEAK: Field = |sample| sample.peak_bytes;

fn middle(samples: &[Sample], field: Field) -> Option<f64> {
    median(samples.iter().map(field))
}

impl Row {
    /// Takes in a round of the peer's `variant`; a loss that is not ours refuses the row.
    pub fn add(&mut self, variant: &'static str, loss: f64, sample: Sample) {
        if let Err(refusal) = self.loss.ok_or("our loss is unknown".to_owned()).and_then(|ours| agree(ours, loss)) {
            self.refused = Some(format!("{variant}: {refusal}"));
            return;
        }
        match self.peers.iter_mut().find(|p| p.variant == variant) {
            Some(peer) => peer.samples.push(sample),
            None => self.peers.push(PeerRows { variant, loss, samples: vec![sample] }),
        }
    }

    /// The peer's fastest variant with its tokens per second; none in a refused row.
    pub fn best(&self) -> Option<(&PeerRows, f64)> {
        if self.refused.is_some() {
            return None;
        }
        let rates = self.peers.iter().filter_map(|peer| Some((peer, middle(&peer.samples, TOKENS)?)));
        rates.max_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// The peer's smallest peak memory over its variants.
    fn least_memory(&self) -> Option<f64> {
        self.best()?;
        self.peers.iter().filter_map(|peer| middle(&peer.samples, PEAK)).min_by(f64::total_cmp)
    }

    /// Everything measured. `import_bytes` is what the peer's process holds before it does anything.
    pub fn measurements(&self, import_bytes: Option<u64>) -> Vec<Measurement> {
        let ours = |field: Field| middle(&self.ours, field);
        let measured = |metric: &str, unit, value: Option<f64>, peer: Option<f64>| {
            let compared = value.zip(peer).and_then(|(value, peer)| ratio(value, peer));
            Measurement { metric: metric.into(), unit, value, peer, ratio: compared }
        };
        let best = self.best();
        let (rate, mfu) = (ours(TOKENS), ours(|sample| sample.mfu));
        let best_rate = best.map(|(_, rate)| rate);
        // The same FLOPs a token over the same peak.
        let peer_mfu = mfu.zip(rate).zip(best_rate).map(|((mfu, rate), peer)| mfu * peer / rate);
        let memory = self.least_memory();
        let over_import = memory.zip(import_bytes).map(|(bytes, import)| bytes - import as f64);
        let mut all = vec![
            measured("tokens_per_s", "tokens/s", rate, best_rate),
            measured("mfu", "of peak", mfu, peer_mfu),
            measured("peak_bytes", "bytes", ours(PEAK), memory),
            measured("peak_bytes_over_import", "bytes", ours(PEAK), over_import),
            measured("loss", "nats", self.loss, best.map(|(peer, _)| peer.loss)),
            measured("compute_share", "of step", ours(|sample| sample.compute), None),
            measured("exchange_share", "of step", ours(|sample| sample.exchange), None),
            measured("max_over_mean", "of mean", ours(|sample| sample.load), None),
            measured("times_one_rank", "times", self.times_one_rank(), None),
            measured("spread", "of median", self.spread(), best.and_then(|(peer, _)| rates_spread(&peer.samples))),
        ];
        if best.is_some() {
            all.extend(self.peers.iter().map(|peer| {
                let theirs = middle(&peer.samples, TOKENS);
                measured(&format!("tokens_per_s.{}", peer.variant), "tokens/s", rate, theirs)
            }));
        }
        all
    }

    /// How many times as fast as one rank with one thread: the median over pairs of rounds.
    fn times_one_rank(&self) -> Option<f64> {
        median(self.ours.iter().zip(&self.one).map(|(ours, one)| ours.tokens_per_s / one.tokens_per_s))
    }

    /// How much our rounds differ.
    pub fn spread(&self) -> Option<f64> {
        rates_spread(&self.ours)
    }
}

fn rates_spread(samples: &[Sample]) -> Option<f64> {
    spread(&samples.iter().map(TOKENS).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(tokens_per_s: f64, peak_bytes: f64) -> Sample {
        Sample { tokens_per_s, peak_bytes, mfu: tokens_per_s / 1000.0, compute: 0.9, exchange: 0.1, load: f64::NAN }
    }

    fn row() -> Row {
        Row { ours: vec![at(90.0, 10.0), at(120.0, 12.0), at(100.0, 11.0)], loss: Some(5.0), ..Row::default() }
    }

    fn find<'a>(all: &'a [Measurement], metric: &str) -> &'a Measurement {
        all.iter().find(|m| m.metric == metric).unwrap()
    }

    #[test]
    fn the_best_variant_is_compared() {
        let mut row = row();
        for (eager, compiled) in [(40.0, 70.0), (50.0, 90.0), (60.0, 80.0)] {
            row.add("eager", 5.00001, at(eager, 50.0));
            row.add("compiled", 5.00002, at(compiled, 44.0 + 20.0));
        }
        assert_eq!(row.best().map(|(peer, rate)| (peer.variant, rate)), Some(("compiled", 80.0)));
        let all = row.measurements(Some(30));
        let rate = find(&all, "tokens_per_s");
        assert_eq!((rate.value, rate.peer, rate.ratio), (Some(100.0), Some(80.0), Some(1.25)));
        assert_eq!(find(&all, "mfu").ratio, Some(1.25));
        assert_eq!(find(&all, "peak_bytes").peer, Some(50.0), "the smallest of the variants");
        assert_eq!(find(&all, "peak_bytes_over_import").peer, Some(20.0));
        assert_eq!(find(&all, "tokens_per_s.eager").ratio, Some(2.0));
        assert_eq!(find(&all, "spread").value, Some(0.3));
        assert_eq!(find(&all, "compute_share").value, Some(0.9));
    }

    #[test]
    fn another_loss_refuses_the_row() {
        let mut row = row();
        row.add("eager", 5.0, at(50.0, 50.0));
        row.add("compiled", 5.001, at(90.0, 50.0));
        assert!(row.refused.as_ref().is_some_and(|r| r.starts_with("compiled")), "{:?}", row.refused);
        let all = row.measurements(Some(30));
        assert!(all.iter().all(|m| m.ratio.is_none() && m.peer.is_none()), "{all:?}");
        assert_eq!(find(&all, "tokens_per_s").value, Some(100.0), "ours is still printed");
    }

    #[test]
    fn one_rank_is_compared_round_by_round() {
        let one = vec![at(50.0, 10.0), at(60.0, 10.0), at(40.0, 10.0)];
        let all = Row { one, ..row() }.measurements(None);
        assert_eq!(find(&all, "times_one_rank").value, Some(2.0), "of 1.8, 2 and 2.5");
        assert_eq!(find(&row().measurements(None), "times_one_rank").value, None);
    }

    #[test]
    fn a_row_without_our_loss_is_refused() {
        let mut row = Row { loss: None, ..row() };
        row.add("eager", 5.0, at(50.0, 50.0));
        assert!(row.refused.is_some());
    }

    #[test]
    fn a_row_without_a_peer_has_our_side() {
        let all = row().measurements(None);
        assert_eq!(find(&all, "peak_bytes").value, Some(11.0));
        assert!(all.iter().all(|m| m.ratio.is_none()));
    }
}
