//! What ranks copy out of one another's memory: the exchanges of their programs, as data.
//!
//! Messages lie in the programs' own memory on both sides, so that each rank pulls what is for it to where it
//! belongs. Between two ranks and one way there is a word, whose turns are strict: the sender says
//! [`READY`] and waits for [`TAKEN`], the receiver waits for [`READY`] and says [`TAKEN`]. An exchange ends
//! when all that was for a rank is there, and all that it had for others is with them: then both sides'
//! memory is free, as the waits between a program's steps take it to be.

use crate::error::Error;
use crate::program::{Buffer, Op, Piece, Program};
use crate::run::pieces;

/// The bit of a word by which a message is there.
pub const READY: u32 = 1;
/// The bit by which it is taken.
pub const TAKEN: u32 = 2;
/// What ends every wait, since a rank is lost.
pub const RELEASED: u32 = READY | TAKEN;

/// Where memory that is no continuation of other memory begins.
const APART: usize = 512;
/// Where memory begins that lies right behind other memory.
const BEHIND: usize = 16;
/// The most bytes from a row to the next of a copy of rows.
const MOST_PITCH: usize = 1 << 30;

/// Where the buffers of a program's own memory lie in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rooms {
    /// Bytes before each.
    pub offsets: Vec<usize>,
    /// Bytes of all.
    pub bytes: usize,
}

impl Rooms {
    /// Those of a program.
    pub fn of(program: &Program) -> Rooms {
        let (mut offsets, mut bytes) = (Vec::with_capacity(program.scratch.len()), 0usize);
        for (number, shape) in program.scratch.iter().enumerate() {
            let begin = if program.joined.contains(&number) { BEHIND } else { APART };
            bytes = bytes.next_multiple_of(begin);
            offsets.push(bytes);
            bytes += shape.elements() * shape.cell.bytes(program.dtype);
        }
        Rooms { offsets, bytes }
    }

    /// Bytes before a piece.
    fn at(&self, piece: &Piece) -> Result<usize, Error> {
        let Buffer::Scratch(number) = piece.buffer else {
            let (theirs, ours) = (format!("a message in {:?}", piece.buffer), "its own memory".to_owned());
            return Err(Error::Mismatch { rank: piece.peer, theirs, ours });
        };
        Ok(self.offsets[number] + piece.offset)
    }
}

/// Rows of bytes that are copied at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pull {
    /// Bytes before the first in the sender's memory.
    pub from: usize,
    /// Bytes before the first in the receiver's.
    pub to: usize,
    /// Bytes of a row.
    pub width: usize,
    /// Rows.
    pub rows: usize,
    /// Bytes from a row to the next, there and here.
    pub pitches: [usize; 2],
}

impl Pull {
    /// The same with a row more, if it is where the next one would be.
    fn with_row(&self, from: usize, to: usize, width: usize) -> Option<Pull> {
        let pitches = match self.rows {
            1 => [from.checked_sub(self.from)?, to.checked_sub(self.to)?],
            _ => self.pitches,
        };
        let next = [self.from + self.rows * pitches[0], self.to + self.rows * pitches[1]];
        let fits = pitches.iter().all(|pitch| (width..=MOST_PITCH).contains(pitch));
        (self.width == width && next == [from, to] && fits).then_some(Pull {
            rows: self.rows + 1,
            pitches,
            ..*self
        })
    }
}

/// One thing that a rank does in an exchange, in the order of its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Says to a rank that what is for it is there.
    Ready(usize),
    /// Waits for a rank's message.
    AwaitReady(usize),
    /// Copies out of a rank's memory.
    Copy(usize, Pull),
    /// Says to a rank that its message is taken.
    Taken(usize),
    /// Waits until a rank has taken what was for it.
    AwaitTaken(usize),
}

/// What the ranks of a message are, and its pieces: bytes before them, and their own.
struct Message {
    step: usize,
    pieces: Vec<(usize, usize)>,
}

/// The messages of a program to a rank, or from it, in their order.
fn messages(program: &Program, rooms: &Rooms, peer: usize, is_sent: bool) -> Result<Vec<Message>, Error> {
    let mut all = Vec::new();
    for (step, own) in program.steps.iter().enumerate() {
        let Op::Exchange { sends, recvs } = &own.op else { continue };
        let found = pieces(program, if is_sent { sends } else { recvs });
        let of_peer = found.iter().filter(|piece| piece.peer == peer && piece.bytes > 0);
        let pieces =
            of_peer.map(|piece| Ok((rooms.at(piece)?, piece.bytes))).collect::<Result<Vec<_>, Error>>()?;
        if !pieces.is_empty() {
            all.push(Message { step, pieces });
        }
    }
    Ok(all)
}

/// Pieces here and there as few copies: what follows one another on both sides is one, and so are rows that
/// are as far apart.
fn copies(from: &Message, to: &Message) -> Vec<Pull> {
    let mut lines: Vec<(usize, usize, usize)> = Vec::new();
    for ((from, bytes), (to, _)) in from.pieces.iter().zip(&to.pieces) {
        match lines.last_mut() {
            Some((first, second, len)) if (*first + *len, *second + *len) == (*from, *to) => *len += bytes,
            _ => lines.push((*from, *to, *bytes)),
        }
    }
    let mut all: Vec<Pull> = Vec::new();
    for (from, to, width) in lines {
        let more = all.last().and_then(|last| last.with_row(from, to, width));
        if more.is_some() {
            all.pop();
        }
        all.push(more.unwrap_or(Pull { from, to, width, rows: 1, pitches: [width; 2] }));
    }
    all
}

/// What `rank` does in each exchange of its program, by the number of the step, from all ranks' programs of
/// a pass. Between two ranks the messages of one are those of the other, in their order.
///
/// # Errors
/// [`Error::Mismatch`] for programs that are not of one plan.
pub fn acts(programs: &[Program], rank: usize) -> Result<Vec<Vec<Act>>, Error> {
    let rooms: Vec<Rooms> = programs.iter().map(Rooms::of).collect();
    let own = &programs[rank];
    // Of each step the ranks that it has a message for, and the copies out of each other rank's memory.
    let mut to: Vec<Vec<usize>> = vec![Vec::new(); own.steps.len()];
    let mut from: Vec<Vec<(usize, Vec<Pull>)>> = vec![Vec::new(); own.steps.len()];
    for (peer, program) in programs.iter().enumerate() {
        let sent = messages(program, &rooms[peer], rank, true)?;
        let come = messages(own, &rooms[rank], peer, false)?;
        let sizes = |all: &[Message]| -> Vec<Vec<usize>> {
            all.iter().map(|message| message.pieces.iter().map(|(_, bytes)| *bytes).collect()).collect()
        };
        let [theirs, ours] = [&sent, &come].map(|all| sizes(all));
        if theirs != ours {
            let [theirs, ours] = [theirs, ours].map(|all| format!("messages of {all:?} bytes"));
            return Err(Error::Mismatch { rank: peer, theirs, ours });
        }
        for (there, here) in sent.iter().zip(&come) {
            from[here.step].push((peer, copies(there, here)));
        }
        for message in messages(own, &rooms[rank], peer, true)?.iter().filter(|_| peer != rank) {
            to[message.step].push(peer);
        }
    }
    let order = |step: usize, peer: usize| {
        let Op::Exchange { recvs, .. } = &own.steps[step].op else { return 0 };
        recvs.iter().position(|(other, _)| *other == peer).unwrap_or(recvs.len())
    };
    let steps = to.into_iter().zip(from).enumerate();
    Ok(steps
        .map(|(step, (to, mut from))| {
            // No two ranks pull from the same one at the same time.
            from.sort_by_key(|(peer, _)| order(step, *peer));
            let mut acts: Vec<Act> = to.iter().map(|peer| Act::Ready(*peer)).collect();
            for (peer, pulls) in from {
                let is_other = peer != rank;
                acts.extend(is_other.then_some(Act::AwaitReady(peer)));
                acts.extend(pulls.into_iter().map(|pull| Act::Copy(peer, pull)));
                acts.extend(is_other.then_some(Act::Taken(peer)));
            }
            acts.extend(to.into_iter().map(Act::AwaitTaken));
            acts
        })
        .collect())
}
