//! Control groups of workers: bounds of host memory and threads that the kernel keeps, and the
//! clients' shares of processor time.
//!
//! A unit with `Delegate=memory pids cpu` and `DelegateSubgroup=server` owns a part of the kernel's
//! hierarchy (systemd from 254 on, cgroup v2):
//!
//! | group | processes | bounds |
//! |---|---|---|
//! | `server` | this process and its helpers | none |
//! | `client-HASH` | none | memory of all its workers, weight of processor time |
//! | `client-HASH/worker-ID` | one worker or endpoint, from before its first instruction | memory, threads |
//!
//! An endpoint of `netperf` is in a group beside its client's, whose bound is for workers. With a
//! starter, all these groups are in the starter's unit, where the starter's process is in
//! `starter`. The server's own unit then has groups of workers that an earlier server left.
//! In a group counts what no process's numbers have, such as a memory file that is mapped nowhere.
//! Everywhere else the supervisor only samples what workers have.

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use tracing::warn;

/// Mount point of the hierarchy.
const MOUNT: &str = "/sys/fs/cgroup";
/// Group of the server, as its unit names it (`DelegateSubgroup=`).
pub const SERVER: &str = "server";
/// Group of the starter.
pub const STARTER: &str = "starter";
/// Rounds in which processes that an earlier version left in the unit's own group are moved.
const MOVES: usize = 5;

/// Bounds of one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bounds {
    /// Host memory in bytes.
    pub memory: u64,
    /// Threads of all its processes.
    pub threads: u64,
}

/// Bounds of all workers of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientBounds {
    /// Host memory in bytes.
    pub memory: u64,
    /// Weight of its processor time against other clients', 1 to 10000.
    pub cpu_weight: u64,
}

/// Group whose bound the kernel met when it killed a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Met {
    /// The worker's own.
    Worker,
    /// Its client's.
    Client,
    /// The service's, or the host's.
    Host,
}

/// The groups of this service's workers, if it has any. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Cgroups(Arc<Mode>);

#[derive(Debug)]
enum Mode {
    Bounded(Tree),
    /// The reason why there are none.
    Sampled(String),
}

/// Shows how the limits of memory are kept.
impl fmt::Display for Cgroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.0 {
            Mode::Bounded(_) => f.write_str("memory limits: control groups"),
            Mode::Sampled(why) => write!(f, "memory limits: sampled ({why})"),
        }
    }
}

impl Cgroups {
    /// Prepares the groups of the unit that runs this process, in the group `subgroup` of it.
    pub fn of_this_unit(subgroup: &str) -> Self {
        let found = fs::read_to_string("/proc/self/cgroup").map_err(|e| e.to_string()).and_then(|text| {
            let own = text.lines().find_map(|line| line.strip_prefix("0::/"));
            let own = own.map(|own| Path::new(MOUNT).join(own)).filter(|own| own.ends_with(subgroup));
            let root = own.as_deref().and_then(Path::parent).ok_or(
                "no delegated control group: it needs cgroup v2, systemd 254, and the unit's Delegate=",
            )?;
            Tree::open(root, subgroup).map_err(|e| format!("{}: {e}", root.display()))
        });
        Self(Arc::new(found.map_or_else(Mode::Sampled, Mode::Bounded)))
    }

    /// Returns `true` if there are groups.
    pub fn exist(&self) -> bool {
        self.tree().is_some()
    }

    fn tree(&self) -> Option<&Tree> {
        match &*self.0 {
            Mode::Bounded(tree) => Some(tree),
            Mode::Sampled(_) => None,
        }
    }

    /// Creates the group of a new worker, with its bounds.
    ///
    /// Returns the file to which the worker's process writes `0` to enter; `None` without groups.
    pub fn create(&self, client: &str, worker: &str, bounds: Bounds) -> io::Result<Option<OwnedFd>> {
        self.tree().map(|tree| tree.create(client, worker, bounds)).transpose()
    }

    /// Moves a worker that an earlier server left into a group of its own, unless it has one.
    pub fn take_over(&self, client: &str, worker: &str, pid: u32, bounds: Bounds) {
        let Some(tree) = self.tree() else { return };
        let group = tree.worker(client, worker);
        let there = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
        if there.lines().any(|line| line.parse() == Ok(pid)) {
            return;
        }
        let moved = tree
            .create(client, worker, bounds)
            .and_then(|file| File::from(file).write_all(pid.to_string().as_bytes()));
        if let Err(e) = moved {
            warn!("{}: cannot bound process {pid}: {e}; its memory is sampled", group.display());
        }
    }

    /// Sets the bounds of a worker, if they have changed.
    pub fn bound(&self, client: &str, worker: &str, bounds: Bounds) {
        if let Some(tree) = self.tree() {
            tree.report(tree.bound(&tree.worker(client, worker), bounds));
        }
    }

    /// Sets the bounds of a client, if they have changed.
    pub fn bound_client(&self, client: &str, bounds: ClientBounds) {
        if let Some(tree) = self.tree() {
            let group = tree.client(client);
            let weight = || tree.set(&group, "cpu.weight", bounds.cpu_weight.clamp(1, 10_000));
            tree.report(tree.set(&group, "memory.max", bounds.memory));
            tree.report(if tree.cpu { weight() } else { Ok(()) });
        }
    }

    /// Returns whose bound the kernel met when it killed a worker for memory; `None` if it did not.
    pub fn killed(&self, client: &str, worker: &str) -> Option<Met> {
        let tree = self.tree()?;
        let worker = tree.worker(client, worker);
        if event(&worker.join("memory.events"), "oom_kill") == 0 {
            return None;
        }
        // Each counts in the groups above as well, except in those files that are local.
        Some(if event(&worker.join("memory.events"), "oom") > 0 {
            Met::Worker
        } else if event(&tree.client(client).join("memory.events.local"), "oom") > 0 {
            Met::Client
        } else {
            Met::Host
        })
    }

    /// Removes the group of an exited worker, and its client's with the last one.
    pub fn remove(&self, client: &str, worker: &str) {
        if let Some(tree) = self.tree() {
            let group = tree.worker(client, worker);
            // A process that the worker has started, which a worker's restrictions refuse.
            let _ = put(&group.join("cgroup.kill"), "1");
            let mut written = tree.written();
            written.leaving.push(group);
            tree.sweep(&mut written);
        }
    }

    /// Removes the groups of exited workers that were still in use.
    pub fn tick(&self) {
        if let Some(tree) = self.tree() {
            tree.sweep(&mut tree.written());
        }
    }
}

/// Groups below a delegated one.
#[derive(Debug)]
struct Tree {
    root: PathBuf,
    /// Whether the unit has the controller of processor time.
    cpu: bool,
    written: Mutex<Written>,
}

#[derive(Debug, Default)]
struct Written {
    /// Last value of each file.
    values: HashMap<PathBuf, u64>,
    /// Groups to remove.
    leaving: Vec<PathBuf>,
    /// Whether an error was logged.
    failed: bool,
}

impl Tree {
    fn open(root: &Path, subgroup: &str) -> io::Result<Self> {
        let controllers = fs::read_to_string(root.join("cgroup.controllers"))?;
        let has = |name| controllers.split_whitespace().any(|c| c == name);
        if !has("memory") || !has("pids") {
            return Err(io::Error::other("the controllers memory and pids are not delegated"));
        }
        // Workers of a version without groups. The kernel allows no process beside groups.
        for _ in 0..MOVES {
            let left = fs::read_to_string(root.join("cgroup.procs"))?;
            if left.is_empty() {
                break;
            }
            for pid in left.lines() {
                // The process may have exited.
                let _ = put(&root.join(subgroup).join("cgroup.procs"), pid);
            }
        }
        enable(root, "+memory +pids")?;
        let cpu = has("cpu") && enable(root, "+cpu").is_ok();
        let tree = Self { root: root.into(), cpu, written: Mutex::default() };
        // Groups of workers that exited while no server ran; the others are in use.
        for client in folders(root).filter(|f| is_named(f, "client-")) {
            folders(&client).for_each(|worker| drop(fs::remove_dir(worker)));
            let _ = fs::remove_dir(client);
        }
        Ok(tree)
    }

    fn client(&self, client: &str) -> PathBuf {
        let hash = blake3::hash(client.as_bytes());
        self.root.join(format!("client-{}", data_encoding::HEXLOWER.encode(&hash.as_bytes()[..8])))
    }

    fn worker(&self, client: &str, worker: &str) -> PathBuf {
        self.client(client).join(format!("worker-{worker}"))
    }

    fn written(&self) -> MutexGuard<'_, Written> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn create(&self, client: &str, worker: &str, bounds: Bounds) -> io::Result<OwnedFd> {
        let (above, group) = (self.client(client), self.worker(client, worker));
        {
            // The client's group may not be removed before it has this one.
            let _no_removal = self.written();
            make(&above)?;
            enable(&above, "+memory +pids")?;
            make(&group)?;
        }
        self.bound(&group, bounds)?;
        // The worker exits as a whole, and its memory never reaches a disk.
        put(&group.join("memory.oom.group"), "1")?;
        match put(&group.join("memory.swap.max"), "0") {
            // A kernel that does not count swapped-out memory.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            set => set?,
        }
        Ok(OpenOptions::new().write(true).open(group.join("cgroup.procs"))?.into())
    }

    fn bound(&self, group: &Path, bounds: Bounds) -> io::Result<()> {
        self.set(group, "memory.max", bounds.memory)?;
        self.set(group, "pids.max", bounds.threads)
    }

    /// Writes a value, if it has changed.
    fn set(&self, group: &Path, file: &str, value: u64) -> io::Result<()> {
        let (path, mut written) = (group.join(file), self.written());
        if written.values.get(&path) == Some(&value) {
            return Ok(());
        }
        // The kernel takes no number above its own greatest one.
        let text = if value >= i64::MAX as u64 { "max".into() } else { value.to_string() };
        put(&path, &text)?;
        written.values.insert(path, value);
        Ok(())
    }

    /// Logs the first failure to change a bound.
    fn report(&self, set: io::Result<()>) {
        if let Err(e) = set
            // The worker has exited.
            && e.kind() != io::ErrorKind::NotFound
            && !std::mem::replace(&mut self.written().failed, true)
        {
            warn!("control groups: cannot change a bound: {e}; the one before stays");
        }
    }

    fn sweep(&self, written: &mut Written) {
        let Written { values, leaving, .. } = written;
        leaving.retain(|group| {
            match fs::remove_dir(group) {
                // A process is still exiting; the next tick tries again.
                Err(e) if e.kind() != io::ErrorKind::NotFound => return true,
                _ => {}
            }
            // Fails while the client has other workers.
            let above = group.parent().filter(|above| fs::remove_dir(above).is_ok());
            values.retain(|file, _| !file.starts_with(above.unwrap_or(group)));
            false
        });
    }
}

/// Writes to an existing file of the kernel's.
fn put(path: &Path, text: &str) -> io::Result<()> {
    let written = OpenOptions::new().write(true).open(path).and_then(|mut f| f.write_all(text.as_bytes()));
    written.map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))
}

fn enable(group: &Path, controllers: &str) -> io::Result<()> {
    put(&group.join("cgroup.subtree_control"), controllers)
}

fn make(group: &Path) -> io::Result<()> {
    match fs::create_dir(group) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

fn folders(group: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(group).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir())
}

fn is_named(group: &Path, begin: &str) -> bool {
    group.file_name().is_some_and(|name| name.to_string_lossy().starts_with(begin))
}

/// Returns a counter of a file of events; 0 if it is not there.
fn event(file: &Path, name: &str) -> u64 {
    let text = fs::read_to_string(file).unwrap_or_default();
    let count = text.lines().filter_map(|line| line.split_once(' ')).find(|(key, _)| *key == name);
    count.and_then(|(_, count)| count.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds { memory: 1 << 30, threads: 512 };

    /// Makes a folder with the files that the kernel makes in a group.
    fn group(path: &Path) {
        fs::create_dir_all(path).unwrap();
        for file in [
            "cgroup.procs",
            "cgroup.subtree_control",
            "cpu.weight",
            "memory.max",
            "memory.oom.group",
            "memory.swap.max",
            "pids.max",
        ] {
            fs::write(path.join(file), "").unwrap();
        }
    }

    fn unit(controllers: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        group(root.path());
        group(&root.path().join(SERVER));
        fs::write(root.path().join("cgroup.controllers"), controllers).unwrap();
        root
    }

    fn read(path: PathBuf) -> String {
        fs::read_to_string(path).unwrap()
    }

    #[test]
    fn a_worker_and_its_client_have_their_bounds() {
        let root = unit("cpu memory pids\n");
        let tree = Tree::open(root.path(), SERVER).unwrap();
        let (client, worker) = (tree.client("vm-1"), tree.worker("vm-1", "ab"));
        assert!(!client.display().to_string().contains("vm-1"), "workers read the names of groups");
        group(&client);
        group(&worker);
        let groups = Cgroups(Arc::new(Mode::Bounded(tree)));
        assert_eq!(groups.to_string(), "memory limits: control groups");
        assert!(groups.create("vm-1", "ab", BOUNDS).unwrap().is_some());
        assert_eq!(read(client.join("cgroup.subtree_control")), "+memory +pids");
        let values = ["memory.max", "pids.max", "memory.oom.group", "memory.swap.max"];
        assert_eq!(values.map(|file| read(worker.join(file))), ["1073741824", "512", "1", "0"]);
        groups.bound_client("vm-1", ClientBounds { memory: u64::MAX, cpu_weight: 20_000 });
        assert_eq!(["memory.max", "cpu.weight"].map(|file| read(client.join(file))), ["max", "10000"]);
        // Unchanged values are not written again.
        fs::write(worker.join("pids.max"), "").unwrap();
        fs::write(worker.join("memory.max"), "").unwrap();
        groups.bound("vm-1", "ab", Bounds { memory: 2 << 30, ..BOUNDS });
        assert_eq!(["memory.max", "pids.max"].map(|file| read(worker.join(file))), ["2147483648", ""]);
    }

    #[test]
    fn the_bound_that_the_kernel_met_is_known() {
        let root = unit("memory pids");
        let tree = Tree::open(root.path(), SERVER).unwrap();
        let (client, worker) = (tree.client("vm-1"), tree.worker("vm-1", "ab"));
        group(&client);
        group(&worker);
        let groups = Cgroups(Arc::new(Mode::Bounded(tree)));
        let killed = |own: &str, of_client: &str| {
            fs::write(worker.join("memory.events"), own).unwrap();
            fs::write(client.join("memory.events.local"), of_client).unwrap();
            groups.killed("vm-1", "ab")
        };
        assert_eq!(killed("low 0\nhigh 0\nmax 9\noom 0\noom_kill 0\n", "oom 3\n"), None);
        assert_eq!(killed("max 9\noom 1\noom_kill 4\n", "oom 0\n"), Some(Met::Worker));
        assert_eq!(killed("max 0\noom 0\noom_kill 4\n", "oom 1\noom_kill 0\n"), Some(Met::Client));
        assert_eq!(killed("max 0\noom 0\noom_kill 4\n", "oom 0\n"), Some(Met::Host));
        assert_eq!(groups.killed("vm-1", "cd"), None);
    }

    #[test]
    fn without_the_controllers_there_are_no_groups() {
        let root = unit("cpu io pids\n");
        let error = Tree::open(root.path(), SERVER).unwrap_err().to_string();
        assert_eq!(error, "the controllers memory and pids are not delegated");
        let sampled = Cgroups(Arc::new(Mode::Sampled("why".into())));
        assert!(sampled.create("vm-1", "ab", BOUNDS).unwrap().is_none());
        assert_eq!(
            (sampled.killed("vm-1", "ab"), sampled.to_string()),
            (None, "memory limits: sampled (why)".into())
        );
    }

    /// A delegated group of the kernel's below the one of this process, removed at the end.
    struct Real(PathBuf);

    impl Real {
        /// Skips the test, with the reason, where this process may not make groups.
        fn new(name: &str) -> Option<Self> {
            let root = Path::new(MOUNT).join(format!("gpuserver-test-{name}-{}", std::process::id()));
            // Only the root of the hierarchy may have processes beside groups.
            let _ = enable(Path::new(MOUNT), "+memory +pids");
            let made = fs::create_dir(&root).and_then(|()| fs::create_dir(root.join(SERVER)));
            match made {
                Ok(()) => Some(Self(root)),
                Err(e) => {
                    eprintln!("skipped: {}: {e}", root.display());
                    None
                }
            }
        }

        fn tree(&self) -> Option<Tree> {
            Tree::open(&self.0, SERVER).inspect_err(|e| eprintln!("skipped: {}: {e}", self.0.display())).ok()
        }
    }

    impl Drop for Real {
        fn drop(&mut self) {
            let _ = put(&self.0.join("cgroup.kill"), "1");
            for _ in 0..200 {
                for client in folders(&self.0) {
                    folders(&client).for_each(|worker| drop(fs::remove_dir(worker)));
                    let _ = fs::remove_dir(client);
                }
                if fs::remove_dir(&self.0).is_ok() {
                    return;
                }
                std::thread::yield_now();
            }
        }
    }

    /// The hierarchy need not have the controllers of memory and threads.
    #[test]
    fn a_worker_starts_inside_its_group() {
        let unified = if Path::new(MOUNT).join("cgroup.controllers").exists() { "" } else { "unified" };
        let root =
            Path::new(MOUNT).join(unified).join(format!("gpuserver-test-enter-{}", std::process::id()));
        if let Err(e) = fs::create_dir(&root) {
            return eprintln!("skipped: {}: {e}", root.display());
        }
        let real = Real(root);
        let file = OpenOptions::new().write(true).open(real.0.join("cgroup.procs")).unwrap().into();
        let mut command = std::process::Command::new("/bin/cat");
        enters(&mut command, file);
        let output = command.arg("/proc/self/cgroup").output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.lines().any(|l| l.starts_with("0::/") && l.contains("gpuserver-test-enter")), "{text}");
    }

    fn enters(command: &mut std::process::Command, group: OwnedFd) {
        use std::os::unix::process::CommandExt;
        // SAFETY: between fork and exec the closure makes one system call.
        unsafe {
            command.pre_exec(move || crate::spawn::enter(&group));
        }
    }

    /// Helper: this test program again, as a worker that takes memory which it maps nowhere.
    #[test]
    fn unmapped_memory() {
        if std::env::var_os("CGROUP_TEST_MIB").is_none() {
            return;
        }
        let mib: usize = std::env::var("CGROUP_TEST_MIB").unwrap().parse().unwrap();
        let file = nix::sys::memfd::memfd_create(c"unmapped", nix::sys::memfd::MFdFlags::empty()).unwrap();
        let mut file = File::from(file);
        for _ in 0..mib {
            file.write_all(&[7; 1 << 20]).unwrap();
        }
    }

    fn worker(groups: &Cgroups, client: &str, id: &str, mib: u64) -> std::process::ExitStatus {
        let file = groups.create(client, id, Bounds { memory: 256 << 20, threads: 64 }).unwrap().unwrap();
        groups.bound_client(client, ClientBounds { memory: 300 << 20, cpu_weight: 50 });
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "cgroups::tests::unmapped_memory"]).env("CGROUP_TEST_MIB", mib.to_string());
        enters(&mut command, file);
        command.stdout(std::process::Stdio::null()).status().unwrap()
    }

    #[test]
    fn the_kernel_kills_a_worker_whose_unmapped_memory_exceeds_its_bound() {
        use std::os::unix::process::ExitStatusExt;
        let Some(real) = Real::new("memory") else { return };
        let Some(tree) = real.tree() else { return };
        let groups = Cgroups(Arc::new(Mode::Bounded(tree)));
        let small = worker(&groups, "vm-1", "aa", 100);
        assert!(small.success(), "{small}");
        assert_eq!(groups.killed("vm-1", "aa"), None);
        let hungry = worker(&groups, "vm-1", "bb", 1024);
        assert_eq!(hungry.signal(), Some(9), "{hungry}");
        assert_eq!(groups.killed("vm-1", "bb"), Some(Met::Worker));
        assert_eq!(groups.killed("vm-1", "aa"), None, "the other worker's group has nothing of it");
        for id in ["aa", "bb"] {
            groups.remove("vm-1", id);
        }
        assert_eq!(folders(&real.0).filter(|f| is_named(f, "client-")).count(), 0);
    }
}
