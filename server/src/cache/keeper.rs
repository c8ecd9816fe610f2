//! Compiled code is its workers' user's: this process or the starter does the acts there.

use std::io;
use std::path::Path;

use tracing::warn;

use super::code::Code;
use crate::starter::code::{CodeAct, Found, What};
use crate::starter::desk::Desk;
use crate::starter::{Act, Answer};

/// Does acts in the folder of compiled code.
#[derive(Debug, Clone)]
pub enum Keeper {
    /// This process, whose user the workers have.
    Here(Code),
    /// The starter, whose user the workers have.
    There(Desk, Code),
}

impl Keeper {
    pub(super) fn code(&self) -> &Code {
        match self {
            Self::Here(code) | Self::There(_, code) => code,
        }
    }

    /// Does what is asked; needs time.
    pub(super) fn act(&self, what: What) -> io::Result<Vec<Found>> {
        match self {
            Self::Here(code) => code.perform(&what),
            Self::There(desk, code) => {
                let answers = desk.act(&Act::Code(CodeAct { max: code.max, what }), None)?;
                let found = |answer| if let Answer::Code(found) = answer { Some(found) } else { None };
                Ok(answers.into_iter().filter_map(found).collect())
            }
        }
    }

    pub(super) fn delete(&self, name: &str) {
        if let Err(e) = self.act(What::Delete(name.into())) {
            warn!("cache {}: not deleted: {e}; the next check tries again", self.code().at(name).display());
        }
    }
}

/// Returns the last name of a path.
pub(super) fn name_in(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}
