//! Every shipped spec at awkward shapes under three seeds.

use std::sync::Mutex;
use std::time::Instant;

use fa_emu::sweep::{SEEDS, Trials, cases, distinct, sweep};
use fa_kernels::Headers;

use crate::emulator;

#[test]
fn every_shipped_kernel_is_right_and_without_a_finding() {
    let Some(emulator) = emulator("every_shipped_kernel_is_right_and_without_a_finding") else { return };
    let only = std::env::var("FA_EMU_ONLY").unwrap_or_default();
    let headers = Headers::embedded();
    let trials = Trials::default();
    let waiting: Vec<_> = fa_kernels::specs::shipped().expect("they are valid");
    let waiting =
        Mutex::new(waiting.into_iter().filter(|file| file.path.contains(&only)).collect::<Vec<_>>());
    let faults = Mutex::new(Vec::new());
    let workers = std::thread::available_parallelism().map_or(1, |count| count.get());
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let Some(file) = waiting.lock().unwrap().pop() else { break };
                    for arch in distinct(&file.shipped.archs) {
                        let started = Instant::now();
                        let unit = emulator.unit(&file.shipped.spec, arch, &headers).unwrap();
                        let compiled = started.elapsed();
                        let verdict = sweep(&unit, &cases(unit.spec()), &SEEDS, &trials).unwrap();
                        eprintln!(
                            "{} {arch}: {} runs in {:.1?}, compiled in {compiled:.1?}",
                            file.path,
                            verdict.runs,
                            started.elapsed() - compiled
                        );
                        for fault in verdict.faults {
                            faults.lock().unwrap().push(format!("{} on {arch}: {fault}", file.path));
                        }
                    }
                }
            });
        }
    });
    let faults = faults.into_inner().unwrap();
    assert!(faults.is_empty(), "{}", faults.join("\n\n"));
}
