//! Memory pools, and those addresses of their memory that several processes may use.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::shares::Object;
use crate::driver::Address;

/// `CUmemPoolPtrExportData`
pub type ExportData = [u8; 64];

/// Returns the seals that forbid any change of a memory file.
fn seals() -> SealFlag {
    SealFlag::F_SEAL_SEAL | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_WRITE
}

/// Places the driver's data into a sealed memory file.
pub fn seal(data: &ExportData) -> std::io::Result<OwnedFd> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let file = File::from(memfd_create(c"gpusession-pointer", flags)?);
    file.write_all_at(data, 0)?;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals()))?;
    Ok(file.into())
}

/// Reads the data from another worker's descriptor; `None` for any other file.
pub fn unseal(given: OwnedFd) -> Option<ExportData> {
    // Other files than memory files have no seals, and a read of theirs could wait for ever.
    let sealed = fcntl(&given, FcntlArg::F_GET_SEALS).ok()?;
    if !SealFlag::from_bits_truncate(sealed).contains(seals()) {
        return None;
    }
    let (file, mut data): (_, ExportData) = (File::from(given), [0; 64]);
    let whole = file.metadata().is_ok_and(|known| known.len() == size_of::<ExportData>() as u64);
    (whole && file.read_exact_at(&mut data, 0).is_ok()).then_some(data)
}

/// A pool of this process or, imported, of another one.
#[derive(Debug, Clone, Copy)]
pub struct Pool {
    pub device: u32,
    /// Whether it was created to be exported as a descriptor.
    pub shareable: bool,
    /// Number under which other processes know it.
    pub share: Option<u64>,
    /// The other worker's object that it is, which does not count here.
    pub imported: Option<Object>,
}

impl Pool {
    /// Returns a pool of this process alone.
    pub fn new(device: u32) -> Self {
        Self { device, shareable: false, share: None, imported: None }
    }
}

/// Memory of a shareable pool of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pointer {
    pub device: u32,
    pub bytes: u64,
    /// Number under which other processes know it.
    pub share: Option<u64>,
}

/// Imports of one object at an address.
#[derive(Debug, Clone, Copy)]
struct Import {
    object: Object,
    count: u32,
}

/// Memory of this process's shareable pools, and of other processes' pools, by address.
#[derive(Default)]
pub struct Pointers {
    own: HashMap<Address, Pointer>,
    /// The driver may give two objects one address, if their process has freed the first one.
    imported: HashMap<Address, Vec<Import>>,
}

impl Pointers {
    /// Notes new memory; returns the share of earlier memory at this address, which is gone.
    ///
    /// A graph can free memory without a call.
    pub fn allocated(&mut self, address: Address, device: u32, bytes: u64) -> Option<u64> {
        self.own.insert(address, Pointer { device, bytes, share: None }).and_then(|gone| gone.share)
    }

    /// Returns memory that begins at an address.
    pub fn get_mut(&mut self, address: Address) -> Option<&mut Pointer> {
        self.own.get_mut(&address)
    }

    /// Takes out memory that is about to be freed.
    pub fn take(&mut self, address: Address) -> Option<Pointer> {
        self.own.remove(&address)
    }

    /// Puts memory back that was not freed, as memory that no other process knows.
    pub fn keep(&mut self, address: Address, kept: Pointer) {
        self.own.entry(address).or_insert(Pointer { share: None, ..kept });
    }

    /// Notes one import of an object at an address.
    pub fn imported(&mut self, address: Address, object: Object) {
        let imports = self.imported.entry(address).or_default();
        match imports.iter_mut().find(|import| import.object == object) {
            Some(known) => known.count += 1,
            None => imports.push(Import { object, count: 1 }),
        }
    }

    /// Subtracts one import at an address and returns its object.
    pub fn one_less(&mut self, address: Address) -> Option<Object> {
        let Entry::Occupied(mut entry) = self.imported.entry(address) else { return None };
        let imports = entry.get_mut();
        let first = imports.first_mut()?;
        first.count -= 1;
        let (object, count) = (first.object, first.count);
        if count == 0 {
            imports.remove(0);
        }
        if imports.is_empty() {
            entry.remove();
        }
        Some(object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Object = ([1; 16], 1);
    const TWO: Object = ([1; 16], 2);

    #[test]
    fn each_import_of_an_address_ends_once() {
        let mut pointers = Pointers::default();
        for object in [ONE, ONE, TWO] {
            pointers.imported(0x100, object);
        }
        let ended: Vec<_> = std::iter::from_fn(|| pointers.one_less(0x100)).collect();
        assert_eq!(ended, [ONE, ONE, TWO]);
        assert!(pointers.imported.is_empty() && pointers.one_less(0x100).is_none());
    }

    #[test]
    fn share_ends_with_its_memory() {
        let mut pointers = Pointers::default();
        assert_eq!(pointers.allocated(0x100, 0, 5), None);
        pointers.get_mut(0x100).unwrap().share = Some(7);
        assert_eq!(pointers.allocated(0x100, 0, 6), Some(7), "a graph has freed it");
        let taken = pointers.take(0x100).unwrap();
        assert_eq!(taken, Pointer { device: 0, bytes: 6, share: None });
        assert_eq!(pointers.take(0x100), None);
        pointers.keep(0x100, Pointer { share: Some(8), ..taken });
        assert_eq!(pointers.get_mut(0x100), Some(&mut taken.clone()), "no other process knows it");
    }

    #[test]
    fn data_survives_its_file_and_no_other_file_is_read() {
        let data: ExportData = std::array::from_fn(|i| i as u8);
        assert_eq!(unseal(seal(&data).unwrap()), Some(data));
        let file = |bytes: &[u8], seals: SealFlag| {
            let file = File::from(memfd_create(c"other", MFdFlags::MFD_ALLOW_SEALING).unwrap());
            file.write_all_at(bytes, 0).unwrap();
            fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
            unseal(file.into())
        };
        assert_eq!(file(&data, seals()), Some(data));
        assert_eq!(file(&data, seals() - SealFlag::F_SEAL_WRITE), None, "it may still change");
        assert_eq!((file(&data[1..], seals()), file(&[0; 65], seals())), (None, None));
        let (pipe, _writer) = std::io::pipe().unwrap();
        assert_eq!(unseal(pipe.into()), None, "nothing waits for a pipe");
    }
}
