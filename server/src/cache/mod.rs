//! Disk cache of workers, which lets the next program start sooner.
//!
//! It may be deleted at any time.
//! Images lie under the hash of their content, which a worker checks before it uses one. Only the
//! server opens and writes them. The driver itself writes the code that it compiled from PTX, and
//! does not check it: workers write their folders, and the server bounds them. Each client has its
//! own folder for both, so that no client reads, fills or changes another's. Each of its users has
//! one for compiled files, unless they share.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tracing::{debug, warn};

use self::code::{CLIENT_SHARE, Code};
use self::files::{COMPILED, Entry, GONE, client_of, leaves_room, made};
pub use self::images::{Images, Incoming};
pub use self::keeper::Keeper;
use self::keeper::name_in;
use self::tree::{BEYOND, LEAST};
use crate::clock::{self, Random, wall};
use crate::config::{Config, Origin};
pub use crate::starter::code::Size;
use crate::starter::code::{Found, What};
use crate::starter::desk::Desk;
use crate::store;

pub mod code;
mod compiled;
mod files;
mod images;
mod keeper;
mod tree;

/// Folder of images, with one for each client.
const IMAGES: &str = "images";
/// Folder of images that workers of an earlier version wrote.
const FORMER_IMAGES: &str = "modules";
/// Interval of [`Cache::trim`].
pub const TRIM_INTERVAL: Duration = Duration::from_secs(60);
/// Interval at which folders are measured that live workers write.
pub const MEASURE_INTERVAL: Duration = Duration::from_secs(1);

/// Folder of the cache, its limit in bytes, and its images.
#[derive(Debug, Clone)]
pub struct Cache {
    folder: PathBuf,
    max: u64,
    images: Arc<Images>,
    keeper: Keeper,
    /// Folder of compiled code of workers that the server started itself, before it had a starter.
    former: Option<Keeper>,
    /// Whether users of a client share compiled code.
    shares: bool,
    /// Name of this server among those that use the folder.
    server: String,
}

impl Cache {
    /// Creates the folders; returns `None` without a cache, where programs start more slowly.
    ///
    /// `there`: the starter, and its folder of compiled code.
    pub fn open(config: &Config, there: Option<(Desk, PathBuf)>, random: &dyn Random) -> Option<Self> {
        let (folder, max) = (Self::present_folder(config), config.cache_max);
        let own = Keeper::Here(Code::new(folder.clone(), max));
        let (keeper, former) = match there {
            Some((desk, folder)) => (Keeper::There(desk, Code::new(folder, max)), Some(own)),
            None => (own, None),
        };
        let cache = Self::of(folder, max, keeper, former)?;
        let server = server_name(&config.state_dir, random);
        Some(Self { shares: config.share_compiled, server, ..cache })
    }

    fn present_folder(config: &Config) -> PathBuf {
        match std::env::var_os("CACHE_DIRECTORY") {
            Some(folder) if !folder.is_empty() => PathBuf::from(folder),
            _ => Self::folder(config),
        }
    }

    /// Returns the folder of images, which no worker may reach.
    pub fn images_of(config: &Config) -> PathBuf {
        Self::present_folder(config).join(IMAGES)
    }

    /// Returns the folder of a server whose unit names no other.
    pub fn folder(config: &Config) -> PathBuf {
        match config.origin("state_dir") {
            Origin::Default => "/var/cache/gpuserver".into(),
            _ => config.state_dir.join("cache"),
        }
    }

    /// Creates the folders in `folder`, for `max` bytes.
    pub fn at(folder: PathBuf, max: u64) -> Option<Self> {
        let keeper = Keeper::Here(Code::new(folder.clone(), max));
        Self::of(folder, max, keeper, None)
    }

    fn of(folder: PathBuf, max: u64, keeper: Keeper, former: Option<Keeper>) -> Option<Self> {
        let images = Arc::new(Images::new(folder.join(IMAGES), max, max / CLIENT_SHARE, wall()));
        let cache = Self { folder, max, images, keeper, former, shares: true, server: String::new() };
        // Workers of an earlier version that still run lose their images, and nothing else.
        let modules = cache.folder.join(FORMER_IMAGES);
        if modules.exists() {
            cache.delete(&modules);
        }
        if max == 0 {
            cache.trim(wall());
            return None;
        }
        let made = [IMAGES, GONE].iter().try_for_each(|kind| made(&cache.folder.join(kind)));
        match made.and_then(|()| cache.keeper.act(What::Open)) {
            Ok(_) => Some(cache),
            Err(e) => {
                warn!("cache {}: not created: {e}; programs start more slowly", cache.folder.display());
                None
            }
        }
    }

    /// Returns who keeps this folder of compiled code, and its name; `None`: it is none.
    fn kept(&self, folder: &Path) -> Option<(&Keeper, String)> {
        let all = [Some(&self.keeper), self.former.as_ref()];
        let name = name_in(folder);
        all.into_iter()
            .flatten()
            .find(|keeper| keeper.code().at(&name) == folder)
            .map(|keeper| (keeper, name))
    }

    /// Returns the folder of the same name where workers write that the server started itself.
    pub fn before_a_starter(&self, folder: &Path) -> PathBuf {
        let former = self.former.as_ref().map(|former| former.code().at(&name_in(folder)));
        former.unwrap_or_else(|| folder.into())
    }

    /// Returns a folder of compiled code that workers must not reach.
    pub fn code_folder(&self) -> PathBuf {
        self.keeper.code().folder().join(COMPILED)
    }

    /// Returns the images of all clients.
    pub fn images(&self) -> &Arc<Images> {
        &self.images
    }

    /// Returns the bytes that the driver may keep as compiled code (`CUDA_CACHE_MAXSIZE`).
    pub fn compiled_max(&self) -> u64 {
        self.keeper.code().compiled_max()
    }

    /// Returns the bytes that the driver may add to its user's, which are as many at most.
    pub fn added_max(&self) -> u64 {
        self.compiled_max() / 2
    }

    /// Returns the bytes of all files of the cache, at most.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// Measures a folder of compiled code, with what its writers deleted and keep open; `None`: it
    /// cannot be measured.
    pub fn compiled_bytes(&self, folder: &Path, writers: &[u32]) -> Option<Size> {
        let (keeper, name) = self.kept(folder)?;
        let found = keeper.act(What::Size(name, writers.to_vec()));
        let found = found.inspect_err(|e| {
            warn!("cache {}: not measured: {e}; the next check tries again", folder.display());
        });
        match found.ok()?.pop() {
            Some(Found::Size(size)) => size,
            _ => None,
        }
    }

    /// Returns why this is too much compiled code for a folder, or for those of a client's workers;
    /// `None` if it is not.
    ///
    /// The driver keeps to [`Self::compiled_max`], so that only a worker that its client has taken
    /// over fills a folder with more; many honest ones may together.
    pub fn excess(&self, bytes: u64) -> Option<String> {
        let share = self.keeper.code().share();
        match bytes {
            _ if bytes > share.saturating_mul(2) => {
                Some(format!("more than {} MiB of compiled code", share >> 19))
            }
            _ if bytes > share && !leaves_room(self.keeper.code().folder(), 0) => {
                Some(format!("{} MiB of compiled code on a disk that is nearly full", bytes >> 20))
            }
            _ => None,
        }
    }

    /// Deletes a file or folder whatever is in it.
    pub fn delete(&self, path: &Path) {
        match self.kept(path) {
            Some((keeper, name)) => keeper.delete(&name),
            None => Code::new(self.folder.clone(), self.max).delete(path),
        }
    }

    /// Deletes what is too large, then the least recently used entries until the rest fits the
    /// limit.
    ///
    /// An image is an entry, and so is a whole folder of compiled files. A client with more than
    /// its share loses these first.
    pub fn trim(&self, now: SystemTime) {
        self.images.scan(now);
        let mut kept = self.images.entries();
        let compiled = [Some(&self.keeper), self.former.as_ref()].into_iter().flatten();
        let compiled = compiled.flat_map(Self::measured).collect::<Vec<_>>().into_iter();
        // An empty folder has nothing to give, and its worker may fill it soon.
        let compiled: Vec<_> =
            compiled.filter(|entry: &Entry| entry.found.bytes > LEAST.min(self.max)).collect();
        let mut of_clients: HashMap<String, u64> = HashMap::new();
        for Entry { path, found } in compiled.iter().filter(|entry| entry.found.bytes != BEYOND) {
            let sum = of_clients.entry(client_of(path).to_owned()).or_default();
            *sum = sum.saturating_add(found.part);
        }
        kept.extend(compiled);
        let share = self.keeper.code().share();
        let within = |entry: &Entry| {
            let sum = of_clients.get(client_of(&entry.path)).copied().unwrap_or_default();
            sum.max(entry.found.part) <= share
        };
        // A worker sets times at will: the future counts as now, and what exceeds its share goes
        // first.
        kept.sort_by_cached_key(|e| (within(e), e.found.used.min(now), Reverse(e.found.part)));
        let sum = |total: u64, entry: &Entry| total.saturating_add(entry.found.part);
        let mut total = kept.iter().filter(|entry| entry.found.bytes != BEYOND).fold(0, sum);
        for Entry { path, found } in kept {
            if found.bytes != BEYOND && total <= self.max {
                continue;
            }
            debug!("cache {}: least recently used, {} bytes: deleted", path.display(), found.bytes);
            self.delete(&path);
            total = total.saturating_sub(if found.bytes == BEYOND { 0 } else { found.part });
        }
        self.images.scan(now);
        let images: u64 = self.images.entries().iter().map(|entry| entry.found.bytes).sum();
        self.images.note_others(total.saturating_sub(images));
    }

    /// Returns the folders of compiled code of a keeper, measured.
    fn measured(keeper: &Keeper) -> Vec<Entry> {
        let found = keeper.act(What::Measure).unwrap_or_else(|e| {
            warn!(
                "cache {}: not measured: {e}; the next check tries again",
                keeper.code().folder().display()
            );
            Vec::new()
        });
        let found = found.into_iter().flat_map(|answer| match answer {
            Found::Measured(found) => found,
            _ => Vec::new(),
        });
        found.map(|(name, found)| Entry { path: keeper.code().at(&name), found }).collect()
    }
}

/// Returns the name of a state directory's server, which the first start draws.
///
/// Servers in containers may share a cache, and have state at the same path. If no name can be
/// kept, the next start has another one, and folders of this one go as those of any server.
fn server_name(state_dir: &Path, random: &dyn Random) -> String {
    let file = state_dir.join("cache.json");
    match store::read::<Option<String>>(&file) {
        Ok(Some(name)) if name.len() == 32 && name.bytes().all(|b| b.is_ascii_hexdigit()) => return name,
        Ok(None) => {}
        Ok(Some(_)) => warn!("{}: holds no name of 32 hex digits; drawing another", file.display()),
        Err(e) => warn!("name of this server in the cache: {e}; drawing another"),
    }
    let name = data_encoding::HEXLOWER.encode(&clock::bytes::<16>(random));
    if let Err(e) = store::write(&file, &name) {
        warn!("name of this server in the cache: not kept: {e}; the next start draws another");
    }
    name
}

#[cfg(test)]
mod tests {
    use super::files::name_of;
    use super::*;

    const KIB: u64 = 1024;

    fn aged(path: &Path, age: u64) {
        let then = wall() - Duration::from_secs(age);
        let times = std::fs::FileTimes::new().set_accessed(then).set_modified(then);
        std::fs::File::open(path).unwrap().set_times(times).unwrap();
    }

    fn file(path: &Path, kib: usize, age: u64) {
        std::fs::write(path, vec![1; kib * KIB as usize]).unwrap();
        aged(path, age);
    }

    fn made_for(cache: &Cache, client: &str, user: Option<u32>) -> PathBuf {
        let folder = cache.store(client, user);
        cache.create(&folder).unwrap();
        folder
    }

    fn names(folder: &Path) -> Vec<String> {
        let all = std::fs::read_dir(folder).unwrap();
        let mut names: Vec<_> = all.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn trim_removes_the_least_recently_used_entries() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().into(), 400 * KIB).unwrap();
        let image = |client: &str, n: u8| {
            let folder = folder.path().join(IMAGES).join(name_of(client));
            made(&folder).unwrap();
            folder.join(data_encoding::HEXLOWER.encode(&[n; 32]))
        };
        for (client, younger) in [("vm-a", 1), ("vm-b", 0)] {
            for (n, age) in [(1, 9999), (2, 9000), (3, 1000)] {
                file(&image(client, n), 60, age - younger);
            }
        }
        let left = |client: &str| [1, 2, 3].iter().filter(|n| image(client, **n).exists()).count();
        cache.trim(wall());
        assert_eq!((left("vm-a"), left("vm-b")), (3, 3), "there is room");
        // One in use stays, and the oldest ones go.
        file(&image("vm-c", 1), 60, 0);
        cache.trim(wall());
        assert_eq!((left("vm-a"), left("vm-b")), (3, 2));
        assert!(!image("vm-b", 1).exists());
        // An image that a worker has asked for is no longer old.
        assert!(cache.images().open("vm-a", &[1; 32], wall()).is_some());
        file(&image("vm-c", 2), 60, 0);
        cache.trim(wall());
        assert!(image("vm-a", 1).exists() && !image("vm-b", 2).exists() && image("vm-a", 2).exists());
        assert!(image("vm-c", 1).exists() && image("vm-c", 2).exists());
    }

    #[test]
    fn a_server_keeps_its_name_and_no_other_has_it() {
        use crate::clock::SystemRandom;
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [first, second] = folders.each_ref().map(|f| server_name(f.path(), &SystemRandom));
        assert!(first != second && first.len() == 32);
        assert_eq!(server_name(folders[0].path(), &SystemRandom), first);
    }

    #[test]
    fn files_of_an_earlier_versions_workers_go() {
        let folder = tempfile::tempdir().unwrap();
        let former = folder.path().join("modules/client/deep");
        std::fs::create_dir_all(&former).unwrap();
        std::fs::write(former.join("image"), b"image").unwrap();
        Cache::at(folder.path().into(), 400 * KIB).unwrap();
        assert_eq!(names(folder.path()), ["compiled", "gone", "images"]);
    }

    #[test]
    fn each_client_and_user_has_a_folder_that_goes_whole() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().into(), 400 * KIB).unwrap();
        let (a, b) = (made_for(&cache, "vm-a", None), made_for(&cache, "../../etc", None));
        let (alice, bob) = (made_for(&cache, "vm-a", Some(1000)), cache.store("vm-a", Some(1001)));
        assert!(alice != a && alice != bob && alice.parent() == a.parent());
        assert!(a != b && b.starts_with(folder.path().join("compiled")));
        for (folder, age) in [(&a, 5000), (&b, 500), (&alice, 600)] {
            file(&folder.join("index"), 150, age);
            aged(folder, age);
        }
        cache.trim(wall());
        assert!(!a.exists() && b.exists() && alice.exists());
        assert_eq!(Cache::at(folder.path().into(), 0).map(|c| c.max), None);
        assert!(!b.exists(), "none is kept");
    }

    #[test]
    fn a_file_that_is_touched_for_ever_keeps_no_more_than_its_share() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().into(), 400 * KIB).unwrap();
        let compiled = |client: &str, kib: usize, age: u64| {
            let folder = made_for(&cache, client, None);
            file(&folder.join("code"), kib, age);
            folder
        };
        let others: Vec<_> = ["b", "c", "d"].iter().map(|client| compiled(client, 80, 100)).collect();
        let touched = compiled("a", 190, 0);
        let later = std::fs::FileTimes::new().set_modified(wall() + Duration::from_secs(1 << 32));
        std::fs::File::open(touched.join("code")).unwrap().set_times(later).unwrap();
        let share = compiled("e", 80, 0);
        cache.trim(wall());
        assert!(!touched.exists() && share.exists());
        assert!(others.iter().all(|folder| folder.exists()), "others lose nothing");
        // More than twice its share goes although there is room.
        let large = compiled("a", 210, 0);
        others.iter().for_each(|folder| cache.delete(folder));
        cache.trim(wall());
        assert!(!large.exists() && share.exists());
    }

    #[test]
    fn many_folders_of_a_client_are_not_many_shares() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().into(), 400 * KIB).unwrap();
        let filled = |folder: PathBuf, kib: usize, age: u64| {
            cache.create(&folder).unwrap();
            file(&folder.join("code"), kib, age);
            folder
        };
        let others = ["b", "c", "d"].map(|client| filled(cache.store(client, Some(1000)), 70, 100));
        let many: Vec<_> = (0..4).map(|n| filled(cache.of_worker("a", &n.to_string()), 70, 0)).collect();
        cache.trim(wall());
        assert!(others.iter().all(|folder| folder.exists()), "others lose nothing");
        assert!(many.iter().filter(|folder| folder.exists()).count() < 3);
    }

    #[test]
    fn a_folder_beyond_twice_its_share_is_in_excess() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().into(), 400 << 20).unwrap();
        assert_eq!(cache.compiled_max(), 50 << 20);
        let compiled = made_for(&cache, "vm-a", None);
        let excess = || cache.excess(cache.compiled_bytes(&compiled, &[])?.bytes);
        assert_eq!(excess(), None);
        let code = std::fs::File::create(compiled.join("code")).unwrap();
        let fill = |mib: i64| {
            use nix::fcntl::{FallocateFlags, fallocate};
            fallocate(&code, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, mib << 20).unwrap();
        };
        fill(150);
        assert_eq!(excess(), None);
        fill(201);
        assert_eq!(excess().unwrap(), "more than 200 MiB of compiled code");
        cache.delete(&compiled);
        assert_eq!(excess(), None, "it is gone");
    }
}
