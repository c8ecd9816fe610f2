//! Addresses that lead to the machine itself, or no farther than its links.

use std::net::{IpAddr, Ipv4Addr};

/// Returns `true` for an address that a server on another machine cannot have.
///
/// These are loopback, link-local, unspecified, multicast and broadcast addresses; a connection to
/// the unspecified one reaches this machine.
pub fn is_nearby(ip: IpAddr) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(v4) => {
            v4.is_loopback()
                || v4.is_link_local()
                || v4.is_multicast()
                || v4 == Ipv4Addr::BROADCAST
                || v4.octets()[0] == 0
        }
        IpAddr::V6(v6) => {
            v6.is_loopback() || v6.is_unicast_link_local() || v6.is_multicast() || v6.is_unspecified()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_machines_are_not_nearby() {
        for (text, expected) in [
            ("127.0.0.1", true),
            ("127.255.0.9", true),
            ("0.0.0.0", true),
            ("0.1.2.3", true),
            ("169.254.169.254", true),
            ("224.0.0.1", true),
            ("255.255.255.255", true),
            ("::", true),
            ("::1", true),
            ("fe80::1", true),
            ("ff02::1", true),
            ("::ffff:127.0.0.1", true),
            ("::ffff:169.254.169.254", true),
            ("10.0.0.5", false),
            ("192.168.1.1", false),
            ("198.51.100.7", false),
            ("::ffff:10.0.0.5", false),
            ("fd00::1", false),
            ("2001:db8::1", false),
        ] {
            assert_eq!(is_nearby(text.parse().unwrap()), expected, "{text}");
        }
    }
}
