//! A line chart of a rate over a size: logarithmic to the right, from zero upwards.

use crate::svg::{Anchor, INK, MUTED, RULE, SERIES, Svg};

/// One line of a chart.
#[derive(Clone, Debug)]
pub struct Series {
    /// Name in the legend.
    pub label: String,
    /// Sizes (above 0, ascending) and rates.
    pub points: Vec<(f64, f64)>,
    /// Index into the palette; lines that belong together share one.
    pub color: usize,
    /// Dashed, to tell two lines of a colour apart.
    pub dashed: bool,
}

/// What a chart says around its lines.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// Above the chart.
    pub title: &'a str,
    /// Below the horizontal axis.
    pub x_label: &'a str,
    /// Above the vertical axis, with the unit.
    pub y_label: &'a str,
    /// A horizontal line to hold the rates against, with its name.
    pub ceiling: Option<(f64, &'a str)>,
}

const LEFT: f64 = 64.0;
const PLOT: (f64, f64) = (560.0, 300.0);
const LEGEND_WIDTH: f64 = 250.0;
const LEGEND_ROW: f64 = 20.0;

/// Draws the chart as an SVG element.
pub fn lines(frame: &Frame, series: &[Series]) -> String {
    lines_svg(frame, series).finish()
}

/// [`lines`] as a drawing that can be part of another.
pub fn lines_svg(frame: &Frame, series: &[Series]) -> Svg {
    // Room for the title, where there is one.
    let top_edge = if frame.title.is_empty() { 34.0 } else { 64.0 };
    let points = || series.iter().flat_map(|s| s.points.iter().copied());
    let highest = points().map(|(_, y)| y).chain(frame.ceiling.map(|(y, _)| y)).fold(0.0, f64::max);
    let (step, top) = ticks(highest);
    let mut sizes: Vec<f64> = points().map(|(x, _)| x).collect();
    sizes.sort_by(f64::total_cmp);
    sizes.dedup();
    let (first, last) =
        (sizes.first().copied().unwrap_or(1.0).log2(), sizes.last().copied().unwrap_or(2.0).log2());
    let x_of = |x: f64| {
        // A single size stands in the middle.
        let share = if last > first { (x.log2() - first) / (last - first) } else { 0.5 };
        LEFT + 16.0 + share * (PLOT.0 - 32.0)
    };
    let y_of = |y: f64| top_edge + PLOT.1 * (1.0 - y / top);

    let height = (top_edge + PLOT.1 + 56.0).max(top_edge + LEGEND_ROW * series.len() as f64 + 16.0);
    let mut svg = Svg::new(LEFT + PLOT.0 + LEGEND_WIDTH, height, frame.title);
    svg.rect([0.0, 0.0, LEFT + PLOT.0 + LEGEND_WIDTH, height], r##"fill="#ffffff""##, "");
    svg.text((LEFT, 24.0), Anchor::Start, r#"font-size="15" font-weight="600""#, frame.title);
    svg.text((LEFT - 8.0, top_edge - 14.0), Anchor::Start, &format!(r#"fill="{MUTED}""#), frame.y_label);
    let mut tick = 0.0;
    while tick <= top * 1.0001 {
        let y = y_of(tick);
        svg.line([LEFT, y, LEFT + PLOT.0, y], &format!(r#"stroke="{RULE}""#));
        svg.text((LEFT - 8.0, y + 4.0), Anchor::End, &format!(r#"fill="{MUTED}""#), &short(tick));
        tick += step;
    }
    for &size in readable(&sizes, x_of).iter() {
        let x = x_of(size);
        svg.line([x, top_edge + PLOT.1, x, top_edge + PLOT.1 + 5.0], &format!(r#"stroke="{MUTED}""#));
        svg.text((x, top_edge + PLOT.1 + 19.0), Anchor::Middle, &format!(r#"fill="{MUTED}""#), &short(size));
    }
    svg.text(
        (LEFT + PLOT.0 / 2.0, top_edge + PLOT.1 + 42.0),
        Anchor::Middle,
        &format!(r#"fill="{MUTED}""#),
        frame.x_label,
    );
    if let Some((rate, name)) = frame.ceiling {
        let y = y_of(rate);
        svg.line([LEFT, y, LEFT + PLOT.0, y], &format!(r#"stroke="{INK}" stroke-dasharray="2 3""#));
        svg.text((LEFT + PLOT.0 - 6.0, y - 5.0), Anchor::End, &format!(r#"fill="{INK}""#), name);
    }
    for (row, line) in series.iter().enumerate() {
        let color = SERIES[line.color % SERIES.len()];
        let dash = if line.dashed { r#" stroke-dasharray="6 4""# } else { "" };
        let stroke = format!(r#"stroke="{color}" stroke-width="2" stroke-linejoin="round"{dash}"#);
        let placed: Vec<(f64, f64)> = line.points.iter().map(|&(x, y)| (x_of(x), y_of(y))).collect();
        svg.polyline(&placed, &stroke);
        for (&(x, y), &at) in line.points.iter().zip(&placed) {
            let tip =
                format!("{}\n{} {}: {} {}", line.label, frame.x_label, short(x), digits(y), frame.y_label);
            let fill = if line.dashed { "#ffffff" } else { color };
            svg.dot(at, 4.0, &format!(r#"fill="{fill}" stroke="{color}" stroke-width="2""#), &tip);
        }
        let (x, y) = (LEFT + PLOT.0 + 24.0, top_edge + 6.0 + LEGEND_ROW * row as f64);
        svg.line([x, y, x + 26.0, y], &stroke);
        svg.text((x + 34.0, y + 4.0), Anchor::Start, "", &line.label);
    }
    svg
}

/// Distance of the grid lines and the axis's end for rates up to `highest`: 1, 2 or 5 times a power of ten, 3 to 8 lines.
fn ticks(highest: f64) -> (f64, f64) {
    if !(highest.is_finite() && highest > 0.0) {
        return (0.5, 1.0);
    }
    let rough = highest / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|&s| s >= rough).unwrap_or(10.0 * power);
    (step, (highest / step).ceil() * step)
}

/// Of ascending sizes those whose labels do not run into one another.
fn readable(sizes: &[f64], x_of: impl Fn(f64) -> f64) -> Vec<f64> {
    const LABEL_WIDTH: f64 = 40.0;
    let mut kept: Vec<f64> = Vec::new();
    for &size in sizes {
        if kept.last().is_none_or(|&before| x_of(size) - x_of(before) >= LABEL_WIDTH) {
            kept.push(size);
        }
    }
    kept
}

/// Sizes by binary thousands where that is exact: `16k` for 16384.
fn short(value: f64) -> String {
    let whole = value.fract() == 0.0;
    match value as u64 {
        n if whole && n >= 1 << 20 && n.is_multiple_of(1 << 20) => format!("{}M", n >> 20),
        n if whole && n >= 1024 && n.is_multiple_of(1024) => format!("{}k", n >> 10),
        _ => digits(value),
    }
}

fn digits(value: f64) -> String {
    if value.fract() == 0.0 || value >= 1000.0 {
        format!("{value:.0}")
    } else if value >= 100.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.2}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_round_numbers_above_the_data() {
        for (highest, step, top) in [
            (101.0, 50.0, 150.0),
            (7.3, 2.0, 8.0),
            (1000.0, 200.0, 1000.0),
            (0.031, 0.01, 0.04),
            (0.0, 0.5, 1.0),
        ] {
            let (got_step, got_top) = ticks(highest);
            assert!(
                (got_step - step).abs() < 1e-9 && (got_top - top).abs() < 1e-9,
                "{highest}: {got_step} {got_top}"
            );
        }
    }

    #[test]
    fn sizes_are_short_and_labels_apart() {
        assert_eq!([512.0, 1024.0, 1536.0, 2097152.0, 0.5].map(short), ["512", "1k", "1536", "2M", "0.50"]);
        assert_eq!(readable(&[1.0, 2.0, 50.0], |x| x), [1.0, 50.0]);
    }

    #[test]
    fn every_series_is_drawn_and_named() {
        let series = |label: &str, dashed| Series {
            label: label.to_owned(),
            points: vec![(512.0, 10.0), (1024.0, 20.0)],
            color: 0,
            dashed,
        };
        let frame = Frame { title: "t", x_label: "N", y_label: "GFLOP/s", ceiling: Some((30.0, "peak")) };
        let text = lines(&frame, &[series("hd 64", false), series("hd 64 causal", true)]);
        assert_eq!(text.matches("<polyline").count(), 2);
        assert_eq!(text.matches("<circle").count(), 4);
        assert!(text.contains(">hd 64 causal</text>") && text.contains(">peak</text>"));
        assert!(!lines(&frame, &[]).contains("NaN"));
    }
}
