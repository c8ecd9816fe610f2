//! The file of the variables that logins get: `[environment]` of gpusession.toml.
//!
//! Root writes it from root's configuration when the daemon starts and reloads. So a daemon that
//! was taken over sets no variable of a login. Readers are `pam_gpusession.so` and the environment
//! generator of systemd's user instances.
//!
//! Each line is `NAME=VALUE`.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;

use crate::Malformed;

/// Default path of the file.
pub const PATH: &str = "/run/gpusession/environment";
/// Longest file, in bytes.
pub const MAX_FILE: u64 = 16 * 1024;
/// Maximum number of variables.
const MAX_VARIABLES: usize = 63;
/// Longest name of a variable, in bytes.
const MAX_NAME: usize = 64;
/// Longest value of a variable, in bytes.
const MAX_VALUE: usize = 1024;

/// Beginnings of variable names that are never set at login.
///
/// They belong to the loader (`LD_`) and the shell, or say who is logged in, from where and how.
/// PAM's list would override the values of sshd and the user's terminal.
const FOREIGN_BEGINNINGS: &[&str] = &["BASH_", "DBUS_", "LC_", "LD_", "SSH_", "SUDO_", "XDG_"];
/// Other names of the C library, the shells and the login.
const FOREIGN: &[&str] = &[
    "BASHOPTS",
    "CDPATH",
    "DISPLAY",
    "ENV",
    "EUID",
    "FPATH",
    "GCONV_PATH",
    "GETCONF_DIR",
    "GLIBC_TUNABLES",
    "GLOBIGNORE",
    "HOME",
    "IFS",
    "KRB5CCNAME",
    "LANG",
    "LANGUAGE",
    "LOCPATH",
    "LOGNAME",
    "MAIL",
    "OLDPWD",
    "PATH",
    "PPID",
    "PROMPT",
    "PROMPT_COMMAND",
    "PS0",
    "PS1",
    "PS2",
    "PS3",
    "PS4",
    "PWD",
    "SHELL",
    "SHELLOPTS",
    "SHLVL",
    "TERM",
    "UID",
    "USER",
    "XAUTHORITY",
    "ZDOTDIR",
];

/// Checks that only root or the reader, of uid `me`, could write an open file.
///
/// The caller opens it without following a symbolic link.
///
/// # Errors
/// The reason not to read it.
pub fn trusted(file: &Metadata, me: u32) -> Result<(), Malformed> {
    if !file.is_file() {
        Err(Malformed("the file of variables is not a regular file"))
    } else if file.uid() != 0 && file.uid() != me {
        Err(Malformed("the file of variables is not root's"))
    } else if file.mode() & 0o022 != 0 {
        Err(Malformed("others than root may write the file of variables"))
    } else if file.len() > MAX_FILE {
        Err(Malformed("the file of variables is longer than 16384 bytes"))
    } else {
        Ok(())
    }
}

/// Returns the text of the file.
///
/// # Errors
/// [`check`] refuses a variable, or a bound is exceeded.
pub fn encode<'a>(variables: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<String, Malformed> {
    let mut text = String::new();
    for (count, (name, value)) in variables.into_iter().enumerate() {
        check(name, value)?;
        if count == MAX_VARIABLES {
            return Err(Malformed("more than 63 variables"));
        }
        text.extend([name, "=", value, "\n"]);
    }
    if text.len() as u64 > MAX_FILE {
        return Err(Malformed("the variables are longer than 16384 bytes together"));
    }
    Ok(text)
}

/// Reads the text of the file; rejects it if one variable may not be set at login.
pub fn parse(text: &str) -> Result<Vec<(&str, &str)>, Malformed> {
    if text.len() as u64 > MAX_FILE {
        return Err(Malformed("the file of variables is longer than 16384 bytes"));
    }
    let mut variables: Vec<(&str, &str)> = Vec::new();
    for line in text.split_terminator('\n') {
        let (name, value) = line.split_once('=').ok_or(Malformed("a line without `=`"))?;
        check(name, value)?;
        if variables.len() == MAX_VARIABLES {
            return Err(Malformed("more than 63 variables"));
        }
        if variables.iter().any(|(known, _)| *known == name) {
            return Err(Malformed("a variable occurs twice"));
        }
        variables.push((name, value));
    }
    Ok(variables)
}

/// Checks whether a variable may be set at login.
///
/// Its name must not control the loader, a shell or the login itself, and its value must be a
/// bounded line that needs no quoting. The administrator, who writes it into a file of root, has to
/// know what other software does with it.
pub fn check(name: &str, value: &str) -> Result<(), Malformed> {
    let bytes = name.as_bytes();
    let word = bytes.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'_');
    if !(1..=MAX_NAME).contains(&bytes.len()) || !word || bytes[0].is_ascii_digit() {
        return Err(Malformed(
            "not the name of a variable: at most 64 letters, digits and _, no digit in front",
        ));
    }
    if name == "CUDA_VISIBLE_DEVICES" {
        return Err(Malformed("belongs to the user; the server determines the GPUs of a lease"));
    }
    if name.starts_with("GPUSESSION_") {
        return Err(Malformed("belongs to the user, who sets it for a program or a shell"));
    }
    if FOREIGN.contains(&name) || FOREIGN_BEGINNINGS.iter().any(|begin| name.starts_with(begin)) {
        return Err(Malformed(
            "belongs to the loader, the shell or the login, and is never set at login; set it where the program is started",
        ));
    }
    if value.len() > MAX_VALUE {
        return Err(Malformed("the value is longer than 1024 bytes"));
    }
    // Shells and systemd interpret other bytes in their own ways.
    if !value.bytes().all(|b| matches!(b, b' '..=b'~') && !b"\"'`$\\".contains(&b)) {
        return Err(Malformed(
            "the value may have letters, digits and plain signs of ASCII only: no quote, backslash, dollar sign or control character",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_loader_shell_and_login_are_refused() {
        let long = "A".repeat(MAX_NAME + 1);
        let no_names = ["", "1A", "CUDA_ X", "CUDA_X=Y", "BASH_FUNC_ls%%", "É", "A\n", "A\0", long.as_str()];
        let of_the_user = ["CUDA_VISIBLE_DEVICES", "GPUSESSION_SOCKET", "GPUSESSION_ID"];
        let beginnings = [
            "LD_PRELOAD",
            "LD_LIBRARY_PATH",
            "LD_",
            "BASH_ENV",
            "LC_ALL",
            "SSH_AUTH_SOCK",
            "XDG_RUNTIME_DIR",
        ];
        for name in no_names.iter().chain(&of_the_user).chain(&beginnings).chain(FOREIGN) {
            assert!(check(name, "x").is_err(), "{name}");
        }
        for name in ["NCCL_NET_PLUGIN", "HF_HOME", "http_proxy", "PYTHONPATH", "_X", "LDX", &long[1..]] {
            assert_eq!(check(name, "x"), Ok(()), "{name}");
        }
        for value in ["1\n", "1\0", "\x1b[31m", "$(id)", "`id`", "a'b", "a\"b", "a\\b", "é"] {
            assert!(check("NCCL_SHM_DISABLE", value).is_err(), "{value}");
        }
        assert!(check("NCCL_SHM_DISABLE", &"1".repeat(MAX_VALUE + 1)).is_err());
        assert!(check("NCCL_SHM_DISABLE", &"1".repeat(MAX_VALUE)).is_ok());
    }

    #[test]
    fn a_written_file_reads_back_and_a_bad_line_rejects_it() {
        let variables = [("HF_HOME", "/srv/a=b 1"), ("NCCL_DEBUG", "")];
        let text = encode(variables).unwrap();
        assert_eq!(text, "HF_HOME=/srv/a=b 1\nNCCL_DEBUG=\n");
        assert_eq!(parse(&text), Ok(variables.to_vec()));
        assert_eq!((encode([]), parse("")), (Ok(String::new()), Ok(vec![])));
        for line in ["LD_PRELOAD=x", "A", "=x", "A=$(id)", "HF_HOME=2", "", "A=\r"] {
            assert!(parse(&format!("{text}{line}\n")).is_err(), "{line:?}");
        }
        assert!(encode([("LD_PRELOAD", "x")]).is_err());
    }

    #[test]
    fn files_are_bounded() {
        let names: Vec<String> = (0..=MAX_VARIABLES).map(|i| format!("X{i}")).collect();
        let some =
            |n: usize, value: &'static str| encode(names[..n].iter().map(|name| (name.as_str(), value)));
        assert!(some(MAX_VARIABLES, "").is_ok());
        assert!(some(MAX_VARIABLES + 1, "").is_err());
        let long: &'static str = "1".repeat(MAX_VALUE).leak();
        assert!(some(15, long).is_ok());
        assert!(some(16, long).is_err());
        assert!(parse(&names.iter().map(|name| format!("{name}=\n")).collect::<String>()).is_err());
    }
}
