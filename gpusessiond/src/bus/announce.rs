//! Announcements of properties: each interface lists its own beside their getters.

/// Defines a function `announce`, which sends PropertiesChanged for each row whose value differs.
///
/// The rows' names are listed in `ANNOUNCED` too: a test compares them with the interface's XML.
macro_rules! announce {
    ($object:ty, $view:ty; $($changed:ident: $of:expr),+ $(,)?) => {
        pub async fn announce(
            object: &$object,
            emitter: &zbus::object_server::SignalEmitter<'_>,
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
        pub const ANNOUNCED: &[&str] = &[$(stringify!($changed)),+];
    };
}

pub(super) use announce;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::bus::{device, lease, manager, server};

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
        let interfaces = [
            ("Manager", manager::ANNOUNCED),
            ("Lease", lease::ANNOUNCED),
            ("Device", device::ANNOUNCED),
            ("Server", server::ANNOUNCED),
        ];
        for (interface, rows) in interfaces {
            let mut expected: Vec<_> = announced(interface).iter().map(|p| function(p)).collect();
            let mut rows = rows.to_vec();
            expected.sort_unstable();
            rows.sort_unstable();
            assert_eq!(rows, expected, "{interface}");
        }
    }
}
