//! Flags and problems that a command cannot do: exit code 2, and what would do.

use crate::common::{fa, refused};

#[test]
fn planning_and_measuring_refuse_what_they_cannot_do() {
    for (line, part) in [
        ("plan --heads 6:4", "heads_kv = 4"),
        ("plan --headdim 0", "head_dim is 0"),
        ("plan --headdim 20", "multiples of 8"),
        ("plan --headdim 512", "multiples of 8 from 8 to 256"),
        ("plan --dtype f32", "no GPU kernel computes in f32"),
        ("plan --dtype e4m3", "no GPU kernel computes in e4m3"),
        ("plan --seqlen 18446744073709551615", "more than 2^48"),
        ("plan --batch 4294967296 --seqlen 4294967296", "more than 2^48"),
        ("plan --batch 0 --seqlen 18446744073709551615", "more than 2^48"),
        ("plan --softcap NaN", "softcap is NaN"),
        ("plan --mode bwd --arch sm100 --family sm100", "leave out --family sm100"),
        ("plan --deterministic", "--mode bwd"),
        ("bench --backend cuda --deterministic", "--mode bwd"),
        ("tune --deterministic", "--mode bwd"),
        ("build --all-configs --mode fwd --deterministic", "--mode bwd"),
        ("validate --all-configs --deterministic", "--mode bwd"),
        ("plan --arch sm80 --family sm90", "sm90 kernels do not run on sm80"),
        ("bench --backend cuda --dtype f32", "use bf16 or f16"),
        ("build --all-configs --family sm100", "sm100 kernels do not run on sm90"),
        ("build --all-configs --headdim 7", "multiples of 8"),
        ("build --all-configs --json no/such/folder/x.json", "no folder"),
        ("validate --check-records --results no/such/folder", "no folder no/such/folder"),
        ("validate --spec no/such/spec.ron", "no/such/spec.ron"),
        ("plan --arch sm90 --family sm100", "no tensor memory"),
        ("plan --arch sm100 --why tile_n=64", "--family sm80"),
        ("plan --why tile_n", "tile_n=192"),
        ("plan --why tile_o=3", "tile_m, tile_n"),
        ("plan --why tile_n=72", "64, 80, 96"),
        ("plan --mode bwd --why stages=2", "no kernel has a field 'stages'"),
        ("bench --dtype e4m3", "e4m3"),
        ("bench --seqlen 100000000 --heads 1024 --headdim 256", "memory are free"),
        ("bench --heads 3:2", "heads_kv = 2"),
        ("bench --seqlen 99999999999999", "more than 2^48"),
        ("man nothing", "there is no command 'nothing'"),
    ] {
        refused(&fa(line), &[part], line);
    }
}

#[test]
fn bad_usage_is_exit_code_2_and_says_what_would_do() {
    for (line, part) in [
        ("", "Usage"),
        ("walk", "unrecognized subcommand"),
        ("run", "<INPUT>"),
        ("run x --deterministic", "--backward"),
        ("run x --window 3", "needs two sides"),
        ("run x --window a,b", "'a' is no count of keys"),
        ("run x --window -2,0", "'-2' is no count of keys"),
        ("run x --layout sbhd", "use bshd or bhsd"),
        ("run x --backend tpu", "reference"),
        ("run x --scale wide", "invalid value 'wide'"),
        ("run x -o -", "name a file"),
        ("tune -o -", "name a file"),
        // A flag whose partner another flag rules out is not ignored.
        ("bench --filter x --seqlen 64", "cannot be used with"),
        ("bench --filter x --append", "cannot be used with"),
        ("bench --filter x", "--marks"),
        ("bench --draw x --plot y --seqlen 64", "cannot be used with"),
        ("bench --draw x --plot y --mode bwd", "cannot be used with"),
        ("bench --draw x --plot y --threads 2", "cannot be used with"),
        ("bench --draw x --plot y --reps 2", "cannot be used with"),
        ("tune --random 3 --marks sm90", "cannot be used with"),
        ("tune --seed 3 --marks sm90", "cannot be used with"),
        ("emulate --mutate --cta 3", "cannot be used with"),
        ("emulate --shipped --day 2026-01-01", "cannot be used with"),
        ("emulate --mutate --day 2026-01-01", "cannot be used with"),
        ("emulate --sample 0 --tried x", "cannot be used with"),
        ("emulate --sample 1 --day x", "YYYY-MM-DD"),
        ("emulate --sample 1 --day 2026-02-29", "YYYY-MM-DD"),
        ("emulate --sample 1 --day 2026-13-01", "YYYY-MM-DD"),
        ("emulate --sample 1 --day 2026-1-01", "YYYY-MM-DD"),
        ("run x --threads 0", "1..=4096"),
        ("run x --isa sse", "unknown instruction set 'sse'"),
        ("run x --arch sm90", "fa plan --arch sm90"),
        ("plan --arch sm75", "sm80, sm86"),
        ("plan --seqlen 4096,8192", "no whole number"),
        ("plan --heads 8:x", "'x' is no whole number"),
        ("plan --headdim=-1", "no whole number"),
        ("plan --batch 99999999999999999999", "is above 18446744073709551615, the most"),
        ("plan --seqlen 99999999999999999999x1", "is above 18446744073709551615, the most: use N or QxK"),
        ("plan -n 1.5", "'1.5' is no whole number"),
        ("emulate x.ron --cta 4294967296", "is above 4294967295, the most"),
        ("plan --seqlen-q 5", "--seqlen-k"),
        ("plan --dtype fp16", "f16"),
        ("plan --why tile_n=64 -n 3", "cannot be used with"),
        ("plan --json --format ron", "cannot be used with"),
        ("check a b --atol=-1", "must be a number, 0 or more"),
        ("check a b --atol nan", "must be a number, 0 or more"),
        ("check a b --atol 1 --inputs c", "cannot be used with"),
        ("build --headdim 64", "--all-configs"),
        ("build --deterministic", "--all-configs"),
        ("validate --mode bwd --deterministic", "--all-configs"),
        ("build --all-configs --out x", "cannot be used with"),
        ("build --all-configs --specs x", "cannot be used with"),
        ("validate --check-records --mode bwd", "cannot be used with"),
        ("validate --sanitize --spec x", "cannot be used with"),
        ("validate --seed 3", "--soak"),
        ("validate --repeat 5 --soak 5", "cannot be used with"),
        ("validate --mode both", "invalid value 'both'"),
        ("tune --mode both", "invalid value 'both'"),
        ("tune --mode both", "--random"),
        ("tune --seed 3", "--random"),
        ("tune --random 0", "invalid value"),
        ("tune --random 5 --seqlen 512", "cannot be used with"),
        ("tune --random 5 --marks sm90", "cannot be used with"),
        ("tune --random 5 --mode fwd --deterministic", "--mode bwd"),
        ("bench --seconds 0", "above 0"),
        ("completions cmd", "invalid value"),
    ] {
        let outcome = fa(line);
        assert_eq!(outcome.code, 2, "{line}: {outcome:?}");
        assert!(outcome.stderr.contains(part), "{line}: '{part}' is not in {}", outcome.stderr);
    }
}

/// clap asks for no flag that another one rules out: what belongs to it must rule that out itself.
#[test]
fn flags_that_belong_to_an_absent_flag_are_refused() {
    for (line, flag) in [
        ("plan --causal --tile-m 64", "--tile-m"),
        ("plan --batch 3 --tile-n 64", "--tile-n"),
        ("plan --packed 64 --explain", "--explain"),
        ("tune --headdim 64 --seed 3", "--seed"),
        ("tune --marks sm90 --seed 3", "--seed"),
        ("build --specs specs --headdim 64", "--headdim"),
        ("build --specs specs --mode bwd", "--mode"),
        ("build --out there --deterministic", "--deterministic"),
        ("build --specs specs --family sm80", "--family"),
        ("build --specs specs --json", "--json"),
        ("validate --full --seed 3", "--seed"),
        ("validate --all-configs --seed 3", "--seed"),
        ("validate --spec x.ron --headdim 64", "--headdim"),
        ("validate --full --deterministic", "--deterministic"),
        ("validate --soak 5 --headdim 64", "--headdim"),
    ] {
        let outcome = fa(line);
        assert!(outcome.code == 2 && outcome.stderr.contains(flag), "{line}: {outcome:?}");
    }
}
