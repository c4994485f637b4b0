//! What long work says while it runs.

/// Something to show to a person who waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// So many steps lie ahead; whatever was shown before is replaced.
    Total(usize),
    /// The step under way.
    Begin(String),
    /// A step is done.
    Done,
    /// A line that a worker process wrote to its standard error.
    Said(String),
}

/// Takes the steps; must be callable from any thread, though one at a time.
pub type Progress<'a> = dyn FnMut(Step) + Send + 'a;
