//! The properties whose changes are announced, by interface.

use zbus::object_server::SignalEmitter;

use super::device::Device;
use super::lease::Lease;
use super::manager::Manager;
use super::project::{
    DeviceEntry, device_paths, health_of, memory_limit, sm_percent, state_of, waits_at, waits_for,
};
use super::server::Server;
use crate::leases::{LeaseView, ServerView};

/// Values of the manager's properties.
#[derive(Clone)]
pub struct ManagerView {
    pub state: &'static str,
    pub target: u32,
    pub ready: u32,
    pub held: usize,
    pub boot_complete: bool,
    pub extra: u32,
    pub lease_ttl: u64,
    pub idle_timeout: u64,
    pub identity_expires: u64,
}

/// Defines a function that sends PropertiesChanged for each row whose value differs between views.
///
/// The rows' names are listed too: a test compares them with the interface's XML.
macro_rules! announce {
    ($function:ident, $rows:ident, $object:ty, $view:ty; $($changed:ident: $of:expr),+ $(,)?) => {
        pub async fn $function(
            object: &$object,
            emitter: &SignalEmitter<'_>,
            before: &$view,
            now: &$view,
        ) -> zbus::Result<()> {
            $({
                let of = $of;
                if of(before) != of(now) {
                    object.$changed(emitter).await?;
                }
            })+
            Ok(())
        }

        #[cfg(test)]
        const $rows: &[&str] = &[$(stringify!($changed)),+];
    };
}

announce! { manager, MANAGER, Manager, ManagerView;
    state_changed: |m: &ManagerView| m.state,
    pool_target_changed: |m: &ManagerView| m.target,
    pool_ready_changed: |m: &ManagerView| m.ready,
    n_current_leases_changed: |m: &ManagerView| m.held,
    boot_allocation_complete_changed: |m: &ManagerView| m.boot_complete,
    leases_max_changed: |m: &ManagerView| m.extra,
    lease_t_t_l_u_sec_changed: |m: &ManagerView| m.lease_ttl,
    default_idle_timeout_u_sec_changed: |m: &ManagerView| m.idle_timeout,
    identity_expires_u_sec_changed: |m: &ManagerView| m.identity_expires,
}

announce! { lease, LEASE, Lease, LeaseView;
    // The user database did not know the user before.
    u_i_d_changed: |l: &LeaseView| l.facts.uid,
    state_changed: |l: &LeaseView| l.facts.state,
    queue_position_changed: |l: &LeaseView| waits_at(&l.facts),
    waits_for_changed: |l: &LeaseView| waits_for(&l.facts).to_owned(),
    // Both show one point in time, and change only when another one begins.
    idle_since_hint_changed: |l: &LeaseView| l.gauges.idle_since,
    idle_since_hint_monotonic_changed: |l: &LeaseView| l.gauges.idle_since,
    idle_timeout_u_sec_changed: |l: &LeaseView| l.facts.idle_timeout_usec,
    devices_changed: |l: &LeaseView| device_paths(&l.facts),
    memory_limit_bytes_changed: |l: &LeaseView| memory_limit(&l.facts),
    s_m_percent_changed: |l: &LeaseView| sm_percent(&l.facts),
    fencing_token_changed: |l: &LeaseView| l.facts.fencing_token,
}

announce! { device, DEVICE, Device, DeviceEntry;
    leases_changed: |d: &DeviceEntry| d.leases.clone(),
    state_changed: |d: &DeviceEntry| state_of(&d.view).to_owned(),
    health_changed: |d: &DeviceEntry| health_of(&d.view),
}

announce! { server, SERVER, Server, ServerView;
    state_changed: |s: &ServerView| s.facts.state.clone(),
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Returns the properties of an interface whose changes a signal announces.
    fn announced(interface: &str) -> Vec<String> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../units/dbus-1/interfaces");
        let xml = std::fs::read_to_string(folder.join(format!("org.gpusession1.{interface}.xml"))).unwrap();
        let properties = xml.split("<property name=\"").skip(1);
        // An annotation stands inside the element, so the element does not close itself.
        let silent = |rest: &&str| rest.split_once('>').unwrap().0.ends_with('/');
        properties.filter(silent).map(|rest| rest.split_once('"').unwrap().0.to_owned()).collect()
    }

    /// Returns the name of the function that announces a property's change, as zbus derives it.
    fn function(property: &str) -> String {
        let mut name = String::new();
        for (at, letter) in property.char_indices() {
            if letter.is_uppercase() && at > 0 {
                name.push('_');
            }
            name.extend(letter.to_lowercase());
        }
        name + "_changed"
    }

    #[test]
    fn every_announced_property_has_a_row_and_no_other_has_one() {
        let interfaces = [("Manager", MANAGER), ("Lease", LEASE), ("Device", DEVICE), ("Server", SERVER)];
        for (interface, rows) in interfaces {
            let mut expected: Vec<_> = announced(interface).iter().map(|p| function(p)).collect();
            let mut rows = rows.to_vec();
            expected.sort_unstable();
            rows.sort_unstable();
            assert_eq!(rows, expected, "{interface}");
        }
    }
}
