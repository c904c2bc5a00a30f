//! How evenly a step's rows went to the experts. Pure.

use events::ExpertLoad;

/// From the rows of each expert, by layer; none without experts. `copies`: rows sent to ranks with their experts, of
/// `rows` tokens in every layer.
pub fn expert_load(loads: &[Vec<u64>], copies: u64, rows: u64, aux_loss: Option<f64>) -> Option<ExpertLoad> {
    let over_mean = |counts: &Vec<u64>| {
        let (max, sum) = (counts.iter().max().copied().unwrap_or(0), counts.iter().sum::<u64>());
        max as f64 * counts.len() as f64 / sum.max(1) as f64
    };
    let worst = loads.iter().map(over_mean).reduce(f64::max)?;
    let mean = loads.iter().map(over_mean).sum::<f64>() / loads.len() as f64;
    let copies_per_token = copies as f64 / (rows * loads.len() as u64).max(1) as f64;
    Some(ExpertLoad { max_over_mean: worst, max_vio: mean - 1.0, copies_per_token, aux_loss })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn balance_is_one_and_no_violation() {
        let even = expert_load(&[vec![3, 3, 3], vec![3, 3, 3]], 0, 0, None).unwrap();
        assert_eq!((even.max_over_mean, even.max_vio, even.copies_per_token), (1.0, 0.0, 0.0));
        let one = expert_load(&[vec![9, 0, 0], vec![3, 3, 3]], 9, 6, None).unwrap();
        assert_eq!((one.max_over_mean, one.max_vio, one.copies_per_token), (3.0, 1.0, 0.75));
        assert_eq!(expert_load(&[], 0, 8, None), None);
    }
}
