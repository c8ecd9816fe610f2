//! Subordinate uids: the user who counts for a uid that `/etc/subuid` gives away (`newuidmap`).
//!
//! Only `/etc/subuid` and `/etc/passwd` are read, and not NSS: the answer bounds a caller before
//! anything is awaited for it. Ranges of root's containers are left out, because these may have
//! many tenants: ranges of root itself, of `containers` (Podman) and of `dockremap` (Docker).

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Owners whose ranges root's containers have.
const OF_ROOT: [&str; 2] = ["containers", "dockremap"];

/// Most bytes of a file that are read.
const MAX_FILE: usize = 1 << 20;

/// The users to whom uids belong, by files that are read again when they have changed.
pub struct Owners {
    subuid: PathBuf,
    passwd: PathBuf,
    known: Mutex<([Option<Stamp>; 2], Known)>,
}

/// The user to whom a uid is subordinate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    /// Uid of the owner; without a line in `/etc/passwd`, the first uid of its first range.
    pub uid: u32,
    /// User name, if the user database has one.
    pub name: Option<String>,
}

/// Inode, size and time of change of a file.
type Stamp = (u64, u64, i64, i64);

/// Content of the files.
#[derive(Debug, Default)]
struct Known {
    /// Uids of `/etc/passwd` by name; each of these users counts alone.
    users: HashMap<String, u32>,
    /// Ranges in the order of the file, each with the uid that counts; the first that fits does.
    ranges: Vec<(RangeInclusive<u32>, u32)>,
}

impl Owners {
    /// Reads this system's files.
    pub fn system() -> Self {
        Self::of(Path::new("/etc/subuid"), Path::new("/etc/passwd"))
    }

    /// Reads these files.
    pub fn of(subuid: &Path, passwd: &Path) -> Self {
        Self { subuid: subuid.into(), passwd: passwd.into(), known: Mutex::default() }
    }

    /// Returns the user who counts for a uid: its owner, or the uid itself.
    ///
    /// For an owner without a line in `/etc/passwd`, the first uid of its first range counts.
    pub fn owner(&self, uid: u32) -> u32 {
        let stamps = [stamp(&self.subuid), stamp(&self.passwd)];
        let mut known = self.known.lock().unwrap_or_else(|e| e.into_inner());
        if known.0 != stamps {
            *known = (stamps, Known::parse(&start_of(&self.subuid), &start_of(&self.passwd)));
        }
        known.1.owner(uid)
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let found = path.metadata().ok()?;
    Some((found.ino(), found.size(), found.ctime(), found.ctime_nsec()))
}

/// Returns the whole lines at the start of a file; none of a file that cannot be read.
fn start_of(path: &Path) -> String {
    let mut bytes = Vec::new();
    let read: io::Result<_> =
        File::open(path).and_then(|file| file.take(MAX_FILE as u64).read_to_end(&mut bytes));
    if read.is_err() {
        return String::new();
    }
    if bytes.len() == MAX_FILE {
        // The end of a range that is cut off would name another range.
        bytes.truncate(bytes.iter().rposition(|byte| *byte == b'\n').unwrap_or(0));
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Known {
    /// Reads lines `OWNER:FIRST:COUNT` and `NAME:PASSWORD:UID:...`; others are left out.
    fn parse(subuid: &str, passwd: &str) -> Self {
        let user = |line: &str| {
            let mut fields = line.split(':');
            let (name, uid) = (fields.next()?, fields.nth(1)?);
            Some((name.to_owned(), uid.parse().ok()?))
        };
        let users: HashMap<String, u32> = passwd.lines().filter_map(user).collect();
        let mut unknown: HashMap<&str, u32> = HashMap::new();
        let range = |line| {
            let (owner, ids) = range(line)?;
            let known = users.get(owner).copied().or_else(|| owner.parse().ok());
            let counts = known.unwrap_or_else(|| *unknown.entry(owner).or_insert(*ids.start()));
            (counts != 0 && !OF_ROOT.contains(&owner)).then_some((ids, counts))
        };
        let ranges = subuid.lines().filter_map(range).collect();
        Self { users, ranges }
    }

    fn owner(&self, uid: u32) -> u32 {
        let owned = self.ranges.iter().find(|(ids, _)| ids.contains(&uid));
        match owned {
            Some((_, owner)) if uid != 0 && !self.users.values().any(|known| *known == uid) => *owner,
            _ => uid,
        }
    }
}

/// Reads a line of `/etc/subuid`: the owner, and the uids.
fn range(line: &str) -> Option<(&str, RangeInclusive<u32>)> {
    let mut fields = line.trim().split(':');
    let (owner, first, count) = (fields.next()?, fields.next()?, fields.next()?);
    let (first, count): (u32, u32) = (first.parse().ok()?, count.parse().ok()?);
    let last = first.checked_add(count.checked_sub(1)?)?;
    (!owner.is_empty() && fields.next().is_none()).then_some((owner, first..=last))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PASSWD: &str = "root:x:0:0::/root:/bin/sh\nalice:x:1000:1000::/:/bin/sh\nbob:x:1001:1001::/:\n";

    fn owner(subuid: &str, uid: u32) -> u32 {
        Known::parse(subuid, PASSWD).owner(uid)
    }

    #[test]
    fn a_subordinate_uid_counts_as_its_owner() {
        let subuid = "# comment\nalice:100000:65536\n1001:200000:10\nalice:300000:1\n";
        for (uid, counts) in [
            (99_999, 99_999),
            (100_000, 1000),
            (165_535, 1000),
            (165_536, 165_536),
            (200_009, 1001),
            (200_010, 200_010),
            (300_000, 1000),
            (1000, 1000),
            (0, 0),
        ] {
            assert_eq!(owner(subuid, uid), counts, "{uid}");
        }
    }

    #[test]
    fn owners_that_the_file_of_users_lacks_count_once_and_roots_ranges_do_not() {
        let subuid = "carol:100000:10\ncarol:200000:10\nroot:300000:10\n0:400000:10\nalice:300000:5\n";
        assert_eq!((owner(subuid, 100_009), owner(subuid, 200_009)), (100_000, 100_000));
        assert_eq!((owner(subuid, 300_007), owner(subuid, 400_000)), (300_007, 400_000));
        assert_eq!(owner(subuid, 300_004), 1000, "root's range hides none");
        let of_root = "containers:2147483647:2147483648\ndockremap:100000:65536\n";
        assert_eq!((owner(of_root, 2_147_490_000), owner(of_root, 100_001)), (2_147_490_000, 100_001));
    }

    #[test]
    fn hostile_lines_take_nobodys_place() {
        for line in [
            "",
            ":::",
            "alice",
            "alice:7000",
            "alice:7000:",
            "alice:7000:0",
            "alice:7000:10:",
            "alice:-1:9000",
            "alice:7000:-1",
            "alice:0x10:9000",
            "alice:7000:4294967295",
            "alice:4294967296:1",
            "alice:1:18446744073709551617",
            ":7000:10",
            "alice:7000 :10",
            "\u{0}\u{feff}alice",
        ] {
            assert_eq!(owner(line, 7001), 7001, "{line:?}");
            assert_eq!(owner(&format!("{line}\nalice:7000:10"), 7001), 1000, "after {line:?}");
        }
        let everyone = "alice:0:4294967295\nbob:7000:10";
        assert_eq!((owner(everyone, 0), owner(everyone, 1001)), (0, 1001), "users of their own");
        assert_eq!(owner(everyone, 7001), 1000, "the first line counts");
    }

    #[test]
    fn the_files_are_read_again_after_a_change_and_never_beyond_their_bound() {
        let folder = tempfile::tempdir().unwrap();
        let (subuid, passwd) = (folder.path().join("subuid"), folder.path().join("passwd"));
        let owners = Owners::of(&subuid, &passwd);
        assert_eq!(owners.owner(100_000), 100_000, "no file");
        std::fs::write(&subuid, "alice:100000:65536\n").unwrap();
        assert_eq!(owners.owner(100_005), 100_000, "no user");
        std::fs::write(&passwd, PASSWD).unwrap();
        assert_eq!(owners.owner(100_005), 1000);
        let mut text = "#\n".repeat(MAX_FILE / 2 - 10);
        text.push_str("bob:500000:1\nalice:100000:65536\n");
        std::fs::write(&subuid, text).unwrap();
        assert_eq!((owners.owner(500_000), owners.owner(100_000)), (1001, 100_000), "a line is cut off");
        std::fs::remove_file(&subuid).unwrap();
        assert_eq!(owners.owner(500_000), 500_000);
    }

    proptest! {
        #[test]
        fn no_text_makes_another_user_count_for_root_or_a_user(
            subuid in "([a-z0-9:\\-\n ]|alice:|bob:|:[0-9]{1,11}\n){0,80}",
            passwd in ".{0,80}",
            uid: u32,
        ) {
            let known = Known::parse(&subuid, &passwd);
            prop_assert_eq!(known.owner(0), 0);
            let _ = known.owner(uid);
            prop_assert_eq!(owner(&subuid, 1000), 1000);
        }

        #[test]
        fn the_first_valid_range_counts(
            lines in proptest::collection::vec((0..4_u32, 0..40_u64, 0..12_u64), 0..8),
            high: bool,
            at in 1..50_u32,
        ) {
            // At both ends of the uids, so that ranges overlap and leave the number's bounds.
            let base = if high { u64::from(u32::MAX) - 40 } else { 1 };
            let text: String = lines
                .iter()
                .map(|(owner, first, count)| format!("{}:{}:{count}\n", 5000 + owner, base + first))
                .collect();
            let Ok(uid) = u32::try_from(base + u64::from(at)) else { return Ok(()) };
            let fits = |(_, first, count): &&(u32, u64, u64)| {
                let (first, end) = (base + first, base + first + count);
                (first..end).contains(&u64::from(uid)) && end <= 1 << 32
            };
            let expected = lines.iter().find(fits).map_or(uid, |(owner, ..)| 5000 + owner);
            prop_assert_eq!(owner(&text, uid), expected);
        }
    }
}
