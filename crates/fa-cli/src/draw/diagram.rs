//! Diagrams: SVG of rectangles, lines and texts with tooltips, for pages.

use svg::node::element::{Line, Rectangle, SVG, Text, Title};

/// Text and lines.
pub const INK: &str = "#1f2430";
/// Secondary text.
pub const MUTED: &str = "#5b6372";
/// Grid lines and outlines.
pub const RULE: &str = "#d8dce3";

/// Text as part of a page: what markup reserves is written as entities.
pub fn escape(text: &str) -> String {
    svg::node::Text::new(text).to_string()
}

/// A tenth of a pixel is as fine as anyone sees.
fn pixels(length: f64) -> f64 {
    (length * 10.0).round() / 10.0
}

/// An empty diagram; coordinates are pixels from the top left, and `label` is what a screen reader says.
pub fn diagram(width: f64, height: f64, label: &str) -> SVG {
    let (width, height) = (pixels(width), pixels(height));
    SVG::new()
        .set("viewBox", (0, 0, width, height))
        .set("width", width)
        .set("height", height)
        .set("role", "img")
        .set("aria-label", label)
        .set("font-size", 12)
        .set("fill", INK)
}

/// A rectangle.
pub fn rect([x, y, width, height]: [f64; 4]) -> Rectangle {
    Rectangle::new()
        .set("x", pixels(x))
        .set("y", pixels(y))
        .set("width", pixels(width))
        .set("height", pixels(height))
}

/// What is shown when a pointer rests on the element that this is added to.
pub fn tip(text: impl Into<String>) -> Title {
    Title::new(text)
}

/// A straight line.
pub fn line([x1, y1, x2, y2]: [f64; 4]) -> Line {
    Line::new().set("x1", pixels(x1)).set("y1", pixels(y1)).set("x2", pixels(x2)).set("y2", pixels(y2))
}

/// A text that starts at `x`, unless its anchor is set, with its baseline at `y`.
pub fn text((x, y): (f64, f64), text: impl Into<String>) -> Text {
    Text::new(text).set("x", pixels(x)).set("y", pixels(y))
}

/// A text whose middle is at `x`.
pub fn centered(at: (f64, f64), content: impl Into<String>) -> Text {
    text(at, content).set("text-anchor", "middle")
}

/// A text that ends at `x`.
pub fn ending(at: (f64, f64), content: impl Into<String>) -> Text {
    text(at, content).set("text-anchor", "end")
}

#[cfg(test)]
mod tests {
    use svg::Node;

    use super::*;

    #[test]
    fn texts_cannot_break_out_of_their_element() {
        let hostile = "a < b & \"c\" 'd' </text>";
        let mut drawing = diagram(10.0, 10.0, hostile);
        drawing.append(rect([0.0, 0.0, 1.0 / 3.0, 1.0]).add(tip(hostile)));
        drawing.append(ending((1.0, 2.0), hostile));
        let drawing = drawing.to_string();
        let document = roxmltree::Document::parse(&drawing).unwrap();
        let root = document.root_element();
        assert_eq!(root.attribute("aria-label"), Some(hostile));
        let texts: Vec<&str> = root.descendants().filter(|n| n.is_text()).filter_map(|n| n.text()).collect();
        let texts: Vec<&str> = texts.into_iter().map(str::trim).filter(|text| !text.is_empty()).collect();
        assert_eq!(texts, [hostile, hostile]);
        let rect = root.children().find(|node| node.tag_name().name() == "rect").unwrap();
        assert_eq!(rect.attribute("width"), Some("0.3"));
    }

    #[test]
    fn texts_of_pages_are_escaped() {
        assert_eq!(escape("a<b & c>"), "a&lt;b &amp; c&gt;");
    }
}
