//! Writes manual pages and shell completions from the definitions of the command lines.
//!
//! FOLDER gets the layout of `/usr`:
//!
//! ```sh
//! gpusession-manual FOLDER
//! ```

use std::error::Error;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory as _};
use clap_complete::{Generator, Shell};

/// A program and the facts for its pages.
struct Program {
    command: Command,
    section: &'static str,
    /// Further pages to read, in troff.
    see_also: &'static str,
    /// Whether people type it, so that it gets completions.
    typed: bool,
}

fn programs() -> [Program; 3] {
    [
        Program {
            command: gpusession::arguments(),
            section: "1",
            see_also: r"\fBgpusession.toml\fR(5), \fBgpusessiond\fR(8), \fBgpuserver\fR(8)",
            typed: true,
        },
        Program {
            command: gpusessiond::arguments::Arguments::command(),
            section: "8",
            see_also: r"\fBgpusession\fR(1), \fBgpusession.toml\fR(5), \fBpam_gpusession\fR(8), \fBsystemd.exec\fR(5) on credentials",
            typed: false,
        },
        Program {
            command: gpuserver::cli::Cli::command(),
            section: "8",
            see_also: r"\fBgpuserver.toml\fR(5), \fBgpusession\fR(1), \fBgpusessiond\fR(8)",
            typed: true,
        },
    ]
}

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args_os().nth(1).ok_or("usage: gpusession-manual FOLDER")?;
    let folder = PathBuf::from(folder);
    for program in programs() {
        if program.typed {
            completions(&program.command, &folder)?;
        }
        // `build` sets the names of the verbs' pages.
        let mut command = program.command.clone().disable_help_subcommand(true);
        command.build();
        pages(&command, &program, &folder.join(format!("share/man/man{}", program.section)))?;
    }
    Ok(())
}

/// Writes a page for a command and one for each of its verbs, as `git` has them.
fn pages(command: &Command, program: &Program, folder: &Path) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(folder)?;
    let name = command.get_display_name().unwrap_or(command.get_name());
    let mut file = File::create(folder.join(format!("{name}.{}", program.section)))?;
    clap_mangen::Man::new(command.clone())
        .title(name.to_uppercase())
        .section(program.section)
        .source(format!("gpusession {}", env!("CARGO_PKG_VERSION")))
        .manual("Remote GPUs")
        .render(&mut file)?;
    let parent = program.command.get_name();
    let up = if name == parent { String::new() } else { format!("\\fB{parent}\\fR({}), ", program.section) };
    writeln!(file, ".SH \"SEE ALSO\"\n{up}{}", program.see_also)?;
    for verb in command.get_subcommands().filter(|verb| !verb.is_hide_set()) {
        pages(verb, program, folder)?;
    }
    Ok(())
}

fn completions(command: &Command, folder: &Path) -> Result<(), Box<dyn Error>> {
    let name = command.get_name().to_owned();
    let shells = [
        (Shell::Bash, "share/bash-completion/completions", name.clone()),
        (Shell::Zsh, "share/zsh/site-functions", format!("_{name}")),
        (Shell::Fish, "share/fish/vendor_completions.d", format!("{name}.fish")),
    ];
    for (shell, place, file) in shells {
        let folder = folder.join(place);
        fs::create_dir_all(&folder)?;
        let mut text = Vec::new();
        let mut command = command.clone();
        command.set_bin_name(name.clone());
        command.build();
        shell.generate(&command, &mut text);
        fs::write(folder.join(file), text)?;
    }
    Ok(())
}
