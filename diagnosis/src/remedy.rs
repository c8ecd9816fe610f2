//! Remedies that are commands, for more than one check.

/// Sets a line of a service's `[Service]` section, and restarts it.
///
/// The drop-in sorts after those that people write, so its line holds.
pub fn set_in_unit(service: &str, line: &str) -> String {
    let folder = format!("/etc/systemd/system/{service}.service.d");
    let name = line.split('=').next().unwrap_or(line);
    format!(
        "sudo mkdir -p {folder} && printf '[Service]\\n{line}\\n' | sudo tee {folder}/zz-{name}.conf && \
         sudo systemctl daemon-reload && sudo systemctl restart {service}"
    )
}

/// Opens a file in an editor, and then runs a command.
///
/// `place` is FILE, FILE:LINE or an error's text that begins so.
pub fn edit(place: &str, then: &str) -> String {
    match place.split(':').next().filter(|file| file.starts_with('/')) {
        Some(file) => format!("sudoedit {file} && {then}"),
        None => format!("correct the file, then {then}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_an_error_is_edited() {
        let then = "sudo systemctl reload gpusession";
        let remedy = edit("/etc/gpusession/conf.d/a.toml:3: unknown key `gpuss`", then);
        assert_eq!(remedy, "sudoedit /etc/gpusession/conf.d/a.toml && sudo systemctl reload gpusession");
        assert_eq!(edit("default", then), "correct the file, then sudo systemctl reload gpusession");
    }

    #[test]
    fn a_drop_in_sorts_last() {
        let remedy = set_in_unit("gpuserver", "LimitSTACK=infinity");
        assert!(remedy.contains("printf '[Service]\\nLimitSTACK=infinity\\n' | sudo tee /etc/systemd/system/gpuserver.service.d/zz-LimitSTACK.conf"), "{remedy}");
    }
}
