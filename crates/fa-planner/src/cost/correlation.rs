//! How well predictions rank what is measured.

/// Spearman's rank correlation; ties share the mean of their ranks. `None` below three pairs or where all are
/// equal.
pub fn rank_correlation(pairs: &[(f64, f64)]) -> Option<f64> {
    if pairs.len() < 3 {
        return None;
    }
    let ranks = |values: Vec<f64>| -> Vec<f64> {
        let below = |x: f64| values.iter().filter(|y| **y < x).count() as f64;
        let equal = |x: f64| values.iter().filter(|y| **y == x).count() as f64;
        values.iter().map(|&x| below(x) + (equal(x) - 1.0) / 2.0).collect()
    };
    let a = ranks(pairs.iter().map(|pair| pair.0).collect());
    let b = ranks(pairs.iter().map(|pair| pair.1).collect());
    let mean = (pairs.len() - 1) as f64 / 2.0;
    let product = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| (x - mean) * (y - mean)).sum::<f64>();
    let norm = (product(&a, &a) * product(&b, &b)).sqrt();
    (norm > 0.0).then(|| product(&a, &b) / norm)
}

#[cfg(test)]
mod tests {
    use super::rank_correlation;

    #[test]
    fn rank_correlation_is_one_for_any_rising_curve() {
        let rising: Vec<(f64, f64)> = (0..10).map(|i| (f64::from(i), f64::from(i * i))).collect();
        assert_eq!(rank_correlation(&rising), Some(1.0));
        let falling: Vec<(f64, f64)> = rising.iter().map(|&(a, b)| (a, -b)).collect();
        assert_eq!(rank_correlation(&falling), Some(-1.0));
        assert_eq!(rank_correlation(&[(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]), None);
        // Hand-computed with ties: ranks (0, 1.5, 1.5, 3) and (0, 1, 2, 3).
        let tied = rank_correlation(&[(1.0, 1.0), (2.0, 2.0), (2.0, 3.0), (3.0, 4.0)]).unwrap();
        assert!((tied - 4.5 / (4.5f64 * 5.0).sqrt()).abs() < 1e-12);
    }
}
