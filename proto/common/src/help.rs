//! The first screen of a program's help, with its verbs in groups.

/// Returns a help template of clap; `about` describes a verb in a line.
///
/// `groups` has headings, and the verbs below each, separated by spaces. `page` is the manual page
/// of a verb, such as `gpusession-VERB(1)`.
pub fn template(
    program: &str,
    page: &str,
    groups: &[(&str, &str)],
    about: impl Fn(&str) -> String,
) -> String {
    let width = groups.iter().flat_map(|(_, verbs)| verbs.split(' ')).map(str::len).max().unwrap_or(0);
    let mut list = String::new();
    for (heading, verbs) in groups {
        list += &format!("\n{heading}:\n");
        for verb in verbs.split(' ') {
            list += &format!("  {verb:width$}  {}\n", about(verb));
        }
    }
    format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n{list}\nOptions:\n{{options}}\n\n\
        `{program} VERB --help` and {page} have more.\n"
    )
}
