//! Resolves addresses in a unit to lines of the kernel's source, inlined calls included, by addr2line of
//! binutils.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use crate::outcome::Frame;

/// Frames by address, innermost first.
pub(crate) type Symbols = BTreeMap<u64, Vec<Frame>>;

/// Addresses per call of addr2line.
const AT_ONCE: usize = 500;

/// Resolves addresses of the library at `unit`. Without an addr2line, frames are the addresses.
pub(crate) fn resolve(unit: &Path, addresses: impl Iterator<Item = u64>) -> Symbols {
    let mut symbols: Symbols = addresses.map(|address| (address, Vec::new())).collect();
    let all: Vec<u64> = symbols.keys().copied().collect();
    for some in all.chunks(AT_ONCE) {
        let output = Command::new("addr2line")
            .args(["-a", "-f", "-i", "-C", "-e"])
            .arg(unit)
            .args(some.iter().map(|address| format!("{address:#x}")))
            .output();
        match output {
            Ok(output) if output.status.success() => {
                parse(&String::from_utf8_lossy(&output.stdout), &mut symbols);
            }
            _ => tracing::warn!("addr2line of the binutils is not here: places are addresses"),
        }
    }
    for (address, frames) in &mut symbols {
        if frames.is_empty() {
            frames.push(Frame { function: "?".into(), file: format!("unit+{address:#x}"), line: 0 });
        }
    }
    symbols
}

/// Blocks of an address and, for each frame, a function and a place.
fn parse(text: &str, symbols: &mut Symbols) {
    let mut lines = text.lines().peekable();
    let is_address = |line: &str| line.starts_with("0x");
    while let Some(line) = lines.next() {
        let Some(address) = line.strip_prefix("0x").and_then(|hex| u64::from_str_radix(hex, 16).ok()) else {
            continue;
        };
        let mut frames = Vec::new();
        while let Some(function) = lines.next_if(|line| !is_address(line)) {
            let Some(place) = lines.next() else { break };
            let place = place.split(" (discriminator").next().unwrap_or(place);
            let (file, line) = place.rsplit_once(':').unwrap_or((place, "0"));
            if file == "??" {
                continue;
            }
            let file = file.trim_start_matches(['.', '/']);
            frames.push(Frame {
                function: short(function),
                file: file.to_owned(),
                line: line.parse().unwrap_or(0),
            });
        }
        symbols.insert(address, frames);
    }
}

/// `fa::sm90::consume<...>(...)::{lambda()#2}::operator()() const` to `sm90::consume::{lambda}`.
fn short(function: &str) -> String {
    let mut out = String::new();
    let mut depth = 0usize;
    for c in function.replace("operator()", "").replace("->", "").chars() {
        match c {
            '<' | '(' => depth += 1,
            '>' | ')' => depth = depth.saturating_sub(1),
            _ if depth == 0 => out.push(c),
            _ => {}
        }
    }
    let out = out.replace(" const", "").replace("fa::", "");
    // A return type may precede it.
    let out = out.trim().trim_end_matches("::");
    out.rsplit(' ').next().unwrap_or(out).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_and_frames_inlined() {
        let mut symbols = Symbols::from([(0x1234, Vec::new()), (0x10, Vec::new())]);
        let text = "0x0000000000000010\n??\n??:0\n0x0000000000001234\n\
                    void fa::wgmma::wait<0>()\n/./ptx/wgmma.cuh:12 (discriminator 2)\n\
                    void fa::sm90::consume<fa::Sm90FwdConfig{(fa::Dtype)2}>(int)::{lambda()#1}::operator()() \
                    const\n\
                    /./sm90/fwd.cuh:345\n";
        parse(text, &mut symbols);
        assert!(symbols[&0x10].is_empty());
        let frames: Vec<String> =
            symbols[&0x1234].iter().map(|frame| format!("{frame} {}", frame.function)).collect();
        assert_eq!(frames[0], "ptx/wgmma.cuh:12 wgmma::wait");
        assert!(frames[1].starts_with("sm90/fwd.cuh:345 sm90::consume"), "{}", frames[1]);
    }
}
