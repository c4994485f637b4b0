//! How long the first call of a process takes, with an empty cache of kernels and with a filled one.

use std::process::Command;
use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};
use fa_candle::flash_attn;

/// The argument of the process that is timed.
pub(crate) const FLAG: &str = "--first-call";

/// Times the first calls of this process.
pub(crate) fn here(device: &Device) -> Result<()> {
    let x = Tensor::zeros((2, 1024, 16, 128), DType::BF16, device)?;
    device.synchronize()?;
    let mut times = Vec::new();
    for _ in 0..4 {
        let start = Instant::now();
        let out = flash_attn(&x, &x, &x, 0.1, true)?;
        let called = start.elapsed();
        device.synchronize()?;
        times.push(format!("{:.2} ({:.3})", ms(start.elapsed()), ms(called)));
        drop(out);
    }
    println!("{}", times.join(", "));
    Ok(())
}

/// Runs this program twice, with a cache of its own.
pub(crate) fn report() {
    let cache = std::env::temp_dir().join(format!("fa-candle-cache-{}", std::process::id()));
    for state in ["empty", "filled"] {
        let program = std::env::current_exe()
            .map(|program| Command::new(program).arg(FLAG).env("FA_CACHE_DIR", &cache).output());
        match program {
            Ok(Ok(output)) => {
                let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
                println!("first calls in ms, with GPU (host alone), cache {state:6}: {text}");
            }
            Ok(Err(error)) | Err(error) => println!("first call, cache {state}: {error}"),
        }
    }
    // It may not be there.
    drop(std::fs::remove_dir_all(cache));
}

fn ms(time: std::time::Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
