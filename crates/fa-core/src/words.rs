//! Words of messages.

/// A count with its noun: `1 thread`, `2 threads`.
pub fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    #[test]
    fn one_has_no_plural() {
        assert_eq!([0, 1, 2].map(|n| super::counted(n, "page")), ["0 pages", "1 page", "2 pages"]);
    }
}
