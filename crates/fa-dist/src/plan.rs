//! A sharded problem: how ranks work together, and which of them holds what.

mod parts;
mod refusals;
mod tensors;

use std::ops::Range;

use fa_core::Problem;
use fa_core::program::{Axis, Interned};
use fa_cpu::check;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::moved::{axes, moved};
use crate::program::AXES;
use crate::shard::{Layout, Shards};
use crate::visible::Seen;

/// How ranks work together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scheme {
    /// Every rank gathers the keys and values that its queries see, some heads at a time, and computes its
    /// rows as one GPU would: nothing is merged, and the bits are those of one GPU.
    Gather,
    /// An exchange turns shards of rows into shards of heads, and another one turns them back: each rank
    /// computes whole sequences for some heads.
    Ulysses,
    /// Keys and values of one rank after the other, whose partial results are merged: the least memory.
    Ring,
    /// Few queries, which all ranks hold, over keys that are spread over ranks: one exchange of (O, LSE).
    Decode,
}

impl Scheme {
    /// Every scheme.
    pub const ALL: [Scheme; 4] = [Scheme::Gather, Scheme::Ulysses, Scheme::Ring, Scheme::Decode];

    /// The name used on the command line and in errors.
    pub const fn name(self) -> &'static str {
        match self {
            Scheme::Gather => "gather",
            Scheme::Ulysses => "ulysses",
            Scheme::Ring => "ring",
            Scheme::Decode => "decode",
        }
    }
}

/// The most ranks of a plan.
pub const MAX_WORLD: usize = 1024;

/// The most parts of a result: groups of them are merged, but no groups of groups.
const MAX_PARTS: usize = fa_core::Merge::MAX_PARTS * fa_core::Merge::MAX_PARTS;

/// Rows at which a rank's parts begin by default: kernels' tiles of queries divide it.
const TILE: (usize, usize) = (128, 128);

/// A problem over ranks, as data.
///
/// ```
/// use fa_core::{Dtype, Mask, Pass, Problem};
/// use fa_dist::{Layout, Scheme, ShardPlan};
///
/// // 131,072 positions, 32 heads of 128, causal, over 8 GPUs.
/// let problem = Problem::square(1, 131_072, 32, 128, Mask::CAUSAL, Dtype::Bf16);
/// let plan = ShardPlan::new(&problem, 8, Scheme::Gather, Layout::Zigzag)?;
/// assert_eq!(plan.queries().ranges(1), [8192..16384, 114_688..122_880]);
/// let program = plan.program(0, Pass::Forward)?;
/// println!("{} steps, {} bytes received", program.steps.len(), program.received());
/// # Ok::<(), fa_dist::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ShardPlan {
    problem: Problem,
    /// Where packed sequences begin, and the last one ends.
    starts: Option<Vec<i32>>,
    world: usize,
    scheme: Scheme,
    queries: Shards,
    keys: Shards,
    stages: usize,
    tiles: (usize, usize),
    /// The program of parts.
    program: Option<Interned>,
    /// Of each chunk of queries the keys that the program's mask lets it see, where it has one.
    seen: Vec<(Range<usize>, Option<Range<usize>>)>,
    /// Whether backwards take the gradient of the LSE.
    has_dlse: bool,
    /// The arrays of the program whose gradients backwards compute.
    arrays: Vec<ArrayGradient>,
}

/// An array of the problem's program whose gradient is computed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ArrayGradient {
    /// Its number in the program.
    pub(crate) array: usize,
    /// Indices of its axes.
    pub(crate) extents: [usize; AXES],
    /// Whether scores read it.
    pub(crate) is_read: bool,
    /// What its indices are where a part has its own elements alone; else why each part has all.
    pub(crate) axes: Result<Vec<Axis>, &'static str>,
}

impl ShardPlan {
    /// The plan that transfers all heads at once.
    pub(crate) fn in_one_stage(
        problem: &Problem,
        starts: Option<Vec<i32>>,
        world: usize,
        scheme: Scheme,
        layout: Layout,
    ) -> Result<ShardPlan, Error> {
        problem.check()?;
        if world == 0 || world > MAX_WORLD {
            return Err(Error::Ranks { name: "world", value: world, need: format!("1 to {MAX_WORLD}") });
        }
        let placeholder = Shards::new(layout, world, 0, 1);
        let mut plan = ShardPlan {
            problem: *problem,
            starts,
            world,
            scheme,
            queries: placeholder.clone(),
            keys: placeholder,
            stages: 1,
            tiles: TILE,
            program: None,
            seen: Vec::new(),
            has_dlse: false,
            arrays: Vec::new(),
        };
        plan.deal(layout);
        plan.check()?;
        plan.with_program_of_parts()
    }

    /// The same plan with the program of its parts.
    fn with_program_of_parts(self) -> Result<ShardPlan, Error> {
        let score = &self.problem.score;
        if !self.has_own_slopes() && score.program.is_none() {
            return Ok(self);
        }
        let slopes = self.has_own_slopes().then_some(score);
        let vars = (self.variables(), self.starts.is_some());
        let decls = score.program.as_deref().map_or(&[][..], |program| program.arrays());
        let own = self.arrays.iter().filter(|own| own.axes.is_ok());
        let own: Vec<&str> = own.map(|own| decls[own.array].name.as_str()).collect();
        let found = moved(slopes, score.program.as_deref(), vars, &own);
        let found = found.map_err(|why| self.refused(format!("its program: {why}"), "use one GPU"))?;
        Ok(ShardPlan { program: Some(found), ..self })
    }

    /// The same plan with the heads in `stages` parts, the transfer of one under the products of another.
    ///
    /// # Errors
    /// [`Error::Ranks`] for a number that does not divide the K/V heads that a rank computes.
    pub fn with_stages(mut self, stages: usize) -> Result<ShardPlan, Error> {
        let heads = match self.scheme {
            Scheme::Gather => self.problem.heads_kv,
            Scheme::Ulysses => self.own_kv_heads(),
            Scheme::Ring | Scheme::Decode => 1,
        };
        if stages == 0 || !heads.is_multiple_of(stages) {
            let need = format!("a divisor of the {heads} K/V heads that are gathered");
            return Err(Error::Ranks { name: "stages", value: stages, need });
        }
        self.stages = stages;
        Ok(self)
    }

    /// The same plan whose backwards take the gradient of the LSE (`dlse`) of the rank's rows, too.
    pub fn with_dlse(self, has_dlse: bool) -> ShardPlan {
        ShardPlan { has_dlse, ..self }
    }

    /// The same plan whose backwards have the gradients of those arrays of the program that are declared
    /// with `grad`, summed over ranks in their order: every rank gets those of the whole. `extents`: the
    /// indices of each axis of every array, in the order of declarations, as all calls give them; 1 beyond
    /// the rank.
    ///
    /// # Errors
    /// [`Error::Tensor`] for extents that are not those of the program's arrays.
    pub fn with_arrays(self, extents: &[[i32; AXES]]) -> Result<ShardPlan, Error> {
        let program = self.problem.score.program;
        let decls = program.as_deref().map_or(&[][..], |program| program.arrays());
        let is_positive = extents.iter().flatten().all(|extent| *extent > 0);
        if extents.len() != decls.len() || !is_positive {
            let need = format!("positive extents of the {} arrays of the program", decls.len());
            return Err(Error::Tensor { tensor: "arrays", got: format!("{extents:?}"), need });
        }
        let Some(program) = program else { return Ok(self) };
        let Problem { lengths, heads_q, heads_kv, .. } = self.problem;
        let lens = |axis: Axis| match axis {
            Axis::Batch => Some(lengths.sequences()),
            Axis::Head => Some(heads_q),
            Axis::HeadKv => Some(heads_kv),
            Axis::Query => Some(lengths.max_q()),
            Axis::Key => Some(lengths.max_k()),
            Axis::Tile | Axis::Diagonal | Axis::Other => None,
        };
        let of = |(array, extents): (usize, &[i32; AXES])| {
            let extents = extents.map(|extent| extent as usize);
            ArrayGradient {
                array,
                extents,
                is_read: program.gradients().iter().any(|gradient| gradient.array == array),
                axes: match lengths.is_uniform() {
                    true => axes(&program, array, extents, lens),
                    false => Err("is read by packed sequences"),
                },
            }
        };
        let wanted = decls.iter().zip(extents.iter().enumerate()).filter(|(decl, _)| decl.gradient);
        let arrays = wanted.map(|(_, own)| of(own)).collect();
        ShardPlan { arrays, ..self }.with_program_of_parts()
    }

    /// The same plan with shards that begin at multiples of `rows`, and keys of a window at multiples of
    /// `keys`: the tiles of the kernel, for bits equal to those of one GPU.
    pub fn with_tiles(mut self, rows: usize, keys: usize) -> ShardPlan {
        self.tiles = (rows.max(1), keys.max(1));
        self.deal(self.queries.layout());
        self
    }

    /// Deals rows and keys to ranks. Short sequences are dealt in smaller pieces than tiles, for balance.
    fn deal(&mut self, layout: Layout) {
        let (world, decode) = (self.world, self.scheme == Scheme::Decode);
        let [_, queries, ..] = check::q_shape(&self.problem);
        let [_, keys, ..] = check::k_shape(&self.problem);
        let align = |len: usize, tile: usize| if len >= 8 * tile * world { tile } else { 1 };
        let align = align(queries.max(keys), self.tiles.0);
        self.queries = if decode {
            Shards::new(Layout::Contiguous, 1, queries, 1)
        } else {
            Shards::new(layout, world, queries, align)
        };
        self.keys = match self.is_cache() {
            // Of each rank.
            true => Shards::new(Layout::Contiguous, world, keys * world, 1),
            false => Shards::new(layout, world, keys, align),
        };
        self.seen = self.seen();
    }

    /// What each chunk of queries sees of all keys, by the mask of a program alone.
    fn seen(&self) -> Vec<(Range<usize>, Option<Range<usize>>)> {
        let in_parts = matches!(self.scheme, Scheme::Gather | Scheme::Ring);
        let Some(seen) = Seen::of(&self.problem, &[]).filter(|_| in_parts) else { return Vec::new() };
        let chunks = self.queries.bounds().windows(2).map(|pair| pair[0]..pair[1]);
        let chunks = chunks.filter(|rows| !rows.is_empty());
        chunks.map(|rows| (rows.clone(), seen.keys(&rows, &(0..self.keys.len()), self.tiles.1))).collect()
    }

    /// Whether each rank's keys are a cache of its own, in pages or with lengths in use: of a decode.
    pub(crate) fn is_cache(&self) -> bool {
        self.scheme == Scheme::Decode && self.problem.lengths.k().used
    }

    /// The whole problem.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Where packed sequences begin, where the plan knows it.
    pub fn starts(&self) -> Option<&[i32]> {
        self.starts.as_deref()
    }

    /// Ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    /// How they work together.
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// In how many parts heads are transferred.
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// Whose queries are whose; of a decode every rank has all.
    pub fn queries(&self) -> &Shards {
        &self.queries
    }

    /// Whose keys are whose.
    pub fn keys(&self) -> &Shards {
        &self.keys
    }

    /// Whether O and LSE have the bits of one GPU with the same kernel.
    pub fn same_bits(&self) -> bool {
        match self.scheme {
            // Tiles of packed sequences begin elsewhere in each.
            Scheme::Gather => self.starts.is_none() && self.program.is_none(),
            // The program of a part is compiled by itself.
            Scheme::Ulysses => self.program.is_none(),
            Scheme::Ring | Scheme::Decode => false,
        }
    }

    /// One line that says all that ranks have to agree on.
    pub fn descriptor(&self) -> String {
        let problem = &self.problem;
        format!(
            "fa-dist {} {} {} world {} stages {} tiles {:?} {:?} {:?} heads {}:{} dim {}-{} {} {} {} {:?} \
             {:?} {:?} dlse {} arrays {:?}",
            env!("CARGO_PKG_VERSION"),
            self.scheme.name(),
            self.queries.layout().name(),
            self.world,
            self.stages,
            self.tiles,
            problem.lengths,
            self.starts,
            problem.heads_q,
            problem.heads_kv,
            problem.head_dim,
            problem.head_dim_v,
            problem.types.q,
            problem.types.kv,
            problem.mask,
            problem.descales,
            problem.softmax_scale,
            problem.score,
            self.has_dlse,
            self.arrays.iter().map(|own| (own.array, own.extents)).collect::<Vec<_>>(),
        )
    }

    /// Whether backwards take the gradient of the LSE.
    pub(crate) fn has_dlse(&self) -> bool {
        self.has_dlse
    }

    /// The arrays of the program whose gradients backwards compute.
    pub(crate) fn arrays(&self) -> &[ArrayGradient] {
        &self.arrays
    }

    /// Lengths of the whole sequence: queries and keys.
    pub(crate) fn len(&self) -> (usize, usize) {
        (self.queries.len(), self.keys.len())
    }

    /// K/V heads that a rank of Ulysses computes.
    pub(crate) fn own_kv_heads(&self) -> usize {
        (self.problem.heads_kv / self.world).max(1)
    }

    /// Heads of stage `stage` of a gather, of K/V and of queries.
    pub(crate) fn stage_heads(&self, stage: usize) -> (Range<usize>, Range<usize>) {
        let (size, group) = (self.problem.heads_kv / self.stages, self.problem.group_size());
        let kv = stage * size..(stage + 1) * size;
        (kv.start * group..kv.end * group, kv)
    }
}
