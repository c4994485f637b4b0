//! The timeline of one CTA as a page: a lane for each warp, TMA and each warpgroup's tensor
//! core, over emulated steps.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::outcome::{Outcome, Span};
use crate::steady::order;

const STYLE: &str = "
:root { color-scheme: light dark; --ink: #1f2430; --soft: #5b6372; --paper: #ffffff; --line: #d8dce3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ec; --soft: #9aa3b2; --paper: #171a21; --line: \
#333945; } }
body { margin: 0; padding: 24px; background: var(--paper); color: var(--ink); font: 14px/1.5 system-ui, \
sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } p { margin: 0 0 12px; color: var(--soft); max-width: 90ch; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; padding: 8px; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } svg .grid { stroke: var(--line); }
.key span { display: inline-block; margin-right: 16px; } .key i { display: inline-block; width: 12px; \
height: 12px; margin-right: 5px; border-radius: 2px; }
pre { white-space: pre-wrap; border: 1px solid var(--line); border-radius: 8px; padding: 12px; }
";

/// Width of the picture, and of the names left of it.
const WIDTH: f64 = 1800.0;
const NAMES: f64 = 190.0;
const ROW: f64 = 22.0;
/// Rows of operations in flight at once, per track.
const DEPTH: usize = 6;

/// Kinds of spans, with colour and description.
const KINDS: [(&str, &str, &str); 7] = [
    ("mbarrier", "#e8a33d", "waits for an mbarrier"),
    ("bar.", "#c85b7d", "waits for a named barrier"),
    ("wgmma", "#3f7fca", "wgmma: in flight, or waited for"),
    ("tcgen05", "#2c5f99", "tcgen05: in flight, or waited for"),
    ("TMA", "#3aa676", "TMA box in flight"),
    ("bulk", "#7a6bd1", "bulk copy or addition"),
    ("", "#8d97a8", "other waits"),
];

/// The colour of waits that never end.
const STUCK: &str = "#d02020";

fn kind(what: &str) -> usize {
    KINDS.iter().position(|(mark, ..)| what.contains(mark)).unwrap_or(KINDS.len() - 1)
}

/// The end of a wait's name where it was not over when the emulation stopped.
const NEVER_ENDS: &str = "never ends";

/// What of the outcome the head says.
fn verdict(outcome: &Outcome) -> String {
    let unfinished = outcome.spans.iter().filter(|span| span.what.ends_with(NEVER_ENDS)).count();
    let waits = match unfinished {
        0 => String::new(),
        1 => "; 1 wait of this CTA never ends".to_owned(),
        many => format!("; {many} waits of this CTA never end"),
    };
    match outcome.findings.len() {
        0 => format!("Nothing was found{waits}."),
        1 => format!("1 finding{waits}."),
        many => format!("{many} findings{waits}."),
    }
}

/// A page for an outcome whose CTA `cta` was traced. `title` and the paragraphs of `lead` are text.
pub fn page(title: &str, lead: &[String], cta: u32, outcome: &Outcome) -> String {
    let spans: Vec<&Span> = outcome.spans.iter().filter(|span| span.end > span.begin).collect();
    let mut body = format!(
        "<h1>{}</h1>\n<p><b>{}</b></p>\n{}<p>CTA {cta} over emulated steps: a step is a warp that goes \
         on to its next \
         wait, or an operation that finishes. Lengths are an order of events, no times.</p>\n<p \
         class=\"key\">",
        escape(title),
        verdict(outcome),
        lead.iter().map(|lead| format!("<p>{}</p>\n", escape(lead))).collect::<String>()
    );
    for (_, colour, words) in KINDS {
        let _ = write!(body, "<span><i style=\"background: {colour}\"></i>{words}</span>");
    }
    let _ = write!(body, "<span><i style=\"background: {STUCK}\"></i>a wait that never ends</span>");
    body.push_str("</p>\n");
    if spans.is_empty() {
        body.push_str("<p>Nothing of this CTA took longer than a step.</p>\n");
    } else {
        body.push_str(&picture(&spans));
    }
    for finding in &outcome.findings {
        let _ = writeln!(body, "<pre>{}</pre>", escape(&finding.to_string()));
    }
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta \
         name=\"viewport\" \
         content=\"width=device-width, initial-scale=1\">\n<title>{}</title>\n<style>{STYLE}</style>\n\
         </head>\n<body>\n{body}</body>\n</html>\n",
        escape(title)
    )
}

fn picture(spans: &[&Span]) -> String {
    let begin = spans.iter().map(|span| span.begin).min().unwrap_or(0);
    let end = spans.iter().map(|span| span.end).max().unwrap_or(1);
    let scale = WIDTH / (end - begin).max(1) as f64;
    let mut tracks: BTreeMap<(u8, u32, &str), Vec<&Span>> = BTreeMap::new();
    for &span in spans {
        let (group, number) = order(&span.track);
        tracks.entry((group, number, &span.track)).or_default().push(span);
    }
    let mut svg = String::new();
    let mut y = 24.0;
    for ((_, _, name), mut own) in tracks {
        own.sort_by_key(|span| span.begin);
        // Operations in flight at the same time are in rows below each other.
        let mut free = [0u64; DEPTH];
        let mut rows = 1;
        let mut bars = String::new();
        for span in own {
            let row = (0..DEPTH).find(|&row| free[row] <= span.begin).unwrap_or(DEPTH - 1);
            free[row] = span.end;
            rows = rows.max(row + 1);
            let (x, width) =
                ((span.begin - begin) as f64 * scale, ((span.end - span.begin) as f64 * scale).max(0.7));
            let place =
                span.stack.first().map_or(String::new(), |frame| format!("\n{frame} ({})", frame.function));
            let _ = writeln!(
                bars,
                "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"{:.1}\" rx=\"2\" \
                 fill=\"{}\"><title>{}: {} to {}{}</title></rect>",
                NAMES + x,
                y + row as f64 * ROW * 0.55,
                ROW * 0.5,
                if span.what.ends_with(NEVER_ENDS) { STUCK } else { KINDS[kind(&span.what)].1 },
                escape(&span.what),
                span.begin,
                span.end,
                escape(&place)
            );
        }
        let height = (rows as f64 * 0.55 * ROW).max(ROW);
        let _ = writeln!(svg, "<text x=\"4\" y=\"{:.1}\">{}</text>", y + 11.0, escape(name));
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"0\" x2=\"{:.0}\" y1=\"{:.1}\" y2=\"{:.1}\"/>",
            NAMES + WIDTH,
            y + height,
            y + height
        );
        svg.push_str(&bars);
        y += height + 4.0;
    }
    for tick in 0..=8u64 {
        let step = begin + (end - begin) * tick / 8;
        let x = NAMES + (step - begin) as f64 * scale;
        let _ = writeln!(
            svg,
            "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"18\" y2=\"{y:.1}\"/><text x=\"{x:.1}\" \
             y=\"13\">{step}</text>"
        );
    }
    format!(
        "<div class=\"scroll\" tabindex=\"0\"><svg width=\"{:.0}\" height=\"{:.0}\" \
         xmlns=\"http://www.w3.org/2000/svg\">\n{svg}</svg></div>\n",
        NAMES + WIDTH + 60.0,
        y + 8.0
    )
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_a_bar_for_every_span_and_says_where() {
        let span = |track: &str, what: &str, begin, end| Span {
            track: track.into(),
            what: what.into(),
            begin,
            end,
            stack: vec![crate::outcome::Frame { function: "f<T>".into(), file: "a.cuh".into(), line: 7 }],
        };
        let outcome = Outcome {
            findings: Vec::new(),
            launches: Vec::new(),
            spans: vec![
                span("warp 4", "mbarrier.try_wait", 3, 9),
                span("TMA", "TMA box", 1, 5),
                span("TMA", "TMA box", 2, 6),
                span("warp 0", "nothing", 4, 4),
                span("warp 5", "mbarrier.try_wait, which never ends", 6, 20),
            ],
            outputs: Vec::new(),
            dsinks: Vec::new(),
            darrays: Vec::new(),
            plan: Vec::new(),
            page_faults: 0,
            lse: Vec::new(),
        };
        let page = page("t", &["fa emulate <x>".to_owned()], 0, &outcome);
        assert_eq!(page.matches("<rect").count(), 4);
        assert_eq!(page.matches("fill=\"#d02020\"").count(), 1);
        assert!(page.contains("<p>fa emulate &lt;x&gt;</p>"));
        assert!(page.contains("mbarrier.try_wait: 3 to 9\na.cuh:7 (f&lt;T&gt;)"));
        assert!(page.find(">TMA</text>").unwrap() < page.find(">warp 4</text>").unwrap());
        assert!(page.contains("<b>Nothing was found; 1 wait of this CTA never ends.</b>"));
    }
}
