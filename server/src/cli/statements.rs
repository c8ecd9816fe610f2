//! `gpuserver statements`: lists the pool's revocations, and carries them between servers.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Subcommand;
use serde_json::{Value, json};

use super::target::{Target, must_run};
use crate::admin::answer::statements::{IMPORTED, StatementPage, StatementRow, print_statements};
use crate::admin::{Ask, Refusal};
use crate::statements::MAX_STATEMENTS;
use crate::text::Output;

/// Longest file that is read, in bytes.
const MAX_FILE: u64 = 64 << 20;

/// A verb of `gpuserver statements`.
#[derive(Debug, Subcommand)]
pub enum StatementsVerb {
    /// List the statements: revoked and forgotten clients, revoked administrators and servers
    List,
    /// Print the statements with their signatures, one on a line, for `statements import`
    Export,
    /// Take the statements of another server, where no way leads between the two
    Import {
        /// File with the output of `statements export`; - for standard input
        file: PathBuf,
    },
}

fn read(file: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    let source: Box<dyn Read> = match file.as_os_str() == "-" {
        true => Box::new(std::io::stdin()),
        false => Box::new(std::fs::File::open(file).with_context(|| file.display().to_string())?),
    };
    source.take(MAX_FILE).read_to_string(&mut text).with_context(|| file.display().to_string())?;
    Ok(text)
}

fn all(server: &Target) -> anyhow::Result<Vec<StatementRow>> {
    let mut rows: Vec<StatementRow> = Vec::new();
    let mut after = 0;
    while rows.len() < MAX_STATEMENTS {
        let page: StatementPage = serde_json::from_value(must_run(server, &Ask::Statements { after })?)?;
        rows.extend(page.statements);
        if !page.more {
            break;
        }
        after = page.last;
    }
    Ok(rows)
}

pub(super) fn statements(
    out: &mut Output<'_>,
    server: &Target,
    verb: Option<&StatementsVerb>,
) -> anyhow::Result<()> {
    match verb {
        None | Some(StatementsVerb::List) => {
            out.answer("statements", serde_json::to_value(all(server)?)?, print_statements)
        }
        Some(StatementsVerb::Export) => {
            if out.json {
                let why = "statements export prints lines, which statements import reads; leave --json out";
                return Err(Refusal::new("usage", why).into());
            }
            for row in all(server)? {
                writeln!(out.out, "{}", row.text)?;
            }
            Ok(())
        }
        Some(StatementsVerb::Import { file }) => {
            let text = read(file)?;
            let lines: Vec<_> =
                text.lines().map(str::trim).filter(|l| !l.is_empty()).map(String::from).collect();
            let mut new = 0;
            for part in lines.chunks(IMPORTED) {
                let taken = must_run(server, &Ask::StatementsImport { statements: part.to_vec() })?;
                new += taken["new"].as_u64().unwrap_or(0);
            }
            let value = json!({ "read": lines.len(), "new": new });
            out.answer("statements", value, |out, value: Value| {
                Ok(writeln!(out, "{} statements read, {} of them new", value["read"], value["new"])?)
            })
        }
    }
}
