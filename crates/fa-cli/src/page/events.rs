//! Steady steps as the emulation went through them.

use std::fmt::Write;

use fa_emu::Emulator;
use fa_emu::steady::{Event, STEPS, Steady, emulate};
use fa_planner::report::{Planned, Tried};

use crate::draw::diagram::escape;
use crate::plan::tried::{Fit, Shape, Shown};
use crate::term::failure::InputError;
use crate::term::progress;

const INTO_STRING: &str = "writing to a string cannot fail";

/// What the lanes show.
pub(crate) const ABOUT: &str = "The same loop as `fa emulate` ran it on a CPU: what was in flight and what \
    warps waited for, with its line in the sources. Lengths are an order of events under one schedule in \
    which operations take a time of the size that they take on a GPU; they are no clocks.";

/// What is said where the emulation was not asked for.
pub(crate) const HOW: &str = "With --emulate the page shows the loop's events by the emulation, too.";

/// Emulated steps of the first choice of each pass: forward and backward.
#[derive(Default)]
pub(crate) struct Emulated {
    /// Of the forward, where there is one.
    pub forward: Option<Steady>,
    /// Of the backward.
    pub backward: Option<Steady>,
}

impl Emulated {
    /// Emulates the first choices; they need a C++ compiler and some seconds.
    ///
    /// # Errors
    /// Where this machine cannot emulate, and for SM100 kernels, whose roles the page has no lanes for.
    pub(crate) fn of(planned: &Planned) -> anyhow::Result<Emulated> {
        let emulator = progress::spinner("compiling the machine", Emulator::new)?;
        let steady = |tried: &Tried| {
            let Some(Fit { shape, name, .. }) = tried.best() else { return Ok(None) };
            let Shape::Kernel(spec) = shape else {
                let why = format!(
                    "--emulate has no lanes for the roles of {name}: leave it out, and use --format spec and \
                     `fa emulate SPEC --report` for its timeline"
                );
                return Err(InputError::Usage(why).into());
            };
            let run = || emulate(&emulator, spec, planned.arch, &planned.problem);
            Ok::<_, anyhow::Error>(progress::spinner("emulating the kernel", run)?)
        };
        let forward = planned.forward.as_ref().map(steady).transpose()?.flatten();
        let backward = planned.backward.as_ref().map(|own| steady(&own.tried)).transpose()?.flatten();
        Ok(Emulated { forward, backward })
    }
}

/// The lanes.
pub(crate) fn steps(steady: &Steady) -> String {
    let mut html = String::from("<div class=\"legend\">");
    for (class, words) in [
        ("load", "copy in flight"),
        ("product", "matrix products in flight"),
        ("add", "addition to device memory"),
        ("wait", "a warp waits"),
    ] {
        if steady.lanes.iter().flat_map(|lane| &lane.events).any(|event| self::class(event) == class) {
            write!(html, "<span><i class=\"{class}\"></i>{words}</span>").expect(INTO_STRING);
        }
    }
    html += "</div>\n";
    let mut before = "";
    for lane in &steady.lanes {
        let name = if lane.name == before { "" } else { &*lane.name };
        before = &lane.name;
        write!(
            html,
            "<div class=\"lane\"><div class=\"rowname\">{}</div><div class=\"track2\">",
            escape(&name.replace("tensor core of warpgroup", "products, warpgroup"))
        )
        .expect(INTO_STRING);
        lane.events.iter().for_each(|event| bar(&mut html, event, steady.length));
        html += "</div></div>\n";
    }
    let ticks: String = (0..=4).map(|tick| format!("<span>{}</span>", steady.length * tick / 4)).collect();
    write!(
        html,
        "<div class=\"ticks\">{ticks}</div>\n<p class=\"note\">{STEPS} steps of the main loop's middle, of \
         CTA 0 on queries x keys {}x{}, in steps of the emulation. Of each warpgroup the first warp is \
         shown; numbers in bars are lines of the sources.{}</p>\n",
        steady.problem.lengths.max_q(),
        steady.problem.lengths.max_k(),
        steady.faults.first().map_or(String::new(), |fault| format!(
            " <b>The emulation found faults in this kernel</b>, the first: {}",
            escape(fault)
        ))
    )
    .expect(INTO_STRING);
    html
}

fn class(event: &Event) -> &'static str {
    match &*event.what {
        _ if event.waits => "wait",
        "wgmma group" => "product",
        "bulk add" => "add",
        _ => "load",
    }
}

fn bar(html: &mut String, event: &Event, length: u64) {
    let share = |steps: u64| 100.0 * steps as f64 / length as f64;
    let verb = if event.waits { "waits for " } else { "" };
    let count =
        if event.waits || event.count == 1 { String::new() } else { format!("{} times ", event.count) };
    let (begin, end) = (event.begin, event.end);
    let tip = format!("{verb}{count}{}: {begin} to {end}, {}", event.what, event.place);
    // `a/b.cuh:126 (f)`: its line.
    let line = event.place.split(' ').next().and_then(|place| place.rsplit(':').next()).unwrap_or("");
    write!(
        html,
        "<span class=\"sp {}\" style=\"left:{:.2}%;width:{:.2}%\" tabindex=\"0\" data-tip=\"{}\"><b \
         class=\"l0\">{}</b></span>",
        class(event),
        share(begin),
        share(end - begin),
        escape(&tip),
        if event.waits { "" } else { line }
    )
    .expect(INTO_STRING);
}
