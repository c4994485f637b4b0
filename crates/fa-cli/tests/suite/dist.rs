//! `fa dist` where there is no GPU: threads on the CPU, and what is refused.

use crate::common::fa;

#[test]
fn ranks_in_memory_are_right_equal_and_told_of_ends() {
    for (line, parts) in [
        ("--ranks 3 --repeat 5 --quick", &["5 equal runs", "ends at each of 6 exchanges of ring"][..]),
        ("--ranks 2", &["gather   bits of one: true", "decode", "203 4:2"]),
        ("--ranks 1 --quick", &["ulysses  bits of one: true"]),
        ("--ranks 3 --only packed", &["causal packed sinks  ring", "dsinks", "full packed          ring"]),
        ("--ranks 2 --only program", &["full program         gather", "causal program dlse  ulysses"]),
        ("--ranks 4 --only decode", &["1x70 8:4 causal paged", "3x70 8:4 full in-use sinks"]),
        ("--ranks 17 --quick", &["ring     bits of one: false", "ends at each of 48 exchanges of ring"]),
    ] {
        let text = fa(&format!("dist check --transport memory {line}")).good();
        assert!(!text.contains("FAIL") && parts.iter().all(|part| text.contains(part)), "{line}: {text}");
    }
    let text = fa("dist check --transport memory --quick --json").good();
    let answers: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
    assert_eq!(answers.len(), 2 * 4);
    assert!(answers.iter().all(|own| own["error"].is_null() && own["differs"].is_null()), "{text}");
}

#[test]
fn what_several_gpus_need_is_said_at_once() {
    for (line, part) in [
        ("dist check --ranks 64", "--ranks 64: "),
        ("dist check --ranks 64 --transport network", "by --transport memory"),
        ("dist bench --ranks 64", "use as many ranks"),
    ] {
        let done = fa(line);
        assert!(done.code == 1 && done.stdout.is_empty() && done.stderr.contains(part), "{line}: {done:?}");
        assert_eq!(done.stderr.lines().count(), 1, "{line}: {}", done.stderr);
    }
    for (line, part) in [
        ("dist bench --transport memory", "measure nccl, copies or network"),
        ("dist check --transport memory --only flex", "no shape has it, use one of "),
        ("dist check --repeat 1", "use 2 to 100000"),
        ("dist check --transport pigeon", "auto, nccl, copies, network, memory"),
    ] {
        let done = fa(line);
        assert!(done.code == 2 && done.stderr.contains(part), "{line}: {done:?}");
    }
}
