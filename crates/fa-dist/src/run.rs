//! Runs a rank's program: the same steps on the CPU and on a GPU.

use crate::error::Error;
use crate::memory::Random;
use crate::program::{Lane, Op, Piece, Program, Step, View};

/// Does the steps of a rank.
pub(crate) trait Engine {
    /// Before a step: waits for the one that it comes after, where queues run side by side.
    fn before(&mut self, number: usize, step: &Step) -> Result<(), Error>;

    /// Computes, or enqueues, what is not a transfer.
    fn apply(&mut self, number: usize, step: &Step) -> Result<(), Error>;

    /// Sends and receives, all at once.
    fn exchange(&mut self, number: usize, sends: &[Piece], recvs: &[Piece]) -> Result<(), Error>;

    /// After a step: notes that it is done, for those that come after it.
    fn after(&mut self, number: usize, step: &Step) -> Result<(), Error>;
}

/// In which order the steps of two queues are taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// As they are listed.
    #[default]
    Listed,
    /// Any order that the queues and their waits allow, by a seed: what two streams might do.
    Seeded(u64),
}

/// Runs `program`.
pub(crate) fn run(program: &Program, order: Order, engine: &mut impl Engine) -> Result<(), Error> {
    let mut one = |number: usize| -> Result<(), Error> {
        let step = &program.steps[number];
        engine.before(number, step)?;
        match &step.op {
            Op::Exchange { sends, recvs } => {
                engine.exchange(number, &pieces(program, sends), &pieces(program, recvs))?;
            }
            Op::Sum { .. }
            | Op::Nothing { .. }
            | Op::Forward { .. }
            | Op::Backward { .. }
            | Op::Merge { .. }
            | Op::Place { .. } => engine.apply(number, step)?,
        }
        engine.after(number, step)
    };
    match order {
        Order::Listed => (0..program.steps.len()).try_for_each(&mut one),
        Order::Seeded(seed) => seeded(program, seed).into_iter().try_for_each(one),
    }
}

/// An order of the steps that both queues and their waits allow.
fn seeded(program: &Program, seed: u64) -> Vec<usize> {
    let mut random = Random(seed);
    let of = |lane| (0..program.steps.len()).filter(move |&number| program.steps[number].lane == lane);
    let mut queues =
        [Lane::Compute, Lane::Transfer].map(|lane| of(lane).collect::<Vec<_>>().into_iter().peekable());
    let (mut done, mut order) = (vec![false; program.steps.len()], Vec::new());
    while order.len() < done.len() {
        let ready = |queue: &mut std::iter::Peekable<std::vec::IntoIter<usize>>| {
            queue.peek().is_some_and(|&number| program.steps[number].after.is_none_or(|after| done[after]))
        };
        let can = [ready(&mut queues[0]), ready(&mut queues[1])];
        let pick = match can {
            [true, true] => (random.next() % 2) as usize,
            [true, false] => 0,
            // The first step of the list that is not done is always ready.
            [false, _] => 1,
        };
        let Some(number) = queues[pick].next() else { break };
        done[number] = true;
        order.push(number);
    }
    order
}

/// The messages of an exchange.
pub(crate) fn pieces(program: &Program, views: &[(usize, View)]) -> Vec<Piece> {
    views.iter().flat_map(|(peer, view)| program.pieces(*peer, view)).collect()
}
