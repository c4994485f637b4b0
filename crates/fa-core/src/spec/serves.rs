//! Which kernel computes which problem: what it is compiled for, and what a launch holds (counts, factors of
//! scores, pages). [`KernelSpec::serves`] is the only rule; planner and launch both ask it.

use super::error::{Mismatch, Unserved};
use super::pages::{boxes_need, byte_panel, operand_panel};
use super::{Kernel, KernelSpec, MAX_COUNT, MAX_SOFTCAP, MaskKind, Reads, Traits};
use crate::program::Interned;
use crate::{DescaleForm, Dtype, Problem, SideRows};

/// An upper bound on the CTAs that a GPU computes at once: more than any does.
const MOST_CTAS: usize = 1 << 16;

impl Problem {
    /// Checks what every GPU kernel asks of a problem beyond [`Problem::check`], whichever kernel it is:
    /// lengths and counts up to [`MAX_COUNT`], a softmax scale and a soft cap that f32 holds, and of codes
    /// what kernels for them compute.
    ///
    /// # Errors
    /// [`Unserved::TooLong`], [`Unserved::Scale`], [`Unserved::Softcap`] or [`Unserved::Codes`], the first
    /// found.
    pub fn check_gpu(&self) -> Result<(), Unserved> {
        let Problem { lengths, heads_q, heads_kv, .. } = *self;
        let sequences = lengths.sequences();
        let mut counts = vec![
            ("batch", sequences),
            ("heads_q", heads_q),
            ("heads_kv", heads_kv),
            ("batch * heads_q", sequences.saturating_mul(heads_q)),
            ("seqlen_q", lengths.max_q()),
            ("seqlen_k", lengths.max_k()),
        ];
        for (name, side) in [("total_q", lengths.q()), ("total_k", lengths.k())] {
            match side.rows {
                SideRows::Packed { total, .. } => counts.push((name, total)),
                SideRows::Paged { page, pages, .. } => counts.extend([
                    ("page", page),
                    ("pages", pages),
                    ("entries of the page table", lengths.table_columns()),
                ]),
                SideRows::Padded { .. } => {}
            }
        }
        counts.into_iter().try_for_each(|(name, value)| count(name, value))?;
        self.check_scores()?;
        self.check_codes_on_gpu()
    }

    /// Rows of codes of 4 bits in whole units of 16 bytes. Of an fp8 Q: no program, head dims in whole steps
    /// of its products, O in bf16, and descales that are the same for all keys of a head.
    fn check_codes_on_gpu(&self) -> Result<(), Unserved> {
        let dtype = self.types.kv;
        let refuse = |what, value, need| Err(Unserved::Codes { dtype, what, value, need });
        if let Some(program) = self.score.program.filter(|_| self.types.is_fp8()) {
            return refuse("program", program.to_string(), "none, or Q in 16 bits beside the codes");
        }
        let (whole, need) = match dtype {
            Dtype::Int4 => (32, "a multiple of 32; pad with zeros"),
            Dtype::E4m3 if self.types.is_fp8() => (16, "a multiple of 16; pad with zeros"),
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 | Dtype::E4m3 | Dtype::Int8 | Dtype::E5m2 => return Ok(()),
        };
        for (what, value) in [("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)] {
            if !value.is_multiple_of(whole) {
                return refuse(what, value.to_string(), need);
            }
        }
        if !self.types.is_fp8() {
            return Ok(());
        }
        if self.types.out != Dtype::Bf16 {
            return refuse("out_dtype", self.types.out.to_string(), "bf16");
        }
        for (what, form) in [("k_descale", self.descales.k), ("v_descale", self.descales.v)] {
            if form == DescaleForm::TokenHead {
                return refuse(what, form.to_string(), "head or sequence_head");
            }
        }
        Ok(())
    }

    /// The softmax scale is positive, and it, its product with log2(e) and what goes with a soft cap are
    /// normal f32; the cap does not spoil the scores.
    fn check_scores(&self) -> Result<(), Unserved> {
        let scale = self.scale();
        let scale_log2 = scale * std::f64::consts::LOG2_E;
        let usable = |value: f64| value > 0.0 && (value as f32).is_normal();
        if !usable(scale) || !usable(scale_log2) {
            return Err(Unserved::Scale { scale });
        }
        let Some(softcap) = self.score.softcap else { return Ok(()) };
        if softcap > MAX_SOFTCAP || !usable(softcap) || !usable(2.0 * scale_log2 / softcap) {
            return Err(Unserved::Softcap { softcap, scale, limit: MAX_SOFTCAP });
        }
        Ok(())
    }
}

fn count(name: &'static str, value: usize) -> Result<(), Unserved> {
    if value <= MAX_COUNT { Ok(()) } else { Err(Unserved::TooLong { name, value, limit: MAX_COUNT }) }
}

impl KernelSpec {
    /// The spec of `kernel` for problems like `problem`, on tiles of these head dims (Q's and K's, V's),
    /// without splits.
    pub fn for_problem(
        problem: &Problem,
        [head_dim, head_dim_v]: [u32; 2],
        kernel: impl Into<Kernel>,
    ) -> Self {
        KernelSpec {
            types: problem.types,
            head_dim,
            head_dim_v,
            mask: MaskKind::of(&problem.mask),
            score: problem.score.kind(),
            reads: Reads::of(problem),
            split: false,
            kernel: kernel.into(),
        }
    }

    /// Checks that the kernel computes `problem`: its types, head dims, mask, changes of scores, ratio of
    /// heads and how rows are found; and that a launch holds it: its counts and factors
    /// ([`Problem::check_gpu`]), the tiles of all heads, its pages. A kernel is compiled without lengths, and
    /// a problem does not name a pass: neither is compared. A kernel that splits keys serves what the same
    /// kernel without splits serves. The problem must be valid ([`Problem::check`]).
    ///
    /// # Errors
    /// The first [`Unserved`] found.
    pub fn serves(&self, problem: &Problem) -> Result<(), Unserved> {
        self.check_compiled(problem)?;
        problem.check_gpu()?;
        self.check_tiles(problem)?;
        self.check_pages(problem)
    }

    /// The kernel was compiled for problems of this kind.
    fn check_compiled(&self, problem: &Problem) -> Result<(), Mismatch> {
        let differs = |what, kernel: String, problem: String| Err(Mismatch { what, kernel, problem });
        let (own, of) = (self.types, problem.types);
        for (what, have, need) in [
            ("dtype", own.q, of.q),
            ("kv_dtype", own.kv, of.kv),
            ("out_dtype", own.out, of.out),
            ("dkv_dtype", own.dkv, of.dkv),
        ] {
            if have != need {
                return differs(what, have.to_string(), need.to_string());
            }
        }
        for (what, have, need) in [
            ("head_dim", self.head_dim, problem.head_dim),
            ("head_dim_v", self.head_dim_v, problem.head_dim_v),
        ] {
            if need > have as usize || !need.is_multiple_of(8) {
                return differs(what, format!("multiples of 8 up to {have}"), need.to_string());
            }
        }
        let traits = self.traits();
        let forms = ["K and V of their own", "V in the first columns of K (latent)"];
        match (traits.is_latent, problem.latent) {
            (false, true) => {
                let problem = format!("{}, which the CPU backend computes", forms[1]);
                return differs("latent", forms[0].to_owned(), problem);
            }
            (true, false) => return differs("latent", forms[1].to_owned(), forms[0].to_owned()),
            (false, false) | (true, true) => {}
        }
        // Its columns have panels of their own behind V's.
        let (rope, need) = ((self.head_dim.saturating_sub(self.head_dim_v)) as usize, problem.head_dim_k());
        if problem.latent && need > rope {
            return differs("head_dim - head_dim_v", format!("up to {rope}"), need.to_string());
        }
        if !self.mask.serves(&problem.mask) {
            return differs("mask", self.mask.name().to_owned(), problem.mask.to_string());
        }
        check_offset(problem)?;
        let (have, need) = (self.score, problem.score.kind());
        let (reads, of) = (self.reads, Reads::of(problem));
        for (what, have, need, [off, on]) in [
            ("softcap", have.softcap, need.softcap, ["no softcap", "a softcap"]),
            ("alibi", have.alibi, need.alibi, ["no ALiBi", "ALiBi"]),
            ("sinks", have.sinks, need.sinks, ["no sinks", "sinks"]),
            ("paged", reads.paged, of.paged, ["keys in one piece", "keys in pages"]),
            ("varied", reads.varied, of.varied, ["uniform lengths", "lengths on the device"]),
        ] {
            if have != need {
                let text = |is_on: bool| if is_on { on } else { off }.to_owned();
                return differs(what, text(have), text(need));
            }
        }
        if have.program != need.program {
            let text = |own: Option<Interned>| own.map_or("no program".to_owned(), |own| own.to_string());
            return differs("program", text(have.program), text(need.program));
        }
        if self.backward().is_some_and(|traits| traits.whole_keys) {
            self.check_whole_keys(problem)?;
        }
        let (group, tile_m, parts) = (problem.group_size(), self.tile().0, traits.head_parts);
        if !group.is_multiple_of(parts as usize) {
            let kernel = format!("groups of a multiple of {parts}");
            return differs("head_parts", kernel, format!("{group} query heads per K/V head"));
        }
        if traits.tile_queries(group / parts as usize) == 0 {
            let kernel = match parts {
                1 => format!("groups that fit tile_m = {tile_m}"),
                _ => format!("groups of which {parts} parts fit tile_m = {tile_m}"),
            };
            return differs("pack_gqa", kernel, format!("{group} query heads per K/V head"));
        }
        Ok(())
    }

    /// A tile has all keys, and every query sees one of them: no tile would write the dQ of others.
    fn check_whole_keys(&self, problem: &Problem) -> Result<(), Mismatch> {
        let (queries, keys) = (problem.lengths.max_q(), problem.lengths.max_k());
        let tile_n = self.tile().1;
        let all_see_keys = self.mask == MaskKind::Full || queries <= keys;
        if (1..=tile_n as usize).contains(&keys) && all_see_keys {
            return Ok(());
        }
        let causal = if self.mask == MaskKind::Full { "" } else { ", as many as queries at least" };
        Err(Mismatch {
            what: "whole_keys",
            kernel: format!("1 to {tile_n} keys{causal}"),
            problem: format!("{queries} queries and {keys} keys"),
        })
    }

    /// The rows of a head and the tiles of all heads fit a launch.
    fn check_tiles(&self, problem: &Problem) -> Result<(), Unserved> {
        let traits = self.traits();
        let problem = &traits.tiled(problem);
        let Traits { tile: (_, tile_n), packs_gqa, cluster, .. } = traits;
        let (group, heads) =
            if packs_gqa { (problem.group_size(), problem.heads_kv) } else { (1, problem.heads_q) };
        let lengths = &problem.lengths;
        count("query rows of a head", lengths.max_q().saturating_mul(group))?;
        // Those of a sequence and head fill whole clusters.
        let queries = lengths.sequences().saturating_mul(cluster as usize - 1);
        let tile_queries = traits.tile_queries(problem.group_size()).max(1) as u32;
        let queries = lengths.most_tiles_q(tile_queries).saturating_add(queries);
        // What a plan adds where it divides the keys of some tiles: `most_slots` of the launch.
        let parts = if self.split && self.reads.varied { 2 } else { 0 };
        let spare = if parts > 0 { 6 * MOST_CTAS } else { 0 };
        let of_queries = queries.saturating_add(parts).saturating_mul(heads).saturating_add(spare);
        count("tiles of queries", of_queries)?;
        if !self.kernel.is_backward() {
            return Ok(());
        }
        // The query heads of a group may be divided among CTAs.
        count("tiles of keys", lengths.most_tiles_k(tile_n).saturating_mul(problem.heads_q))
    }

    /// Pages are what the kernel's loads take.
    fn check_pages(&self, problem: &Problem) -> Result<(), Unserved> {
        let traits = self.traits();
        let (_, tile_n) = traits.tile;
        let Some(page) = problem.lengths.page().filter(|_| !traits.copies_rows()) else { return Ok(()) };
        for head_dim in [self.head_dim, self.head_dim_v] {
            let row_bytes = match self.kernel.computes_in_8_bits() {
                true => byte_panel(head_dim),
                false => 2 * operand_panel(head_dim),
            };
            if let Some(multiple) = boxes_need(page, tile_n, row_bytes) {
                return Err(Unserved::Page { page, tile_n, head_dim, multiple });
            }
        }
        Ok(())
    }
}

/// The mask's offset is one that kernels compute: their windows have limits of 0 and more, which hold the
/// offset, and their ALiBi is aligned to the bottom right corner.
fn check_offset(problem: &Problem) -> Result<(), Mismatch> {
    let offset = problem.mask.offset;
    let refuse = |kernel: &str| {
        let problem = format!("query_offset = {offset} ({}), which the CPU backend computes", problem.mask);
        Err(Mismatch { what: "query_offset", kernel: kernel.to_owned(), problem })
    };
    if offset != 0 && problem.score.alibi.is_some() {
        return refuse("ALiBi with query_offset = 0");
    }
    if !problem.mask.holds_offset() {
        return refuse("offsets up to left and from -right, by which no side of the window is negative");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{Sm80Fwd, Sm90Bwd, Sm90Fwd};
    use crate::{Descales, Kernel, Lengths, Mask, MaskKind, ScoreKind, ScoreMod, Side, Types};

    const BASE: Problem = Problem::square(2, 300, 5, 64, Mask::FULL, Dtype::Bf16);

    fn spec(kernel: Kernel, reads: Reads) -> KernelSpec {
        let (types, mask, score) = (Types::same(Dtype::Bf16), MaskKind::Full, ScoreKind::default());
        KernelSpec { types, head_dim: 64, head_dim_v: 64, mask, score, reads, split: false, kernel }
    }

    #[test]
    fn pages_that_no_box_loads_are_not_served() {
        let reads = Reads { varied: true, paged: true };
        let paged = |page| BASE.with_lengths(Lengths::of(2, Side::padded(1), Side::paged(page, 64, 300)));
        let boxes = spec(Kernel::Sm90Fwd(Sm90Fwd::default()), reads);
        assert_eq!(boxes.serves(&paged(16)), Ok(()));
        let error = boxes.serves(&paged(1)).expect_err("128 boxes of one row for 32 lanes");
        assert_eq!(error, Unserved::Page { page: 1, tile_n: 128, head_dim: 64, multiple: 4 });
        assert!(error.to_string().contains("use pages of a multiple of 4"), "{error}");
        let gathered = spec(Kernel::Sm90Fwd(Sm90Fwd { gather: true, ..Sm90Fwd::default() }), reads);
        assert_eq!(gathered.serves(&paged(1)), Ok(()));
        let narrow = Sm90Fwd { gather: true, tile_n: 48, ..Sm90Fwd::default() };
        let error = spec(Kernel::Sm90Fwd(narrow), reads).check().expect_err("lanes without a row");
        assert!(error.to_string().contains("tile_n of 64 or more"), "{error}");
        assert_eq!(spec(Kernel::Sm80Fwd(Sm80Fwd::default()), reads).serves(&paged(1)), Ok(()));
    }

    #[test]
    fn offsets_that_a_window_holds_are_served_and_others_refused_by_name() {
        let window = KernelSpec {
            mask: MaskKind::Window,
            ..spec(Kernel::Sm80Fwd(Sm80Fwd::default()), Reads::UNIFORM)
        };
        let of = |mask: Mask| BASE.with_mask(mask);
        for mask in
            [Mask::CAUSAL.with_offset(9), Mask::window(4, 2).with_offset(-2), Mask::band(Some(7), None)]
        {
            assert_eq!(window.serves(&of(mask)), Ok(()), "{mask}");
        }
        let sloped = ScoreMod::NONE.with_alibi(Some(crate::Alibi::PerHead));
        for problem in [
            of(Mask::CAUSAL.with_offset(-1)),
            of(Mask::window(4, 2).with_offset(5)),
            of(Mask::CAUSAL.with_offset(1)).with_score(sloped),
        ] {
            let error = window.serves(&problem).expect_err("a negative limit, or a moved diagonal");
            assert_eq!(error.what(), "query_offset");
            assert!(error.to_string().contains("which the CPU backend computes"), "{error}");
        }
        let causal = spec(Kernel::Sm80Fwd(Sm80Fwd::default()), Reads::UNIFORM);
        let causal = KernelSpec { mask: MaskKind::Causal, ..causal };
        assert_eq!(causal.serves(&of(Mask::CAUSAL.with_offset(9))).expect_err("not causal").what(), "mask");
    }

    #[test]
    fn counts_that_no_launch_holds_are_not_served() {
        let dense = spec(Kernel::Sm90Fwd(Sm90Fwd::default()), Reads::UNIFORM);
        let backward = spec(Kernel::Sm90Bwd(Sm90Bwd::default()), Reads::UNIFORM);
        let of = |batch, q, k, heads| BASE.with_lengths(Lengths::uniform(batch, q, k)).with_heads(heads, 1);
        let named = |spec: &KernelSpec, problem: &Problem| match spec.serves(problem) {
            Err(Unserved::TooLong { name, value, limit }) if value > limit && limit == MAX_COUNT => name,
            other => panic!("{other:?}"),
        };
        assert_eq!(dense.serves(&of(1, MAX_COUNT, MAX_COUNT, 1)), Ok(()));
        assert_eq!(named(&dense, &of(1, MAX_COUNT + 1, 1, 1)), "seqlen_q");
        assert_eq!(named(&dense, &of(1, 1, 1 << 32, 1)), "seqlen_k");
        assert_eq!(named(&dense, &of(1 << 31, 1, 1, 1)), "batch");
        assert_eq!(named(&dense, &of(1 << 20, 1, 1, 2048)), "batch * heads_q");
        assert_eq!(named(&dense, &of(1 << 20, 256, 1, 1024)), "tiles of queries");
        assert_eq!(named(&backward, &of(1 << 20, 1, 256, 1024)), "tiles of keys");
        let packs = Kernel::Sm90Fwd(Sm90Fwd { pack_gqa: true, ..Sm90Fwd::default() });
        assert_eq!(named(&spec(packs, Reads::UNIFORM), &of(1, MAX_COUNT, 1, 2)), "query rows of a head");
        let cache = Lengths::of(1, Side::padded(1), Side::paged(1 << 31, 1, 1));
        assert_eq!(
            BASE.with_lengths(cache).check_gpu(),
            Err(Unserved::TooLong { name: "page", value: 1 << 31, limit: MAX_COUNT })
        );
    }

    #[test]
    fn what_no_kernel_of_codes_computes_is_refused_by_name() {
        let fp8 = BASE.with_types(Types::fp8(Dtype::Bf16)).with_descales(Descales::all(DescaleForm::Head));
        assert_eq!(fp8.check_gpu(), Ok(()));
        let sloped = ScoreMod::NONE.with_alibi(Some(crate::Alibi::PerHead)).with_sinks(true);
        for score in [sloped, ScoreMod::softcap(30.0)] {
            assert_eq!(fp8.with_score(score).with_head_dims(48, 16).check_gpu(), Ok(()));
        }
        let program = crate::program::Program::parse("k <= q + off").unwrap().intern().unwrap();
        let int4 = BASE.with_types(Types::same(Dtype::Bf16).with_kv(Dtype::Int4));
        for dims in [(32, 32), (96, 64), (256, 128)] {
            assert_eq!(int4.with_head_dims(dims.0, dims.1).check_gpu(), Ok(()));
        }
        assert_eq!(int4.with_score(ScoreMod::NONE.with_program(Some(program))).check_gpu(), Ok(()));
        for (problem, what, part) in [
            (
                fp8.with_head_dim(72),
                "head_dim",
                "head_dim = 72 with K and V in e4m3: GPU kernels need a multiple of 16",
            ),
            (fp8.with_head_dim_v(8), "head_dim_v", "pad with zeros"),
            (
                int4.with_head_dim(80),
                "head_dim",
                "head_dim = 80 with K and V in int4: GPU kernels need a multiple of 32; pad with zeros",
            ),
            (int4.with_head_dim_v(48), "head_dim_v", "a multiple of 32"),
            (
                fp8.with_types(Types::fp8(Dtype::F16)),
                "out_dtype",
                "out_dtype = f16 with K and V in e4m3: GPU kernels need bf16",
            ),
            (
                fp8.with_descales(fp8.descales.with_v(DescaleForm::TokenHead)),
                "v_descale",
                "need head or sequence_head",
            ),
            (
                fp8.with_score(ScoreMod::NONE.with_program(Some(program))),
                "program",
                "the CPU backend takes any",
            ),
        ] {
            let error = problem.check_gpu().expect_err("must be refused");
            assert_eq!(error.what(), what);
            assert!(error.to_string().contains(part), "{error}");
            assert_eq!(problem.check(), Ok(()));
        }
    }

    #[test]
    fn factors_that_spoil_scores_are_not_served() {
        let of = |softmax_scale, softcap| {
            BASE.with_softmax_scale(softmax_scale)
                .with_score(ScoreMod::NONE.with_softcap(softcap))
                .check_gpu()
        };
        for softcap in [None, Some(1e-3), Some(30.0), Some(MAX_SOFTCAP)] {
            assert_eq!(of(None, softcap), Ok(()));
        }
        for (scale, softcap) in [(None, 1e-39), (None, MAX_SOFTCAP * 1.001), (Some(1e30), 1e-30)] {
            assert!(matches!(of(scale, Some(softcap)), Err(Unserved::Softcap { .. })), "{softcap}");
        }
        for scale in [0.0, -1.0, 1e-39, 1e39] {
            assert_eq!(of(Some(scale), None), Err(Unserved::Scale { scale }));
        }
    }
}
