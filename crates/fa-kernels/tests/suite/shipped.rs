//! Shipped specs, and bundles of them.

use std::collections::HashSet;
use std::path::Path;

use fa_core::{
    Alibi, DescaleForm, Descales, Family, KernelSpec, Lengths, Mask, MaskKind, Problem, ScoreMod,
    ShippedSpec, Side,
};
use fa_kernels::bundle::Manifest;
use fa_kernels::{Cache, Headers, ship, specs};
use fa_planner::plan::{PlanOptions, best};

use crate::nvrtc;

#[test]
fn shipped_specs_differ_and_stand_in_the_folder_of_their_kernel() {
    let files = specs::shipped().unwrap_or_else(|(path, error)| panic!("specs/{path}: {error}"));
    assert!(!files.is_empty());
    let mut names = HashSet::new();
    for file in files {
        let name = file.shipped.spec.to_string();
        assert!(file.path.starts_with(&name[..4]), "{} holds {name}", file.path);
        assert!(!file.shipped.archs.is_empty(), "{} ships for no architecture", file.path);
        assert!(names.insert(name.clone()), "{name} ships twice");
    }
}

/// What specs are for: two sequences of 8k with 2,048 columns in all heads, or with groups of four, and more
/// of 4k, 1k and 256; packed chats and sentences; chunks of prompts, and decoding, on pages; latents are
/// decoded.
fn uses(spec: &KernelSpec) -> Vec<Problem> {
    let traits = spec.traits();
    let head_dims = (spec.head_dim as usize, spec.head_dim_v as usize);
    let alone = (2048 / head_dims.0).max(1);
    let short = Side::packed(16_384, 256);
    let (chats, pages) = (Side::packed(16_384, 4096), |page: usize, batch: usize| {
        Side::paged(page, batch * 4096 / page, 4096)
    });
    let uses = match (spec.reads.varied, spec.reads.paged) {
        (_, true) if traits.is_latent => vec![
            (Lengths::of(128, Side::padded(1), pages(64, 128)), (64, 1)),
            (Lengths::of(128, Side::padded(1), pages(64, 128)), (16, 1)),
            (Lengths::of(8, Side::padded(1), pages(64, 8)), (64, 1)),
        ],
        (_, false) if traits.is_latent => vec![(Lengths::uniform(128, 1, 4096), (64, 1))],
        (false, _) => vec![
            (Lengths::uniform(2, 8192, 8192), (alone, alone)),
            (Lengths::uniform(2, 8192, 8192), (32, 8)),
            (Lengths::uniform(4, 4096, 4096), (alone, alone)),
            (Lengths::uniform(16, 1024, 1024), (alone, alone)),
            (Lengths::uniform(128, 256, 256), (12, 12)),
        ],
        (true, false) => {
            vec![(Lengths::of(8, chats, chats), (32, 8)), (Lengths::of(128, short, short), (12, 12))]
        }
        (true, true) => vec![
            (Lengths::of(8, Side::padded(512), pages(64, 8)), (32, 8)),
            (Lengths::of(64, Side::padded(1), pages(16, 64)), (32, 8)),
        ],
    };
    let mask = match spec.mask {
        MaskKind::Full => Mask::FULL,
        MaskKind::Causal => Mask::CAUSAL,
        MaskKind::Window => Mask::causal_window(512),
    };
    let score = ScoreMod::NONE
        .with_softcap(spec.score.softcap.then_some(30.0))
        .with_alibi(spec.score.alibi.then_some(Alibi::PerHead))
        .with_sinks(spec.score.sinks);
    let descales = match (spec.types.is_fp8(), spec.reads_codes()) {
        (true, _) => Descales::all(DescaleForm::Head),
        (false, true) => Descales::both(DescaleForm::Head),
        (false, false) => Descales::NONE,
    };
    let of = |(lengths, heads)| {
        Problem::new(lengths, heads, head_dims, spec.types)
            .with_mask(mask)
            .with_score(score)
            .with_descales(descales)
            .with_latent(traits.is_latent)
            .with_softmax_scale(traits.is_latent.then_some(0.1))
    };
    uses.into_iter().map(of).collect()
}

/// What is compiled ahead is what the library chooses first: else it is compiled once more, or never used.
/// This is of the SM90 forwards, and of the SM80-class ones that decode from 8-bit caches; others ship by
/// measurement, as alternatives, or for GPUs with less shared memory.
#[test]
fn shipped_forwards_are_the_planners_first_choices() {
    let files = specs::shipped().unwrap_or_else(|(path, error)| panic!("specs/{path}: {error}"));
    let mut compared = 0;
    for file in files {
        let ShippedSpec { archs, spec } = file.shipped;
        let traits = spec.traits();
        let decodes_codes = spec.reads_codes() && spec.reads.paged;
        if traits.pass.is_backward() || !(traits.family == Family::Sm90 || decodes_codes) {
            continue;
        }
        let options = PlanOptions::default().with_family(Some(traits.family));
        let first = |problem: &Problem| best(problem, archs[0], &options).map(|plan| plan.spec);
        let firsts: Vec<KernelSpec> = uses(&spec).iter().filter_map(|problem| first(problem).ok()).collect();
        let names: Vec<String> = firsts.iter().map(ToString::to_string).collect();
        assert!(firsts.contains(&spec), "{}: {spec}, but the planner chooses {names:#?}", file.path);
        compared += 1;
    }
    assert!(compared > 35, "{compared}");
}

/// Of every kernel the first spec for its first architecture: `fa prove` compiles all of them.
#[test]
fn shipped_specs_compile_within_their_plans_and_make_a_bundle() {
    // Kept between runs, by content: a kernel is compiled again when its sources change.
    let cache = Cache::open(Some(Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels")), 1 << 30);
    let compiler = nvrtc();
    let files = specs::shipped().unwrap_or_else(|(path, error)| panic!("specs/{path}: {error}"));
    let mut wanted: Vec<ShippedSpec> = Vec::new();
    for ShippedSpec { archs, spec } in files.into_iter().map(|file| file.shipped) {
        if wanted.iter().all(|own| own.spec.kernel.name() != spec.kernel.name()) {
            wanted.push(ShippedSpec { archs: vec![archs[0]], spec });
        }
    }
    assert_eq!(wanted.len(), 7, "{wanted:?}");
    let built = ship::build(&wanted, &[], &compiler, &cache, &Headers::embedded(), &|_, _| ()).unwrap();
    assert!(built.failures.is_empty(), "{:?}", built.failures);
    assert!(built.rows.iter().all(|row| row.actual_blocks >= row.planned_blocks), "{:?}", built.rows);

    let folder = tempfile::tempdir().unwrap();
    let written = ship::write_bundle(&built, &compiler, folder.path()).unwrap();
    assert_eq!(written.kernels.len(), built.rows.len());
    assert_eq!(Manifest::read(folder.path()).unwrap(), written);
    assert_eq!(written.others.len() % 5, 0);
    assert!(written.others.iter().any(|own| own.file.starts_with("sm90/fa_append.")), "{:?}", written.others);
    for own in written.cubins() {
        assert!(own.file.ends_with(&format!(".{}.cubin", own.source)), "{}", own.file);
    }
    let cubin = folder.path().join(&written.kernels[0].cubins[0].file);
    std::fs::write(&cubin, b"damaged").unwrap();
    let error = Manifest::read(folder.path()).unwrap_err().to_string();
    assert!(error.contains("checksum") && error.contains("cargo xtask build"), "{error}");
}

/// With `--features bundle` and a bundle of the present sources (`cargo xtask build`), no shipped kernel is
/// compiled.
#[cfg(feature = "bundle")]
#[test]
fn the_built_in_bundle_holds_every_shipped_kernel() {
    use fa_kernels::bundle::Bundle;
    use fa_kernels::{Source, smem_bytes};
    let bundle = Bundle::embedded();
    if bundle.is_empty() {
        // Built without a bundle at hand: the build script has said so.
        return;
    }
    let files = specs::shipped().unwrap_or_else(|(path, error)| panic!("specs/{path}: {error}"));
    for ShippedSpec { archs, spec } in files.into_iter().map(|file| file.shipped) {
        for arch in archs {
            let programs =
                Source::programs(&spec, arch, Some(smem_bytes(&spec)), &Headers::embedded()).unwrap();
            let cubins = bundle.find_all(&programs);
            let cubins = cubins.unwrap_or_else(|| panic!("{spec} on {arch} is not in the bundle"));
            assert!(cubins.iter().all(|cubin| cubin.starts_with(b"\x7fELF")));
        }
    }
}
