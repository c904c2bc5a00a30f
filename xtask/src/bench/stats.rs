//! Medians, ratios, and when two losses are the same.

/// How far two losses on the same weights and tokens may lie apart, nats.
pub const LOSS_TOLERANCE: f64 = 1e-4;

/// The middle value, or the mean of the two middle ones; `None` of nothing or of a value that is no number.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    if sorted.is_empty() || sorted.iter().any(|v| v.is_nan()) {
        return None;
    }
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    Some(if sorted.len() % 2 == 1 { sorted[half] } else { (sorted[half - 1] + sorted[half]) / 2.0 })
}

/// The values between which the middle half lies, interpolated; `None` as for [`median`].
pub fn quartiles(values: &[f64]) -> Option<(f64, f64)> {
    let mut sorted = values.to_vec();
    if sorted.is_empty() || sorted.iter().any(|v| v.is_nan()) {
        return None;
    }
    sorted.sort_by(f64::total_cmp);
    let at = |part: f64| {
        let place = part * (sorted.len() - 1) as f64;
        let (below, rest) = (place as usize, place.fract());
        sorted[below] + rest * (sorted[(below + 1).min(sorted.len() - 1)] - sorted[below])
    };
    Some((at(0.25), at(0.75)))
}

/// Largest minus smallest over the median: how much the rounds differ.
pub fn spread(values: &[f64]) -> Option<f64> {
    let middle = median(values.iter().copied()).filter(|m| *m > 0.0)?;
    let (low, high) = values.iter().fold((f64::INFINITY, 0.0), |(l, h): (f64, f64), v| (l.min(*v), h.max(*v)));
    Some((high - low) / middle)
}

/// Ours over theirs; `None` where that says nothing.
pub fn ratio(ours: f64, peer: f64) -> Option<f64> {
    Some(ours / peer).filter(|r| r.is_finite() && peer > 0.0)
}

/// Whether the losses of both sides are those of the same model.
pub fn agree(ours: f64, peer: f64) -> Result<(), String> {
    let difference = (ours - peer).abs();
    // A difference that is no number is no agreement.
    if difference <= LOSS_TOLERANCE {
        return Ok(());
    }
    Err(format!("our loss is {ours:.6}, theirs {peer:.6}: they may differ by {LOSS_TOLERANCE:e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median([7.0]), Some(7.0));
        assert_eq!(median([]), None);
        assert_eq!(median([1.0, f64::NAN, 2.0]), None);
    }

    #[test]
    fn between_the_quartiles_lies_the_middle_half() {
        assert_eq!(quartiles(&[5.0, 1.0, 2.0, 4.0, 3.0]), Some((2.0, 4.0)));
        assert_eq!(quartiles(&[1.0, 2.0]), Some((1.25, 1.75)));
        assert_eq!(quartiles(&[7.0]), Some((7.0, 7.0)));
        assert_eq!((quartiles(&[]), quartiles(&[f64::NAN])), (None, None));
    }

    #[test]
    fn the_spread_is_relative_to_the_median() {
        assert_eq!(spread(&[8.0, 10.0, 11.0]), Some(0.3));
        assert_eq!(spread(&[5.0]), Some(0.0));
        assert_eq!(spread(&[]), None);
        assert_eq!(spread(&[0.0, 0.0]), None);
    }

    #[test]
    fn a_ratio_is_ours_over_theirs() {
        assert_eq!(ratio(3.0, 2.0), Some(1.5));
        assert_eq!(ratio(3.0, 0.0), None);
        assert_eq!(ratio(f64::NAN, 2.0), None);
    }

    #[test]
    fn losses_agree_within_the_tolerance_and_name_both_otherwise() {
        assert!(agree(5.577_670, 5.577_669).is_ok());
        assert!(agree(5.0, 5.0 + 0.9e-4).is_ok());
        let refusal = agree(5.0, 5.0002).unwrap_err();
        assert!(refusal.contains("5.000000") && refusal.contains("5.000200"), "{refusal}");
        assert!(agree(f64::NAN, 5.0).is_err() && agree(5.0, f64::INFINITY).is_err());
    }
}
