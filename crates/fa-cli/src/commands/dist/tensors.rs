//! The tensors of a job: those of the whole problem, and those of a rank.

use fa_core::extras::OwnedExtras;
use fa_core::lengths::{Side, SideRows};
use fa_core::program::{InputError, Inputs, OwnedInputs};
use fa_core::{Lengths, Problem};
use fa_cpu::check::{k_shape, out_shape, q_shape, v_shape};
use fa_cpu::{Arguments, Element, Extras};
use fa_dist::{Scheme, ShardPlan, Shards};
use fa_lab::random::Random;

use super::found::Found;
use super::jobs::Job;

/// Q, K, V and dO, and what else a job's problem takes.
pub(super) struct Tensors<T> {
    /// The problem whose shapes these are.
    pub problem: Problem,
    /// Q, K, V and dO, packed.
    pub values: [Vec<T>; 4],
    /// Their shapes, `[batch, rows, heads, dim]`.
    pub shapes: [[usize; 4]; 4],
    extras: OwnedExtras,
    program: Option<OwnedInputs>,
}

/// Normal values: a block of them again and again, since gigabytes are filled.
fn values<T: Element>(len: usize, seed: u64) -> Vec<T> {
    let mut random = Random::new(seed);
    let block: Vec<T> = (0..len.min(1_000_003)).map(|_| T::from_f32(random.normal())).collect();
    let mut all = Vec::with_capacity(len);
    while all.len() < len {
        let more = (len - all.len()).min(block.len());
        all.extend_from_slice(&block[..more]);
    }
    all
}

/// The problem of one process, which has the keys of all caches in a row.
pub(super) fn one(job: &Job) -> Problem {
    let (problem, lengths) = (job.problem, job.problem.lengths);
    match job.used.first() {
        None => problem,
        Some(own) => {
            let keys = Side::padded(lengths.max_k() * job.used.len()).with_used();
            problem.with_lengths(Lengths::of(own.len(), lengths.q(), keys))
        }
    }
}

/// Whose rows of queries and of keys a rank has: of a decode all have all queries.
fn shards(plan: &ShardPlan, rank: usize) -> [(&Shards, usize); 4] {
    let queries = if plan.scheme() == Scheme::Decode { 0 } else { rank };
    [(plan.queries(), queries), (plan.keys(), rank), (plan.keys(), rank), (plan.queries(), queries)]
}

/// The rows of a rank, of `[batch, rows, heads, dim]`.
fn scattered<T: Clone>((shards, rank): (&Shards, usize), whole: &[T], shape: [usize; 4]) -> Vec<T> {
    let (rows, width) = (shape[1], shape[2] * shape[3]);
    let sequences = (0..shape[0]).map(|b| &whole[b * rows * width..][..rows * width]);
    sequences.flat_map(|sequence| shards.scatter(rank, sequence, width)).collect()
}

impl<T: Element> Tensors<T> {
    /// Those of one process.
    pub(super) fn whole(job: &Job) -> Tensors<T> {
        let problem = one(job);
        let shapes = [q_shape(&problem), k_shape(&problem), v_shape(&problem), out_shape(&problem)];
        let mut seed = 0;
        let values = shapes.map(|shape| {
            seed += 1;
            values(shape.iter().product(), seed)
        });
        let mut extras = OwnedExtras::even(&problem);
        if let Some(starts) = &job.starts {
            (extras.cu_seqlens_q, extras.cu_seqlens_k) = (Some(starts.clone()), Some(starts.clone()));
        }
        if !job.used.is_empty() {
            let all = |b: usize| job.used.iter().map(|own| own[b]).sum();
            extras.seqused_k = Some((0..shapes[0][0]).map(all).collect());
        }
        let numbers = |seed| self::values::<f32>(problem.heads_q, seed);
        extras.sinks = extras.sinks.map(|_| numbers(6));
        extras.alibi_slopes =
            extras.alibi_slopes.map(|_| numbers(7).iter().map(|x| 0.01 * x.abs()).collect());
        // Codes stand for values up to 8 or 80.
        let smaller = |descales: Vec<f32>| descales.iter().map(|own| 0.05 * own).collect();
        (extras.k_descale, extras.v_descale) = (extras.k_descale.map(smaller), extras.v_descale.map(smaller));
        let rows = shapes[3][..3].iter().product();
        extras.dlse = job.dlse.then(|| self::values(rows, 8));
        Tensors { problem, values, shapes, extras, program: OwnedInputs::drawn(&problem, 9) }
    }

    /// Those of a rank.
    pub(super) fn of_rank(&self, job: &Job, plan: &ShardPlan, rank: usize) -> Tensors<T> {
        let own = shards(plan, rank);
        let mut shapes = self.shapes;
        let mut values = [0, 1, 2, 3].map(|i| {
            shapes[i][1] = own[i].0.rows(own[i].1);
            scattered(own[i], &self.values[i], self.shapes[i])
        });
        let mut extras = self.extras.clone();
        // The plan knows the starts.
        (extras.cu_seqlens_q, extras.cu_seqlens_k) = (None, None);
        let [batch, rows, heads, _] = self.shapes[3];
        extras.dlse = extras.dlse.map(|dlse| scattered(own[3], &dlse, [batch * heads, rows, 1, 1]));
        let mut problem = job.problem;
        if let Some(used) = job.used.get(rank) {
            extras.seqused_k = Some(used.clone());
            let (table, [k, v]) = self.cache(job, rank);
            extras.page_table = table;
            (shapes[1], shapes[2]) = (k_shape(&problem), v_shape(&problem));
            (values[1], values[2]) = (k, v);
        } else {
            problem = problem.with_lengths(Lengths::uniform(batch, shapes[0][1], shapes[1][1]));
        }
        Tensors { problem, values, shapes, extras, program: self.program.clone() }
    }

    /// The page table and K and V of a rank's cache: its keys of each sequence, and others in rows that are
    /// not in use.
    fn cache(&self, job: &Job, rank: usize) -> (Option<Vec<i32>>, [Vec<T>; 2]) {
        let most = job.problem.lengths.max_k();
        let (page, columns, table) = match job.problem.lengths.k().rows {
            SideRows::Paged { page, pages, .. } => {
                let columns = most.div_ceil(page);
                let entries = 0..self.shapes[0][0] * columns;
                // Pages in another order than that of keys.
                (page, columns, Some(entries.map(|entry| (pages - 1 - entry) as i32).collect::<Vec<_>>()))
            }
            SideRows::Padded { .. } | SideRows::Packed { .. } => (most, 1, None),
        };
        let caches = [1, 2].map(|i| {
            let [_, all, heads, dim] = self.shapes[i];
            let (width, shape) = (heads * dim, [k_shape(&job.problem), v_shape(&job.problem)][i - 1]);
            let mut cache = self::values::<T>(shape.iter().product(), 10 + rank as u64);
            for b in 0..self.shapes[0][0] {
                let before: i32 = job.used[..rank].iter().map(|own| own[b]).sum();
                for row in 0..job.used[rank][b] as usize {
                    let entry = b * columns + row / page;
                    let at = table.as_ref().map_or(entry, |table| table[entry] as usize) * page + row % page;
                    let from = (b * all + before as usize + row) * width;
                    cache[at * width..][..width].clone_from_slice(&self.values[i][from..][..width]);
                }
            }
            cache
        });
        (table, caches)
    }

    /// K and V where they are codes: bytes that are numbers of every type.
    pub(super) fn codes(&self) -> Option<[Vec<u8>; 2]> {
        let byte = |value: &T| (value.to_f32().abs() * 18.0) as u8 + 16;
        let of = |i: usize| self.values[i].iter().map(byte).collect();
        self.problem.types.kv.is_code().then(|| [of(1), of(2)])
    }

    /// The rows of a rank of what one process computed.
    pub(super) fn rows_of(&self, one: &Found<T>, plan: &ShardPlan, rank: usize) -> Found<T> {
        let own = shards(plan, rank);
        let of = |i: usize, values: &[T]| scattered(own[i], values, self.shapes[i]);
        let [batch, rows, heads, _] = self.shapes[3];
        Found {
            out: of(3, &one.out),
            lse: scattered(own[3], &one.lse, [batch * heads, rows, 1, 1]),
            gradients: one.gradients.iter().enumerate().map(|(i, values)| of(i, values)).collect(),
            dsinks: one.dsinks.clone(),
            darrays: one.darrays.clone(),
        }
    }

    /// What the program of masks and scores is given, if there is one.
    pub(super) fn inputs(&self) -> Result<Option<Inputs<'_>>, InputError> {
        let both = self.problem.score.program.as_deref().zip(self.program.as_ref());
        both.map(|(program, inputs)| inputs.view(program)).transpose()
    }

    /// What both passes are given besides Q, K and V; of them a backward takes the gradient of the LSE.
    pub(super) fn arguments<'a>(&'a self, program: Option<&'a Inputs<'a>>, backward: bool) -> Arguments<'a> {
        let extras = self.extras.view();
        let dlse = extras.dlse.filter(|_| backward);
        Arguments { extras: Extras { dlse, ..extras }, program, ..Arguments::default() }
    }
}
