//! Root's commands on files of the server, with the rights of these files' owner.
//!
//! A process of the server's user may have put a link in their place. Root would follow it to files
//! of the host, and give them away.

use std::fs;
use std::io;
use std::marker::PhantomData;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::unistd::{Gid, Uid, geteuid, setfsgid, setfsuid};

/// The calling thread reaches files as the owner of a folder, until this is dropped.
#[must_use = "the rights last as long as this"]
pub struct AsOwner {
    /// The rights of before; `None`: unchanged.
    before: Option<(Uid, Gid)>,
    /// Keeps it in its thread, whose rights these are.
    _of_thread: PhantomData<*const ()>,
}

/// Gives up root's rights on files; without effect for another user, and in a folder of root.
pub fn as_owner_of(folder: &Path) -> io::Result<AsOwner> {
    let unchanged = AsOwner { before: None, _of_thread: PhantomData };
    if !geteuid().is_root() {
        return Ok(unchanged);
    }
    let owner = fs::metadata(folder)?;
    if owner.uid() == 0 {
        return Ok(unchanged);
    }
    let group = setfsgid(Gid::from_raw(owner.gid()));
    let user = setfsuid(Uid::from_raw(owner.uid()));
    Ok(AsOwner { before: Some((user, group)), _of_thread: PhantomData })
}

impl Drop for AsOwner {
    fn drop(&mut self) {
        if let Some((user, group)) = self.before {
            setfsuid(user);
            setfsgid(group);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    #[test]
    fn a_link_leads_root_no_further_than_the_owner() {
        if !geteuid().is_root() {
            return eprintln!("skipped: needs root");
        }
        const OWNER: u32 = 65_534;
        let root = tempfile::tempdir().unwrap();
        fs::set_permissions(root.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let (state, secret) = (root.path().join("state"), root.path().join("secret"));
        fs::create_dir(&state).unwrap();
        chown(&state, Some(OWNER), Some(OWNER)).unwrap();
        fs::write(&secret, "root's").unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
        symlink(&secret, state.join("lock")).unwrap();
        {
            let _owner = as_owner_of(&state).unwrap();
            assert_eq!(fs::read(state.join("lock")).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
            fs::write(state.join("own"), "").unwrap();
            assert!(fs::write(root.path().join("other"), "").is_err());
        }
        assert_eq!(fs::metadata(state.join("own")).unwrap().uid(), OWNER);
        assert_eq!(fs::read_to_string(&secret).unwrap(), "root's", "root's rights are back");
    }
}
