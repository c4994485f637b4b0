//! What a GPU executes of a cubin, entry by entry: code, its attributes, constants and relocations, without
//! names, debug tables and whatever depends on the entries beside it.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use crate::jit::entries::PLACE;

/// Digits of a code hash: 64 bits, beyond any accident.
const DIGITS: usize = 16;

/// Section types and flags of ELF that are read.
const SYMBOLS: u32 = 2;
const NO_BITS: u32 = 8;

/// The bank with the addresses of global data: of all constants in the source that have a name, whether or
/// not an instruction reads them, by the order of their mangled names. A kernel that reads none has no
/// operand in it (`c[0x4]` in machine code), and is the same whatever it holds.
const GLOBAL_BANK: &str = ".nv.constant4";

/// Attributes of `.nv.info` that name a function: their value is a symbol and a number.
const FORMAT_WORDS: u8 = 4;

/// The attribute of `.nv.info` of an entry that begins with a symbol: the bank of its parameters.
const PARAM_BANK: u8 = 0x0a;

/// A hash of what each entry of a cubin executes: `.text`, `.nv.info`, `.nv.constant` and relocations of the
/// entry, and constants without an entry. It is the same in whatever company the entry is. Two cubins with
/// equal hashes run alike whatever their sources call things, as long as they read no global data
/// (`GLOBAL_BANK`).
///
/// `None` for a file that is no cubin.
pub fn entry_codes(cubin: &[u8]) -> Option<BTreeMap<String, String>> {
    let elf = Elf::read(cubin)?;
    let names = elf.sections.iter().filter_map(|own| own.name.strip_prefix(".text."));
    names.filter(|entry| *entry != PLACE).map(|entry| Some((entry.to_owned(), elf.code_of(entry)?))).collect()
}

struct Section<'a> {
    name: &'a str,
    bytes: &'a [u8],
    size: u64,
}

struct Elf<'a> {
    sections: Vec<Section<'a>>,
    /// The name of each symbol.
    symbols: Vec<Symbol<'a>>,
}

/// A symbol: its section and its place there.
struct Symbol<'a> {
    name: &'a str,
    section: u16,
    value: u64,
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let mut word = [0; 8];
    word[..N].copy_from_slice(bytes.get(at..at.checked_add(N)?)?);
    Some(u64::from_le_bytes(word))
}

fn part(bytes: &[u8], at: u64, size: u64) -> Option<&[u8]> {
    bytes.get(usize::try_from(at).ok()?..usize::try_from(at.checked_add(size)?).ok()?)
}

fn text_at(strings: &[u8], at: u64) -> Option<&str> {
    let rest = strings.get(usize::try_from(at).ok()?..)?;
    std::str::from_utf8(&rest[..rest.iter().position(|byte| *byte == 0)?]).ok()
}

impl<'a> Elf<'a> {
    /// Reads the tables of a 64-bit little-endian ELF file.
    fn read(file: &'a [u8]) -> Option<Elf<'a>> {
        if !file.starts_with(b"\x7fELF\x02\x01") {
            return None;
        }
        let table = number::<8>(file, 0x28)? as usize;
        let (entry, count) = (number::<2>(file, 0x3a)? as usize, number::<2>(file, 0x3c)? as usize);
        let header = |index: usize| file.get(table.checked_add(index * entry)?..)?.get(..entry);
        // Name, type, offset, size and the section of names of a header.
        let fields = |index: usize| {
            let own = header(index)?;
            Some((
                number::<4>(own, 0)?,
                number::<4>(own, 4)? as u32,
                number::<8>(own, 0x18)?,
                number::<8>(own, 0x20)?,
                number::<4>(own, 0x28)? as usize,
            ))
        };
        let bytes = |index: usize| {
            let (_, kind, at, size, _) = fields(index)?;
            if kind == NO_BITS { Some(&[][..]) } else { part(file, at, size) }
        };
        let names = bytes(number::<2>(file, 0x3e)? as usize)?;
        let (mut sections, mut symbols) = (Vec::new(), Vec::new());
        for index in 0..count {
            let (name, kind, _, size, strings) = fields(index)?;
            let own = bytes(index)?;
            sections.push(Section { name: text_at(names, name)?, bytes: own, size });
            if kind == SYMBOLS {
                let strings = bytes(strings)?;
                for symbol in own.chunks_exact(24) {
                    symbols.push(Symbol {
                        name: text_at(strings, number::<4>(symbol, 0)?)?,
                        section: number::<2>(symbol, 6)? as u16,
                        value: number::<8>(symbol, 8)?,
                    });
                }
            }
        }
        Some(Elf { sections, symbols })
    }

    fn code_of(&self, entry: &str) -> Option<String> {
        let mut hash = Sha256::new();
        let mut sections: Vec<&Section<'_>> = self.sections.iter().collect();
        sections.sort_by_key(|own| own.name);
        for section in sections {
            let Section { name, bytes, size, .. } = section;
            let owner = name.rsplit_once('.').map_or("", |(_, owner)| owner);
            let is_own = owner == entry;
            let is_entry = |owner: &str| self.sections.iter().any(|own| own.name == format!(".text.{owner}"));
            let kind = name.strip_suffix(&format!(".{entry}")).unwrap_or(name);
            let counts = [".text", ".nv.info", ".nv.constant", ".nv.shared", ".nv.local", ".rela"];
            let is_left = !counts.iter().any(|own| kind.starts_with(own))
                || name.ends_with(GLOBAL_BANK)
                || kind.contains(".debug");
            if is_left || (!is_own && is_entry(owner)) {
                continue;
            }
            if *name == ".nv.info" {
                // As long as there are entries.
                self.attributes(bytes, entry, &mut hash)?;
                continue;
            }
            hash.update(format!("{kind} {size}\n"));
            if kind.starts_with(".rel") {
                self.relocations(bytes, &mut hash)?;
            } else if kind == ".nv.info" {
                own_attributes(bytes, &mut hash)?;
            } else {
                hash.update(bytes);
            }
        }
        let digits: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Some(digits[..DIGITS].to_owned())
    }

    /// Relocations: what they point at by section and place, since a symbol's number and name may change.
    fn relocations(&self, bytes: &[u8], hash: &mut Sha256) -> Option<()> {
        for own in bytes.chunks_exact(24) {
            let (at, info, addend) = (number::<8>(own, 0)?, number::<8>(own, 8)?, number::<8>(own, 16)?);
            let symbol = self.symbols.get((info >> 32) as usize)?;
            let section = self.sections.get(usize::from(symbol.section)).map_or("", |own| own.name);
            hash.update(format!("{at} {} {addend} {section} {}\n", info as u32, symbol.value));
        }
        Some(())
    }

    /// The attributes of `entry` among those of all functions (registers, stack), and those of none.
    fn attributes(&self, bytes: &[u8], entry: &str, hash: &mut Sha256) -> Option<()> {
        for (head, value) in attributes_of(bytes)? {
            let symbol = number::<4>(value, 0).and_then(|own| self.symbols.get(own as usize));
            match symbol {
                Some(symbol) if symbol.name == entry => {
                    hash.update(head);
                    hash.update(&value[4..]);
                }
                Some(symbol) if !symbol.name.is_empty() => {}
                _ => {
                    hash.update(head);
                    hash.update(value);
                }
            }
        }
        Some(())
    }
}

/// The attributes of an entry, without the number of the symbol of its parameters.
fn own_attributes(bytes: &[u8], hash: &mut Sha256) -> Option<()> {
    for (head, value) in attributes_of(bytes)? {
        let skipped = if head[1] == PARAM_BANK { value.len().min(4) } else { 0 };
        hash.update(head);
        hash.update(&value[skipped..]);
    }
    Some(())
}

/// The attributes in a section `.nv.info`: format, code and size or number of each, and its value where it
/// has words.
fn attributes_of(mut bytes: &[u8]) -> Option<Vec<(&[u8], &[u8])>> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let head = bytes.get(..4)?;
        let size = if head[0] == FORMAT_WORDS { number::<2>(head, 2)? as usize } else { 0 };
        found.push((head, bytes.get(4..4 + size)?));
        bytes = &bytes[4 + size..];
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_cubin_has_no_code() {
        for bytes in [&b""[..], b"\x7fELF", b"\x7fELF\x02\x01", &[0x7f; 200]] {
            assert_eq!(entry_codes(bytes), None);
        }
        let mut cut = b"\x7fELF\x02\x01".to_vec();
        cut.resize(64, 0xff);
        assert_eq!(entry_codes(&cut), None);
    }
}
