//! The drop-in that `gpuserver config set` writes.

use std::path::{Path, PathBuf};

/// Returns the drop-in of a configuration file that `gpuserver config set` writes.
pub fn runtime_file(file: &Path) -> PathBuf {
    file.with_extension("d").join("90-runtime.toml")
}

/// Returns the parts of a dotted key, as TOML splits it.
///
/// A request names the key. Lines or a value inside of it would change other keys, and are errors.
pub fn key_parts(key: &str) -> Result<Vec<String>, String> {
    let no_key = || format!("{key:?} is not a key");
    if key.chars().any(char::is_control) {
        return Err(no_key());
    }
    let probe: toml::Table = toml::from_str(&format!("{key} = 0")).map_err(|_| no_key())?;
    let (mut parts, mut at) = (Vec::new(), &probe);
    loop {
        let mut entries = at.iter();
        let (Some((name, inner)), None) = (entries.next(), entries.next()) else { return Err(no_key()) };
        parts.push(name.clone());
        match inner {
            toml::Value::Table(inner) => at = inner,
            toml::Value::Integer(0) => return Ok(parts),
            _ => return Err(no_key()),
        }
    }
}

/// Returns the text of that file with `key` set to `value`, or without `key` if `value` is `None`.
pub fn edit_runtime(text: &str, key: &str, value: Option<&str>) -> Result<String, String> {
    let mut document: toml::Table = toml::from_str(text).map_err(|e| e.message().to_string())?;
    let path = key_parts(key)?;
    let Some((last, folders)) = path.split_last() else { return Err(format!("{key:?} is not a key")) };
    let mut table = &mut document;
    for folder in folders {
        let inner = table.entry(folder.clone()).or_insert_with(|| toml::Value::Table(toml::Table::new()));
        table = inner.as_table_mut().ok_or_else(|| format!("{folder} is a value, not a table"))?;
    }
    match value {
        // A TOML value, or else a string without quotes.
        Some(text) => {
            let value = toml::from_str::<toml::Table>(&format!("v = {text}"))
                .ok()
                .and_then(|mut t| t.remove("v"))
                .unwrap_or_else(|| toml::Value::String(text.into()));
            table.insert(last.clone(), value);
        }
        None => drop(table.remove(last)),
    }
    let body = toml::to_string(&document).map_err(|e| e.to_string())?;
    Ok(format!("# Written by `gpuserver config set`.\n{body}"))
}
