//! Client proxies of the daemon's interfaces, with the methods that `gpusession` calls.
//!
//! No call starts a daemon that root has stopped: callers decide that.

use std::collections::HashMap;

use zbus::{OwnedFd, OwnedObjectPath, Variant, proxy};

#[proxy(
    interface = "org.gpusession1.Manager",
    default_service = "org.gpusession1",
    default_path = "/org/gpusession1"
)]
pub trait Manager {
    #[zbus(no_autostart)]
    fn describe(&self) -> zbus::Result<String>;
    #[zbus(no_autostart)]
    fn describe_servers(&self) -> zbus::Result<String>;
    #[zbus(allow_interactive_auth, no_autostart)]
    fn measure(&self, server: &str, seconds: u32) -> zbus::Result<String>;
    #[zbus(allow_interactive_auth, no_autostart)]
    fn create_lease(
        &self,
        request: HashMap<&str, Variant<'_>>,
        flags: u64,
    ) -> zbus::Result<(String, OwnedObjectPath, OwnedFd)>;
    #[zbus(allow_interactive_auth, no_autostart)]
    fn release_lease(&self, id: &str) -> zbus::Result<()>;
    #[zbus(allow_interactive_auth, no_autostart)]
    fn reload(&self) -> zbus::Result<()>;
    #[zbus(name = "GetLeaseByPIDFD", no_autostart)]
    fn get_lease_by_pidfd(&self, pidfd: zbus::wire::Fd<'_>) -> zbus::Result<Vec<OwnedObjectPath>>;
    #[zbus(no_autostart)]
    fn get_lease(&self, id: &str) -> zbus::Result<OwnedObjectPath>;
}

#[proxy(interface = "org.gpusession1.Lease", default_service = "org.gpusession1")]
pub trait Lease {
    #[zbus(allow_interactive_auth, no_autostart)]
    fn park(&self) -> zbus::Result<()>;
    #[zbus(allow_interactive_auth, no_autostart)]
    fn unpark(&self) -> zbus::Result<()>;
    #[zbus(no_autostart)]
    fn get_environment(&self) -> zbus::Result<HashMap<String, String>>;
}
