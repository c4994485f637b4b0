//! The program where the system starts no thread: all work is done by the one that there is.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::common::{Dir, command, repository, text};

/// A user whose processes are limited; the superuser's are not.
const NOBODY: u32 = 65534;

/// Runs a program with no further process or thread allowed to its user.
fn limited(program: &Path, args: &[&str]) -> Output {
    // Shells name the limit differently.
    let limit = "ulimit -u 0 2>/dev/null || ulimit -p 0; exec \"$0\" \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", limit, text(program)]).args(args).stdin(Stdio::null());
    if std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0) {
        command.uid(NOBODY).gid(NOBODY);
    }
    command.output().expect("there is a shell")
}

#[test]
fn without_threads_the_program_computes_the_same() {
    let forks = limited(Path::new("/bin/sh"), &["-c", "/bin/true; echo started"]);
    if String::from_utf8_lossy(&forks.stdout).contains("started") {
        eprintln!("this system does not limit the processes of a user: nothing is tested");
        return;
    }
    let folder = Dir::new();
    let open = |path: &Path| std::fs::set_permissions(path, PermissionsExt::from_mode(0o777)).expect("ours");
    open(folder.root());
    let (program, input) = (folder.path("fa"), folder.path("in.safetensors"));
    std::fs::copy(env!("CARGO_BIN_EXE_fa"), &program).expect("a copy");
    std::fs::copy(repository("examples/minilm-layer0.safetensors"), &input).expect("a copy");
    open(&program);
    open(&input);
    let outputs = ["one", "two", "three"].map(|name| folder.path(name));
    let whole = command(&["run", text(&input), "-o", text(&outputs[0])]).output().expect("it starts");
    assert!(whole.status.success(), "{whole:?}");
    for (line, output) in [(vec![], &outputs[1]), (vec!["--threads", "3"], &outputs[2])] {
        let line = [&["-v", "run", text(&input), "-o", text(output)], &line[..]].concat();
        let alone = limited(&program, &line);
        let said = String::from_utf8_lossy(&alone.stderr);
        assert!(alone.status.success() && said.contains("cannot be started"), "{line:?}: {alone:?}");
        let [same, first] = [output, &outputs[0]].map(|path| std::fs::read(path).expect("written"));
        assert!(same == first, "{line:?}: another result");
    }
    for line in ["plan --headdim 64", "check in one", "bench --seqlen 32", "doctor"] {
        let line = line.replace("in one", &format!("{} {}", text(&input), text(&outputs[0])));
        let alone = limited(&program, &line.split(' ').collect::<Vec<_>>());
        let text = String::from_utf8_lossy(&alone.stderr);
        assert!(!text.contains("panicked") && alone.status.code().is_some(), "{line}: {alone:?}");
        assert!(alone.status.success() || line == "doctor", "{line}: {alone:?}");
    }
}
