//! Steady steps as the emulation went through them.

use std::fmt::Write;

use fa_core::{Kernel, KernelSpec};
use fa_emu::Emulator;
use fa_emu::steady::{Event, STEPS, Steady, emulate};
use fa_planner::kernels::sm100_fwd::{Sm100Tile, account};
use fa_planner::report::{Planned, Tried};

use crate::draw::diagram::escape;
use crate::page::timeline::bar_labels;
use crate::plan::tried::{Fit, Shape, Shown};
use crate::term::progress;

const INTO_STRING: &str = "writing to a string cannot fail";

/// What the lanes show.
pub(crate) const ABOUT: &str = "The same loop as fa emulate ran it on a CPU: what was in flight and what \
    warps waited for, with its line in the sources. Lengths are an order of events under one schedule in \
    which operations take a time of the size that they take on a GPU; they are no clocks.";

/// What is said where the emulation was not asked for.
pub(crate) const HOW: &str = "With --emulate the page shows the loop's events by the emulation, too.";

/// A kernel's steps.
pub(crate) struct Loop {
    spec: KernelSpec,
    steady: Steady,
}

/// Emulated steps of the first choice of each pass; nothing where its loop is too short.
#[derive(Default)]
pub(crate) struct Emulated {
    /// Of the forward.
    pub forward: Option<Loop>,
    /// Of the backward.
    pub backward: Option<Loop>,
}

impl Emulated {
    /// Emulates the first choices; they need a C++ compiler and some seconds.
    ///
    /// # Errors
    /// Where this machine cannot emulate.
    pub(crate) fn of(planned: &Planned) -> anyhow::Result<Emulated> {
        let emulator = progress::spinner("compiling the machine", Emulator::new)?;
        let steady = |tried: &Tried| -> anyhow::Result<Option<Loop>> {
            let Some(Fit { shape, .. }) = tried.best() else { return Ok(None) };
            let spec = match shape {
                Shape::Kernel(spec) => spec,
                Shape::Sm100(plan) => &plan.spec,
            };
            let run = || emulate(&emulator, spec, planned.arch, &planned.problem);
            let steady = progress::spinner("emulating the kernel", run)?;
            Ok(steady.map(|steady| Loop { spec: spec.clone(), steady }))
        };
        let forward = planned.forward.as_ref().map(steady).transpose()?.flatten();
        let backward = planned.backward.as_ref().map(|own| steady(&own.tried)).transpose()?.flatten();
        Ok(Emulated { forward, backward })
    }
}

/// The lanes.
pub(crate) fn steps(Loop { spec, steady }: &Loop) -> String {
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
    html += "</div>\n<div class=\"scroll\" tabindex=\"0\"><div class=\"lanes\">\n";
    let mut before = "";
    for lane in &steady.lanes {
        let name = if lane.name == before { "" } else { &*lane.name };
        before = &lane.name;
        write!(
            html,
            "<div class=\"lane\"><div class=\"rowname\">{}</div><div class=\"track2\">",
            escape(&title(name, spec))
        )
        .expect(INTO_STRING);
        lane.events.iter().for_each(|event| bar(&mut html, event, steady.length));
        html += "</div></div>\n";
    }
    let ticks: String = (0..=4).map(|tick| format!("<span>{}</span>", steady.length * tick / 4)).collect();
    write!(
        html,
        "<div class=\"ticks\">{ticks}</div>\n</div></div>\n<p class=\"note\">{STEPS} steps of the \
         main loop's \
         middle, of \
         CTA 0 on queries x keys {}x{}, in steps of the emulation. Of each warpgroup the first warp is \
         shown; bars name the line of the sources that issued them, or what is waited for.{}</p>\n",
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

/// A lane's name; of a warp with its role, where warps have roles. Warpgroups that multiply are counted from
/// 0, as in the other drawing: the producer's is none of them.
fn title(name: &str, spec: &KernelSpec) -> String {
    let number = |prefix: &str| name.strip_prefix(prefix).and_then(|rest| rest.parse::<u32>().ok());
    if let Some(warpgroup) = number("tensor core of warpgroup ") {
        return format!("products, warpgroup {}", warpgroup.saturating_sub(1));
    }
    match number("warp ").and_then(|warp| role(spec, warp)) {
        Some(role) => format!("{name}, {role}"),
        None => name.to_owned(),
    }
}

/// What a warp is for, in kernels whose warps have roles.
fn role(spec: &KernelSpec, warp: u32) -> Option<String> {
    match &spec.kernel {
        Kernel::Sm90Fwd(_) | Kernel::Sm90FwdFp8(_) | Kernel::Sm90Wide(_) | Kernel::Sm90Bwd(_) if warp < 4 => {
            Some("producer".to_owned())
        }
        Kernel::Sm90Wide(_) => Some(if warp < 8 { "leader" } else { "follower" }.to_owned()),
        Kernel::Sm90Fwd(_) | Kernel::Sm90FwdFp8(_) | Kernel::Sm90Bwd(_) => {
            Some(format!("warpgroup {}", warp / 4 - 1))
        }
        Kernel::Sm100Fwd(own) => {
            let mut end = 0;
            let roles = account::roles(&Sm100Tile::of(spec, own));
            let role = roles.into_iter().find(|role| {
                end += role.warps;
                warp < end
            });
            role.map(|role| role.name.to_owned())
        }
        Kernel::Sm80Fwd(_) | Kernel::Sm80Bwd(_) => None,
    }
}

fn class(event: &Event) -> &'static str {
    match &*event.what {
        _ if event.waits => "wait",
        "wgmma group" | "tcgen05.mma" => "product",
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
    // `a/b.cuh:126 (f)`: its line, and with its file.
    let place = event.place.split(' ').next().unwrap_or("");
    let (file, line) = (place.rsplit('/').next().unwrap_or(""), place.rsplit(':').next().unwrap_or(""));
    let labels = if event.waits { bar_labels(&[&event.what]) } else { bar_labels(&[line, file]) };
    write!(
        html,
        "<span class=\"sp {}\" style=\"left:{:.2}%;width:{:.2}%\" tabindex=\"0\" \
         data-tip=\"{}\">{labels}</span>",
        class(event),
        share(begin),
        share(end - begin),
        escape(&tip),
    )
    .expect(INTO_STRING);
}
