//! Tasks on lanes: each starts when its lane, its unit and what it needs are ready.

use super::lanes::{Activity, Lane, Span, Timeline};
use crate::cost::StepClocks;

/// What does one thing at a time, for all lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Tensor,
    Softmax,
    Copy,
    /// Whatever every lane has of its own.
    Own,
}

/// Steps before those that are shown, in which the pipeline fills, and steps that are shown.
const WARM: usize = 16;
const SHOWN: usize = 2;
/// From here on the pipeline is full.
const FULL: usize = 4;
/// Steps after them, whose loads run ahead.
const AFTER: usize = 4;
/// Steps in all.
pub(crate) const STEPS: usize = WARM + SHOWN + AFTER;

#[derive(Clone, Debug)]
struct Task {
    lane: usize,
    unit: Unit,
    activity: Activity,
    name: &'static str,
    step: usize,
    clocks: f64,
    needs: Vec<usize>,
    begin: f64,
    end: f64,
    /// What it waited for last.
    because: String,
}

/// Lanes and their tasks.
#[derive(Debug, Default)]
pub(crate) struct Schedule {
    lanes: Vec<String>,
    tasks: Vec<Task>,
}

impl Schedule {
    pub(crate) fn lane(&mut self, name: impl Into<String>) -> usize {
        self.lanes.push(name.into());
        self.lanes.len() - 1
    }

    /// Appends a task to a lane. `needs` are tasks that have to end first.
    pub(crate) fn task(
        &mut self,
        lane: usize,
        unit: Unit,
        (activity, name, step): (Activity, &'static str, usize),
        clocks: f64,
        needs: impl IntoIterator<Item = usize>,
    ) -> usize {
        self.tasks.push(Task {
            lane,
            unit,
            activity,
            name,
            step,
            clocks,
            needs: needs.into_iter().collect(),
            begin: f64::NAN,
            end: f64::NAN,
            because: String::new(),
        });
        self.tasks.len() - 1
    }

    /// Places every task: always the one next that can start first.
    fn run(&mut self) {
        let mut queues: Vec<Vec<usize>> = vec![Vec::new(); self.lanes.len()];
        for (index, task) in self.tasks.iter().enumerate().rev() {
            queues[task.lane].push(index);
        }
        let mut free_lane = vec![0.0f64; self.lanes.len()];
        let mut free_unit: [(f64, Option<usize>); 3] = [(0.0, None); 3];
        loop {
            // Of those that can start at once, the one that has been ready for longest.
            let mut first: Option<((f64, f64), usize)> = None;
            for &head in queues.iter().filter_map(|queue| queue.last()) {
                let task = &self.tasks[head];
                if task.needs.iter().any(|&need| self.tasks[need].end.is_nan()) {
                    continue;
                }
                let needed = task.needs.iter().map(|&need| self.tasks[need].end).fold(0.0, f64::max);
                let unit = unit_index(task.unit).map_or(0.0, |unit| free_unit[unit].0);
                let ready = free_lane[task.lane].max(needed);
                let when = (ready.max(unit), ready);
                if first.is_none_or(|(earliest, _)| when < earliest) {
                    first = Some((when, head));
                }
            }
            let Some(((start, _), index)) = first else { break };
            let because = self.because(index, start, &free_unit);
            let task = &mut self.tasks[index];
            (task.begin, task.end, task.because) = (start, start + task.clocks, because);
            free_lane[task.lane] = task.end;
            if let Some(unit) = unit_index(task.unit) {
                free_unit[unit] = (task.end, Some(index));
            }
            queues[task.lane].pop();
        }
    }

    /// What a task that starts at `start` waited for last.
    fn because(&self, index: usize, start: f64, free_unit: &[(f64, Option<usize>); 3]) -> String {
        let task = &self.tasks[index];
        let last = task.needs.iter().map(|&need| &self.tasks[need]).max_by(|a, b| a.end.total_cmp(&b.end));
        if let Some(need) = last
            && need.end >= start
        {
            return format!("waits for {} of {}", need.name, self.lanes[need.lane]);
        }
        match unit_index(task.unit).map(|unit| free_unit[unit]) {
            Some((end, Some(user))) if end >= start => {
                let unit = match task.unit {
                    Unit::Tensor => "the tensor cores",
                    Unit::Softmax => "the softmax pipes",
                    Unit::Copy | Unit::Own => "the copies before",
                };
                let user = &self.tasks[user];
                format!("{unit} are busy with {} of {}", user.name, self.lanes[user.lane])
            }
            _ => String::new(),
        }
    }

    /// Two steps, from where the first task of `anchor` of step `WARM` begins.
    pub(crate) fn timeline(mut self, anchor: usize, clocks: &StepClocks) -> Timeline {
        self.run();
        let starts = |step: usize| {
            let own = self.tasks.iter().find(|task| task.lane == anchor && task.step == step);
            own.map_or(0.0, |task| task.begin)
        };
        let (begin, end) = (starts(WARM), starts(WARM + SHOWN));
        let lanes: Vec<Lane> = (0..self.lanes.len()).map(|lane| self.shown(lane, begin, end)).collect();
        let inside = |task: &Task| (task.end.min(end) - task.begin.max(begin)).max(0.0);
        let tensor: f64 = self.tasks.iter().filter(|t| t.unit == Unit::Tensor).map(inside).sum();
        Timeline {
            lanes,
            clocks: end - begin,
            step: (end - starts(FULL)) / (WARM + SHOWN - FULL) as f64,
            predicted: clocks.total,
            tensor_busy: tensor / (end - begin),
        }
    }

    fn shown(&self, lane: usize, begin: f64, end: f64) -> Lane {
        let mut spans: Vec<Span> = Vec::new();
        let (mut at, mut busy) = (begin, 0.0);
        for task in self.tasks.iter().filter(|task| task.lane == lane && task.end > begin) {
            // A wait shorter than this cannot be seen.
            let least = 0.002 * (end - begin);
            let from = task.begin.clamp(begin, end);
            if from - at > least {
                let (activity, label) = (Activity::Wait, task.because.clone());
                spans.push(Span { activity, label, begin: at - begin, end: from - begin });
            }
            let to = task.end.min(end);
            if to > from {
                let label = format!("{} {}", task.name, task.step as i64 - WARM as i64);
                spans.push(Span {
                    activity: task.activity,
                    label: label.trim().to_owned(),
                    begin: from - begin,
                    end: to - begin,
                });
                busy += to - from;
            }
            at = to.max(at);
            if task.begin >= end {
                break;
            }
        }
        Lane { name: self.lanes[lane].clone(), spans, busy: busy / (end - begin) }
    }
}

fn unit_index(unit: Unit) -> Option<usize> {
    match unit {
        Unit::Tensor => Some(0),
        Unit::Softmax => Some(1),
        Unit::Copy => Some(2),
        Unit::Own => None,
    }
}
