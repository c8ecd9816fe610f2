//! Removal of secrets from texts for reports.
//!
//! Configuration is copied by a list of public keys, not by a search for secrets. A search follows
//! for all texts, since a journal may hold anything.

use std::collections::BTreeSet;

/// Text in place of a value that stays on the machine.
pub const SET: &str = "(set)";
const REMOVED: &str = "(removed)";
/// Starts of join tokens, of tokens for servers, and of fleet keys.
const TOKENS: [&str; 3] = ["gpsj-", "gpss-", "gpsf-"];
/// Parts of names whose values are removed.
const NAMES: [&str; 8] =
    ["password", "passwd", "passphrase", "secret", "token", "credential", "authorization", "private_key"];
/// Known secrets below this length would match by chance.
const MIN_SECRET: usize = 8;

/// Secrets that are known: contents of key files, and values of keys that are not public.
#[derive(Debug, Clone, Default)]
pub struct Secrets(BTreeSet<String>);

impl Secrets {
    /// Adds the lines of a secret file, or a value.
    pub fn add(&mut self, text: &str) {
        let lines = text.lines().map(str::trim).filter(|l| l.len() >= MIN_SECRET && !l.starts_with("-----"));
        self.0.extend(lines.map(str::to_owned));
    }

    /// Removes known secrets, tokens, PEM blocks, and values of names such as `password`.
    pub fn scrub(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut in_block = false;
        for line in text.split_inclusive('\n') {
            let begins = line.contains("-----BEGIN ");
            if begins {
                out += "(PEM block removed)\n";
            }
            let ends = line.contains("-----END ");
            if !begins && !in_block && !ends {
                out += &self.line(line);
            }
            in_block = (in_block || begins) && !ends;
        }
        out
    }

    fn line(&self, line: &str) -> String {
        let mut line = line.to_owned();
        // Longer secrets first: a shorter one may be a part of them.
        let mut known: Vec<&String> = self.0.iter().filter(|secret| line.contains(*secret)).collect();
        known.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        for secret in known {
            line = line.replace(secret, REMOVED);
        }
        named(&TOKENS.iter().fold(line, |line, start| tokens(start, &line)))
    }
}

fn tokens(start: &str, line: &str) -> String {
    let mut parts = line.split(start);
    let mut out = parts.next().unwrap_or("").to_owned();
    for part in parts {
        let end = part.find(|c: char| !c.is_ascii_alphanumeric() && !"-_.+/=".contains(c));
        out += start;
        out += REMOVED;
        out += &part[end.unwrap_or(part.len())..];
    }
    out
}

/// Removes the rest of a line after `NAME=`, `NAME: ` or `--NAME `, if the name means a secret.
fn named(line: &str) -> String {
    let lower = line.to_ascii_lowercase();
    let found = NAMES.iter().flat_map(|name| lower.match_indices(name)).filter_map(|(at, name)| {
        // A longer name counts too, such as `token_file` or `"password"`.
        let rest = &lower[at + name.len()..];
        let word = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '-');
        let rest = &rest[word.unwrap_or(rest.len())..];
        let value = rest.trim_start_matches(['"', '\'']).trim_start();
        let option = lower[..at].ends_with("--") && rest.starts_with(' ');
        let sign = value.starts_with(['=', ':']);
        (sign || option).then(|| lower.len() - value.len() + usize::from(sign))
    });
    let Some(from) = found.min() else { return line.to_owned() };
    if line[from..].trim().is_empty() {
        return line.to_owned();
    }
    let newline = if line.ends_with('\n') { "\n" } else { "" };
    format!("{} {REMOVED}{newline}", line[..from].trim_end())
}

/// Formats a TOML file as `KEY = VALUE` lines; keys that `public` does not know show no value.
///
/// Those values become `secrets`. Comments are left out. A file with an error yields its place,
/// and all its text becomes secret.
pub fn toml(text: &str, public: &dyn Fn(&str) -> bool, secrets: &mut Secrets) -> String {
    let table = match text.parse::<toml::Table>() {
        Ok(table) => table,
        Err(error) => {
            // The parser's message may quote the text.
            text.lines().for_each(|line| secrets.add(line));
            let at = error.span().map_or(0, |span| span.start);
            let line = text.as_bytes()[..at.min(text.len())].iter().filter(|b| **b == b'\n').count() + 1;
            return format!("not copied: line {line} is no TOML\n");
        }
    };
    let mut out = String::new();
    flatten("", "", &toml::Value::Table(table), public, secrets, &mut out);
    out
}

/// Writes the values below a key; `shown` has the numbers of lists, `key` has not.
fn flatten(
    shown: &str,
    key: &str,
    value: &toml::Value,
    public: &dyn Fn(&str) -> bool,
    secrets: &mut Secrets,
    out: &mut String,
) {
    match value {
        toml::Value::Table(table) => {
            for (name, value) in table {
                let below = |above: &str| match above {
                    "" => name.clone(),
                    above => format!("{above}.{name}"),
                };
                flatten(&below(shown), &below(key), value, public, secrets, out);
            }
        }
        toml::Value::Array(list) if list.iter().any(toml::Value::is_table) => {
            for (index, value) in list.iter().enumerate() {
                flatten(&format!("{shown}[{index}]"), key, value, public, secrets, out);
            }
        }
        value if public(key) => *out += &format!("{shown} = {value}\n"),
        value => {
            hide(value, secrets);
            *out += &format!("{shown} = {SET}\n");
        }
    }
}

fn hide(value: &toml::Value, secrets: &mut Secrets) {
    match value {
        toml::Value::String(text) => secrets.add(text),
        toml::Value::Array(list) => list.iter().for_each(|value| hide(value, secrets)),
        toml::Value::Table(table) => table.values().for_each(|value| hide(value, secrets)),
        other => secrets.add(&other.to_string()),
    }
}

/// Formats an administrator's unit file: no variables' values, credentials or arguments.
pub fn unit(text: &str, secrets: &mut Secrets) -> String {
    let mut out = String::new();
    // A backslash joins lines, and the second part must not escape.
    let joined = text.replace("\\\n", " ");
    for line in joined.lines().filter(|line| !line.trim_start().starts_with(['#', ';'])) {
        let Some((name, value)) = line.split_once('=') else {
            out += &format!("{line}\n");
            continue;
        };
        let value = value.trim();
        let shown = match name.trim() {
            "Environment" => {
                let words = value.split_whitespace().map(|word| word.trim_matches(['"', '\'']));
                let names = words.filter_map(|word| {
                    let (name, value) = word.split_once('=')?;
                    secrets.add(value);
                    Some(format!("{name}={SET}"))
                });
                names.collect::<Vec<_>>().join(" ")
            }
            key if key.starts_with("SetCredential") => {
                secrets.add(value);
                SET.to_owned()
            }
            key if key.starts_with("Exec") => match value.split_once(char::is_whitespace) {
                Some((program, arguments)) => {
                    arguments.split_whitespace().for_each(|word| secrets.add(word));
                    format!("{program} (arguments removed)")
                }
                None => value.to_owned(),
            },
            _ => value.to_owned(),
        };
        out += &format!("{name}={shown}\n");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_blocks_and_named_values_are_removed() {
        let secrets = Secrets::default();
        for (text, clean) in [
            ("joined with gpsj-ab12.XY_z9 at 10:00", "joined with gpsj-(removed) at 10:00"),
            ("fleet gpsf-ab12 gpss-ab34, gpsf-56", "fleet gpsf-(removed) gpss-(removed), gpsf-(removed)"),
            ("password=hunter2 and more\nnext", "password= (removed)\nnext"),
            (r#"{"api_token": "abc"}"#, r#"{"api_token": (removed)"#),
            ("run --password hunter2", "run --password (removed)"),
            ("Authorization: Bearer abc", "Authorization: (removed)"),
            ("the token is not valid", "the token is not valid"),
            (
                "a\n-----BEGIN EC PRIVATE KEY-----\nMHc\n-----END EC PRIVATE KEY-----\nb",
                "a\n(PEM block removed)\nb",
            ),
        ] {
            assert_eq!(secrets.scrub(text), clean);
        }
    }

    #[test]
    fn a_known_secret_is_removed_from_every_text() {
        let mut secrets = Secrets::default();
        secrets.add("-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49\n");
        secrets.add("short");
        assert_eq!(secrets.scrub("a short MIGHAgEAMBMGByqGSM49."), "a short (removed).");
    }

    #[test]
    fn only_public_keys_of_toml_keep_their_values() {
        let mut secrets = Secrets::default();
        let text = "# swordfish1\nwait_ms = 5\npin = 12345678\n[[lease]]\nmemory = \"50%\"\n[environment]\nK = \"swordfish2\"\n";
        let shown = toml(text, &|key| ["wait_ms", "lease.memory"].contains(&key), &mut secrets);
        assert_eq!(shown, "environment.K = (set)\nlease[0].memory = \"50%\"\npin = (set)\nwait_ms = 5\n");
        assert_eq!(secrets.scrub("swordfish2 12345678"), "(removed) (removed)");
        let broken = toml("a = 1\nb = swordfish3\n", &|_| true, &mut secrets);
        assert_eq!(broken, "not copied: line 2 is no TOML\n");
        assert_eq!(secrets.scrub("b = swordfish3"), "(removed)");
    }

    #[test]
    fn unit_files_lose_variables_and_arguments() {
        let mut secrets = Secrets::default();
        let text = "[Service]\n# swordfish1\nEnvironment=\"A=swordfish2\" \\\n B=c\n\
            SetCredential=x:swordfish3\nExecStart=/usr/bin/x --pin swordfish4\nRestart=always\n";
        let expected = "[Service]\nEnvironment=A=(set) B=(set)\nSetCredential=(set)\n\
            ExecStart=/usr/bin/x (arguments removed)\nRestart=always\n";
        assert_eq!(unit(text, &mut secrets), expected);
        assert_eq!(secrets.scrub("swordfish4"), "(removed)");
    }
}
