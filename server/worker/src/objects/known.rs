//! Values that the driver returned, by kind: only these go back to it.
//!
//! The driver follows such a value as a pointer, and a frame may name any number.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::driver::{Status, status};

/// Kind of a value, as `calls.txt` names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Array,
    Mipmap,
    Texture,
    Surface,
    /// Handle of physical memory; the driver returns one value several times, and counts.
    Memory,
    Pool,
    Node,
    /// Handle of a conditional node's condition.
    Condition,
}

const KINDS: usize = Kind::Condition as usize + 1;
/// Kinds that end with their context, and with their graph.
const OF_CONTEXT: [Kind; 4] = [Kind::Array, Kind::Mipmap, Kind::Texture, Kind::Surface];
const OF_GRAPH: [Kind; 2] = [Kind::Node, Kind::Condition];

/// Object without which a value ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Owner {
    /// The client's handle of a context, or the driver's of a graph; 0: none.
    pub of: u64,
    /// Array whose part this one is; 0: none.
    pub whole: u64,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    owner: Owner,
    count: u32,
}

/// Value that [`Known::take`] took out; `None` for null.
pub type Taken = Option<Owner>;

/// Values of one kind.
#[derive(Default)]
struct Table {
    entries: HashMap<u64, Entry>,
    /// Values by the context or graph with which they end.
    by_owner: HashMap<u64, HashSet<u64>>,
}

impl Table {
    fn insert(&mut self, value: u64, entry: Entry) {
        if entry.owner.of != 0 {
            self.by_owner.entry(entry.owner.of).or_default().insert(value);
        }
        self.entries.insert(value, entry);
    }

    fn remove(&mut self, value: u64) -> Option<Entry> {
        let entry = self.entries.remove(&value)?;
        if let Some(values) = self.by_owner.get_mut(&entry.owner.of) {
            values.remove(&value);
            if values.is_empty() {
                self.by_owner.remove(&entry.owner.of);
            }
        }
        Some(entry)
    }

    fn forget(&mut self, owner: u64) {
        for value in self.by_owner.remove(&owner).into_iter().flatten() {
            self.entries.remove(&value);
        }
    }

    fn adopt(&mut self, from: u64, to: u64) {
        let Some(values) = self.by_owner.remove(&from) else { return };
        for value in &values {
            if let Some(entry) = self.entries.get_mut(value) {
                entry.owner.of = to;
            }
        }
        self.by_owner.entry(to).or_default().extend(values);
    }
}

/// Table of each kind.
#[derive(Default)]
pub struct Known([Mutex<Table>; KINDS]);

impl Known {
    fn of(&self, kind: Kind) -> MutexGuard<'_, Table> {
        self.0[kind as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a value that the driver returned.
    pub fn note(&self, kind: Kind, value: u64, owner: Owner) {
        if value == 0 {
            return;
        }
        let mut table = self.of(kind);
        match table.entries.get_mut(&value) {
            Some(entry) if kind == Kind::Memory => entry.count = entry.count.saturating_add(1),
            // An error may have named a node without its graph.
            Some(entry) if kind == Kind::Node && entry.owner != owner => {
                table.remove(value);
                table.insert(value, Entry { owner, count: 1 });
            }
            Some(_) => {}
            None => table.insert(value, Entry { owner, count: 1 }),
        }
    }

    /// As [`Known::note`], for a value that may be known with its true owner.
    pub fn note_new(&self, kind: Kind, value: u64, owner: Owner) {
        let mut table = self.of(kind);
        if value != 0 && !table.entries.contains_key(&value) {
            table.insert(value, Entry { owner, count: 1 });
        }
    }

    /// Returns an error unless the driver returned this value, and did not take it back.
    ///
    /// Null stands for no object: the driver checks it.
    pub fn check(&self, kind: Kind, value: u64) -> Result<(), Status> {
        self.owner(kind, value).map(drop)
    }

    /// As [`Known::check`], for each of several values.
    pub fn check_all(&self, kind: Kind, values: impl IntoIterator<Item = u64>) -> Result<(), Status> {
        let table = self.of(kind);
        let known = |value: u64| value == 0 || table.entries.contains_key(&value);
        if values.into_iter().all(known) { Ok(()) } else { Err(unknown(kind)) }
    }

    /// Returns the owner of a value.
    pub fn owner(&self, kind: Kind, value: u64) -> Result<Owner, Status> {
        match self.of(kind).entries.get(&value) {
            Some(entry) => Ok(entry.owner),
            None if value == 0 => Ok(Owner::default()),
            None => Err(unknown(kind)),
        }
    }

    /// Takes out a value that the driver is about to destroy: it may return it to another thread.
    pub fn take(&self, kind: Kind, value: u64) -> Result<Taken, Status> {
        if value == 0 {
            return Ok(None);
        }
        let mut table = self.of(kind);
        let entry = table.entries.get_mut(&value).ok_or_else(|| unknown(kind))?;
        let owner = entry.owner;
        entry.count -= 1;
        if entry.count == 0 {
            table.remove(value);
        }
        drop(table);
        if matches!(kind, Kind::Array | Kind::Mipmap) {
            self.parts_gone(value);
        }
        Ok(Some(owner))
    }

    /// Forgets the parts of an array.
    fn parts_gone(&self, whole: u64) {
        let mut arrays = self.of(Kind::Array);
        let parts = arrays.entries.iter().filter(|(_, part)| part.owner.whole == whole);
        let parts: Vec<u64> = parts.map(|(value, _)| *value).collect();
        for part in parts {
            arrays.remove(part);
        }
    }

    /// Puts back a value that the driver did not destroy; parts of an array have to be asked for
    /// again.
    pub fn put_back(&self, kind: Kind, value: u64, taken: Taken) {
        if let Some(owner) = taken {
            self.note(kind, value, owner);
        }
    }

    /// Forgets what ends with a context.
    pub fn context_gone(&self, ctx: u64) {
        OF_CONTEXT.into_iter().for_each(|kind| self.of(kind).forget(ctx));
    }

    /// Forgets what ends with a graph, by the driver's handle of it.
    pub fn graph_gone(&self, graph: u64) {
        OF_GRAPH.into_iter().for_each(|kind| self.of(kind).forget(graph));
    }

    /// Lets what belongs to a green context end with its device's primary one.
    pub fn adopt(&self, green: u64, primary: u64) {
        OF_CONTEXT.into_iter().for_each(|kind| self.of(kind).adopt(green, primary));
    }
}

/// Returns the driver's error for an object that does not exist.
fn unknown(kind: Kind) -> Status {
    match kind {
        Kind::Array | Kind::Mipmap | Kind::Texture | Kind::Surface => status::INVALID_HANDLE,
        Kind::Memory | Kind::Pool | Kind::Node | Kind::Condition => status::INVALID_VALUE,
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    const OF_ONE: Owner = Owner { of: 1, whole: 0 };

    #[test]
    fn only_values_of_the_driver_are_known_by_kind_and_until_their_end() {
        let known = Known::default();
        known.note(Kind::Array, 10, OF_ONE);
        assert_eq!(known.check(Kind::Array, 10), Ok(()));
        assert_eq!(known.check(Kind::Mipmap, 10), Err(status::INVALID_HANDLE), "another kind");
        assert_eq!(known.check(Kind::Node, 0x4141_4141_4141_4141), Err(status::INVALID_VALUE));
        assert_eq!(known.check(Kind::Array, 0), Ok(()), "the driver checks null");
        assert_eq!(known.check_all(Kind::Array, [10, 0]), Ok(()));
        assert_eq!(known.check_all(Kind::Array, [10, 11]), Err(status::INVALID_HANDLE));
        let taken = known.take(Kind::Array, 10).unwrap();
        assert_eq!(known.check(Kind::Array, 10), Err(status::INVALID_HANDLE), "freed");
        assert!(known.take(Kind::Array, 10).is_err(), "twice");
        known.put_back(Kind::Array, 10, taken);
        known.context_gone(2);
        assert_eq!(known.check(Kind::Array, 10), Ok(()), "another context's end");
        known.adopt(1, 3);
        known.context_gone(1);
        assert_eq!(known.check(Kind::Array, 10), Ok(()), "the primary context has it");
        known.context_gone(3);
        assert!(known.check(Kind::Array, 10).is_err());
    }

    #[test]
    fn parts_of_an_array_end_with_it() {
        let known = Known::default();
        known.note(Kind::Mipmap, 20, OF_ONE);
        known.note(Kind::Array, 21, Owner { of: 1, whole: 20 });
        known.note(Kind::Array, 22, OF_ONE);
        known.take(Kind::Mipmap, 20).unwrap();
        assert!(known.check(Kind::Array, 21).is_err());
        assert_eq!(known.check(Kind::Array, 22), Ok(()));
    }

    #[test]
    fn a_handle_of_memory_is_known_as_often_as_the_driver_returned_it() {
        let known = Known::default();
        known.note(Kind::Memory, 30, Owner::default());
        known.note(Kind::Memory, 30, Owner::default());
        known.take(Kind::Memory, 30).unwrap();
        assert_eq!(known.check(Kind::Memory, 30), Ok(()));
        known.take(Kind::Memory, 30).unwrap();
        assert_eq!(known.check(Kind::Memory, 30), Err(status::INVALID_VALUE));
        known.note(Kind::Pool, 31, Owner::default());
        known.note(Kind::Pool, 31, Owner::default());
        known.take(Kind::Pool, 31).unwrap();
        assert!(known.check(Kind::Pool, 31).is_err(), "destroyed once");
    }

    #[test]
    fn nodes_end_with_their_graph() {
        let known = Known::default();
        known.note(Kind::Node, 40, Owner { of: 7, whole: 0 });
        known.note(Kind::Node, 41, Owner { of: 8, whole: 0 });
        known.note(Kind::Node, 42, Owner { of: 7, whole: 0 });
        known.note(Kind::Node, 42, Owner { of: 8, whole: 0 });
        known.graph_gone(7);
        assert!(known.check(Kind::Node, 40).is_err());
        assert_eq!(known.owner(Kind::Node, 41).unwrap().of, 8);
        assert_eq!(known.owner(Kind::Node, 42).unwrap().of, 8, "the last graph that named it");
    }

    #[test]
    fn end_of_a_graph_costs_its_own_nodes() {
        const MANY: u64 = 200_000;
        let known = Known::default();
        let node = |graph| Owner { of: graph, whole: 0 };
        (1..=MANY).for_each(|value| known.note(Kind::Node, value, node(1)));
        let since = Instant::now();
        for graph in 2..20_000 {
            known.note(Kind::Node, MANY + graph, node(graph));
            known.graph_gone(graph);
        }
        assert!(since.elapsed() < Duration::from_secs(5), "{:?}", since.elapsed());
        assert!(known.check(Kind::Node, MANY + 2).is_err());
        assert_eq!(known.check(Kind::Node, MANY), Ok(()));
        (1..=MANY).for_each(|value| assert!(known.take(Kind::Node, value).is_ok()));
        assert!(known.of(Kind::Node).by_owner.is_empty() && known.of(Kind::Node).entries.is_empty());
    }
}
