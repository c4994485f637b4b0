//! On a signal to stop, the program leaves no half-written file behind, and ends by that signal.

/// Removes unfinished files on SIGINT, SIGTERM and SIGHUP, then lets the signal end the program. Where files
/// are written without a name there is nothing to remove.
#[cfg(unix)]
pub(crate) fn clean_up_when_told_to() {
    use fa_attn::atomic_file;
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    use signal_hook::iterator::Signals;
    use signal_hook::low_level::emulate_default_handler;

    let wait = || {
        let ignored = ignored_signals();
        let asked = [SIGHUP, SIGINT, SIGTERM].into_iter().filter(|&signal| ignored >> (signal - 1) & 1 == 0);
        let Ok(mut signals) = Signals::new(asked) else { return };
        if let Some(signal) = signals.forever().next() {
            atomic_file::remove_unfinished();
            let _ = emulate_default_handler(signal);
        }
    };
    // Without the thread, signals keep their default action.
    let _ = std::thread::Builder::new().name("signals".to_owned()).spawn(wait);
}

/// Signals that the parent process set to be ignored, as `nohup` does: a bit for each, from 1.
#[cfg(unix)]
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Other systems give a program that is stopped no chance to clean up.
#[cfg(not(unix))]
pub(crate) fn clean_up_when_told_to() {}
