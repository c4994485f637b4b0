//! A timeline as data: actors and what they do.

use serde::Serialize;

/// What a span is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Activity {
    /// A copy to shared memory.
    Load,
    /// A product on the tensor cores.
    Product,
    /// Softmax, or the gradients of the scores.
    Softmax,
    /// An addition to device memory.
    Add,
    /// Barriers, shuffles and latency that nothing hides.
    Exposed,
    /// Waiting.
    Wait,
}

/// Something that takes time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Span {
    /// What it is.
    pub activity: Activity,
    /// In a word, with the step that it belongs to: `S 0`, `P V -1`. Of a wait, what ends it.
    pub label: String,
    /// First clock, from the beginning of what is shown.
    pub begin: f64,
    /// Clock after the last.
    pub end: f64,
}

/// What one actor does.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Lane {
    /// The actor: `producer`, `warpgroup 0`.
    pub name: String,
    /// In order of time, waits included.
    pub spans: Vec<Span>,
    /// Share of the time that it does not wait.
    pub busy: f64,
}

/// Two steady steps of one SM.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Timeline {
    /// The actors.
    pub lanes: Vec<Lane>,
    /// Clocks that are shown.
    pub clocks: f64,
    /// Clocks of a step in this order.
    pub step: f64,
    /// Clocks of a step by the calibrated model.
    pub predicted: f64,
    /// Share of a step that the tensor cores are busy in this order.
    pub tensor_busy: f64,
}
