//! Tables of configuration keys: one row yields all that a key needs.
//!
//! ```ignore
//! keys! {
//!     pub struct Keys("", Reader<'_>, ConfigError) {
//!         "Workers";
//!         /// Number of workers kept ready for each lease.
//!         ///
//!         /// At most 64.
//!         warm_workers: u32 = 2, COUNT, live;
//!         /// CUDA driver library; by default NVIDIA's.
//!         driver: Option<PathBuf> = absent("/usr/lib/libcuda.so.1"), DRIVER;
//!     }
//! }
//! ```
//!
//! - The text opens a section of the manual and of the shipped file.
//! - The comment's first paragraph describes the key in the shipped file and in short explanations;
//!   the manual has the whole comment. Backquotes mark names.
//! - The default is TOML. A default that depends on the host is a function, with an example.
//! - The next word is the parser; its type is the affair of the crate.
//! - `live` marks a key that changes without a restart.

use std::fmt;
use std::path::Path;

/// Description of a key for people.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Section that begins with this row; empty in all other rows.
    pub section: &'static str,
    /// Name as in the file, with its table.
    pub name: &'static str,
    /// TOML text of the default, or of an example.
    pub value: &'static str,
    /// Whether `value` is the default on every host.
    pub fixed: bool,
    /// Whether a change takes effect without a restart.
    pub live: bool,
    /// Lines of the comment.
    pub about: &'static [&'static str],
}

impl Row {
    /// Returns the name without its table.
    pub fn key(&self) -> &'static str {
        self.name.rsplit('.').next().unwrap_or(self.name)
    }

    /// Returns the comment's first paragraph as plain text.
    pub fn brief(&self) -> String {
        paragraphs(self.about).next().unwrap_or_default().replace('`', "")
    }

    /// Returns the default as plain text, if it is the same on every host.
    pub fn default(&self) -> Option<&'static str> {
        self.fixed.then(|| self.value.trim_matches('"'))
    }
}

/// Yields the paragraphs of a comment, each on one line.
fn paragraphs(lines: &[&str]) -> impl Iterator<Item = String> {
    lines.split(|line| line.is_empty()).map(|lines| {
        let lines: Vec<_> = lines.iter().map(|line| line.trim()).collect();
        lines.join(" ")
    })
}

/// Returns the manual's entries of a table, in troff.
pub fn manual(rows: &[Row]) -> String {
    let mut out = String::new();
    for row in rows {
        if !row.section.is_empty() {
            out += &format!(".SS {}\n", row.section);
        }
        let (name, live) = (troff(row.key()), if row.live { " +" } else { "" });
        out += ".TP\n";
        out += &match row.fixed {
            true => format!(".BR {name} \" = {}{live}\"\n", troff(row.value)),
            false => format!(".B {name}\n"),
        };
        out += &prose(row.about);
    }
    out
}

/// Returns a comment in troff: a sentence on each line.
pub fn prose(about: &[&str]) -> String {
    let text = paragraphs(about).collect::<Vec<_>>().join(" ");
    let mut out = String::new();
    let mut bold = false;
    for (i, c) in text.char_indices() {
        match c {
            '`' => {
                bold = !bold;
                out += if bold { "\\fB" } else { "\\fR" };
            }
            ' ' if text[..i].ends_with('.') && begins_sentence(&text[i + 1..]) => out.push('\n'),
            _ => out += &troff(c.encode_utf8(&mut [0; 4])),
        }
    }
    out + "\n"
}

fn begins_sentence(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_uppercase() || c == '"')
}

fn troff(text: &str) -> String {
    text.replace('\\', "\\e").replace('"', "\\(dq").replace('-', "\\-")
}

/// Returns the shipped file's lines of a table; all keys are comments.
pub fn sample(rows: &[Row]) -> String {
    let mut out = String::new();
    for row in rows {
        if !row.section.is_empty() {
            out += &format!("\n# ---- {}\n\n", row.section);
        }
        out += &comment(&row.brief());
        out += &format!("#{} = {}\n", row.key(), row.value);
    }
    out
}

/// Returns a text as comments of at most 100 columns.
pub fn comment(text: &str) -> String {
    let mut out = String::from("#");
    let mut column = 1;
    for word in text.split(' ') {
        if column + 1 + word.len() > 100 {
            out += "\n#";
            column = 1;
        }
        out.push(' ');
        out += word;
        column += 1 + word.len();
    }
    out + "\n"
}

/// Returns a table's section of the manual.
pub fn manual_table(title: &str, about: &[&str], rows: &[Row]) -> String {
    format!(".SS {title}\n{}{}", prose(about), manual(rows))
}

/// Returns a table's part of the shipped file, with the header as it stands in a file.
pub fn sample_table(header: &str, about: &[&str], rows: &[Row]) -> String {
    let about: Vec<_> = paragraphs(about).collect();
    format!("\n{}#{header}\n{}", comment(&about.join(" ").replace('`', "")), sample(rows))
}

/// Returns the key lines of a shipped file without their `#`.
///
/// An explanation has a space after the `#`; a line without `#` is an error.
pub fn uncommented(file: &str) -> Result<String, String> {
    let mut out = String::new();
    for line in file.lines().filter(|line| !line.is_empty()) {
        let comment = line.strip_prefix('#').ok_or_else(|| format!("not a comment: {line}"))?;
        if !comment.starts_with(' ') {
            out += comment;
            out.push('\n');
        }
    }
    Ok(out)
}

/// Names of the structures and calls from which a source file reads a field of a row.
const HOLDERS: [&str; 8] =
    ["config", "config()", "keys", "access", "access()", "client", "transport", "users"];

/// Lists rows whose field no source file below `folder` reads, but for tests and `keys.rs`.
pub fn unread<'a>(
    folder: &Path,
    rows: impl IntoIterator<Item = &'a Row>,
) -> std::io::Result<Vec<&'static str>> {
    fn collect(folder: &Path, text: &mut String) -> std::io::Result<()> {
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() && name != "tests" {
                collect(&path, text)?;
            } else if name.ends_with(".rs") && !["tests.rs", "keys.rs"].contains(&&*name) {
                text.push_str(&std::fs::read_to_string(path)?);
            }
        }
        Ok(())
    }
    let mut text = String::new();
    collect(folder, &mut text)?;
    let parts: Vec<_> = text.split('.').collect();
    let fields: std::collections::HashSet<_> = parts
        .windows(2)
        .filter(|pair| HOLDERS.iter().any(|holder| is_read(pair[0], holder)))
        .map(|pair| pair[1].split(|c| !of_name(c)).next().unwrap_or_default())
        .collect();
    Ok(rows.into_iter().filter(|row| !fields.contains(row.key())).map(|row| row.name).collect())
}

fn of_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Returns `true` if the text before a dot ends with this name.
fn is_read(before: &str, holder: &str) -> bool {
    before.trim_end().strip_suffix(holder).is_some_and(|rest| !rest.ends_with(of_name))
}

/// Compares the lines of a file from `start` up to a line that starts with `end` with `block`.
///
/// Writes them instead if `GPUSESSION_BLESS` is set, as `make docs` does.
pub fn up_to_date(file: &Path, start: &str, end: &str, block: &str) -> Result<(), String> {
    let failed = |why: &dyn fmt::Display| format!("{}: {why}", file.display());
    let text = std::fs::read_to_string(file).map_err(|e| failed(&e))?;
    let fresh =
        replace_block(&text, start, end, block).ok_or_else(|| failed(&"the generated lines are missing"))?;
    if text == fresh {
        Ok(())
    } else if std::env::var_os("GPUSESSION_BLESS").is_some() {
        std::fs::write(file, fresh).map_err(|e| failed(&e))
    } else {
        Err(failed(&"differs from the table of keys; `make docs` writes it"))
    }
}

/// Replaces the lines from `start` up to a line that starts with `end`; `None` without such lines.
fn replace_block(text: &str, start: &str, end: &str, block: &str) -> Option<String> {
    let line = |from: usize, of: &str| Some(from + text[from..].find(&format!("\n{of}"))? + 1);
    let begin = line(0, start)?;
    let finish = line(begin, end)?;
    Some([&text[..begin], block, &text[finish..]].concat())
}

/// Defines a table of keys; see the module.
///
/// `NAME("PREFIX.", READER, ERROR)` names the table in front of each key, the type with the method
/// `key`, and its error. The struct has a field for each row.
#[macro_export]
macro_rules! keys {
    (
        $(#[doc = $title:literal])*
        $(#[derive($($derive:path),+)])?
        pub struct $table:ident($prefix:literal, $reader:ty, $error:ty) {
            $(
                $($section:literal;)?
                $(#[doc = $about:literal])+
                $field:ident $(as $name:literal)?: $type:ty
                    = $default:tt $(($example:tt))?, $kind:expr $(, $live:ident)?;
            )+
        }
    ) => {
        $(#[doc = $title])*
        #[derive(Debug, Clone, PartialEq)]
        $(#[derive($($derive),+)])?
        pub struct $table {
            $($(#[doc = $about])+ pub $field: $type),+
        }

        impl $table {
            /// Comment of the table.
            #[allow(dead_code, reason = "only some tables have a section of their own")]
            pub const ABOUT: &'static [&'static str] = &[$($title),*];

            /// The rows, for people.
            pub const ROWS: &'static [$crate::keys::Row] = &[$(
                $crate::keys::Row {
                    section: concat!($($section)?),
                    name: concat!($prefix, $crate::keys!(@name $field $($name)?)),
                    value: $crate::keys!(@value $default $($example)?),
                    fixed: $crate::keys!(@fixed $($example)?),
                    live: $crate::keys!(@live $($live)?),
                    about: &[$($about),+],
                }
            ),+];

            /// Reads each key in the order of the rows.
            #[allow(unused_assignments, reason = "the last row counts, too")]
            pub fn read(reader: &mut $reader) -> Result<Self, $error> {
                let mut row = 0;
                $(
                    let $field = reader.key(
                        &Self::ROWS[row],
                        &$kind,
                        $crate::keys!(@found $default $($example)?),
                    )?;
                    row += 1;
                )+
                Ok(Self { $($field),+ })
            }

            /// Returns these values, but for live keys the fresh ones.
            #[allow(dead_code, reason = "only some tables have live keys")]
            pub fn with_live_of(&self, fresh: &Self) -> Self {
                Self { $($field: $crate::keys!(@pick self fresh $field $($live)?)),+ }
            }
        }
    };
    (@name $field:ident) => { stringify!($field) };
    (@name $field:ident $name:literal) => { $name };
    (@value $default:tt) => { stringify!($default) };
    (@value $found:tt $example:tt) => { stringify!($example) };
    (@fixed) => { true };
    (@fixed $example:tt) => { false };
    (@live) => { false };
    (@live live) => { true };
    (@found $default:tt) => { None };
    (@found $found:tt $example:tt) => { Some($found) };
    (@pick $old:ident $fresh:ident $field:ident) => { $old.$field.clone() };
    (@pick $old:ident $fresh:ident $field:ident live) => { $fresh.$field.clone() };
}

#[cfg(test)]
mod tests {
    use super::*;

    pub struct Reader;

    impl Reader {
        fn key<T>(
            &mut self,
            row: &Row,
            parse: &fn(&str) -> T,
            found: Option<fn() -> T>,
        ) -> Result<T, String> {
            Ok(found.map_or_else(|| parse(row.value), |found| found()))
        }
    }

    fn own_name() -> String {
        "host".into()
    }

    const NUMBER: fn(&str) -> usize = |text| text.len();
    const TEXT: fn(&str) -> String = |text| text.into();

    keys! {
        /// Title.
        pub struct Keys("t.", Reader, String) {
            "First-part";
            /// Name of `this`, a "test". More.
            ///
            /// Further.
            name: String = own_name("x"), TEXT;
            /// Number.
            two_words as "two-words": usize = [1, 2], NUMBER, live;
        }
    }

    #[test]
    fn a_row_yields_reader_and_texts() {
        let keys = Keys::read(&mut Reader).unwrap();
        assert_eq!(keys, Keys { name: "host".into(), two_words: 6 });
        let fresh = Keys { name: "other".into(), two_words: 7 };
        assert_eq!(keys.with_live_of(&fresh), Keys { name: "host".into(), two_words: 7 });
        assert_eq!(Keys::ABOUT, [" Title."]);
        assert_eq!(Keys::ROWS[1].name, "t.two-words");
        assert_eq!((Keys::ROWS[0].default(), Keys::ROWS[1].default()), (None, Some("[1, 2]")));
        assert_eq!(Keys::ROWS[0].brief(), "Name of this, a \"test\". More.");
        assert_eq!(
            manual(Keys::ROWS),
            ".SS First-part\n.TP\n.B name\nName of \\fBthis\\fR, a \\(dqtest\\(dq.\nMore.\nFurther.\n\
             .TP\n.BR two\\-words \" = [1, 2] +\"\nNumber.\n"
        );
        assert_eq!(
            sample(Keys::ROWS),
            "\n# ---- First-part\n\n# Name of this, a \"test\". More.\n#name = \"x\"\n# Number.\n#two-words = [1, 2]\n"
        );
    }

    #[test]
    fn blocks_and_comments() {
        let text = "a\n.SH K\nold\n.SH Z\nend\n";
        assert_eq!(replace_block(text, ".SH K", ".SH Z", "new\n").as_deref(), Some("a\nnew\n.SH Z\nend\n"));
        assert_eq!(replace_block(text, ".SH Q", ".SH Z", ""), None);
        let long = comment(&"word ".repeat(30));
        assert!(long.lines().all(|l| l.len() <= 100) && long.lines().count() == 2, "{long}");
    }
}
