//! Just enough SVG: shapes with tooltips, in strings.

use std::fmt::Write;

/// Text and lines.
pub const INK: &str = "#1f2430";
/// Secondary text.
pub const MUTED: &str = "#5b6372";
/// Grid lines and outlines.
pub const RULE: &str = "#d8dce3";
/// Series colours, distinguishable with any common colour vision (Okabe and Ito's set, darkest first).
pub const SERIES: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1f2430"];

/// A drawing under construction; coordinates are pixels from the top left.
#[derive(Debug)]
pub struct Svg {
    width: f64,
    height: f64,
    label: String,
    body: String,
}

/// Where a text's position is on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// At its start.
    Start,
    /// In its middle.
    Middle,
    /// At its end.
    End,
}

impl Anchor {
    const fn name(self) -> &'static str {
        match self {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        }
    }
}

/// `text` with what XML reserves written as entities.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            c if c.is_control() && c != '\n' => {}
            c => escaped.push(c),
        }
    }
    escaped
}

fn tooltip(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("<title>{}</title>", escape(text)) }
}

impl Svg {
    /// An empty drawing; `label` is what a screen reader says.
    pub fn new(width: f64, height: f64, label: &str) -> Svg {
        Svg { width, height, label: label.to_owned(), body: String::new() }
    }

    /// Width and height.
    pub fn size(&self) -> (f64, f64) {
        (self.width, self.height)
    }

    /// Puts another drawing into this one, its top left at a point.
    pub fn nest(&mut self, (x, y): (f64, f64), inner: Svg) {
        self.raw(&format!(r#"<g transform="translate({x:.1} {y:.1})">"#));
        self.body.push_str(&inner.body);
        self.raw("</g>");
    }

    /// Appends an element as it is.
    pub fn raw(&mut self, element: &str) {
        self.body.push_str(element);
        self.body.push('\n');
    }

    /// A rectangle with a tooltip (none if empty); `style` is further attributes, such as `fill="#fff"`.
    pub fn rect(&mut self, [x, y, width, height]: [f64; 4], style: &str, tip: &str) {
        let tip = tooltip(tip);
        self.raw(&format!(
            r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" {style}>{tip}</rect>"#
        ));
    }

    /// A straight line.
    pub fn line(&mut self, [x1, y1, x2, y2]: [f64; 4], style: &str) {
        self.raw(&format!(r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" {style}/>"#));
    }

    /// A line through points.
    pub fn polyline(&mut self, points: &[(f64, f64)], style: &str) {
        let mut path = String::new();
        for (x, y) in points {
            write!(path, "{x:.1},{y:.1} ").expect("writing to a string cannot fail");
        }
        self.raw(&format!(r#"<polyline points="{}" fill="none" {style}/>"#, path.trim_end()));
    }

    /// A dot with a tooltip.
    pub fn dot(&mut self, (x, y): (f64, f64), radius: f64, style: &str, tip: &str) {
        let tip = tooltip(tip);
        self.raw(&format!(r#"<circle cx="{x:.1}" cy="{y:.1}" r="{radius}" {style}>{tip}</circle>"#));
    }

    /// A text whose baseline is at `y`.
    pub fn text(&mut self, (x, y): (f64, f64), anchor: Anchor, style: &str, text: &str) {
        let (anchor, text) = (anchor.name(), escape(text));
        self.raw(&format!(r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" {style}>{text}</text>"#));
    }

    /// The finished element, for a file of its own or inside HTML.
    pub fn finish(self) -> String {
        let Svg { width, height, label, body } = self;
        let label = escape(&label);
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
             height=\"{height}\" role=\"img\" aria-label=\"{label}\" font-family=\"system-ui, -apple-system, \
             'Segoe UI', Roboto, 'Liberation Sans', sans-serif\" font-size=\"12\" fill=\"{INK}\">\n{body}</svg>\n"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_cannot_break_out_of_their_element() {
        assert_eq!(escape("a<b & \"c\"\u{7}>"), "a&lt;b &amp; &quot;c&quot;&gt;");
        let mut svg = Svg::new(10.0, 10.0, "x\"y");
        svg.rect([0.0, 0.0, 1.0, 1.0], "", "1 < 2");
        let text = svg.finish();
        assert!(
            text.contains("aria-label=\"x&quot;y\"") && text.contains("<title>1 &lt; 2</title>"),
            "{text}"
        );
    }
}
