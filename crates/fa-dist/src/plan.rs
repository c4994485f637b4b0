//! A sharded problem: which rank holds what, and the program of each.

use std::ops::Range;

use fa_core::lengths::SideRows;
use fa_core::program::{Axis, Interned, Var};
use fa_core::{Alibi, Extra, Extras, Lengths, Mask, Pass, Problem, TensorLayout, Types};
use fa_cpu::check;
use serde::{Deserialize, Serialize};

use crate::block::{Block, block, packed_block};
use crate::error::Error;
use crate::moved::{LAST, Place, axes, moved, scalar};
use crate::program::{AXES, Buffer, Cell, Part, Shape, Window};
use crate::shard::{Layout, Shards, overlap};
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

    /// Whether parts compute ALiBi by programs: kernels count distances from the corner of the last row and
    /// key, where a causal mask keeps the diagonal.
    fn has_own_slopes(&self) -> bool {
        let Mask { right, offset, .. } = self.problem.mask;
        let has_corner = match self.scheme {
            Scheme::Gather => right == Some(0) && offset == 0,
            Scheme::Ring => false,
            Scheme::Ulysses | Scheme::Decode => true,
        };
        self.problem.score.alibi.is_some() && !has_corner
    }

    /// Whether parts have a program, which sees the numbers of the whole.
    pub(crate) fn has_program(&self) -> bool {
        self.program.is_some()
    }

    /// What a part's program sees otherwise than the part: those of the whole.
    fn variables(&self) -> &'static [Var] {
        match self.scheme {
            Scheme::Gather | Scheme::Ring if self.starts.is_none() => {
                &[Var::H, Var::Hk, Var::Q, Var::K, Var::Sq, Var::Sk, Var::Off]
            }
            Scheme::Gather | Scheme::Ring => {
                &[Var::B, Var::H, Var::Hk, Var::Q, Var::K, Var::Sq, Var::Sk, Var::Off]
            }
            Scheme::Ulysses => &[Var::H, Var::Hk],
            Scheme::Decode => &[],
        }
    }

    fn refused(&self, what: String, instead: &str) -> Error {
        let instead = instead.to_owned();
        Error::Refused { scheme: self.scheme.name(), world: self.world, what, instead }
    }

    /// What the scheme computes.
    fn check(&self) -> Result<(), Error> {
        let Problem { lengths, heads_q, heads_kv, .. } = self.problem;
        let refuse = |what: String, instead: &str| Err(self.refused(what, instead));
        if let (SideRows::Paged { page, .. }, false) = (lengths.k().rows, self.is_cache()) {
            return refuse(
                format!("keys in pages of {page} rows"),
                "use decode, or pack or pad the keys of each rank",
            );
        }
        if self.problem.latent {
            let instead = "split the heads between ranks, each of which holds all latents, or their keys, \
                           with a call on each rank and a merge by LSE";
            return refuse("latent problems, whose keys begin with their values".to_owned(), instead);
        }
        if lengths.q().used || lengths.k().used && !self.is_cache() {
            return refuse("lengths in use".to_owned(), "pack the sequences, or leave the lengths out");
        }
        let Mask { left, right, offset, .. } = self.problem.mask;
        let is_whole = (left, right) == (None, None)
            || (left, right, offset) == (None, Some(0), 0) && lengths.max_q() == 1;
        if self.is_cache() && !is_whole {
            // The last keys of a sequence are on any rank.
            let what = format!("{} queries under the mask {} on caches", lengths.max_q(), self.problem.mask);
            return refuse(what, "decode one query at a time, or give a full mask");
        }
        let is_uniform = match self.is_cache() {
            true => !lengths.q().is_packed() && !lengths.k().is_packed(),
            false => lengths.is_uniform(),
        };
        match (is_uniform, self.scheme, &self.starts) {
            (true, ..) | (false, Scheme::Ulysses, _) => {}
            (false, Scheme::Gather | Scheme::Ring, None) => {
                let what = "packed sequences of unknown starts".to_owned();
                return refuse(what, "use ShardPlan::packed, or ulysses");
            }
            (false, Scheme::Gather | Scheme::Ring, Some(_)) => {
                if offset != 0 || !(right == Some(0) || (left, right) == (None, None)) {
                    // The diagonal of a part would end elsewhere in each sequence.
                    let what = format!("packed sequences under the mask {}", self.problem.mask);
                    return refuse(what, "use ulysses, or a causal or full mask");
                }
            }
            (false, Scheme::Decode, _) => {
                return refuse("packed sequences".to_owned(), "use gather, ulysses or ring");
            }
        }
        let (score, types) = (self.problem.score, self.problem.types);
        let kinds = if self.is_cache() { types.with_kv(types.q) } else { types };
        if kinds != Types::same(types.q) {
            let instead = "use one type for all tensors, or decode on caches of codes with lengths in use";
            return refuse(format!("tensors of several types ({types:?})"), instead);
        }
        if score.program.is_some() && self.scheme == Scheme::Decode {
            let what = if score.dropout.is_some() { "dropout" } else { "a program of masks or scores" };
            return refuse(what.to_owned(), "use gather, ulysses or ring");
        }
        match (score.alibi, self.scheme) {
            (Some(Alibi::PerSequenceHead), _) => {
                return refuse("slopes of each sequence".to_owned(), "use slopes of heads alone");
            }
            (Some(Alibi::PerHead), Scheme::Decode) => {
                return refuse("ALiBi".to_owned(), "use gather, ulysses or ring");
            }
            (Some(Alibi::PerHead), Scheme::Gather | Scheme::Ulysses | Scheme::Ring) | (None, _) => {}
        }
        let (rows, keys) = self.len();
        let seeing = || self.block(0..rows, 0..keys).map_or(0, |block| block.rows.len());
        let is_counted = self.scheme != Scheme::Ulysses && self.starts.is_none() && !self.is_cache();
        if score.sinks && is_counted && seeing() < rows {
            // Their LSE is the sink.
            return refuse("sinks where queries see no key".to_owned(), "use ulysses");
        }
        if self.scheme == Scheme::Ulysses {
            let world = self.world;
            let whole = heads_q.is_multiple_of(world)
                && (heads_kv.is_multiple_of(world) || world.is_multiple_of(heads_kv));
            if !whole {
                let what =
                    format!("{heads_q} query heads and {heads_kv} K/V heads, which {world} does not divide");
                return refuse(what, "use gather or ring");
            }
        }
        if matches!(self.scheme, Scheme::Ring | Scheme::Decode) && 4 * self.world > MAX_PARTS {
            // Each of a rank's two ranges of queries may see both of another rank's.
            let what = format!("up to {} partial results", 4 * self.world);
            return refuse(what, &format!("use gather, or at most {} ranks", MAX_PARTS / 4));
        }
        Ok(())
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

    /// Shape of the shard of a tensor that the caller has, `[batch, rows, heads, dim]`.
    pub fn shape(&self, rank: usize, buffer: Buffer) -> Shape {
        let [batch, ..] = check::q_shape(&self.problem);
        let queries = if self.scheme == Scheme::Decode { 0 } else { rank };
        let (queries, keys) = (self.queries.rows(queries), self.keys.rows(rank));
        let Problem { heads_q, heads_kv, head_dim, head_dim_v, .. } = self.problem;
        let own =
            |rows, heads, dim| Shape { batch, rows, heads, dim, cell: Cell::Own, order: TensorLayout::Bshd };
        if let (true, Buffer::K | Buffer::V) = (self.is_cache(), buffer) {
            // In elements of codes, of which a byte may have two.
            let of = if buffer == Buffer::K { check::k_shape } else { check::v_shape };
            let [batch, _, heads, dim] = of(&self.problem);
            return Shape { batch, ..own(keys, heads, dim) };
        }
        match buffer {
            Buffer::Q | Buffer::Dq => own(queries, heads_q, head_dim),
            Buffer::K | Buffer::Dk => own(keys, heads_kv, head_dim),
            Buffer::V | Buffer::Dv => own(keys, heads_kv, head_dim_v),
            Buffer::Out | Buffer::Dout => own(queries, heads_q, head_dim_v),
            Buffer::Lse | Buffer::Dlse => {
                Shape { cell: Cell::F32, order: TensorLayout::Bhsd, ..own(queries, heads_q, 1) }
            }
            Buffer::Dsinks => {
                Shape { batch: 1, cell: Cell::F32, order: TensorLayout::Bhsd, ..own(1, heads_q, 1) }
            }
            Buffer::Darray(array) => {
                let found = self.arrays.iter().find(|own| own.array == array);
                let rows = found.map_or(0, |own| own.extents.iter().product());
                Shape { batch: 1, cell: Cell::F32, order: TensorLayout::Bhsd, ..own(rows, 1, 1) }
            }
            Buffer::Scratch(_) => own(0, 0, 0),
        }
    }

    /// The caller's tensors of a pass, as shards of `rank`.
    pub(crate) fn tensors(&self, rank: usize, backward: bool) -> Vec<(Buffer, Shape)> {
        let forward = [Buffer::Q, Buffer::K, Buffer::V, Buffer::Out, Buffer::Lse];
        let gradients = [Buffer::Dout, Buffer::Dq, Buffer::Dk, Buffer::Dv];
        let sinks = [Buffer::Dsinks];
        let sinks = sinks.iter().filter(|_| self.problem.score.sinks);
        let dlse = [Buffer::Dlse];
        let dlse = dlse.iter().filter(|_| self.has_dlse);
        let arrays: Vec<Buffer> = self.arrays.iter().map(|own| Buffer::Darray(own.array)).collect();
        let gradients = gradients.iter().chain(sinks).chain(dlse).chain(&arrays).filter(|_| backward);
        forward.iter().chain(gradients).map(|&buffer| (buffer, self.shape(rank, buffer))).collect()
    }

    /// Whether backwards take the gradient of the LSE.
    pub(crate) fn has_dlse(&self) -> bool {
        self.has_dlse
    }

    /// The arrays of the program whose gradients backwards compute.
    pub(crate) fn arrays(&self) -> &[ArrayGradient] {
        &self.arrays
    }

    /// The refusal of the gradient of an array whose extents the plan does not know.
    pub(crate) fn without_extents(&self, array: &str) -> Error {
        let what = format!("the gradient of the array {array} of a program whose extents it does not know");
        self.refused(what, "give them by ShardPlan::with_arrays, or declare the array without grad")
    }

    /// Whether a call's arrays are those that the plan knows: their extents, in the order of declarations.
    pub(crate) fn check_arrays(&self, given: &[[i32; AXES]]) -> Result<(), Error> {
        let decls = self.problem.score.program;
        let decls = decls.as_deref().map_or(&[][..], |program| program.arrays());
        for own in &self.arrays {
            let found = given.get(own.array).map(|extents| extents.map(|extent| extent.max(0) as usize));
            if found != Some(own.extents) {
                let name = &decls[own.array].name;
                let got = found.map_or("not given".to_owned(), |extents| format!("{extents:?} of {name}"));
                let need = format!("{:?}", own.extents);
                return Err(Error::Tensor { tensor: "an array of the program", got, need });
            }
        }
        Ok(())
    }

    /// What of an array a part has that begins at this row and key.
    fn window(
        &self,
        own: &ArrayGradient,
        (lengths, (row, key)): (Lengths, (usize, usize)),
        heads: &Range<usize>,
        kv_heads: usize,
    ) -> Window {
        let mut window = Window::whole(own.extents);
        for (axis, range) in own.axes.iter().flatten().zip(&mut window.ranges) {
            let kv = heads.start / self.problem.group_size().max(1);
            let of_part = match axis {
                Axis::Head => heads.clone(),
                Axis::HeadKv => kv..kv + kv_heads,
                Axis::Query => row..row + lengths.max_q(),
                Axis::Key => key..key + lengths.max_k(),
                Axis::Batch | Axis::Tile | Axis::Diagonal | Axis::Other => continue,
            };
            // All share an axis of one element.
            if range.len() > 1 {
                *range = of_part;
            }
        }
        window
    }

    /// Lengths of the whole sequence: queries and keys.
    pub(crate) fn len(&self) -> (usize, usize) {
        (self.queries.len(), self.keys.len())
    }

    /// Whether a call of a pass may have these extras, and has those that it needs.
    pub(crate) fn check_extras<I32, F32>(&self, given: &Extras<I32, F32>, pass: Pass) -> Result<(), Error> {
        let refuse = |what: &str, instead: &str| Err(self.refused(what.to_owned(), instead));
        let wants_dlse = self.has_dlse && pass.is_backward();
        let (starts, dlse) =
            (given.cu_seqlens_q.is_some() || given.cu_seqlens_k.is_some(), given.dlse.is_some());
        for (extra, value) in given.as_ref().entries() {
            let is_known = matches!(extra, Extra::CuSeqlensQ | Extra::CuSeqlensK) && self.starts.is_some();
            let need = extra.need(&self.problem, pass).filter(|need| !need.is_optional && !is_known);
            if let (Some(need), None) = (need, value) {
                let (got, need) = ("not given".to_owned(), format!("{} elements", need.len));
                return Err(Error::Tensor { tensor: extra.name(), got, need });
            }
        }
        match (starts && self.starts.is_some(), dlse, wants_dlse) {
            (true, ..) => refuse("cu_seqlens of a call", "leave them out: the plan knows the starts"),
            (false, true, false) => refuse(
                "the gradient of the LSE (dlse) in this call",
                "use ShardPlan::with_dlse, by which backwards take it",
            ),
            (false, false, true) => {
                refuse("a backward without dlse", "give it, or leave ShardPlan::with_dlse out")
            }
            (false, true, true) | (false, false, false) => Ok(()),
        }
    }

    /// What of the mask is visible between some rows and some keys; of the rows of a chunk without the keys
    /// at both ends that a program hides.
    pub(crate) fn block(&self, rows: Range<usize>, keys: Range<usize>) -> Option<Block> {
        let cut = |keys| block(self.problem.mask, self.len(), rows.clone(), keys, self.tiles.1);
        if let Some(starts) = &self.starts {
            return packed_block(self.problem.mask, starts, rows, keys, self.tiles.1);
        }
        let whole = cut(keys.clone())?;
        let Some((_, seen)) = self.seen.iter().find(|(chunk, _)| *chunk == rows) else { return Some(whole) };
        let found = seen.as_ref().and_then(|seen| cut(overlap(seen, &keys)?));
        // Rows without a key have their sink yet.
        let is_kept = |found: &Block| found.rows == whole.rows;
        if self.problem.score.sinks && !found.as_ref().is_some_and(is_kept) { Some(whole) } else { found }
    }

    /// The problem of a kernel's call between rows and keys of the whole, of packed sequences that begin at
    /// `starts` among them.
    pub(crate) fn part(
        &self,
        (rows, keys): (&Range<usize>, &Range<usize>),
        (mask, starts): (Mask, &Option<[Vec<i32>; 2]>),
        heads: &Range<usize>,
        kv_heads: usize,
    ) -> Part {
        let first = (rows.start, keys.start);
        let (rows, keys) = (rows.len(), keys.len());
        let lengths = match starts {
            None => Lengths::uniform(check::q_shape(&self.problem)[0], rows, keys),
            Some(starts) => {
                let [q, k] = starts.each_ref().map(|starts| longest(starts));
                Lengths::packed(starts[0].len() - 1, rows, keys, q, k)
            }
        };
        self.part_of((lengths, first), starts.clone(), heads, kv_heads, mask)
    }

    /// The problem of a rank's call on its cache.
    pub(crate) fn cache_part(&self) -> Part {
        let Problem { lengths, heads_q, heads_kv, .. } = self.problem;
        self.part_of((lengths, (0, 0)), None, &(0..heads_q), heads_kv, Mask::FULL)
    }

    /// The whole problem for some heads.
    pub(crate) fn heads_part(&self, heads: &Range<usize>, kv_heads: usize) -> Part {
        let starts = self.starts.clone().map(|starts| [starts.clone(), starts]);
        self.part_of((self.problem.lengths, (0, 0)), starts, heads, kv_heads, self.problem.mask)
    }

    fn part_of(
        &self,
        (lengths, (row, key)): (Lengths, (usize, usize)),
        starts: Option<[Vec<i32>; 2]>,
        heads: &Range<usize>,
        kv_heads: usize,
        mask: Mask,
    ) -> Part {
        // The scale follows from the head dim alone: parts have the whole's.
        let problem = self.problem.with_lengths(lengths).with_heads(heads.len(), kv_heads).with_mask(mask);
        // What is merged gets its sinks then.
        let sinks = problem.score.sinks && !matches!(self.scheme, Scheme::Ring | Scheme::Decode);
        let score = problem.score.with_sinks(sinks).with_dropout(None);
        // Under a causal mask packed sequences of a rank's own end where its diagonals do.
        let has_corner = starts.is_some() && self.problem.mask.right == Some(0) && score.program.is_none();
        let score = match self.has_own_slopes() {
            false => score.with_program(self.program),
            true if has_corner => score,
            true => score.with_alibi(None).with_softcap(None).with_program(self.program),
        };
        let places = match score.program {
            None => Vec::new(),
            Some(_) => self.places((row, key), starts.as_ref(), heads),
        };
        let cut = self.arrays.iter().filter(|own| own.axes.is_ok());
        let arrays = cut.map(|own| (own.array, self.window(own, (lengths, (row, key)), heads, kv_heads)));
        let arrays = arrays.collect();
        Part { problem: problem.with_score(score), heads: heads.clone(), starts, places, arrays }
    }

    /// What the program of a part is told that begins at this row and key, of packed sequences that begin at
    /// `starts` among its rows.
    fn places(
        &self,
        (row, key): (usize, usize),
        starts: Option<&[Vec<i32>; 2]>,
        heads: &Range<usize>,
    ) -> Vec<Place> {
        let (rows, keys) = self.len();
        // The part's first sequence, which has rows, and its last one: where they begin, and their lengths.
        let of_sequence = |number: usize| {
            let bounds = self.starts.as_deref().and_then(|starts| starts.get(number..number + 2));
            bounds.map_or((0, rows, keys), |own| {
                let len = (own[1] - own[0]) as usize;
                (own[0] as usize, len, len)
            })
        };
        let first = self.starts.as_deref().map_or(0, |all| all.partition_point(|at| *at as usize <= row));
        let (first, count) = (first.saturating_sub(1), starts.map_or(1, |[own, _]| own.len() - 1));
        let ((begin, sq, sk), (_, end, _)) = (of_sequence(first), of_sequence(first + count - 1));
        let number = |var: Var| match var {
            Var::S => 0,
            Var::B => first as i64,
            Var::H => heads.start as i64,
            Var::Hk => (heads.start / self.problem.group_size().max(1)) as i64,
            Var::Q => (row - begin) as i64,
            Var::K => (key - begin) as i64,
            Var::Sq => sq as i64,
            Var::Sk => sk as i64,
            Var::Off => sk as i64 - sq as i64 + self.problem.mask.offset,
        };
        let own = self.variables().iter().filter_map(|var| Some((scalar(*var)?, number(*var) as i32)));
        let [last, of_last] = LAST;
        own.chain([(last, count as i32 - 1), (of_last, end as i32)]).collect()
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

/// Rows of the longest sequence.
fn longest(starts: &[i32]) -> usize {
    starts.windows(2).map(|pair| (pair[1] - pair[0]) as usize).max().unwrap_or(0)
}
