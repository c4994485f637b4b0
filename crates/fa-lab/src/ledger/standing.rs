//! The present units next to the ledger: what holds, what has changed, what is not known here.

use std::collections::{BTreeMap, BTreeSet};

use fa_core::Arch;
use fa_kernels::Headers;
use rayon::prelude::*;
use serde::{Serialize, Serializer};

use super::code::{Workshop, launches, tokens};
use super::units::{Unit, emulated_sms};
use super::{Entry, Ledger, Row, Tier};
use crate::error::{Result, message};

/// What has become of a unit since the ledger was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Same {
    /// Its source has the same tokens: what it executes is known without a compiler.
    Tokens,
    /// Its source was compiled.
    Compiled,
    /// Its source differs, and there is no compiler to see whether its code does.
    Unknown,
    /// It does not compile within its plan: why.
    Broken(String),
}

/// A unit as it is, next to its row.
#[derive(Clone, Debug, Serialize)]
pub struct Standing {
    /// The unit.
    #[serde(serialize_with = "key_of")]
    pub unit: Unit,
    /// The hash of its tokens.
    pub tokens: String,
    /// The hash of its launches.
    pub launches: String,
    /// The entries that its cases launch, with the numbers of SMs on which they do.
    pub launched: BTreeMap<&'static str, BTreeSet<u32>>,
    /// How its code is known.
    pub same: Same,
    /// Registers on the architectures that it has to compile for, as far as known.
    pub registers: BTreeMap<Arch, u32>,
    /// Its entries with the runs that have judged their present code and launches.
    pub entries: BTreeMap<String, Entry>,
}

fn key_of<S: Serializer>(unit: &Unit, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&unit.key())
}

impl Standing {
    /// Whether the registers on all of its architectures are known.
    fn has_registers(&self) -> bool {
        self.unit.archs.iter().all(|arch| self.registers.contains_key(arch))
    }

    /// Whether its code is known.
    pub fn is_known(&self) -> bool {
        matches!(self.same, Same::Tokens | Same::Compiled)
    }

    /// Whether the emulation launches an entry: on as few SMs some are not, which are for a GPU to judge.
    pub fn is_emulated(&self, entry: &str) -> bool {
        let sms = self.unit.spec().map(emulated_sms);
        self.launched.get(entry).is_some_and(|own| sms.is_none_or(|sms| own.contains(&sms)))
    }

    /// Writes down the unit as it is, and that run `id` has judged these of its entries. What judged other
    /// code or other launches is dropped; of several runs of a tier the last one stays.
    pub fn note(&self, ledger: &mut Ledger, judged: Option<(&str, &[&str])>) {
        if !self.is_known() {
            return;
        }
        let runs = &ledger.runs;
        let row = ledger.units.entry(self.unit.key()).or_default();
        let mut entries = std::mem::take(&mut row.entries);
        let same_launches = row.launches == self.launches;
        entries.retain(|name, own| {
            same_launches && self.entries.get(name).is_some_and(|now| now.code == own.code)
        });
        for (name, now) in &self.entries {
            let own = Entry { code: now.code.clone(), by: Vec::new() };
            entries.entry(name.clone()).or_insert(own);
        }
        if let Some((id, names)) = judged {
            let tier = runs[id].tier;
            for name in names {
                let Some(Entry { by: own, .. }) = entries.get_mut(*name) else { continue };
                let is_kept = |by: &String| {
                    let other = runs[by].tier;
                    other != tier && !(other == Tier::Waived && tier.is_on_gpu())
                };
                own.retain(is_kept);
                own.push(id.to_owned());
                own.sort();
            }
        }
        *row = Row {
            tokens: self.tokens.clone(),
            launches: self.launches.clone(),
            registers: self.registers.clone(),
            entries,
        };
    }

    /// Entries that its cases launch and that no run of these tiers has judged as they are.
    pub fn without<'a>(
        &'a self,
        ledger: &'a Ledger,
        is_enough: impl Fn(Tier) -> bool + 'a,
    ) -> impl Iterator<Item = &'a str> + 'a {
        let lacks = move |(name, own): &(&String, &Entry)| {
            self.launched.contains_key(name.as_str()) && !ledger.tiers(own).any(&is_enough)
        };
        self.entries.iter().filter(lacks).map(|(name, _)| name.as_str())
    }
}

/// Compares units with the ledger. Those whose tokens differ are compiled where there is the ledger's
/// compiler, on all cores: for their own architecture, and where the code differs for all of theirs.
///
/// # Errors
/// A spec that is not valid, a problem that no kernel computes.
pub fn compare(ledger: &Ledger, units: Vec<Unit>, workshop: Option<&Workshop>) -> Result<Vec<Standing>> {
    let headers = workshop.map_or_else(Headers::embedded, |own| own.headers().clone());
    // Another compiler makes other code, of which the ledger says nothing.
    let workshop = match workshop {
        Some(own) if ledger.compiler.is_empty() || own.version()? == ledger.compiler => Some(own),
        Some(_) | None => None,
    };
    let none = Row::default();
    let standing = |unit: Unit| -> Result<Standing> {
        let tokens = tokens(&unit, &headers)?;
        let (launches, launched) = if unit.is_proven { launches(&unit)? } else { Default::default() };
        let row = ledger.units.get(&unit.key()).unwrap_or(&none);
        let mut own = Standing {
            same: Same::Tokens,
            registers: row.registers.clone(),
            entries: row.entries.clone(),
            unit,
            tokens,
            launches,
            launched,
        };
        let has_code = !own.unit.is_proven || !row.entries.is_empty();
        if row.tokens != own.tokens || !own.has_registers() || !has_code {
            match workshop {
                Some(workshop) => compile(&mut own, row, workshop),
                None => own.same = Same::Unknown,
            }
        }
        if own.unit.is_proven && row.launches != own.launches {
            own.entries.values_mut().for_each(|entry| entry.by.clear());
        }
        Ok(own)
    };
    let pool = rayon::ThreadPoolBuilder::new().build().expect("threads");
    pool.install(|| units.into_par_iter().with_max_len(1).map(standing).collect())
}

/// Finds out what a unit executes by compiling it.
fn compile(own: &mut Standing, row: &Row, workshop: &Workshop) {
    let found = workshop.codes(&own.unit).and_then(|codes| {
        let same =
            |(name, code): (&String, &String)| row.entries.get(name).is_some_and(|old| old.code == *code);
        let same_code = own.unit.is_proven && codes.iter().all(same);
        let is_known = own.has_registers() && (same_code || row.tokens == own.tokens);
        let registers = if is_known { row.registers.clone() } else { workshop.registers(&own.unit)? };
        Ok((codes, registers))
    });
    match found {
        Ok((codes, registers)) => {
            own.same = Same::Compiled;
            own.registers = registers;
            let entry = |(name, code): (String, String)| {
                let by = row.entries.get(&name).filter(|old| old.code == code);
                (name, Entry { by: by.map(|old| old.by.clone()).unwrap_or_default(), code })
            };
            own.entries = codes.into_iter().filter(|_| own.unit.is_proven).map(entry).collect();
        }
        Err(error) => own.same = Same::Broken(message(&error)),
    }
}

/// Counts over all units.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Entries.
    pub entries: usize,
    /// Of those, the entries that each tier has judged.
    pub of: BTreeMap<Tier, usize>,
    /// Entries that nothing on a GPU has judged and no waiver excuses, or that no emulation has.
    pub open: Vec<String>,
    /// Entries that no case launches, emulated or of a GPU's quick grid: nothing judges them.
    pub idle: Vec<String>,
    /// Units of which it is not known here whether their code has changed.
    pub unknown: Vec<String>,
    /// Units whose source has changed and whose code has not.
    pub moved: Vec<String>,
    /// Units that do not compile within their plans, and why.
    pub broken: Vec<String>,
}

/// What the ledger says of the present units.
pub fn summary(ledger: &Ledger, standings: &[Standing]) -> Summary {
    let mut all = Summary::default();
    for own in standings {
        let key = own.unit.key();
        let row = ledger.units.get(&key);
        match &own.same {
            Same::Unknown => all.unknown.push(key.clone()),
            Same::Broken(why) => all.broken.push(why.clone()),
            Same::Compiled if row.is_some_and(|row| row.tokens != own.tokens) => all.moved.push(key.clone()),
            Same::Compiled | Same::Tokens => {}
        }
        if !own.is_known() {
            continue;
        }
        for (name, entry) in &own.entries {
            all.entries += 1;
            if !own.launched.contains_key(name.as_str()) {
                all.idle.push(format!("{name} of {key}"));
                continue;
            }
            let tiers: BTreeSet<Tier> = ledger.tiers(entry).collect();
            for tier in &tiers {
                *all.of.entry(*tier).or_default() += 1;
            }
            let mut lacks = Vec::new();
            if own.is_emulated(name) && !tiers.iter().any(|tier| tier.is_emulated()) {
                lacks.push("emulation");
            }
            if !tiers.iter().any(|tier| tier.is_on_gpu() || *tier == Tier::Waived) {
                lacks.push("a GPU");
            }
            if !lacks.is_empty() {
                all.open.push(format!("{name} of {key}: not judged by {}", lacks.join(" and ")));
            }
        }
    }
    all.moved.retain(|key| !all.open.iter().any(|open| open.contains(&format!(" of {key}:"))));
    all
}

#[cfg(test)]
mod tests {
    use super::super::{Run, units};
    use super::*;

    /// A unit whose entries have this code, as the ledger knows them.
    fn standing(ledger: &Ledger, codes: [&str; 2], launches: &str) -> Standing {
        let unit = units().unwrap().into_iter().find(|unit| unit.name == "append").unwrap();
        let row = ledger.units.get(&unit.key()).cloned().unwrap_or_default();
        let entry = |(name, code): (&str, &str)| {
            let old = row.entries.get(name).filter(|old| old.code == code && row.launches == launches);
            let by = old.map(|old| old.by.clone()).unwrap_or_default();
            (name.to_owned(), Entry { code: code.to_owned(), by })
        };
        Standing {
            entries: ["fa_kernel", "fa_plan"].into_iter().zip(codes).map(entry).collect(),
            tokens: codes.concat(),
            launches: launches.to_owned(),
            launched: ["fa_kernel", "fa_plan"].map(|entry| (entry, [2].into())).into(),
            same: Same::Compiled,
            registers: BTreeMap::new(),
            unit,
        }
    }

    fn run(ledger: &mut Ledger, tier: Tier) -> String {
        let text = String::new;
        ledger.add(&Run {
            tier,
            of: text(),
            date: text(),
            on: text(),
            commit: text(),
            judge: text(),
            cases: 1,
        })
    }

    fn open(ledger: &Ledger, codes: [&str; 2], launches: &str) -> Vec<String> {
        summary(ledger, &[standing(ledger, codes, launches)]).open
    }

    #[test]
    fn a_proof_is_of_an_entrys_code_and_of_the_launches() {
        let mut ledger = Ledger::default();
        let all = ["fa_kernel", "fa_plan"];
        for tier in [Tier::Emulated, Tier::Waived] {
            let id = run(&mut ledger, tier);
            standing(&ledger, ["a", "b"], "l").note(&mut ledger, Some((&id, &all)));
        }
        assert_eq!(open(&ledger, ["a", "b"], "l"), [""; 0]);
        assert_eq!(
            open(&ledger, ["a", "c"], "l"),
            ["fa_plan of append on sm90: not judged by emulation and a GPU"]
        );
        assert_eq!(open(&ledger, ["a", "b"], "m").len(), 2, "other launches");
        // A GPU takes the place of the waiver, of the entries that it has judged.
        let id = run(&mut ledger, Tier::Quick);
        standing(&ledger, ["a", "b"], "l").note(&mut ledger, Some((&id, &all[..1])));
        let row = &ledger.units["append on sm90"];
        assert_eq!(row.entries["fa_kernel"].by, ["emulated1", "quick1"]);
        assert_eq!(row.entries["fa_plan"].by, ["emulated1", "waived1"]);
        // Changed code is proven anew; the other entry's runs stay.
        let id = run(&mut ledger, Tier::Emulated);
        standing(&ledger, ["a", "c"], "l").note(&mut ledger, Some((&id, &all)));
        let row = &ledger.units["append on sm90"];
        assert_eq!(
            (row.entries["fa_kernel"].by.len(), &row.entries["fa_plan"].by[..]),
            (2, &["emulated1".to_owned()][..])
        );
        assert_eq!(open(&ledger, ["a", "c"], "l"), ["fa_plan of append on sm90: not judged by a GPU"]);
    }

    #[test]
    fn without_a_compiler_other_sources_are_not_known_and_fail_nothing() {
        let ledger = Ledger::default();
        let unit = units().unwrap().into_iter().find(|unit| unit.name == "merge").unwrap();
        let standings = compare(&ledger, vec![unit], None).unwrap();
        let found = summary(&ledger, &standings);
        assert_eq!((found.unknown.len(), found.open.len(), found.entries), (1, 0, 0));
    }
}
