//! Plots as SVG documents: what they have in common, and how several stand on one sheet.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::draw::diagram;

/// Where a plot is drawn.
pub(crate) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// Text and marks, secondary text, and grid lines, as in diagrams.
pub(crate) const INK: RGBColor = rgb(diagram::INK);
pub(crate) const MUTED: RGBColor = rgb(diagram::MUTED);
pub(crate) const RULE: RGBColor = rgb(diagram::RULE);

/// `#rrggbb` as the drawing library has it.
const fn rgb(hex: &str) -> RGBColor {
    let Ok(bits) = u32::from_str_radix(hex.split_at(1).1, 16) else { panic!("not #rrggbb") };
    let [_, red, green, blue] = bits.to_be_bytes();
    RGBColor(red, green, blue)
}

/// Colours of series, distinguishable with any common colour vision: Okabe and Ito's set, darkest first.
pub(crate) struct OkabeIto;

impl Palette for OkabeIto {
    const COLORS: &'static [(u8, u8, u8)] = &[
        (0x00, 0x72, 0xb2),
        (0xd5, 0x5e, 0x00),
        (0x00, 0x9e, 0x73),
        (0xcc, 0x79, 0xa7),
        (0xe6, 0x9f, 0x00),
        (0x56, 0xb4, 0xe9),
        (0x1f, 0x24, 0x30),
    ];
}

/// Sizes of texts in pixels.
pub(crate) const TEXT: f64 = 12.0;
const TITLE: f64 = 15.0;
const HEADING: f64 = 17.0;
/// Left of titles.
const INDENT: i32 = 16;
/// Height of a sheet's heading, and of a panel's title.
const HEADING_ROOM: u32 = 40;
const TITLE_ROOM: u32 = 36;
/// Around a plot with its labels, and between it and the legend.
pub(crate) const MARGIN: u32 = 10;
/// Below a plot, with the horizontal axis's labels.
pub(crate) const BELOW: u32 = 46;
/// Width of the line or mark before a name in the legend.
pub(crate) const KEY: i32 = 26;
/// Between that and the name.
const KEY_GAP: u32 = 8;
/// Height of a legend's row.
const ROW: u32 = 19;

/// The label of an axis: a number without the digits that only rounding errors fill.
pub(crate) fn number(value: f64) -> String {
    const PRECISION: f64 = 1e9;
    ((value * PRECISION).round() / PRECISION).to_string()
}

/// A plot that knows the room it needs.
pub(crate) trait Panel {
    /// Width and height in pixels.
    ///
    /// # Errors
    /// When a text cannot be measured.
    fn size(&self) -> anyhow::Result<(u32, u32)>;

    /// Whether it takes a row of a sheet alone.
    fn is_wide(&self) -> bool {
        false
    }

    /// Draws it on an area of at least that size.
    ///
    /// # Errors
    /// What the drawing library reports.
    fn draw(&self, area: &Area) -> anyhow::Result<()>;
}

/// A font of a height in pixels.
fn font(pixels: f64, style: FontStyle) -> FontDesc<'static> {
    // The SVG backend writes a font's size divided by this.
    const SIZE_PER_PIXEL: f64 = 1.24;
    FontDesc::new(FontFamily::SansSerif, pixels * SIZE_PER_PIXEL, style)
}

/// The style of texts of a height in pixels.
pub(crate) fn text(pixels: f64, color: RGBColor) -> TextStyle<'static> {
    font(pixels, FontStyle::Normal).color(&color)
}

/// Room that a text of a height in pixels may take: the viewer chooses the font, so this is an estimate for a
/// wide one.
///
/// # Errors
/// What the drawing library reports.
pub(crate) fn width_of(text: &str, pixels: f64) -> anyhow::Result<u32> {
    let (width, _) = font(pixels, FontStyle::Normal).box_size(text)?;
    Ok(width + width / 6)
}

/// The widest of some texts in the plots' usual size.
///
/// # Errors
/// As [`width_of`].
pub(crate) fn widest(texts: &[&str]) -> anyhow::Result<u32> {
    texts.iter().map(|text| width_of(text, TEXT)).try_fold(0, |widest, width| Ok(widest.max(width?)))
}

/// Room of a legend with these names: width and height.
///
/// # Errors
/// As [`width_of`].
pub(crate) fn legend_size(names: &[&str]) -> anyhow::Result<(u32, u32)> {
    Ok((KEY.unsigned_abs() + KEY_GAP + widest(names)? + MARGIN, ROW * u32::try_from(names.len())?))
}

/// Draws a row of a legend: `key` makes its line or mark at the middle of the left edge.
///
/// The library's own legends stand inside of the plot, where they would hide lines and bars.
///
/// # Errors
/// What the drawing library reports.
pub(crate) fn legend_row<'a, E: IntoDynElement<'a, SVGBackend<'a>, (i32, i32)>>(
    area: &Area<'a>,
    row: usize,
    name: &str,
    key: impl FnOnce((i32, i32)) -> E,
) -> anyhow::Result<()> {
    let middle = i32::try_from(ROW * u32::try_from(row)? + ROW / 2)?;
    area.draw(&key((0, middle)).into_dyn())?;
    let style = text(TEXT, INK).pos(Pos::new(HPos::Left, VPos::Center));
    area.draw_text(name, &style, (KEY + i32::try_from(KEY_GAP)?, middle))?;
    Ok(())
}

/// Room of a panel's title: width and height; none without one.
///
/// # Errors
/// As [`width_of`].
pub(crate) fn title_size(title: &str) -> anyhow::Result<(u32, u32)> {
    if title.is_empty() {
        return Ok((0, 0));
    }
    Ok((width_of(title, TITLE)? + 2 * INDENT.unsigned_abs(), TITLE_ROOM))
}

/// Writes a panel's title, if it has one; the area below it is left.
///
/// # Errors
/// What the drawing library reports.
pub(crate) fn titled<'a>(area: &Area<'a>, title: &str) -> anyhow::Result<Area<'a>> {
    let (_, height) = title_size(title)?;
    headed(area, title, TITLE, height)
}

fn headed<'a>(area: &Area<'a>, text: &str, pixels: f64, height: u32) -> anyhow::Result<Area<'a>> {
    let (head, rest) = area.split_vertically(height);
    if !text.is_empty() {
        let style = font(pixels, FontStyle::Bold).color(&INK).pos(Pos::new(HPos::Left, VPos::Center));
        head.draw_text(text, &style, (INDENT, i32::try_from(height / 2)?))?;
    }
    Ok(rest)
}

/// An SVG document of panels, `columns` of them side by side, below a heading if there is one.
///
/// # Errors
/// What the panels and the drawing library report.
pub(crate) fn sheet(heading: &str, columns: usize, panels: &[Box<dyn Panel>]) -> anyhow::Result<String> {
    sheet_with_legend(heading, &[], columns, panels)
}

/// A line of a sheet's legend.
#[derive(Clone, Debug)]
pub(crate) struct Key {
    /// What the line is.
    pub name: String,
    /// Index into the palette.
    pub color: usize,
    /// As the lines are drawn.
    pub dashed: bool,
}

/// The same with one legend for all panels, below the heading.
///
/// # Errors
/// What the panels and the drawing library report.
pub(crate) fn sheet_with_legend(
    heading: &str,
    legend: &[Key],
    columns: usize,
    panels: &[Box<dyn Panel>],
) -> anyhow::Result<String> {
    let rows = rows_of(columns.max(1), panels)?;
    let columns = u32::try_from(rows.iter().map(Row::columns).max().unwrap_or(1))?;
    let narrow = rows.iter().filter(|row| !row.is_wide).map(|row| row.width).max().unwrap_or(0);
    let wide = rows.iter().filter(|row| row.is_wide).map(|row| row.width).max().unwrap_or(0);
    let title = if heading.is_empty() { 0 } else { HEADING_ROOM };
    let width = wide.max(narrow * columns).max(width_of(heading, HEADING)? + 2 * INDENT.unsigned_abs());
    let keys = legend_places(legend, width)?;
    let head = title + keys.iter().map(|(_, row)| (row + 1) * LEGEND_ROW).max().unwrap_or(0);
    let whole = (width, head + rows.iter().map(|row| row.height).sum::<u32>());
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, whole).into_drawing_area();
        root.fill(&WHITE)?;
        let below = headed(&root, heading, HEADING, title)?;
        let (legend_area, body) = below.split_vertically(head - title);
        for (key, (x, row)) in legend.iter().zip(&keys) {
            draw_key(&legend_area, key, *x, row * LEGEND_ROW + LEGEND_ROW / 2)?;
        }
        let mut top = 0;
        for row in &rows {
            let each = if row.is_wide { width } else { width / columns };
            for (left, panel) in (0..).step_by(each as usize).zip(row.panels) {
                panel.draw(&body.clone().shrink((left, top), (each, row.height)))?;
            }
            top += row.height;
        }
        root.present()?;
    }
    // XML admits no control characters, not even escaped.
    svg.retain(|c| !c.is_control() || c == '\n');
    Ok(compact(&svg))
}

/// The document without defaults on every element, and with lines of one pen that follow one another as one
/// path: a dashed line is hundreds of lines.
fn compact(svg: &str) -> String {
    const FONT: &str = " font-family=\"sans-serif\"";
    let mut plain = svg.to_owned();
    for default in [FONT, " opacity=\"1\"", " stroke=\"none\" stroke-width=\"2\""] {
        plain = plain.replace(default, "");
    }
    let plain = plain.replacen("<svg", &format!("<svg{FONT}"), 1);
    let mut out = String::with_capacity(plain.len());
    let mut last = None;
    for line in plain.lines() {
        let polyline = line.strip_prefix("<polyline ").and_then(|line| line.split_once(" points=\""));
        let pen = polyline.map(|(pen, _)| pen);
        if last.is_some() && pen != last {
            out += "\"/>\n";
        }
        match polyline {
            Some((pen, points)) => {
                if last != Some(pen) {
                    out += &format!("<path {pen} d=\"");
                }
                out.push('M');
                out += points.trim_end_matches("\"/>").trim_end();
            }
            None => {
                out += line;
                out.push('\n');
            }
        }
        last = pen;
    }
    out
}

/// Panels side by side.
struct Row<'a> {
    panels: &'a [Box<dyn Panel>],
    /// Of one that takes the row alone.
    is_wide: bool,
    /// Of the widest.
    width: u32,
    height: u32,
}

impl Row<'_> {
    fn columns(&self) -> usize {
        self.panels.len()
    }
}

/// Panels in rows of at most `columns`, in their order.
fn rows_of(columns: usize, panels: &[Box<dyn Panel>]) -> anyhow::Result<Vec<Row<'_>>> {
    let mut rows = Vec::new();
    let runs = panels.chunk_by(|a, b| a.is_wide() == b.is_wide());
    for run in runs {
        let is_wide = run[0].is_wide();
        for panels in run.chunks(if is_wide { 1 } else { columns }) {
            let sizes: Vec<(u32, u32)> = panels.iter().map(|panel| panel.size()).collect::<Result<_, _>>()?;
            let widest = |of: fn(&(u32, u32)) -> u32| sizes.iter().map(of).max().unwrap_or(0);
            rows.push(Row { panels, is_wide, width: widest(|size| size.0), height: widest(|size| size.1) });
        }
    }
    Ok(rows)
}

/// Height of a row of a sheet's legend.
const LEGEND_ROW: u32 = 24;
/// Texts of a sheet's legend.
const LEGEND_TEXT: f64 = 14.0;

/// Where the keys of a legend begin, and in which row, within `width`.
fn legend_places(legend: &[Key], width: u32) -> anyhow::Result<Vec<(u32, u32)>> {
    let (mut x, mut row) = (INDENT.unsigned_abs(), 0);
    let mut places = Vec::with_capacity(legend.len());
    for key in legend {
        let own = KEY.unsigned_abs() + KEY_GAP + width_of(&key.name, LEGEND_TEXT)? + 2 * MARGIN;
        if x + own > width && x > INDENT.unsigned_abs() {
            (x, row) = (INDENT.unsigned_abs(), row + 1);
        }
        places.push((x, row));
        x += own;
    }
    Ok(places)
}

fn draw_key(area: &Area, key: &Key, x: u32, y: u32) -> anyhow::Result<()> {
    let (x, y) = (i32::try_from(x)?, i32::try_from(y)?);
    let stroke = OkabeIto::pick(key.color).stroke_width(3);
    let ends = [(x, y), (x + KEY, y)];
    if key.dashed {
        area.draw(&plotters::element::DashedPathElement::new(ends, 6, 4, stroke))?;
    } else {
        area.draw(&PathElement::new(ends, stroke))?;
    }
    let style = text(LEGEND_TEXT, INK).pos(Pos::new(HPos::Left, VPos::Center));
    area.draw_text(&key.name, &style, (x + KEY + i32::try_from(KEY_GAP)?, y))?;
    Ok(())
}

/// The texts of an SVG document, which has to be well-formed, with finite numbers and no text outside of its
/// view.
#[cfg(test)]
pub(crate) fn texts_of(svg: &str) -> Vec<String> {
    let document = roxmltree::Document::parse(svg).unwrap();
    let whole = document.root_element();
    assert!(whole.has_tag_name(("http://www.w3.org/2000/svg", "svg")), "{svg}");
    let number =
        |node: roxmltree::Node, name: &str| -> f64 { node.attribute(name).unwrap().parse().unwrap() };
    let (width, height) = (number(whole, "width"), number(whole, "height"));
    for attribute in document.descendants().flat_map(|node| node.attributes()) {
        assert!(!["NaN", "inf"].iter().any(|word| attribute.value().contains(word)), "{attribute:?}");
    }
    let texts = document.descendants().filter(|node| node.tag_name().name() == "text");
    let content = |node: roxmltree::Node| {
        let (x, y, text) = (number(node, "x"), number(node, "y"), node.text().unwrap_or_default().trim());
        let reach = match node.attribute("text-anchor") {
            _ if node.has_attribute("transform") => (0.0, 0.0),
            Some("middle") => (0.5, 0.5),
            Some("end") => (1.0, 0.0),
            _ => (0.0, 1.0),
        };
        // Letters of wide fonts take this share of their height.
        let length = 0.6 * number(node, "font-size") * text.chars().count() as f64;
        let (left, right) = (x - reach.0 * length, x + reach.1 * length);
        assert!(
            left >= 0.0 && right <= width && (0.0..=height).contains(&y),
            "'{text}' at {left}..{right}, {y}"
        );
        text.to_owned()
    };
    texts.map(content).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A panel that is only its title.
    struct Titled(&'static str);

    impl Panel for Titled {
        fn size(&self) -> anyhow::Result<(u32, u32)> {
            title_size(self.0)
        }

        fn draw(&self, area: &Area) -> anyhow::Result<()> {
            titled(area, self.0).map(drop)
        }
    }

    fn drawn(heading: &str, columns: usize, titles: &[&'static str]) -> String {
        let panels: Vec<Box<dyn Panel>> =
            titles.iter().map(|title| Box::new(Titled(title)) as Box<dyn Panel>).collect();
        sheet(heading, columns, &panels).unwrap()
    }

    #[test]
    fn panels_stand_in_rows_below_the_heading() {
        let svg = drawn("heading", 2, &["one", "two", "three"]);
        assert_eq!(texts_of(&svg), ["heading", "one", "two", "three"]);
        let document = roxmltree::Document::parse(&svg).unwrap();
        let at = |name: &str| -> Vec<i32> {
            let texts = document.descendants().filter(|node| node.has_tag_name("text"));
            texts.map(|node| node.attribute(name).unwrap().parse().unwrap()).collect()
        };
        let (x, y) = (at("x"), at("y"));
        assert!(x[1] == x[3] && x[1] < x[2] && y[1] == y[2] && y[0] < y[1] && y[1] < y[3], "{x:?} {y:?}");
    }

    #[test]
    fn sheets_without_panels_or_heading_are_documents() {
        assert_eq!(texts_of(&drawn("nothing was measured", 2, &[])), ["nothing was measured"]);
        assert_eq!(texts_of(&drawn("", 1, &["one"])), ["one"]);
        assert!(texts_of(&drawn("", 1, &[])).is_empty());
    }

    #[test]
    fn texts_cannot_break_out_of_their_element() {
        let hostile = "a < b & \"c\" 'd' </text>";
        assert_eq!(texts_of(&drawn(hostile, 1, &["<svg>\u{7}"])), [hostile, "<svg>"]);
    }

    #[test]
    fn labels_of_axes_are_short() {
        assert_eq!([0.1 + 0.2, 200.0, 0.005].map(number), ["0.3", "200", "0.005"]);
    }
}
