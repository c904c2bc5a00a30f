//! A failing case made small: keys are left out as long as it fails.

use std::time::{Duration, Instant};

use super::draw::Drawn;
use super::layouts::Asked;
use super::{Search, Verdict};

/// For one case.
const TIME: Duration = Duration::from_secs(60);

impl Search {
    /// The smallest run file and layout found in a minute that still fail.
    pub(super) fn shrink(&mut self, drawn: &Drawn, asked: &Asked) -> (Drawn, Asked) {
        let until = Instant::now() + TIME;
        let (mut drawn, mut asked) = (drawn.clone(), asked.clone());
        if asked.simd.is_some() {
            let plain = Asked { simd: None, ..asked.clone() };
            if self.fails(&drawn, &plain) {
                asked = plain;
            }
        }
        let mut at = 0;
        while at < asked.sets.len() && Instant::now() < until {
            let mut less = asked.clone();
            let lost = less.sets.remove(at);
            // All ranks stay threads of this process.
            if !lost.starts_with("layout.transport") && self.fails(&drawn, &less) {
                asked = less;
            } else {
                at += 1;
            }
        }
        let mut at = 0;
        while at < drawn.0.len() && Instant::now() < until {
            let less = drawn.without(at);
            if self.fails(&less, &asked) {
                drawn = less;
            } else {
                at += 1;
            }
        }
        (drawn, asked)
    }

    fn fails(&mut self, drawn: &Drawn, asked: &Asked) -> bool {
        let Ok((_, reference)) = self.reference(drawn) else { return false };
        matches!(self.judge(drawn, "", &reference, asked), Verdict::Fault(_))
    }
}
