//! Acts that the starter does itself, because they take its user.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use crate::cache::code::Code;
use crate::cgroups::Cgroups;
use crate::mps::folder;
use crate::pidfd::pid_of;
use crate::spawn::end_group;
use crate::starter::{Act, Answer, Introduction};

/// Places of a starter.
#[derive(Debug, Clone)]
pub struct Places {
    /// Control groups of its unit.
    pub groups: Cgroups,
    /// Folder of compiled code.
    pub cache: Option<PathBuf>,
    /// Folder of the MPS daemons.
    pub mps: Option<PathBuf>,
}

/// Does what the server asked.
pub fn perform(act: &Act, descriptors: Vec<OwnedFd>, places: &Places) -> io::Result<Vec<Answer>> {
    let Places { groups, cache, mps } = places;
    match act {
        Act::Introduce => {
            let text = |path: &Option<PathBuf>| path.as_deref().and_then(Path::to_str).map(str::to_owned);
            return Ok(vec![Answer::Introduced(Introduction {
                uid: nix::unistd::geteuid().as_raw(),
                limits: groups.to_string(),
                bounds: groups.exist(),
                cache: text(cache),
                mps: text(mps),
            })]);
        }
        // A zombie has its number, too; one that was reaped has none.
        Act::Kill => match descriptors.first().and_then(pid_of) {
            Some(0) => {}
            Some(pid) => {
                let _ = end_group(pid);
            }
            None => return Err(io::Error::other("the descriptor is no pidfd")),
        },
        Act::Bound(group) => groups.bound(&group.of, &group.name(), group.bounds),
        Act::BoundAll(client, bounds) => groups.bound_client(client, *bounds),
        Act::Met(group) => return Ok(vec![Answer::Met(groups.killed(&group.of, &group.name()))]),
        Act::Leave(group) => groups.remove(&group.of, &group.name()),
        Act::Code(act) => {
            let folder = cache.clone().ok_or_else(|| {
                io::Error::other("it has no folder for compiled code; CacheDirectory= of its unit names one")
            })?;
            let found = Code::new(folder, act.max).perform(&act.what)?;
            return Ok(found.into_iter().map(Answer::Code).collect());
        }
        Act::Mps(act) => {
            let folder = mps
                .as_ref()
                .ok_or_else(|| io::Error::other("it has no folder for MPS; its option --mps names one"))?;
            return Ok(folder::perform(folder, act)?.map(Answer::Mps).into_iter().collect());
        }
    }
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixListener;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;
    use crate::cgroups::STARTER;
    use crate::peer::Served;
    use crate::pidfd::pidfd_open;
    use crate::starter::code::{CodeAct, Found, What};
    use crate::starter::desk::Desk;
    use crate::starter::mps::{FolderAct, Told};
    use crate::starter::service::{self, Programs};

    /// A starter of this user, which starts nothing.
    fn desk(folder: &Path) -> Desk {
        let socket = folder.join("start.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let served = Served { uid: nix::unistd::geteuid().as_raw(), unit: None };
        let groups = Cgroups::of_this_unit(STARTER);
        let programs = Programs { program: "/bin/false".into(), groups: groups.clone() };
        let places = Places { groups, cache: Some(folder.join("code")), mps: Some(folder.join("mps")) };
        std::thread::spawn(move || {
            service::serve(&listener, programs, &served, move |act, beside| perform(act, beside, &places))
        });
        Desk::at(&socket)
    }

    #[test]
    fn a_process_is_killed_by_its_pidfd_and_never_by_a_number() {
        use std::os::unix::process::CommandExt;
        let folder = tempfile::tempdir().unwrap();
        let desk = desk(folder.path());
        let mut child = Command::new("/bin/sleep").arg("1000").process_group(0).spawn().unwrap();
        let pidfd = pidfd_open(child.id()).unwrap();
        desk.act(&Act::Kill, Some(pidfd.as_fd())).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(9));
        // Its number may be another process's by now.
        assert_eq!(desk.act(&Act::Kill, Some(pidfd.as_fd())).unwrap(), []);
        let other = std::fs::File::open("/dev/null").unwrap();
        let refused = desk.act(&Act::Kill, Some(other.as_fd())).unwrap_err();
        assert!(refused.to_string().contains("no pidfd"), "{refused}");
    }

    #[test]
    fn acts_are_done_with_the_starters_user_in_its_places() {
        let folder = tempfile::tempdir().unwrap();
        let desk = desk(folder.path());
        let Introduction { uid, limits, bounds, cache, mps } = desk.introduction().unwrap();
        assert_eq!(uid, nix::unistd::geteuid().as_raw());
        assert_eq!(bounds, limits == "memory limits: control groups", "{limits}");
        let at = |name: &str| Some(folder.path().join(name).display().to_string());
        assert_eq!((cache, mps), (at("code"), at("mps")));

        let code = |what: What| desk.act(&Act::Code(CodeAct { max: 1 << 30, what }), None);
        code(What::Open).unwrap();
        // More than one message has.
        let names: Vec<_> = (0..3000).map(|n| format!("{n:032x}-1000")).collect();
        for name in &names {
            std::fs::create_dir(folder.path().join("code/compiled").join(name)).unwrap();
        }
        let listed = code(What::Names).unwrap().into_iter().flat_map(|answer| match answer {
            Answer::Code(Found::Names(names)) => names,
            other => panic!("{other:?}"),
        });
        let mut listed: Vec<_> = listed.collect();
        listed.sort();
        assert_eq!(listed, names);
        let refused = code(What::Delete("../mps".into())).unwrap_err();
        assert!(refused.to_string().contains("no folder of compiled code"), "{refused}");

        desk.act(&Act::Mps(FolderAct::Make(3)), None).unwrap();
        std::fs::write(folder.path().join("mps/3/l/server.log"), "one\ntwo\n").unwrap();
        let log = desk.act(&Act::Mps(FolderAct::Read(3, 1, 4)), None).unwrap();
        assert_eq!(log, [Answer::Mps(Told::Log(b"two\n".to_vec(), 8))]);
        let absent = desk.act(&Act::Mps(FolderAct::Read(3, 0, 0)), None).unwrap_err();
        assert_eq!(absent.kind(), std::io::ErrorKind::NotFound);
        assert!(desk.act(&Act::Mps(FolderAct::Read(3, 2, 0)), None).is_err(), "there is no such log");
        desk.act(&Act::Mps(FolderAct::Clear), None).unwrap();
        assert!(!folder.path().join("mps/3").exists());
    }
}
