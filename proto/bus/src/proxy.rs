//! Client proxies of the daemon's interfaces, with the methods that `gpusession` calls.
//!
//! No call starts a daemon that root has stopped: callers decide that.

use std::collections::HashMap;

use zbus::{OwnedFd, OwnedObjectPath, Variant, proxy};

/// Proxy of the daemon's object [`crate::PATH`].
#[proxy(
    interface = "org.gpusession1.Manager",
    default_service = "org.gpusession1",
    default_path = "/org/gpusession1"
)]
pub trait Manager {
    /// Returns the JSON of [`crate::describe::Described`], as the caller may see it.
    #[zbus(no_autostart)]
    fn describe(&self) -> zbus::Result<String>;
    /// Returns the JSON of [`crate::describe::Survey`]; the daemon asks every server first.
    #[zbus(no_autostart)]
    fn describe_servers(&self) -> zbus::Result<String>;
    /// Returns the JSON of [`crate::describe::Endpoint`], for a measurement of these seconds.
    #[zbus(allow_interactive_auth, no_autostart)]
    fn measure(&self, server: &str, seconds: u32) -> zbus::Result<String>;
    /// Requests a lease by the keys of [`crate::request`].
    ///
    /// It ends when the last copy of the descriptor closes, unless `flags` has
    /// [`crate::request::PERSISTENT`].
    #[zbus(allow_interactive_auth, no_autostart)]
    fn create_lease(
        &self,
        request: HashMap<&str, Variant<'_>>,
        flags: u64,
    ) -> zbus::Result<(String, OwnedObjectPath, OwnedFd)>;
    /// Releases a lease by its id; its programs lose their GPUs.
    #[zbus(allow_interactive_auth, no_autostart)]
    fn release_lease(&self, id: &str) -> zbus::Result<()>;
    /// Reads the configuration again; an error leaves it as it is.
    #[zbus(allow_interactive_auth, no_autostart)]
    fn reload(&self) -> zbus::Result<()>;
    /// Returns the leases that programs of a process get.
    #[zbus(name = "GetLeaseByPIDFD", no_autostart)]
    fn get_lease_by_pidfd(&self, pidfd: zbus::wire::Fd<'_>) -> zbus::Result<Vec<OwnedObjectPath>>;
    /// Returns the object of a lease by its id, or by the name that only one pending lease has.
    #[zbus(no_autostart)]
    fn get_lease(&self, id: &str) -> zbus::Result<OwnedObjectPath>;
}

/// Proxy of a lease's object, see [`crate::lease_path`].
#[proxy(interface = "org.gpusession1.Lease", default_service = "org.gpusession1")]
pub trait Lease {
    /// Moves the lease's device memory to the server's host memory, until a program calls again.
    #[zbus(allow_interactive_auth, no_autostart)]
    fn park(&self) -> zbus::Result<()>;
    /// Requests the memory back, without waiting for it.
    #[zbus(allow_interactive_auth, no_autostart)]
    fn unpark(&self) -> zbus::Result<()>;
    /// Returns the variables with which a program uses the lease.
    #[zbus(no_autostart)]
    fn get_environment(&self) -> zbus::Result<HashMap<String, String>>;
}
