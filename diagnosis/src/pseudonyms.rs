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
    /// A person: `user1`, `user2`.
    User,
    /// An identity of the pool, as `client1`.
    Client,
    /// A name in DNS, as `host1`.
    Host,
    /// An IPv4 or IPv6 address, as `address1`.
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
const KEYS: [(&str, Kind); 9] = [
    ("user", Kind::User),
    ("users", Kind::User),
    ("actor", Kind::User),
    ("client", Kind::Client),
    ("server", Kind::Host),
    ("address", Kind::Host),
    ("control_address", Kind::Host),
    ("data_address", Kind::Host),
    ("data_addresses", Kind::Host),
];
/// Names of this software, of systems and of words in it, which say nothing about a site.
const COMMON: [&str; 24] = [
    "gpusession",
    "gpusessiond",
    "gpuserver",
    "root",
    "localhost",
    "local",
    "localdomain",
    "server",
    "client",
    "user",
    "users",
    "host",
    "admin",
    "administrator",
    "gpu",
    "cuda",
    "nvidia",
    "linux",
    "debian",
    "ubuntu",
    "fedora",
    "all",
    "name",
    "you",
];
/// Shorter names would match by chance.
const MIN_NAME: usize = 2;
/// Longest run of characters that may be an address, in bytes.
const MAX_ADDRESS: usize = 60;
/// User ids of people, as Debian and Fedora give them.
const PEOPLE: std::ops::Range<u32> = 1000..60_000;

/// Names that are known so far, with their pseudonyms.
#[derive(Debug, Clone, Default)]
pub struct Pseudonyms {
    known: BTreeMap<String, String>,
    counts: BTreeMap<Kind, usize>,
    /// Length of the longest name.
    longest: usize,
}

impl Pseudonyms {
    /// Gives a name and its parts pseudonyms, unless they have some; HOST:PORT counts as its host.
    ///
    /// The parts of `CORP\ada`, `ada@corp.example` and `gpu1.corp.example` also stand alone.
    pub fn add(&mut self, kind: Kind, name: &str) {
        let name = name.strip_prefix("administrator ").unwrap_or(name);
        match (kind, name.split_once('@'), name.split_once('\\'), host(name).split_once('.')) {
            (_, Some((user, domain)), ..) => {
                self.add(kind, user);
                self.add_one(Kind::Host, domain);
            }
            (_, _, Some((domain, user)), _) => {
                self.add_one(Kind::Host, domain);
                self.add(kind, user);
            }
            (Kind::Host, .., Some((label, domain))) if host(name).parse::<IpAddr>().is_err() => {
                self.add_one(kind, host(name));
                self.add_one(kind, label);
                if domain.contains('.') {
                    self.add_one(kind, domain);
                }
            }
            (Kind::Host, ..) => self.add_one(kind, host(name)),
            _ => self.add_one(kind, name),
        }
    }

    fn add_one(&mut self, kind: Kind, name: &str) {
        let number = name.chars().all(|c| c.is_ascii_digit());
        let plain = name.chars().all(is_part);
        if name.len() >= MIN_NAME
            && plain
            && !number
            && !COMMON.contains(&name)
            && name.parse::<IpAddr>().is_err()
        {
            self.pseudonym(kind, name);
        }
    }

    fn pseudonym(&mut self, kind: Kind, name: &str) -> String {
        if let Some(known) = self.known.get(name) {
            return known.clone();
        }
        let count = self.counts.entry(kind).or_default();
        *count += 1;
        let pseudonym = format!("{}{count}", kind.word());
        self.known.insert(name.to_owned(), pseudonym.clone());
        self.longest = self.longest.max(name.len());
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
                if let (Some(name), true) = (object.get("name"), object.contains_key("control_address")) {
                    self.add_value("server", name);
                }
                if let Some(Value::String(key)) = object.get("key") {
                    self.add_limit(key, object.get("value").and_then(Value::as_str).unwrap_or_default());
                }
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
                identity.get("name").and_then(Value::as_str).iter().for_each(|n| self.add(Kind::Client, n));
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

    /// Adds the names in a limit's key (`limits.client.NAME.gpus`), and in a list of members.
    fn add_limit(&mut self, key: &str, value: &str) {
        let mut words = key.split('.');
        let layer = (words.next(), words.next());
        let kind = match (layer, words.next_back()) {
            ((Some("limits"), Some("client")), Some(_)) => Kind::Client,
            ((Some("limits"), Some("user")), Some(_)) => Kind::User,
            ((Some("limits"), Some("group")), Some(members @ ("clients" | "users"))) => {
                let kind = if members == "users" { Kind::User } else { Kind::Client };
                value.split('"').skip(1).step_by(2).for_each(|name| self.add(kind, name.trim_matches('*')));
                return;
            }
            _ => return,
        };
        self.add(kind, words.collect::<Vec<_>>().join(".").trim_matches(['"', '*']));
    }

    /// Replaces the names in the values of a JSON text; any other text is replaced as such.
    pub fn replace_json(&mut self, text: &str) -> String {
        match serde_json::from_str(text) {
            Ok(mut value) => {
                self.replace_values(&mut value);
                format!("{value:#}\n")
            }
            Err(_) => self.replace(text),
        }
    }

    fn replace_values(&mut self, value: &mut Value) {
        match value {
            Value::String(text) => *text = self.replace(text),
            Value::Array(list) => list.iter_mut().for_each(|value| self.replace_values(value)),
            Value::Object(object) => object.values_mut().for_each(|value| self.replace_values(value)),
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
            self.replace_run(run, &mut out);
            rest = after;
        }
        out + rest
    }

    /// Replaces the names in a run of the characters of names and addresses.
    fn replace_run(&mut self, run: &str, out: &mut String) {
        let ends = |at: usize| at == run.len() || !run[at..].starts_with(char::is_alphanumeric);
        let mut begins = true;
        let mut at = 0;
        while let Some(next) = run[at..].chars().next() {
            let found = if begins { self.name_at(&run[at..], |end| ends(at + end)) } else { None };
            match found {
                Some((pseudonym, len)) => {
                    *out += &pseudonym;
                    at += len;
                    begins = false;
                }
                None => {
                    out.push(next);
                    at += next.len_utf8();
                    begins = !next.is_alphanumeric();
                }
            }
        }
    }

    /// Returns the pseudonym of the address or the longest name at the start of a text, and its
    /// length.
    fn name_at(&mut self, text: &str, ends: impl Fn(usize) -> bool) -> Option<(String, usize)> {
        // Longer runs are no addresses, and are not searched to their end.
        let part = |b: &u8| b.is_ascii_hexdigit() || b".:".contains(b);
        let end = text.bytes().take(MAX_ADDRESS + 1).take_while(part).count();
        if end <= MAX_ADDRESS {
            let address_text = &text[..end];
            // A sentence may end after an address.
            let trimmed = address_text.trim_end_matches(['.', ':']);
            for candidate in [address_text, trimmed] {
                if let Some((address, len)) = address(candidate).filter(|(_, len)| ends(*len)) {
                    return Some((self.pseudonym(Kind::Address, &address), len));
                }
            }
        }
        (1..=text.len().min(self.longest))
            .rev()
            .filter(|end| text.is_char_boundary(*end) && ends(*end))
            .find_map(|end| Some((self.known.get(&text[..end])?.clone(), end)))
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

/// Returns the usual form of a machine's address, and its length in a text that it begins, with or
/// without a port.
fn address(text: &str) -> Option<(String, usize)> {
    let len = match text.parse::<SocketAddr>() {
        Ok(SocketAddr::V4(_)) => text.find(':').unwrap_or(text.len()),
        _ => text.len(),
    };
    match text[..len].parse::<IpAddr>().map(|ip| ip.to_canonical()) {
        Ok(ip) if ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() => None,
        Ok(ip) => Some((ip.to_string(), len)),
        Err(_) => is_hardware_address(text).then(|| (text.to_owned(), len)),
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
            ("vm-1.site.example", "host1.host5"),
            ("adapter, adage, bobby and gpu10", "adapter, adage, bobby and gpu10"),
            ("session-vm-1-ada.scope", "session-host1-user1.scope"),
            ("user \"ada\": denied", "user \"user1\": denied"),
            ("root runs gpuserver on localhost", "root runs gpuserver on localhost"),
            ("für ada: gut, adaß", "für user1: gut, adaß"),
        ] {
            assert_eq!(names.replace(text), clean);
        }
    }

    #[test]
    fn keys_of_json_stay_and_escapes_hide_no_name() {
        let mut names = named();
        let text = r#"{"ada": "ada", "why": "a\nada of\n10.0.0.7", "n": [1, true]}"#;
        let clean = json!({ "ada": "user1", "why": "a\nuser1 of\naddress1", "n": [1, true] });
        assert_eq!(names.replace_json(text), format!("{clean:#}\n"));
        assert_eq!(names.replace_json("no JSON of ada"), "no JSON of user1");
    }

    #[test]
    fn names_of_directories_administrators_and_limits_are_known() {
        let mut names = Pseudonyms::default();
        names.add(Kind::User, "eve@corp.example");
        names.add(Kind::User, "CORP\\max");
        names.add_json(&json!({
            "actor": "administrator zoe",
            "users": ["kim"],
            "keys": [
                { "key": "limits.client.vm-7.gpus", "value": "1" },
                { "key": "limits.user.\"lee\".gpus", "value": "1" },
                { "key": "limits.group.lab.users", "value": "[\"pat\", \"sam*\"]" },
            ],
            "name": "gpu9", "control_address": "10.0.0.1:7601",
        }));
        let text = "eve@corp.example CORP\\max zoe kim vm-7 lee pat sam gpu9 eve max";
        let clean = names.replace(text);
        for name in ["eve", "corp", "CORP", "max", "zoe", "kim", "vm-7", "lee", "pat", "sam", "gpu9"] {
            assert!(!clean.contains(name), "{name} in {clean}");
        }
    }

    #[test]
    fn addresses_are_found_by_their_form() {
        let mut names = Pseudonyms::default();
        for (text, clean) in [
            ("198.18.0.12:55480 and 198.18.0.12.", "address1:55480 and address1."),
            ("[::ffff:198.18.0.12]:55480", "[address1]:55480"),
            ("inet6 fd77:1ab::b/64 scope", "inet6 address2/64 scope"),
            ("2001:db8:1:2::/64 peer:10.0.0.7", "address3/64 peer:address4"),
            ("10.0.0.7-10.0.0.9, 10.0.0.7:22->10.0.0.9", "address4-address5, address4:22->address5"),
            (
                "link/ether 52:54:00:12:34:56 brd ff:ff:ff:ff:ff:ff",
                "link/ether address6 brd ff:ff:ff:ff:ff:ff",
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
    fn long_runs_take_little_time() {
        let mut names = named();
        let text = "a.".repeat(1 << 17) + &"4a".repeat(1 << 17) + &"é:".repeat(1 << 15);
        assert_eq!(names.replace(&text), text);
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
