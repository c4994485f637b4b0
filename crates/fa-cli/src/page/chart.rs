//! Charts of a page: lines over an axis of powers of two or ten, readable on a phone and in the dark. What a
//! pointer shows, focus shows too.

use std::fmt::Write;

use crate::draw::diagram::escape;

const INTO_STRING: &str = "writing to a string cannot fail";
/// The drawing, and the plot in it.
const SIZE: (f64, f64) = (430.0, 280.0);
const LEFT: f64 = 48.0;
const RIGHT: f64 = 27.0;
const TOP: f64 = 24.0;
const BOTTOM: f64 = 40.0;

/// An axis.
pub(crate) struct Axis {
    /// What it counts, with the unit.
    pub label: String,
    pub low: f64,
    pub high: f64,
    pub log: bool,
    /// Places of ticks and their texts.
    pub ticks: Vec<(f64, String)>,
}

impl Axis {
    /// From `low` to `high` in powers of `base`.
    pub(crate) fn log(label: &str, low: f64, high: f64, base: f64) -> Axis {
        let (first, last) = (low.log(base).floor(), high.log(base).ceil().max(low.log(base).floor() + 1.0));
        let every = ((last - first) / 8.0).ceil().max(1.0);
        let ticks = (0..)
            .map(|i| first + every * f64::from(i))
            .take_while(|power| *power <= last)
            .map(|power| (base.powf(power), short(base.powf(power))))
            .collect();
        Axis { label: label.to_owned(), low: base.powf(first), high: base.powf(last), log: true, ticks }
    }

    /// From zero to a round number above `high`.
    pub(crate) fn linear(label: &str, high: f64) -> Axis {
        let high = if high > 0.0 { high } else { 1.0 };
        let decade = 10f64.powf((high / 5.0).log10().floor());
        let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * decade);
        let step = steps.into_iter().find(|step| high / step <= 5.5).unwrap_or(high);
        let count = (high / step).ceil();
        let ticks = (0..=count as u32).map(|i| (f64::from(i) * step, short(f64::from(i) * step))).collect();
        Axis { label: label.to_owned(), low: 0.0, high: count * step, log: false, ticks }
    }

    fn share(&self, value: f64) -> f64 {
        let share = if self.log {
            (value / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        share.clamp(0.0, 1.0)
    }
}

/// `16k` for 16384, `0.5`, `1000`, `1e-6`.
fn short(value: f64) -> String {
    if value >= 1024.0 && value % 1024.0 == 0.0 {
        return format!("{}k", value / 1024.0);
    }
    if value != 0.0 && value.abs() < 1e-3 {
        return format!("{value:.0e}");
    }
    ((value * 1e6).round() / 1e6).to_string()
}

/// A line with marks, or either.
pub(crate) struct Line {
    pub name: String,
    /// 0 to 3.
    pub color: usize,
    pub dashed: bool,
    /// Whether its marks are joined, and whether they are filled.
    pub joined: bool,
    pub full: bool,
    /// Places and what to say of them.
    pub points: Vec<(f64, f64, String)>,
}

/// A limit: a polyline without marks, with its name.
pub(crate) struct Roof {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// The chart with its legend.
pub(crate) fn chart(label: &str, x: &Axis, y: &Axis, roofs: &[Roof], lines: &[Line]) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n",
        SIZE.0,
        SIZE.1,
        escape(label)
    );
    let plot = Plot { x, y };
    plot.axes(&mut svg);
    for roof in roofs {
        plot.roof(&mut svg, roof);
    }
    let mut legend = String::new();
    for line in lines.iter().filter(|line| !line.points.is_empty()) {
        plot.line(&mut svg, line);
        // As its marks are: a line, or a dot.
        let sample = if line.joined { "stroke" } else { "dot" };
        let (color, dashed) = line.classes();
        write!(legend, "<span><i class=\"{sample} {color}{dashed}\"></i>{}</span>", escape(&line.name))
            .expect(INTO_STRING);
    }
    format!("{svg}</svg>\n<div class=\"legend\">{legend}</div>\n")
}

impl Line {
    /// Its colour and its dashes, as classes.
    fn classes(&self) -> (String, &'static str) {
        (format!("c{}", self.color % 4), if self.dashed { " dashed" } else { "" })
    }
}

/// The drawing's axes, between which its parts are drawn.
struct Plot<'a> {
    x: &'a Axis,
    y: &'a Axis,
}

impl Plot<'_> {
    fn place(&self, (x, y): (f64, f64)) -> (f64, f64) {
        let at_x = LEFT + (SIZE.0 - LEFT - RIGHT) * self.x.share(x);
        let at_y = TOP + (SIZE.1 - TOP - BOTTOM) * (1.0 - self.y.share(y));
        (at_x, at_y)
    }

    fn path(&self, points: impl Iterator<Item = (f64, f64)>) -> String {
        let places = points.map(|point| self.place(point));
        places.map(|(x, y)| format!("{x:.1},{y:.1}")).collect::<Vec<_>>().join(" ")
    }

    fn axes(&self, svg: &mut String) {
        let (left, right, bottom) = (LEFT, SIZE.0 - RIGHT, SIZE.1 - BOTTOM);
        for (at, text) in &self.y.ticks {
            let (_, py) = self.place((self.x.low, *at));
            write!(
                svg,
                "<line class=\"rule\" x1=\"{left}\" x2=\"{right:.1}\" y1=\"{py:.1}\" y2=\"{py:.1}\"/><text \
                 class=\"muted\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
                left - 6.0,
                py + 4.0
            )
            .expect(INTO_STRING);
        }
        for (at, text) in &self.x.ticks {
            let (px, _) = self.place((*at, self.y.low));
            write!(
                svg,
                "<line class=\"axis\" x1=\"{px:.1}\" x2=\"{px:.1}\" y1=\"{bottom}\" y2=\"{:.1}\"/><text \
                 class=\"muted\" x=\"{px:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{text}</text>",
                bottom + 4.0,
                bottom + 16.0
            )
            .expect(INTO_STRING);
        }
        writeln!(
            svg,
            "<line class=\"axis\" x1=\"{left}\" x2=\"{right:.1}\" y1=\"{bottom}\" y2=\"{bottom}\"/><text \
             class=\"muted\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text><text \
             class=\"muted\" x=\"4\" y=\"13\">{}</text>",
            (left + right) / 2.0,
            SIZE.1 - 6.0,
            escape(&self.x.label),
            escape(&self.y.label)
        )
        .expect(INTO_STRING);
    }

    /// The roof, with its name at its end.
    fn roof(&self, svg: &mut String, roof: &Roof) {
        let (places, name) = (self.path(roof.points.iter().copied()), escape(&roof.name));
        write!(svg, "<polyline class=\"roof\" points=\"{places}\"><title>{name}</title></polyline>")
            .expect(INTO_STRING);
        if let Some(&end) = roof.points.last() {
            let (px, py) = self.place(end);
            writeln!(
                svg,
                "<text class=\"muted\" x=\"{px:.1}\" y=\"{:.1}\" text-anchor=\"end\">{name}</text>",
                py - 4.0
            )
            .expect(INTO_STRING);
        }
    }

    /// The line, and its marks with what they say.
    fn line(&self, svg: &mut String, line: &Line) {
        let (color, dashed) = line.classes();
        if line.joined {
            let places = self.path(line.points.iter().map(|(px, py, _)| (*px, *py)));
            writeln!(svg, "<polyline class=\"line {color}{dashed}\" points=\"{places}\"/>")
                .expect(INTO_STRING);
        }
        let full = if line.full { " full" } else { "" };
        for (px, py, tip) in &line.points {
            let (at_x, at_y) = self.place((*px, *py));
            writeln!(
                svg,
                "<g class=\"pt{full}\" tabindex=\"0\" aria-label=\"{0}\"><circle class=\"hit\" \
                 cx=\"{at_x:.1}\" cy=\"{at_y:.1}\" r=\"11\"/><circle class=\"{color}\" cx=\"{at_x:.1}\" \
                 cy=\"{at_y:.1}\" r=\"3.5\"/><text class=\"tip\" x=\"{1:.1}\" y=\"13\" \
                 text-anchor=\"end\">{0}</text></g>",
                escape(tip),
                SIZE.0 - 4.0
            )
            .expect(INTO_STRING);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_round_numbers() {
        let axis = Axis::linear("y", 989.0);
        assert_eq!((axis.low, axis.high, axis.ticks.len()), (0.0, 1000.0, 6));
        let axis = Axis::log("x", 300.0, 33_000.0, 2.0);
        assert_eq!((axis.low, axis.high), (256.0, 65_536.0));
        assert!(axis.ticks.iter().any(|(_, text)| text == "16k"));
        let single = Axis::log("x", 64.0, 64.0, 2.0);
        assert!(single.high > single.low);
        assert!(Axis::linear("y", 0.0).high > 0.0);
        let wide = Axis::log("y", 1e-6, 1000.0, 10.0);
        assert!(wide.ticks.iter().all(|(_, text)| text.len() <= 5), "{:?}", wide.ticks);
    }
}
