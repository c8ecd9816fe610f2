//! Pseudonyms in reports: `user1` for a user, `host1` for a host, the same in all files.
//!
//! The names come from the report's own JSON, from the user database and from its caller. Addresses
//! need no list: they are found by their form.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};

use serde_json::Value;

/// Sort of a name, and the start of its pseudonyms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    User,
    Client,
    Host,
    Address,
}

impl Kind {
    fn word(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Client => "client",
            Self::Host => "host",
            Self::Address => "address",
        }
    }
}

/// Keys of JSON whose values are names.
const KEYS: [(&str, Kind); 6] = [
    ("user", Kind::User),
    ("client", Kind::Client),
    ("server", Kind::Host),
    ("address", Kind::Host),
    ("control_address", Kind::Host),
    ("data_addresses", Kind::Host),
];
/// Names of this software and of every machine, which say nothing about a site.
const COMMON: [&str; 7] = ["gpusession", "gpusessiond", "gpuserver", "root", "localhost", "local", "server"];
/// Shorter names would match by chance.
const MIN_NAME: usize = 2;
/// User ids of people, as Debian and Fedora give them.
const PEOPLE: std::ops::Range<u32> = 1000..60_000;

/// Names that are known so far, with their pseudonyms.
#[derive(Debug, Clone, Default)]
pub struct Pseudonyms {
    known: BTreeMap<String, String>,
    counts: BTreeMap<Kind, usize>,
}

impl Pseudonyms {
    /// Gives a name a pseudonym, unless it has one; HOST:PORT counts as its host.
    pub fn add(&mut self, kind: Kind, name: &str) {
        let name = match kind {
            Kind::Host => host(name),
            _ => name,
        };
        let number = name.chars().all(|c| c.is_ascii_digit());
        if name.len() < MIN_NAME || number || COMMON.contains(&name) || name.parse::<IpAddr>().is_ok() {
            return;
        }
        self.pseudonym(kind, name);
    }

    fn pseudonym(&mut self, kind: Kind, name: &str) -> String {
        if let Some(known) = self.known.get(name) {
            return known.clone();
        }
        let count = self.counts.entry(kind).or_default();
        *count += 1;
        let pseudonym = format!("{}{count}", kind.word());
        self.known.insert(name.to_owned(), pseudonym.clone());
        pseudonym
    }

    /// Adds the people of a user database, `/etc/passwd`.
    pub fn add_people(&mut self, passwd: &str) {
        for line in passwd.lines() {
            let mut fields = line.split(':');
            let (Some(name), Some(uid)) = (fields.next(), fields.nth(1)) else { continue };
            if uid.parse().is_ok_and(|uid| PEOPLE.contains(&uid)) {
                self.add(Kind::User, name);
            }
        }
    }

    /// Adds the names in a JSON value.
    pub fn add_json(&mut self, value: &Value) {
        match value {
            Value::Array(list) => list.iter().for_each(|value| self.add_json(value)),
            Value::Object(object) => {
                for (key, value) in object {
                    self.add_value(key, value);
                    self.add_json(value);
                }
            }
            _ => {}
        }
    }

    fn add_value(&mut self, key: &str, value: &Value) {
        let kind = KEYS.iter().find(|(name, _)| *name == key).map(|(_, kind)| *kind);
        match (kind, value) {
            (Some(kind), Value::String(name)) => self.add(kind, name),
            (Some(_), Value::Array(list)) => list.iter().for_each(|value| self.add_value(key, value)),
            // The client's certificate has its name.
            (None, Value::Object(identity)) if key == "identity" => {
                identity
                    .get("name")
                    .and_then(Value::as_str)
                    .iter()
                    .for_each(|name| self.add(Kind::Client, name));
            }
            // A list of servers or clients has their names under `name`.
            (None, Value::Array(list)) => {
                let kind = match key {
                    "servers" => Kind::Host,
                    "clients" => Kind::Client,
                    _ => return,
                };
                list.iter().filter_map(|row| row["name"].as_str()).for_each(|name| self.add(kind, name));
            }
            _ => {}
        }
    }

    /// Replaces known names and all addresses, which get pseudonyms as they appear.
    pub fn replace(&mut self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(begin) = rest.find(is_part) {
            out += &rest[..begin];
            rest = &rest[begin..];
            let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
            let (run, after) = rest.split_at(end);
            // A key of JSON is no name.
            match after.starts_with("\":") {
                true => out += run,
                false => self.replace_run(run, &mut out),
            }
            rest = after;
        }
        out + rest
    }

    /// Replaces the names in a run of the characters of names and addresses.
    fn replace_run(&mut self, run: &str, out: &mut String) {
        // A sentence may end after an address.
        let body = run.trim_end_matches(['.', ':']);
        if let Some((address, port)) = address(body) {
            *out += &self.pseudonym(Kind::Address, &address);
            *out += port;
            *out += &run[body.len()..];
            return;
        }
        let is_end = |at: usize| at == run.len() || !run.as_bytes()[at].is_ascii_alphanumeric();
        let mut at = 0;
        while at < run.len() {
            let begins = at == 0 || !run.as_bytes()[at - 1].is_ascii_alphanumeric();
            // The longest name that begins here.
            let found = (at + 1..=run.len())
                .rev()
                .filter(|end| begins && run.is_char_boundary(*end) && is_end(*end))
                .find_map(|end| Some((self.known.get(&run[at..end])?, end)));
            match found {
                Some((pseudonym, end)) => {
                    *out += pseudonym;
                    at = end;
                }
                None => {
                    let next = run[at..].chars().next().map_or(1, char::len_utf8);
                    *out += &run[at..at + next];
                    at += next;
                }
            }
        }
    }

    /// Formats the table of all pseudonyms, a line each, for the owner of the report.
    pub fn table(&self) -> String {
        let mut lines: Vec<_> = self.known.iter().map(|(name, pseudonym)| (pseudonym, name)).collect();
        lines.sort_by_key(|(pseudonym, _)| (pseudonym.len(), (*pseudonym).clone()));
        lines.iter().fold(String::new(), |mut table, (pseudonym, name)| {
            let _ = writeln!(table, "{pseudonym}\t{name}");
            table
        })
    }
}

/// Returns `true` for the characters of names, addresses and ports.
fn is_part(c: char) -> bool {
    c.is_alphanumeric() || "_-.:".contains(c)
}

/// Returns the host of HOST:PORT or [HOST]:PORT.
fn host(address: &str) -> &str {
    match address.rsplit_once(':') {
        Some((host, port)) if port.chars().all(|c| c.is_ascii_digit()) && !host.contains(':') => host,
        Some((host, _)) if host.starts_with('[') => host.trim_matches(['[', ']']),
        _ => address,
    }
}

/// Splits a text that is an address of a machine, with or without a port; the address is in its
/// usual form.
fn address(text: &str) -> Option<(String, &str)> {
    let split = match text.parse::<SocketAddr>() {
        Ok(SocketAddr::V4(_)) => text.find(':').unwrap_or(text.len()),
        _ => text.len(),
    };
    let (address, port) = text.split_at(split);
    match address.parse::<IpAddr>().map(|ip| ip.to_canonical()) {
        Ok(ip) if ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() => None,
        Ok(ip) => Some((ip.to_string(), port)),
        Err(_) => is_hardware_address(address).then(|| (address.to_owned(), port)),
    }
}

/// Returns `true` for six pairs of hexadecimal digits.
fn is_hardware_address(text: &str) -> bool {
    let pair = |pair: &str| pair.len() == 2 && pair.chars().all(|c| c.is_ascii_hexdigit());
    text.split(':').count() == 6 && text.split(':').all(pair) && text != "ff:ff:ff:ff:ff:ff"
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn named() -> Pseudonyms {
        let mut names = Pseudonyms::default();
        names.add_people(
            "root:x:0:0::/root:/bin/sh\nada:x:1000:1000::/home/ada:/bin/sh\nnobody:x:65534:1::/:/x\n",
        );
        names.add(Kind::Host, "vm-1");
        names.add_json(&json!({
            "leases": [{ "client": "vm-1", "user": "bob", "server": "gpu1" }],
            "servers": [{ "name": "gpu1", "address": "gpu1.site.example:7601" }],
            "data_addresses": ["[fd77::1]:7602", "gpu2:7602"],
            "user": 7,
        }));
        names
    }

    #[test]
    fn names_become_the_same_words_everywhere() {
        let mut names = named();
        for (text, clean) in [
            ("ada@vm-1:/home/ada$", "user1@host1:/home/user1$"),
            (
                "bob's lease on gpu1.site.example:7601, gpu1 and gpu2.",
                "user2's lease on host4:7601, host3 and host2.",
            ),
            ("adapter, adage, bobby and gpu10", "adapter, adage, bobby and gpu10"),
            ("session-vm-1-ada.scope", "session-host1-user1.scope"),
            (r#"{"ada": "ada", "user": "bob"}"#, r#"{"ada": "user1", "user": "user2"}"#),
            ("root runs gpuserver on localhost", "root runs gpuserver on localhost"),
            ("für ada: gut", "für user1: gut"),
        ] {
            assert_eq!(names.replace(text), clean);
        }
    }

    #[test]
    fn addresses_are_found_by_their_form() {
        let mut names = Pseudonyms::default();
        for (text, clean) in [
            ("198.18.0.12:55480 and 198.18.0.12.", "address1:55480 and address1."),
            ("[::ffff:198.18.0.12]:55480", "[address1]:55480"),
            ("inet6 fd77:1ab::b/64 scope", "inet6 address2/64 scope"),
            (
                "link/ether 52:54:00:12:34:56 brd ff:ff:ff:ff:ff:ff",
                "link/ether address3 brd ff:ff:ff:ff:ff:ff",
            ),
            ("127.0.0.1:7601, ::1, 0.0.0.0, [::]:7602", "127.0.0.1:7601, ::1, 0.0.0.0, [::]:7602"),
            (
                "0000:01:00.0 at 12:34:56, std::io, 580.159.04",
                "0000:01:00.0 at 12:34:56, std::io, 580.159.04",
            ),
        ] {
            assert_eq!(names.replace(text), clean);
        }
    }

    #[test]
    fn the_table_tells_the_owner_who_is_who() {
        let mut names = named();
        names.replace("10.1.2.3");
        let table = names.table();
        for line in ["user1\tada", "user2\tbob", "host1\tvm-1", "address1\t10.1.2.3"] {
            assert!(table.lines().any(|l| l == line), "{line} not in {table}");
        }
        assert!(!table.contains("root") && !table.contains("nobody"), "{table}");
    }

    #[test]
    fn short_and_common_names_stay() {
        let mut names = Pseudonyms::default();
        for name in ["a", "42", "gpuserver", "10.0.0.1", ""] {
            names.add(Kind::User, name);
        }
        assert_eq!(names.table(), "");
    }
}
