//! The tests of `peers/peers.py`, which are Python: they need neither torch nor a GPU.

use std::path::Path;
use std::process::Command;

#[test]
fn the_helper_asks_refuses_and_calls_as_it_should() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/test_peers.py");
    let Ok(done) = Command::new("python3").arg(&script).output() else {
        eprintln!("note: no python3 here, peers/test_peers.py is not run");
        return;
    };
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}
