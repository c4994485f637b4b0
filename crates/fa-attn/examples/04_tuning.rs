//! Tuning: the first call of a problem has the planner's best kernel; a few candidates are measured in the
//! background, and the winner is kept on disk for all programs. Needs a GPU.
//!
//! ```text
//! cargo run --release -p fa-attn --example 04_tuning
//! ```

use fa_attn::{Dtype, Engine, Error, Mask, Pass, Problem, Tuning};

fn main() -> Result<(), Error> {
    let engine = Engine::new()?;
    if engine.gpu().is_none() {
        println!("no GPU here: there is nothing to tune");
        return Ok(());
    }
    engine.set_tuning(Tuning::ON_FIRST_USE)?;
    let problem = Problem::square(2, 4096, 16, 128, Mask::CAUSAL, Dtype::Bf16);
    println!("{}", engine.bind(&problem, Pass::Forward)?.report().text());
    // A program goes on computing; this one waits to show what was measured.
    for outcome in engine.finish_tuning() {
        for tried in &outcome.tried {
            let ms = tried.ms.map_or_else(|| "-".to_owned(), |ms| format!("{ms:.3} ms"));
            println!("{ms:>10}  {}  {}", tried.spec, tried.error.as_deref().unwrap_or_default());
        }
        match (&outcome.winner, &outcome.error) {
            (Some(winner), _) => println!("kept: {winner}"),
            (None, Some(error)) => println!("nothing kept: {error}"),
            (None, None) => println!("nothing was faster than the first choice"),
        }
    }
    println!("{}", engine.bind(&problem, Pass::Forward)?.report().text());
    Ok(())
}
