//! Comparison of a verb's JSON with its table in `docs/json.md`.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

/// Types of the leaves of a JSON value, by their keys as `docs/json.md` writes them.
fn leaves(key: &str, value: &Value, out: &mut BTreeSet<(String, &'static str)>) {
    let leaf = match value {
        Value::Object(map) => {
            let below = |k: &str| if key.is_empty() { k.to_owned() } else { format!("{key}.{k}") };
            return map.iter().for_each(|(k, value)| leaves(&below(k), value, out));
        }
        Value::Array(list) => return list.iter().for_each(|value| leaves(&format!("{key}[]"), value, out)),
        Value::String(_) => "string",
        Value::Bool(_) => "boolean",
        Value::Null => "null",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
    };
    out.insert((key.to_owned(), leaf));
}

fn page() -> String {
    std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/json.md")).expect("docs/json.md")
}

/// Lists the verbs that `docs/json.md` describes, as `PROGRAM VERB`.
pub fn sections() -> BTreeSet<String> {
    let heading = |line: &str| line.strip_prefix("## `")?.strip_suffix('`').map(str::to_owned);
    page().lines().filter_map(heading).collect()
}

/// Returns `true` if a key is described by a row; `NAME` at the end of a row stands for any name.
fn fits(row: &str, key: &str) -> bool {
    row == key || row.strip_suffix("NAME").is_some_and(|start| key.starts_with(start))
}

/// Compares a verb's JSON with its table in `docs/json.md`: each key is in both, with its type.
///
/// # Panics
/// If they differ.
#[track_caller]
pub fn documented(verb: &str, value: &Value) {
    documented_together(verb, std::slice::from_ref(value));
}

/// Compares outputs of a verb, none of which has all keys, with its table.
///
/// # Panics
/// If they differ.
#[track_caller]
pub fn documented_together(verb: &str, values: &[Value]) {
    let page = page();
    let section = page.split_once(&format!("## `{verb}`\n")).expect(verb).1;
    let section = section.split("\n## ").next().unwrap_or_default();
    let row = |line: &'_ str| {
        let mut cells = line.strip_prefix("| `")?.split('|');
        let key = cells.next()?.trim().trim_end_matches('`').to_owned();
        Some((key, cells.next()?.split(" or ").map(|word| word.trim().to_owned()).collect::<Vec<_>>()))
    };
    let table: BTreeMap<String, Vec<String>> = section.lines().filter_map(row).collect();
    let mut found = BTreeSet::new();
    values.iter().for_each(|value| leaves("", value, &mut found));
    for (key, leaf) in &found {
        let described = table.iter().find(|(row, _)| fits(row, key));
        let (_, types) = described.unwrap_or_else(|| panic!("{verb}: {key} is not in docs/json.md"));
        assert!(types.iter().any(|t| t == leaf), "{verb}: {key} is {leaf}, docs/json.md says {types:?}");
    }
    for row in table.keys() {
        assert!(found.iter().any(|(key, _)| fits(row, key)), "{verb}: no {row} in {values:?}");
    }
}
