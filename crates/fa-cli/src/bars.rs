//! A chart of horizontal bars in groups: what a step or a switch does to a rate.

use crate::svg::{Anchor, MUTED, RULE, SERIES, Svg};

/// Bars that belong together.
#[derive(Clone, Debug)]
pub struct Group {
    /// Left of the bars.
    pub label: String,
    /// One per series; none where a series has no value here.
    pub values: Vec<Option<f64>>,
    /// Shown when a pointer rests on the bars.
    pub tip: String,
}

const LABEL_WIDTH: f64 = 230.0;
const BAR_WIDTH: f64 = 420.0;
const RIGHT: f64 = 150.0;
const BAR: f64 = 14.0;
const GAP: f64 = 10.0;

/// Draws groups of bars from zero, with a line at 1: values are ratios.
pub fn ratios(title: &str, series: &[&str], groups: &[Group]) -> Svg {
    let top = 78.0;
    let row = BAR * series.len() as f64 + GAP;
    let (width, height) = (LABEL_WIDTH + BAR_WIDTH + RIGHT, top + row * groups.len() as f64 + 16.0);
    let mut svg = Svg::new(width, height, title);
    svg.rect([0.0, 0.0, width, height], r##"fill="#ffffff""##, "");
    svg.text((16.0, 24.0), Anchor::Start, r#"font-size="15" font-weight="600""#, title);
    let mut x = 16.0;
    for (index, name) in series.iter().enumerate() {
        svg.rect([x, 40.0, 12.0, 12.0], &format!(r#"fill="{}""#, SERIES[index % SERIES.len()]), "");
        svg.text((x + 18.0, 50.0), Anchor::Start, &format!(r#"fill="{MUTED}""#), name);
        x += 18.0 + 7.5 * name.len() as f64 + 24.0;
    }
    let highest = groups.iter().flat_map(|group| group.values.iter().flatten()).copied().fold(1.0, f64::max);
    let length = |value: f64| BAR_WIDTH * value.max(0.0) / highest;
    for (index, group) in groups.iter().enumerate() {
        let y = top + row * index as f64;
        let middle = y + BAR * series.len() as f64 / 2.0;
        svg.text((LABEL_WIDTH - 10.0, middle + 4.0), Anchor::End, "", &group.label);
        for (bar, value) in group.values.iter().enumerate() {
            let Some(value) = value else { continue };
            let y = y + BAR * bar as f64;
            let style = format!(r#"fill="{}""#, SERIES[bar % SERIES.len()]);
            svg.rect([LABEL_WIDTH, y, length(*value), BAR - 2.0], &style, &group.tip);
            let at = (LABEL_WIDTH + length(*value) + 6.0, y + BAR - 4.0);
            svg.text(at, Anchor::Start, r#"font-size="11""#, &format!("{value:.2}"));
        }
    }
    let one = LABEL_WIDTH + length(1.0);
    svg.line([LABEL_WIDTH, top - 8.0, LABEL_WIDTH, height - 16.0], &format!(r#"stroke="{RULE}""#));
    let dash = format!(r#"stroke="{MUTED}" stroke-dasharray="3 3""#);
    svg.line([one, top - 8.0, one, height - 16.0], &dash);
    svg
}

/// Drawings below one another.
pub fn stack(label: &str, drawings: Vec<Svg>) -> String {
    let sizes: Vec<(f64, f64)> = drawings.iter().map(Svg::size).collect();
    let width = sizes.iter().map(|size| size.0).fold(0.0, f64::max);
    let mut whole = Svg::new(width, sizes.iter().map(|size| size.1).sum(), label);
    whole.rect([0.0, 0.0, width, whole.size().1], r##"fill="#ffffff""##, "");
    let mut y = 0.0;
    for (drawing, (_, height)) in drawings.into_iter().zip(sizes) {
        whole.nest((0.0, y), drawing);
        y += height;
    }
    whole.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_stand_for_values_and_missing_ones_are_left_out() {
        let group = |label: &str, values| Group { label: label.to_owned(), values, tip: String::new() };
        let groups = [group("a < b", vec![Some(1.0), Some(2.0)]), group("c", vec![Some(0.5), None])];
        let text = stack("s", vec![ratios("t", &["ours", "theirs"], &groups)]);
        assert_eq!(text.matches(&format!("width=\"{BAR_WIDTH:.1}\"")).count(), 1);
        assert!(text.contains(">a &lt; b</text>") && text.contains(">0.50</text>"));
        // Two backgrounds, two keys, three bars.
        assert_eq!(text.matches("<rect").count(), 7);
    }
}
