//! Rejections by limit: how many candidates each rejected, and which of those it rejected by least.

/// What one limit rejected. `K` names the limit, `T` is a rejected candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tally<K, T> {
    /// The limit.
    pub limit: K,
    /// How many candidates it rejected.
    pub rejected: usize,
    /// Of these the one that exceeds it by least, the first among equals.
    pub nearest: T,
}

/// Counts `misses`, each with the limit that it breaks, by how much (in a unit that is the limit's own), and
/// the candidate itself. The limits come in the order in which they first appear.
pub fn tally<K: PartialEq, T>(misses: impl IntoIterator<Item = (K, f64, T)>) -> Vec<Tally<K, T>> {
    let mut limits: Vec<(Tally<K, T>, f64)> = Vec::new();
    for (limit, excess, miss) in misses {
        match limits.iter_mut().find(|(known, _)| known.limit == limit) {
            Some((known, least)) => {
                known.rejected += 1;
                if excess < *least {
                    (known.nearest, *least) = (miss, excess);
                }
            }
            None => limits.push((Tally { limit, rejected: 1, nearest: miss }, excess)),
        }
    }
    limits.into_iter().map(|(limit, _)| limit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_keep_their_order_and_the_first_of_the_nearest() {
        let misses = [
            ("smem", 2.0, 'a'),
            ("regs", 0.5, 'b'),
            ("smem", 1.0, 'c'),
            ("smem", 1.0, 'd'),
            ("regs", 0.75, 'e'),
        ];
        let found = tally(misses);
        let expected = [
            Tally { limit: "smem", rejected: 3, nearest: 'c' },
            Tally { limit: "regs", rejected: 2, nearest: 'b' },
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn rules_that_are_no_numbers_keep_their_first_candidate() {
        let found = tally([("rule", f64::INFINITY, 1), ("rule", f64::INFINITY, 2)]);
        assert_eq!(found, [Tally { limit: "rule", rejected: 2, nearest: 1 }]);
        assert!(tally::<&str, u32>([]).is_empty());
    }
}
