//! Progress of long work.

/// An event to show to the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The number of steps ahead; replaces what was shown before.
    Total(usize),
    /// The current step.
    Begin(String),
    /// A step is done.
    Done,
    /// A line that a worker process wrote to its standard error.
    Said(String),
}

/// Receives the steps; must be callable from any thread, one call at a time.
pub type Progress<'a> = dyn FnMut(Step) + Send + 'a;
