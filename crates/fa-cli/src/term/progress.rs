//! Progress on standard error for what takes over a second: a bar on a terminal, elsewhere a line every half
//! minute.

use std::io::IsTerminal;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use fa_lab::Step;
use indicatif::{ProgressBar, ProgressStyle};

/// Work that ends sooner shows nothing.
const PATIENCE: Duration = Duration::from_secs(1);

/// A log gets no more than a line in this time.
const LINE: Duration = Duration::from_secs(30);

/// Runs `work`, with a spinner and a clock once it has taken over a second.
pub(crate) fn spinner<R>(message: &'static str, work: impl FnOnce() -> R) -> R {
    if !std::io::stderr().is_terminal() {
        return work();
    }
    std::thread::scope(|scope| {
        let (done, finished) = mpsc::channel::<()>();
        let show = move || {
            if finished.recv_timeout(PATIENCE) != Err(mpsc::RecvTimeoutError::Timeout) {
                return;
            }
            let bar = ProgressBar::new_spinner().with_message(message).with_elapsed(PATIENCE);
            bar.set_style(style("{spinner} {msg} {elapsed}"));
            bar.enable_steady_tick(Duration::from_millis(100));
            // Ends when the sender is dropped, also by a panic of the work.
            let _ = finished.recv();
            bar.finish_and_clear();
        };
        // Without a thread nothing is shown.
        let _ = std::thread::Builder::new().spawn_scoped(scope, show);
        let result = work();
        drop(done);
        result
    })
}

/// A bar over a known number of steps.
#[derive(Debug)]
pub(crate) struct Steps {
    bar: ProgressBar,
    started: Instant,
    said: Instant,
    done: u64,
}

impl Steps {
    /// A bar of `len` steps, not shown yet.
    pub(crate) fn new(len: usize) -> Steps {
        let bar = ProgressBar::with_draw_target(Some(len as u64), indicatif::ProgressDrawTarget::hidden());
        bar.set_style(style("{bar:30} {pos}/{len} {msg} (left: {eta})"));
        let started = Instant::now();
        Steps { bar, started, said: started, done: 0 }
    }

    /// Shows the name of the current step.
    pub(crate) fn begin(&mut self, message: String) {
        if self.started.elapsed() > PATIENCE && self.bar.is_hidden() && std::io::stderr().is_terminal() {
            self.bar.set_draw_target(indicatif::ProgressDrawTarget::stderr());
        }
        if let Some(line) = self.line(&message)
            && !std::io::stderr().is_terminal()
        {
            eprintln!("{line}");
        }
        self.bar.set_message(message);
        self.bar.set_position(self.done);
    }

    /// The line for a log when the next step is `message`, if it is time for one.
    fn line(&mut self, message: &str) -> Option<String> {
        if self.said.elapsed() < LINE {
            return None;
        }
        self.said = Instant::now();
        let (done, len, seconds) = (self.done, self.bar.length()?, self.started.elapsed().as_secs());
        Some(format!("{done} of {len} done in {seconds} s; next: {message}"))
    }

    /// One step is done.
    pub(crate) fn advance(&mut self) {
        self.done += 1;
        self.bar.set_position(self.done);
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Shows the steps of the lab's work, and messages of its workers.
pub(crate) fn steps() -> impl FnMut(Step) + Send {
    let mut steps: Option<Steps> = None;
    move |step| match (step, &mut steps) {
        (Step::Total(len), steps) => *steps = Some(Steps::new(len)),
        (Step::Begin(message), Some(steps)) => steps.begin(message),
        (Step::Done, Some(steps)) => steps.advance(),
        (Step::Begin(_) | Step::Done, None) => {}
        (Step::Said(line), _) => eprintln!("{line}"),
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the templates here are constants")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_gets_a_line_when_its_time_has_come() {
        let mut steps = Steps::new(9);
        assert_eq!(steps.line("first"), None);
        steps.advance();
        let Some(earlier) = Instant::now().checked_sub(LINE) else { return };
        (steps.started, steps.said) = (earlier, earlier);
        assert_eq!(
            steps.line("second").unwrap(),
            format!("1 of 9 done in {} s; next: second", LINE.as_secs())
        );
        assert_eq!(steps.line("third"), None);
    }
}
