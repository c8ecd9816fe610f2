//! The private tables (`tables.txt`): their slots and functions, and the refused ones.

use std::collections::BTreeSet;
use std::fmt::Write as _;

const TABLES: &str = include_str!("../tables.txt");

/// A library that hands out tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// Our `libcuda.so.1`.
    Libcuda,
    /// The simulated driver's library.
    Simgpu,
}

/// One filled slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    /// Position in the table, from 0.
    pub index: usize,
    /// Name of the function behind it, or `nothing` or `null`.
    pub function: &'static str,
    /// Whether the simulated driver leaves the slot empty.
    pub libcuda_only: bool,
    /// Purpose of the function.
    pub meaning: &'static str,
}

/// One table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// Bytes of the id, the first byte highest.
    pub id: u128,
    /// Name that this project gives it, for messages.
    pub name: &'static str,
    /// Users of the table, or the reason for refusing it.
    pub about: &'static str,
    /// Number of slots; `None` if the table is refused.
    pub len: Option<usize>,
    /// Filled slots, in the order of the file.
    pub slots: Vec<Slot>,
}

impl Table {
    /// Returns the slots that a library fills; it hands out the tables with at least one.
    pub fn filled(&self, library: Library) -> impl Iterator<Item = &Slot> {
        self.slots.iter().filter(move |slot| library == Library::Libcuda || !slot.libcuda_only)
    }
}

/// Returns every table, in the order of the file.
///
/// # Panics
/// If the file is wrong (it is part of this crate): an id twice, a slot twice or beyond its table.
pub fn tables() -> Vec<Table> {
    let mut tables: Vec<Table> = Vec::new();
    let mut ids = BTreeSet::new();
    for line in TABLES.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let wrong = || -> ! { panic!("tables.txt: {line:?}") };
        let (words, about) = line.split_once('|').unwrap_or_else(|| wrong());
        let (words, about): (Vec<_>, _) = (words.split_whitespace().collect(), about.trim());
        let id = |text| u128::from_str_radix(text, 16).unwrap_or_else(|_| wrong());
        match words[..] {
            ["table", hex, len, name] => {
                let len = Some(len.parse().unwrap_or_else(|_| wrong()));
                tables.push(Table { id: id(hex), name, about, len, slots: Vec::new() });
            }
            ["refuse", hex, name] => {
                tables.push(Table { id: id(hex), name, about, len: None, slots: Vec::new() });
            }
            [index, function, ref only @ ..] if matches!(only, [] | ["libcuda"]) => {
                let table = tables.last_mut().unwrap_or_else(|| wrong());
                let index = index.parse().unwrap_or_else(|_| wrong());
                assert!(table.len.is_some_and(|len| index < len), "tables.txt: no such slot: {line:?}");
                assert!(table.slots.iter().all(|slot| slot.index != index), "tables.txt: twice: {line:?}");
                let libcuda_only = !only.is_empty();
                table.slots.push(Slot { index, function, libcuda_only, meaning: about });
                continue;
            }
            _ => wrong(),
        }
        assert!(tables.last().is_some_and(|table| ids.insert(table.id)), "tables.txt: twice: {line:?}");
    }
    tables
}

/// Returns Rust source of the tables that a library hands out.
///
/// The source has a static `NAME: Slots<LEN>` for each table, `find`, which finds a table by its
/// id, and `REFUSED`: ids and names of the others.
///
/// The including module has the functions of the slots, `nothing`, `type Slot = *const ()`, `struct
/// Slots<const N: usize>([Slot; N])`, and `unknown!(INDEX, NAME)` for empty slots.
pub fn tables_source(library: Library) -> String {
    let mut out = String::new();
    let mut arms = String::new();
    let mut refused = String::new();
    for table in tables() {
        let name = table.name;
        let Some(len) = table.len.filter(|_| table.filled(library).next().is_some()) else {
            writeln!(refused, "    ({:#x}, {name:?}),", table.id).unwrap();
            continue;
        };
        writeln!(out, "pub(super) static {name}: Slots<{len}> = Slots([").unwrap();
        for index in 0..len {
            let slot = match table.filled(library).find(|slot| slot.index == index) {
                Some(Slot { function: "null", .. }) => "std::ptr::null()".to_string(),
                Some(slot) => format!("{} as Slot", slot.function),
                None if index == 0 => {
                    format!("std::ptr::without_provenance({len} * std::mem::size_of::<Slot>())")
                }
                None => format!("unknown!({index}, {name:?})"),
            };
            writeln!(out, "    {slot},").unwrap();
        }
        out.push_str("]);\n");
        writeln!(arms, "        {:#x} => {name}.0.as_ptr(),", table.id).unwrap();
    }
    format!(
        "{out}/// Finds a table by its id.\npub fn find(id: u128) -> Option<*const Slot> {{\n    Some(match id {{\n{arms}        _ => return None,\n    }})\n}}\n\
         /// Known tables that are not handed out.\npub const REFUSED: &[(u128, &str)] = &[\n{refused}];\n"
    )
}

/// Returns the part of `docs/coverage.md` about the private tables.
pub fn coverage() -> String {
    let mut out = String::from(
        "\n# Private tables\n\nGenerated from `proto/calls/tables.txt`. NVIDIA's libraries ask for them with `cuGetExportTable`. \
         Slots that are not listed return `CUDA_ERROR_NOT_SUPPORTED` and are counted, as are requests for refused tables \
         (`GPUSESSION_TRACE=missing`).\n\n| table | users, or reason for refusing it | slots |\n|---|---|---|\n",
    );
    for table in tables() {
        let slots: Vec<_> =
            table.slots.iter().map(|slot| format!("{}: {}", slot.index, slot.meaning)).collect();
        let answer = match table.len {
            Some(len) => format!("{len} slots; {}", slots.join("; ")),
            None => "refused".into(),
        };
        writeln!(out, "| `{:032x}` {} | {} | {answer} |", table.id, table.name, table.about).unwrap();
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_library_gives_out_what_it_has() {
        let all = tables();
        let given = |library| all.iter().filter(move |table| table.filled(library).next().is_some());
        assert_eq!(given(Library::Libcuda).count(), all.iter().filter(|table| table.len.is_some()).count());
        assert!(given(Library::Simgpu).count() < given(Library::Libcuda).count());
        let source = tables_source(Library::Simgpu);
        assert!(source.contains("static TOOLS_TLS: Slots<3>") && !source.contains("static COMPILE_CACHE"));
        assert!(source.contains("0xda9151d33ae6cc41a5c04f26d533e328, \"COMPILE_CACHE\""), "refused there");
    }

    #[test]
    fn the_slots_that_real_programs_call_are_filled() {
        // Native programs use these, and continue without them: see the reasons in tables.txt.
        const DONE_WITHOUT: [u128; 2] =
            [0xf8cff951_21468b4e_b9e2fb46_9e7c0dd9, 0x69a28e9f_24498b47_b030c5da_330ea4e9];
        let tables = tables();
        let mut called = 0;
        for entry in crate::used() {
            let Some((id, index)) = entry.strip_suffix(']').and_then(|entry| entry.split_once('[')) else {
                continue;
            };
            let (id, index): (_, usize) = (u128::from_str_radix(id, 16).unwrap(), index.parse().unwrap());
            let table = tables.iter().find(|table| table.id == id);
            let filled = table.is_some_and(|table| table.slots.iter().any(|slot| slot.index == index));
            assert_eq!(filled, !DONE_WITHOUT.contains(&id), "{entry}");
            called += 1;
        }
        assert!(called > 15, "used.tsv is whole");
    }
}
