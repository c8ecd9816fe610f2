//! Names of `org.gpusession1` on D-Bus, for the daemon that serves it and for its callers.
//!
//! * [`proxy`]: client proxies of the interfaces, with the methods that `gpusession` calls;
//! * [`describe`]: the JSON of `Describe`;
//! * [`request`]: keys and flags of `CreateLease`;
//! * [`error`]: names of errors.

pub mod describe;
pub mod error;
pub mod proxy;
pub mod request;

use zbus::OwnedObjectPath;

/// Well-known name on the bus.
pub const NAME: &str = "org.gpusession1";
/// Path of the manager; all other objects are below it.
pub const PATH: &str = "/org/gpusession1";

/// Returns the path of a lease's object.
pub fn lease_path(id: &str) -> OwnedObjectPath {
    path("lease", id)
}

/// Returns the path of a GPU's object.
pub fn device_path(uuid: &str) -> OwnedObjectPath {
    path("device", uuid)
}

/// Returns the path of a server's object.
pub fn server_path(name: &str) -> OwnedObjectPath {
    path("server", name)
}

fn path(kind: &str, id: &str) -> OwnedObjectPath {
    OwnedObjectPath::try_from(format!("{PATH}/{kind}/{}", path_element(id)))
        .unwrap_or_else(|_| unreachable!("an escaped element makes a valid path"))
}

/// Escapes one element of a D-Bus object path as sd-bus does (`GPU-ab` → `GPU_2dab`).
pub fn path_element(text: &str) -> String {
    if text.is_empty() {
        return "_".into();
    }
    let mut out = String::with_capacity(text.len());
    for (i, byte) in text.bytes().enumerate() {
        if byte.is_ascii_alphabetic() || (byte.is_ascii_digit() && i > 0) {
            out.push(byte as char);
        } else {
            out.push_str(&format!("_{byte:02x}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_like_sd_bus() {
        assert_eq!(path_element("GPU-ab"), "GPU_2dab");
        assert_eq!(path_element("7abc"), "_37abc");
        assert_eq!(path_element(""), "_");
        assert_eq!(path_element("ä_"), "_c3_a4_5f");
    }
}
