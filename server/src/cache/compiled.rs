//! Code that the driver compiled: a store for each user, and a folder for each worker.
//!
//! The driver believes what it finds, so no user's worker may write what another's reads. A worker
//! starts before its user is known, and may write one folder alone. So the server links the user's
//! code into that folder before the program's first bytes arrive, and takes back what is new at the
//! worker's end.
//!
//! The driver looks at each compilation whether the file is there, two folders deep, and needs no
//! entry of its index. So each worker has an index of its own.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, renameat};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{UnlinkatFlags, linkat};
use tracing::{debug, warn};

use super::Cache;
use super::code::Code;
use super::files::{absent, made, name_of};
use super::keeper::{Keeper, name_in};
use super::tree::{Folder, remove_empty, still_there, unlink};
use crate::starter::code::{Found, Measured, What};

/// Most files of a user's store, and folders that hold them: each start of a program links them,
/// and the server looks at them each second while it runs.
const MOST_FILES: usize = 1 << 12;

/// A file of compiled code, two folders deep.
struct CodeFile<'a> {
    /// Names of the folders, the outer one first.
    place: [&'a OsStr; 2],
    folder: &'a Folder,
    name: &'a OsStr,
    facts: &'a Metadata,
}

impl Cache {
    /// Returns whether the users of a client share compiled code.
    pub fn shares(&self) -> bool {
        self.shares
    }

    /// Creates the folder of the driver's own cache (`CUDA_CACHE_PATH`); `None` if it cannot.
    pub fn create(&self, folder: &Path) -> Option<()> {
        let (keeper, name) = self.kept(folder)?;
        keeper
            .act(What::Create(name))
            .inspect_err(|e| {
                warn!("cache {}: not created: {e}; workers continue without a cache", folder.display())
            })
            .ok()
            .map(drop)
    }

    /// Returns the folder that all users of a client share, or the store of one user.
    pub fn store(&self, client: &str, user: Option<u32>) -> PathBuf {
        self.keeper.code().at(&store_of(client, user))
    }

    /// Returns the folder of a worker of this server.
    pub fn of_worker(&self, client: &str, worker: &str) -> PathBuf {
        self.keeper.code().at(&format!("{}.{}.{worker}", name_of(client), self.server))
    }

    /// Links a user's compiled code into the folder of a worker, as much as it can in this time.
    pub fn lend(&self, client: &str, user: u32, folder: &Path, within: Duration) -> io::Result<()> {
        let Some((keeper, worker)) = self.kept(folder) else { return Ok(()) };
        keeper.act(What::Lend { store: store_of(client, Some(user)), worker, within }).map(drop)
    }

    /// Moves new compiled code of an exited worker into its user's store, and deletes its folder.
    pub fn take_back(&self, client: &str, user: u32, folder: &Path) {
        let Some((keeper, worker)) = self.kept(folder) else { return };
        if let Err(e) = keeper.act(What::TakeBack { worker, store: store_of(client, Some(user)) }) {
            warn!("cache {}: not kept: {e}; its user's programs compile again", folder.display());
        }
    }

    fn listed(&self, keeper: &Keeper) -> Vec<PathBuf> {
        let names = keeper.act(What::Names).unwrap_or_else(|e| {
            warn!(
                "cache {}: not listed: {e}; folders that no worker uses stay",
                keeper.code().folder().display()
            );
            Vec::new()
        });
        let names = names
            .into_iter()
            .flat_map(|answer| if let Found::Names(names) = answer { names } else { Vec::new() });
        names.map(|name| keeper.code().at(&name)).collect()
    }

    /// Lists folders of compiled code that no worker may need: those that a client's users share,
    /// where they may not, and with `left` those of this server's workers. Workers that the server
    /// started itself, before it had a starter, wrote all that is left of theirs.
    pub fn doubtful(&self, left: bool) -> Vec<PathBuf> {
        let mine = format!(".{}.", self.server);
        let doubtful = |name: &str| match name.contains(['-', '.']) {
            false => !self.shares,
            true => left && name.contains(&mine),
        };
        let now = self.listed(&self.keeper).into_iter().filter(|path| doubtful(&name_in(path)));
        // No worker starts with those.
        now.chain(self.former.iter().flat_map(|former| self.listed(former))).collect()
    }

    /// Deletes those of the doubtful folders that are not in use.
    pub fn drop_unused(&self, doubtful: Vec<PathBuf>, used: &HashSet<PathBuf>) {
        for path in doubtful.into_iter().filter(|path| !used.contains(path)) {
            debug!("cache {}: of no use any longer: deleted", path.display());
            self.delete(&path);
        }
    }
}

/// Returns the name of the folder that all users of a client share, or of the store of one user.
fn store_of(client: &str, user: Option<u32>) -> String {
    let user = user.map(|uid| format!("-{uid}")).unwrap_or_default();
    name_of(client) + &user
}

impl Code {
    /// Links a store's files into the folder of a worker, as much as it can `until` then.
    pub(super) fn lend(&self, store: &Path, worker: &Path, until: Instant) -> io::Result<()> {
        let Some(store) = still_there(Folder::at(store))? else { return Ok(()) };
        let worker = Folder::at(worker)?;
        each_file(&store, |file| {
            if Instant::now() >= until {
                return Ok(false);
            }
            let to = folder_in(&worker, file.place)?;
            match linkat(&file.folder.0, file.name, &to.0, file.name, AtFlags::empty()) {
                Ok(()) | Err(Errno::EEXIST | Errno::ENOENT | Errno::EMLINK) => Ok(true),
                Err(e) => Err(e.into()),
            }
        })
    }

    /// Moves new files of a worker's folder into a store, and deletes the folder.
    pub(super) fn take_back(&self, folder: &Path, store: &Path) {
        if let Err(e) = self.moved(folder, store).or_else(absent) {
            warn!("cache {}: not kept: {e}; its user's programs compile again", folder.display());
        }
        self.delete(folder);
    }

    fn moved(&self, folder: &Path, store: &Path) -> io::Result<()> {
        let worker = Folder::at(folder)?;
        let (mut files, mut bytes, mut to) = (0, 0, None);
        let done = each_file(&worker, |file| {
            // The store has, or had, what has another link.
            if file.facts.nlink() > 1 {
                return Ok(true);
            }
            (files, bytes) = (files + 1, Measured::of_file(file.facts).bytes.saturating_add(bytes));
            if files > MOST_FILES || bytes > self.compiled_max() {
                return Ok(false);
            }
            if to.is_none() {
                made(store)?;
                to = Some(Folder::at(store)?);
            }
            let Some(to) = &to else { return Ok(false) };
            let moved =
                |()| Ok(renameat(&file.folder.0, file.name, &folder_in(to, file.place)?.0, file.name)?);
            // The end of another worker may delete an empty folder in between.
            moved(()).or_else(|e| absent(e).and_then(moved))?;
            Ok(true)
        });
        // Also after an error, the store may have grown.
        to.map_or(Ok(()), |store| self.bound(&store)).and(done)
    }

    /// Deletes the least recently used files until a store is within its bounds.
    fn bound(&self, store: &Folder) -> io::Result<()> {
        let mut all: Vec<(SystemTime, u64, [OsString; 2], OsString)> = Vec::new();
        each_file(store, |file| {
            let Measured { bytes, used, .. } = Measured::of_file(file.facts);
            all.push((used, bytes, file.place.map(OsStr::to_owned), file.name.to_owned()));
            Ok(true)
        })?;
        all.sort();
        let mut places: HashMap<[OsString; 2], usize> = HashMap::new();
        all.iter().for_each(|(_, _, place, _)| *places.entry(place.clone()).or_default() += 1);
        let mut bytes: u64 = all.iter().map(|(_, bytes, ..)| bytes).sum();
        let mut files = all.len();
        for (_, freed, place, name) in all {
            if files + places.len() <= MOST_FILES && bytes <= self.compiled_max() {
                break;
            }
            // The ends of other workers delete, too.
            if let Some(outer) = still_there(Folder::below(&store.0, &place[0]))?
                && let Some(inner) = still_there(Folder::below(&outer.0, &place[1]))?
            {
                still_there(unlink(&inner, &name, UnlinkatFlags::NoRemoveDir))?;
            }
            (files, bytes) = (files - 1, bytes.saturating_sub(freed));
            if let Some(left) = places.get_mut(&place) {
                *left -= 1;
                if *left == 0 {
                    places.remove(&place);
                    if let Some(outer) = still_there(Folder::below(&store.0, &place[0]))? {
                        remove_empty(&outer, &place[1])?;
                    }
                    remove_empty(store, &place[0])?;
                }
            }
        }
        Ok(())
    }
}

/// Calls `act` for each regular file that lies two folders deep, as long as it returns `true`.
///
/// Others are none of the driver's code.
fn each_file(top: &Folder, mut act: impl FnMut(&CodeFile) -> io::Result<bool>) -> io::Result<()> {
    for outer in top.entries()? {
        let outer = outer?.file_name();
        let Some(folder) = still_there(Folder::below(&top.0, &outer))? else { continue };
        for inner in folder.entries()? {
            let inner = inner?.file_name();
            let Some(folder) = still_there(Folder::below(&folder.0, &inner))? else { continue };
            for entry in folder.entries()? {
                let entry = entry?;
                let Some(facts) = still_there(entry.metadata())?.filter(Metadata::is_file) else { continue };
                let (place, name) = ([&*outer, &*inner], entry.file_name());
                if !act(&CodeFile { place, folder: &folder, name: &name, facts: &facts })? {
                    return Ok(());
                }
            }
        }
    }
    Ok(())
}

/// Opens the folder at a place, and creates it if it is absent.
fn folder_in(top: &Folder, place: [&OsStr; 2]) -> io::Result<Folder> {
    let inside = |parent: &Folder, name| match mkdirat(&parent.0, name, Mode::S_IRWXU) {
        Ok(()) | Err(Errno::EEXIST) => Folder::below(&parent.0, name),
        Err(e) => Err(e.into()),
    };
    inside(&inside(top, place[0])?, place[1])
}

#[cfg(test)]
mod tests {
    use super::super::tree::tests::unprivileged;
    use super::*;
    use crate::clock::wall;

    const KIB: u64 = 1024;

    /// Writes code of this age into a worker's folder.
    fn code(folder: &Path, name: &str, kib: u64, age: u64) {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, vec![1; (kib * KIB) as usize]).unwrap();
        let then = wall() - Duration::from_secs(age);
        let times = std::fs::FileTimes::new().set_accessed(then).set_modified(then);
        std::fs::File::open(path).unwrap().set_times(times).unwrap();
    }

    const LONG: Duration = Duration::from_secs(60);

    fn cache(folder: &tempfile::TempDir) -> Cache {
        Cache::at(folder.path().into(), 800 * KIB).unwrap()
    }

    #[test]
    fn a_store_keeps_the_latest_code_within_its_bound() {
        let root = tempfile::tempdir().unwrap();
        let cache = cache(&root);
        let store = cache.store("vm-1", Some(1000));
        let has = |name: &str| store.join(name).exists();
        for (n, (name, age)) in [("a/b/1", 300), ("a/b/2", 100), ("c/d/3", 200)].into_iter().enumerate() {
            let worker = cache.of_worker("vm-1", &n.to_string());
            code(&worker, name, 40, age);
            cache.take_back("vm-1", 1000, &worker);
            assert!(!worker.exists());
        }
        assert!(!has("a/b/1") && has("a/b/2") && has("c/d/3"), "100 KiB at most");
        let latest = cache.of_worker("vm-1", "latest");
        code(&latest, "c/e/4", 40, 0);
        cache.take_back("vm-1", 1000, &latest);
        code(&latest, "c/f/5", 40, 0);
        cache.take_back("vm-1", 1000, &latest);
        assert!(has("c/e/4") && has("c/f/5") && !has("c/d") && !has("a"), "emptied folders go");
        // A worker gives no more than that, either.
        let worker = cache.of_worker("vm-1", "many");
        (0..8).for_each(|n| code(&worker, &format!("e/f/{n}"), 40, 0));
        cache.take_back("vm-1", 1000, &worker);
        let kept = (0..8).filter(|n| has(&format!("e/f/{n}"))).count();
        assert_eq!(kept, 2);
    }

    #[test]
    fn code_of_many_workers_counts_once_and_goes_to_none_of_them_alone() {
        let root = tempfile::tempdir().unwrap();
        let cache = cache(&root);
        let first = cache.of_worker("vm-1", "first");
        code(&first, "a/b/code", 80, 10);
        cache.take_back("vm-1", 1000, &first);
        let workers: Vec<_> = (0..20).map(|n| cache.of_worker("vm-1", &n.to_string())).collect();
        for worker in &workers {
            cache.create(worker).unwrap();
            cache.lend("vm-1", 1000, worker, Duration::ZERO).unwrap();
            assert!(!worker.join("a").exists(), "no time is left");
            cache.lend("vm-1", 1000, worker, LONG).unwrap();
            // Again, as after an upgrade of the server.
            cache.lend("vm-1", 1000, worker, LONG).unwrap();
            let size = cache.compiled_bytes(worker, &[]).unwrap();
            assert_eq!(size.bytes, (80 + 3 * 4) * KIB, "all of it");
            assert!(size.part < size.bytes - 30 * KIB, "some of it");
        }
        cache.trim(wall());
        assert!(workers.iter().all(|worker| worker.join("a/b/code").exists()), "there is room");
        workers.iter().for_each(|worker| cache.take_back("vm-1", 1000, worker));
        assert!(cache.store("vm-1", Some(1000)).join("a/b/code").exists());
    }

    #[test]
    fn a_store_is_within_its_bound_also_after_an_error() {
        let root = tempfile::tempdir().unwrap();
        let cache = cache(&root);
        let store = cache.store("vm-1", Some(1000));
        (0..4).for_each(|n| code(&store, &format!("c/d/{n}"), 40, 0));
        std::fs::write(store.join("a"), "in a folder's place").unwrap();
        let worker = cache.of_worker("vm-1", "first");
        code(&worker, "a/b/code", 4, 0);
        assert!(cache.keeper.code().moved(&worker, &store).is_err());
        let kept = (0..4).filter(|n| store.join(format!("c/d/{n}")).exists()).count();
        assert_eq!(kept, 2, "100 KiB at most");
    }

    #[test]
    fn a_mode_keeps_no_code_from_the_store() {
        use std::os::unix::fs::PermissionsExt;
        unprivileged(|| {
            let root = tempfile::tempdir().unwrap();
            let cache = cache(&root);
            for mode in [0o0, 0o400] {
                let worker = cache.of_worker("vm-1", "first");
                let name = format!("a/b/{mode}");
                code(&worker, &name, 4, 0);
                for locked in ["a/b", "a", ""] {
                    let mode = std::fs::Permissions::from_mode(mode);
                    std::fs::set_permissions(worker.join(locked), mode).unwrap();
                }
                cache.take_back("vm-1", 1000, &worker);
                assert!(!worker.exists() && cache.store("vm-1", Some(1000)).join(name).exists());
            }
        });
    }
}
