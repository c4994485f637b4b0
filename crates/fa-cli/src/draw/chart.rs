//! A line chart of a rate over a size: logarithmic to the right, from zero upwards.

use plotters::element::DashedPathElement;
use plotters::prelude::*;

use crate::draw::plot::{self, Area, BELOW, INK, KEY, MARGIN, MUTED, OkabeIto, Panel, RULE, TEXT};

/// One line of a chart.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    /// Name in the legend.
    pub label: String,
    /// Sizes (above 0, ascending) and rates; what is not finite is left out.
    pub points: Vec<(f64, f64)>,
    /// Index into the palette; lines that belong together share one.
    pub color: usize,
    /// Dashed, to distinguish two lines of one colour.
    pub dashed: bool,
}

/// A chart: its lines and what it says around them.
#[derive(Clone, Debug)]
pub(crate) struct Chart {
    /// Above the chart; may be empty.
    pub title: String,
    /// Below the horizontal axis.
    pub x_label: &'static str,
    /// Beside the vertical axis: the unit.
    pub y_label: &'static str,
    /// A horizontal line to hold the rates against, with its name.
    pub ceiling: Option<(f64, String)>,
    /// The lines, in the legend's order.
    pub series: Vec<Series>,
    /// One of several on a sheet that has their legend, with this end of the vertical axis.
    pub shared: Option<f64>,
}

/// Width and height between the axes.
const PLOT: (u32, u32) = (560, 300);
/// The same of one of several.
const SMALL: (u32, u32) = (330, 190);
/// Left of the plot, with the vertical axis's labels.
const LEFT: u32 = 64;
/// Length of a dash and of the gap behind it.
const DASH: (i32, i32) = (10, 6);
const DOT: (i32, i32) = (2, 5);

impl Series {
    fn drawable(&self) -> Vec<(f64, f64)> {
        let points = self.points.iter().copied();
        points.filter(|(x, y)| x.is_finite() && *x > 0.0 && y.is_finite()).collect()
    }
}

impl Chart {
    /// The chart as a whole document.
    ///
    /// # Errors
    /// What the drawing library reports.
    pub(crate) fn into_svg(self) -> anyhow::Result<String> {
        plot::sheet("", 1, &[Box::new(self)])
    }

    fn ceiling(&self) -> Option<(f64, &str)> {
        self.ceiling.as_ref().map(|(rate, name)| (*rate, name.as_str())).filter(|(rate, _)| rate.is_finite())
    }

    /// Sizes from the power of two below the least to the one above the greatest, and a little more.
    fn sizes(&self) -> (f64, f64) {
        const ROOM: f64 = 1.12;
        let sizes = || self.series.iter().flat_map(Series::drawable).map(|(x, _)| x);
        let (least, greatest) = (sizes().fold(f64::INFINITY, f64::min), sizes().fold(0.0, f64::max));
        if greatest == 0.0 {
            return (1.0, 2.0);
        }
        let (first, last) = (least.log2().floor(), greatest.log2().ceil());
        // A single size stands in the middle.
        let widen = if first == last { 1.0 } else { 0.0 };
        ((first - widen).exp2() / ROOM, (last + widen).exp2() * ROOM)
    }

    /// Width and height between the axes.
    fn plot(&self) -> (u32, u32) {
        if self.shared.is_some() { SMALL } else { PLOT }
    }

    /// The end of the vertical axis.
    pub(crate) fn top(&self) -> f64 {
        if let Some(top) = self.shared {
            return top;
        }
        let rates = self.series.iter().flat_map(Series::drawable).map(|(_, y)| y);
        let highest = rates.chain(self.ceiling().map(|(rate, _)| rate)).fold(0.0, f64::max);
        if highest > 0.0 { 1.08 * highest } else { 1.0 }
    }
}

impl Panel for Chart {
    fn size(&self) -> anyhow::Result<(u32, u32)> {
        let ceiling = self.ceiling().map(|(_, name)| name);
        let names: Vec<&str> =
            ceiling.into_iter().chain(self.series.iter().map(|line| &*line.label)).collect();
        let (title, mut legend) = (plot::title_size(&self.title)?, plot::legend_size(&names)?);
        if self.shared.is_some() {
            legend = (0, 0);
        }
        let width = MARGIN + LEFT + self.plot().0 + MARGIN + legend.0;
        let height = (self.plot().1 + BELOW).max(legend.1);
        Ok((width.max(title.0), title.1 + MARGIN + height + MARGIN))
    }

    fn draw(&self, area: &Area) -> anyhow::Result<()> {
        let area = plot::titled(area, &self.title)?;
        let (area, legend) =
            area.margin(MARGIN, MARGIN, MARGIN, 0).split_horizontally(LEFT + self.plot().0 + MARGIN);
        let own_legend = self.shared.is_none();
        let (_, height) = area.dim_in_pixel();
        let (first, last) = self.sizes();
        let mut chart = ChartBuilder::on(&area)
            .margin_right(MARGIN)
            .margin_bottom(height.saturating_sub(self.plot().1 + BELOW))
            .y_label_area_size(LEFT)
            .x_label_area_size(BELOW)
            .build_cartesian_2d((first..last).log_scale().base(2.0), 0.0..self.top())?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .bold_line_style(RULE)
            .light_line_style(TRANSPARENT)
            .axis_style(MUTED)
            .set_all_tick_mark_size(4)
            .label_style(plot::text(TEXT, MUTED))
            // With more than nine labels for two powers of two the library would add some between them.
            .x_labels(9)
            .y_labels(7)
            .x_label_formatter(&|size| binary(*size))
            .y_label_formatter(&|rate| plot::number(*rate))
            .x_desc(self.x_label)
            .y_desc(self.y_label)
            .draw()?;
        let key = |(x, y): (i32, i32)| [(x, y), (x + KEY, y)];
        let ceiling = self.ceiling();
        if let Some((rate, name)) = ceiling {
            let ((dot, gap), stroke) = (DOT, INK.stroke_width(1));
            chart.draw_series(DashedLineSeries::new([(first, rate), (last, rate)], dot, gap, stroke))?;
            if own_legend {
                plot::legend_row(&legend, 0, name, |at| DashedPathElement::new(key(at), dot, gap, stroke))?;
            }
        }
        for (line, row) in self.series.iter().zip(usize::from(ceiling.is_some())..) {
            let (points, stroke) = (line.drawable(), OkabeIto::pick(line.color).stroke_width(2));
            if line.dashed {
                let (dash, gap) = DASH;
                chart.draw_series(DashedLineSeries::new(points.clone(), dash, gap, stroke))?;
                if own_legend {
                    plot::legend_row(&legend, row, &line.label, |at| {
                        DashedPathElement::new(key(at), dash, gap, stroke)
                    })?;
                }
            } else {
                chart.draw_series(LineSeries::new(points.clone(), stroke))?;
                if own_legend {
                    plot::legend_row(&legend, row, &line.label, |at| PathElement::new(key(at), stroke))?;
                }
            }
            let fill = if line.dashed { WHITE.filled() } else { stroke.filled() };
            chart.draw_series(points.into_iter().map(|point| {
                EmptyElement::at(point) + Circle::new((0, 0), 4, fill) + Circle::new((0, 0), 4, stroke)
            }))?;
        }
        Ok(())
    }
}

/// A size by binary thousands where that is exact: `16k` for 16384.
fn binary(size: f64) -> String {
    let [kilo, mega] = [1024.0, 1_048_576.0];
    if size >= mega && size % mega == 0.0 {
        format!("{}M", size / mega)
    } else if size >= kilo && size % kilo == 0.0 {
        format!("{}k", size / kilo)
    } else {
        plot::number(size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::plot::texts_of;

    fn line(label: &str, dashed: bool, points: &[(f64, f64)]) -> Series {
        Series { label: label.to_owned(), points: points.to_vec(), color: usize::from(dashed), dashed }
    }

    fn chart(series: Vec<Series>) -> Chart {
        let title = "rates of a < b & \"c\"".to_owned();
        Chart { title, x_label: "keys", y_label: "TFLOP/s", ceiling: None, series, shared: None }
    }

    /// Elements of a kind whose attribute has a value.
    fn count(svg: &str, element: &str, attribute: &str, value: &str) -> usize {
        let document = roxmltree::Document::parse(svg).unwrap();
        let alike = |node: &roxmltree::Node| {
            node.tag_name().name() == element && node.attribute(attribute) == Some(value)
        };
        document.descendants().filter(alike).count()
    }

    #[test]
    fn every_line_is_drawn_and_named_and_the_axes_are_labelled() {
        let points = [(512.0, 101.0), (1024.0, 240.0), (16384.0, 580.0)];
        let mut chart = chart(vec![line("fa", false, &points), line("<peer>", true, &points[..2])]);
        chart.ceiling = Some((660.0, "peak 660".to_owned()));
        let svg = chart.into_svg().unwrap();
        let texts = texts_of(&svg);
        let named = ["rates of a < b & \"c\"", "keys", "TFLOP/s", "fa", "<peer>", "peak 660"];
        let sizes = ["512", "1k", "2k", "4k", "8k", "16k"];
        let rates = ["0", "200", "400", "600"];
        for text in named.iter().chain(&sizes).chain(&rates) {
            assert!(texts.iter().any(|drawn| drawn == text), "'{text}' is not in {texts:?}");
        }
        assert!(!texts.iter().any(|drawn| drawn == "256" || drawn == "32k"), "{texts:?}");
        // A full dot for each point of ours, a hollow one for each of the peer's.
        assert_eq!(count(&svg, "circle", "fill", "#0072B2"), 3);
        assert_eq!(count(&svg, "circle", "stroke", "#D55E00"), 2);
        // The line and its key; dashes are many lines of one path.
        let lines = |color: &str| {
            let own = svg.lines().filter(|line| line.starts_with("<path") && line.contains(color));
            own.map(|line| line.matches('M').count()).sum::<usize>()
        };
        assert_eq!(lines("#0072B2"), 2);
        assert!(lines("#D55E00") > 4);
    }

    #[test]
    fn one_point_is_drawn_in_the_middle() {
        let svg = chart(vec![line("fa", false, &[(4096.0, 7.3)])]).into_svg().unwrap();
        assert_eq!(count(&svg, "circle", "fill", "#0072B2"), 1);
        let middle = MARGIN + LEFT + PLOT.0 / 2;
        let near = [middle - 1, middle].map(|x| count(&svg, "circle", "cx", &x.to_string()));
        assert!(near.contains(&2), "{svg}");
        let texts = texts_of(&svg);
        assert!(["2k", "4k", "8k", "6"].iter().all(|text| texts.iter().any(|t| t == text)), "{texts:?}");
    }

    #[test]
    fn what_is_not_a_number_is_left_out() {
        let points = [(0.0, 1.0), (512.0, f64::NAN), (1024.0, f64::INFINITY), (2048.0, 3.0)];
        let mut chart = chart(vec![line("fa", true, &points), line("empty", false, &[])]);
        chart.ceiling = Some((f64::NAN, "unknown peak".to_owned()));
        let svg = chart.into_svg().unwrap();
        assert_eq!(count(&svg, "circle", "stroke", "#D55E00"), 1);
        let texts = texts_of(&svg);
        assert!(texts.iter().any(|text| text == "empty"), "{texts:?}");
        assert!(!texts.iter().any(|text| text == "unknown peak"), "{texts:?}");
    }

    #[test]
    fn charts_without_lines_have_axes() {
        let texts = texts_of(&chart(Vec::new()).into_svg().unwrap());
        assert!(texts.iter().any(|text| text == "TFLOP/s"), "{texts:?}");
    }

    #[test]
    fn legends_are_as_long_and_as_wide_as_their_names() {
        let series = |index: usize| line(&format!("{index} {}", "name ".repeat(12)), false, &[(512.0, 1.0)]);
        let texts = texts_of(&chart((0..40).map(series).collect()).into_svg().unwrap());
        assert_eq!(texts.iter().filter(|text| text.ends_with("name")).count(), 40);
    }

    #[test]
    fn sizes_are_short() {
        let sizes = [512.0, 1024.0, 1536.0, 2_097_152.0, 0.5];
        assert_eq!(sizes.map(binary), ["512", "1k", "1536", "2M", "0.5"]);
    }
}
