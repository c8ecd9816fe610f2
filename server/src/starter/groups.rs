//! Control groups of workers in the starter's unit, as the server uses them.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;

use tracing::{debug, warn};

use super::desk::Desk;
use super::{Act, Answer, Group};
use crate::cgroups::{Bounds, ClientBounds, Met};

/// Groups in the starter's unit. The starter makes them with their programs.
#[derive(Debug)]
pub struct Groups {
    desk: Desk,
    /// Describes how the starter bounds memory.
    limits: String,
    /// Whether there are groups at all.
    exist: bool,
    /// Acts for the thread that asks for one after the other.
    acts: mpsc::Sender<Act>,
    sent: Arc<Mutex<Sent>>,
}

/// Bounds that were sent last.
#[derive(Debug, Default)]
struct Sent {
    programs: HashMap<(String, [u8; 16]), Bounds>,
    clients: HashMap<String, ClientBounds>,
}

impl Groups {
    /// Starts the thread; `exist`: whether there are groups, without which it sends nothing.
    pub fn new(desk: Desk, limits: String, exist: bool) -> io::Result<Self> {
        let (acts, queue) = mpsc::channel::<Act>();
        let sent: Arc<Mutex<Sent>> = Arc::default();
        let (at, seen) = (desk.clone(), sent.clone());
        thread::Builder::new().name("groups".into()).spawn(move || {
            for act in queue {
                if let Err(e) = at.act(&act, None) {
                    debug!("control groups: {act:?}: {e}; the next tick sends all bounds again");
                    *seen.lock().unwrap_or_else(PoisonError::into_inner) = Sent::default();
                }
            }
        })?;
        Ok(Self { desk, limits, exist, acts, sent })
    }

    /// Describes how the starter bounds memory.
    pub fn limits(&self) -> &str {
        &self.limits
    }

    fn changed(&self, change: impl FnOnce(&mut Sent) -> bool) -> bool {
        change(&mut self.sent.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn send(&self, act: Act) {
        if self.exist {
            let _ = self.acts.send(act);
        }
    }

    /// Sets the bounds of a program, if they have changed.
    pub fn bound(&self, of: &str, id: [u8; 16], bounds: Bounds) {
        let changed = |sent: &mut Sent| sent.programs.insert((of.into(), id), bounds) != Some(bounds);
        if self.changed(changed) {
            self.send(Act::Bound(Group { of: of.into(), id, bounds }));
        }
    }

    /// Sets the bounds of a client, if they have changed.
    pub fn bound_client(&self, client: &str, bounds: ClientBounds) {
        if self.changed(|sent| sent.clients.insert(client.into(), bounds) != Some(bounds)) {
            self.send(Act::BoundAll(client.into(), bounds));
        }
    }

    /// Forgets what was sent for a client, whose group may be a new one.
    pub fn renewed(&self, client: &str) {
        self.changed(|sent| sent.clients.remove(client).is_some());
    }

    /// Returns whose bound the kernel met when it killed a program for memory; waits for the
    /// starter.
    pub fn killed(&self, of: &str, id: [u8; 16]) -> Option<Met> {
        if !self.exist {
            return None;
        }
        let group = Group { of: of.into(), id, bounds: Bounds { memory: 0, threads: 0 } };
        match self.desk.act(&Act::Met(group), None).map(|mut answers| answers.pop()) {
            Ok(Some(Answer::Met(met))) => met,
            Ok(_) => None,
            Err(e) => {
                warn!(
                    "control groups: no answer whether a bound of memory killed a worker: {e}; its end shows another reason"
                );
                None
            }
        }
    }

    /// Removes the group of an exited program, and its client's with the last one.
    pub fn remove(&self, of: &str, id: [u8; 16]) {
        let forget = |sent: &mut Sent| {
            sent.programs.remove(&(of.to_owned(), id));
            if !sent.programs.keys().any(|(other, _)| other == of) {
                sent.clients.remove(of);
            }
            true
        };
        self.changed(forget);
        self.send(Act::Leave(Group { of: of.into(), id, bounds: Bounds { memory: 0, threads: 0 } }));
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::super::service::{self, Programs};
    use super::*;
    use crate::cgroups::{Cgroups, STARTER};
    use crate::peer::Served;

    #[test]
    fn changes_alone_are_sent_and_all_bounds_after_a_failure() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("start.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let served = Served { uid: nix::unistd::geteuid().as_raw(), unit: None };
        let programs = Programs { program: "/bin/false".into(), groups: Cgroups::of_this_unit(STARTER) };
        let (heard, acts) = mpsc::channel();
        std::thread::spawn(move || {
            service::serve(&listener, programs, &served, move |act, _| {
                heard.send(act.clone()).map_err(io::Error::other)?;
                // The starter fails to remove a group of the client `broken`.
                let fails = matches!(act, Act::Leave(group) if group.of == "broken");
                if fails { Err(io::Error::other("broken")) } else { Ok(Vec::new()) }
            })
        });
        let groups = Groups::new(Desk::at(&socket), "limits".into(), true).unwrap();
        let next = || acts.recv_timeout(std::time::Duration::from_secs(10)).unwrap();
        let bounds = Bounds { memory: 1 << 30, threads: 64 };
        let group = |bounds| Group { of: "vm-1".into(), id: [1; 16], bounds };
        groups.bound("vm-1", [1; 16], bounds);
        groups.bound("vm-1", [1; 16], bounds);
        let more = Bounds { threads: 65, ..bounds };
        groups.bound("vm-1", [1; 16], more);
        assert_eq!([next(), next()], [Act::Bound(group(bounds)), Act::Bound(group(more))]);

        let all = ClientBounds { memory: 1 << 40, cpu_weight: 100 };
        groups.bound_client("vm-1", all);
        groups.bound_client("vm-1", all);
        groups.renewed("vm-1");
        groups.bound_client("vm-1", all);
        let bounded = Act::BoundAll("vm-1".into(), all);
        assert_eq!([next(), next()], [bounded.clone(), bounded.clone()], "its group may be a new one");

        groups.remove("broken", [2; 16]);
        assert!(matches!(next(), Act::Leave(_)));
        // The failure is noted a moment after the starter has heard the act.
        let again = std::iter::repeat_with(|| {
            groups.bound("vm-1", [1; 16], more);
            acts.recv_timeout(std::time::Duration::from_millis(20))
        });
        let again = again.take(500).find_map(Result::ok);
        assert_eq!(again, Some(Act::Bound(group(more))));
        groups.bound_client("vm-1", all);
        assert_eq!(next(), bounded);
    }
}
