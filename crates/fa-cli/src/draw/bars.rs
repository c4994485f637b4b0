//! A chart of horizontal bars in groups: what a step or a switch does to a rate, or rates of shapes that are
//! no series.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::draw::plot::{self, Area, BELOW, INK, KEY, MARGIN, MUTED, OkabeIto, Panel, RULE, TEXT};

/// Bars that belong together.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    /// Left of the bars.
    pub label: String,
    /// One per series; none where a series has no value here.
    pub values: Vec<Option<f64>>,
}

/// Groups of bars from zero.
#[derive(Clone, Debug)]
pub(crate) struct Bars {
    /// Above the chart; may be empty.
    pub title: String,
    /// Below the horizontal axis: what is over what.
    pub x_label: String,
    /// Names in the legend.
    pub series: Vec<String>,
    /// From the top down.
    pub groups: Vec<Group>,
    /// What the values are.
    pub kind: Kind,
    /// Width of the labels on a sheet whose plots begin at one place; `None` for that of its own.
    pub label_room: Option<u32>,
}

/// What the values of bars are, with the colours of the series in the palette.
#[derive(Clone, Debug)]
pub(crate) enum Kind {
    /// Ratios: there is a line at 1, and a legend where there are several series.
    Ratios(Vec<usize>),
    /// Rates or times on a sheet that has the legend.
    Values(Vec<usize>),
}

/// Width between the axes.
const PLOT: u32 = 460;
/// Height of a bar, with what parts it from the next one, and of what parts groups.
const BAR: i32 = 14;
const GAP: i32 = 10;

impl Bars {
    /// The names of a legend of its own.
    fn legend(&self) -> Vec<&str> {
        match self.kind {
            Kind::Ratios(_) if self.series.len() > 1 => self.series.iter().map(|name| &**name).collect(),
            Kind::Ratios(_) | Kind::Values(_) => Vec::new(),
        }
    }

    fn color(&self, series: usize) -> usize {
        let (Kind::Ratios(colors) | Kind::Values(colors)) = &self.kind;
        colors.get(series).copied().unwrap_or(series)
    }

    /// Heights of a group and of all.
    fn heights(&self) -> anyhow::Result<(i32, i32)> {
        let group = BAR * i32::try_from(self.series.len())? + GAP;
        Ok((group, group * i32::try_from(self.groups.len())?.max(1)))
    }

    /// Room of the labels left of the plot.
    fn left(&self) -> anyhow::Result<u32> {
        let labels: Vec<&str> = self.groups.iter().map(|group| &*group.label).collect();
        Ok(self.label_room.map_or_else(|| plot::widest(&labels), Ok)? + 2 * MARGIN)
    }

    /// A series's values with the indices of their groups.
    fn values(&self, series: usize) -> impl Iterator<Item = (usize, f64)> {
        let value = move |(index, group): (usize, &Group)| {
            let value = group.values.get(series).copied().flatten()?;
            value.is_finite().then_some((index, value.max(0.0)))
        };
        self.groups.iter().enumerate().filter_map(value)
    }
}

impl Panel for Bars {
    fn is_wide(&self) -> bool {
        true
    }

    fn size(&self) -> anyhow::Result<(u32, u32)> {
        let names = self.legend();
        let (title, mut legend) = (plot::title_size(&self.title)?, plot::legend_size(&names)?);
        if names.is_empty() {
            legend = (0, 0);
        }
        let width = MARGIN + self.left()? + PLOT + MARGIN + legend.0;
        let height = (self.heights()?.1.unsigned_abs() + BELOW).max(legend.1);
        Ok((width.max(title.0), title.1 + MARGIN + height + MARGIN))
    }

    fn draw(&self, area: &Area) -> anyhow::Result<()> {
        let area = plot::titled(area, &self.title)?;
        let (left, (group_height, bars)) = (self.left()?, self.heights()?);
        let (area, legend) = area.margin(MARGIN, MARGIN, MARGIN, 0).split_horizontally(left + PLOT + MARGIN);
        let (_, height) = area.dim_in_pixel();
        let is_ratio = matches!(self.kind, Kind::Ratios(_));
        let values = (0..self.series.len()).flat_map(|s| self.values(s)).map(|(_, value)| value);
        let highest = values.fold(if is_ratio { 1.0 } else { 0.0 }, f64::max);
        let highest = if highest > 0.0 { highest } else { 1.0 };
        // The vertical axis counts pixels from the top.
        let top_of = |group: usize| group_height * group as i32;
        let middles = (0..self.groups.len()).map(|group| top_of(group) + group_height / 2).collect();
        let label = |y: &i32| self.groups[(y / group_height) as usize].label.clone();
        let mut chart = ChartBuilder::on(&area)
            .margin_right(MARGIN)
            .margin_bottom(height.saturating_sub(bars.unsigned_abs() + BELOW))
            .y_label_area_size(left)
            .x_label_area_size(BELOW)
            // Room for the value behind the longest bar.
            .build_cartesian_2d(
                0.0..if is_ratio { 1.12 } else { 1.2 } * highest,
                (bars..0).with_key_points(middles),
            )?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .bold_line_style(RULE)
            .light_line_style(TRANSPARENT)
            .axis_style(MUTED)
            .set_all_tick_mark_size(4)
            .x_label_style(plot::text(TEXT, MUTED))
            .y_label_style(plot::text(TEXT, INK))
            .axis_desc_style(plot::text(TEXT, MUTED))
            .x_labels(if is_ratio { 7 } else { 5 })
            .x_label_formatter(&|ratio| plot::number(*ratio))
            .y_label_formatter(&label)
            .x_desc(&self.x_label)
            .draw()?;
        let pieces = |index: usize| {
            self.values(index)
                .map(move |(group, value)| (top_of(group) + GAP / 2 + BAR * index as i32, value))
        };
        for (index, name) in self.series.iter().enumerate() {
            let fill = OkabeIto::pick(self.color(index)).filled();
            chart.draw_series(
                pieces(index).map(|(y, value)| Rectangle::new([(0.0, y), (value, y + BAR - 2)], fill)),
            )?;
            if !self.legend().is_empty() {
                plot::legend_row(&legend, index, name, |(x, y)| {
                    Rectangle::new([(x + KEY - 12, y - 6), (x + KEY, y + 6)], fill)
                })?;
            }
        }
        if is_ratio {
            chart.draw_series(DashedLineSeries::new([(1.0, 0), (1.0, bars)], 3, 3, INK.stroke_width(1)))?;
        }
        // Numbers stand on white, so that the line at 1 does not strike them out.
        let style = plot::text(TEXT - 1.0, INK).pos(Pos::new(HPos::Left, VPos::Center));
        for (y, value) in (0..self.series.len()).flat_map(pieces) {
            let digits = if value >= 99.95 { 0 } else { 2 - usize::from(value >= 9.995) };
            let number = format!("{value:.digits$}");
            let right = 5 + i32::try_from(plot::width_of(&number, TEXT - 1.0)?)?;
            let ground = Rectangle::new([(3, -5), (right, 5)], WHITE.filled());
            let at = EmptyElement::at((value, y + BAR / 2 - 1));
            chart.draw_series([at + ground + Text::new(number, (5, 0), style.clone())])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::plot::texts_of;

    fn drawn(groups: &[(&str, [Option<f64>; 2])]) -> String {
        let group = |(label, values): &(&str, [Option<f64>; 2])| Group {
            label: (*label).to_owned(),
            values: values.to_vec(),
        };
        let ratios = Bars {
            title: "what <it> does".to_owned(),
            x_label: "over the first".to_owned(),
            series: vec!["ours".to_owned(), "theirs & others".to_owned()],
            groups: groups.iter().map(group).collect(),
            kind: Kind::Ratios(vec![0, 1]),
            label_room: None,
        };
        plot::sheet("", 1, &[Box::new(ratios)]).unwrap()
    }

    /// Widths of the rectangles of a colour, the legend's key left out.
    fn widths(svg: &str, fill: &str) -> Vec<f64> {
        let document = roxmltree::Document::parse(svg).unwrap();
        let bars = document.descendants().filter(|node| node.attribute("fill") == Some(fill));
        let widths: Vec<f64> = bars.map(|node| node.attribute("width").unwrap().parse().unwrap()).collect();
        widths[..widths.len() - 1].to_vec()
    }

    #[test]
    fn bars_stand_for_values_and_missing_ones_are_left_out() {
        let svg = drawn(&[
            ("a < b", [Some(1.0), Some(2.0)]),
            ("c", [Some(0.5), None]),
            ("d", [None, Some(f64::NAN)]),
        ]);
        let texts = texts_of(&svg);
        let named = ["what <it> does", "over the first", "ours", "theirs & others", "a < b", "c", "d"];
        for text in named.iter().chain(&["1.00", "2.00", "0.50"]) {
            assert_eq!(texts.iter().filter(|drawn| drawn == text).count(), 1, "'{text}' in {texts:?}");
        }
        let (ours, theirs) = (widths(&svg, "#0072B2"), widths(&svg, "#D55E00"));
        assert_eq!((ours.len(), theirs.len()), (2, 1));
        assert!(
            (theirs[0] - 2.0 * ours[0]).abs() <= 2.0 && (ours[0] - 2.0 * ours[1]).abs() <= 2.0,
            "{ours:?} {theirs:?}"
        );
    }

    #[test]
    fn charts_without_values_have_axes() {
        for groups in [&[][..], &[("a", [None, None])]] {
            let svg = drawn(groups);
            assert!(texts_of(&svg).iter().any(|text| text == "over the first"));
            assert!(widths(&svg, "#0072B2").is_empty());
        }
    }
}
