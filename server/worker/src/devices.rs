//! Device files of NVIDIA's driver that a worker needs: the common ones, and those of its GPUs.

use std::fs;
use std::path::{Path, PathBuf};

use gpusession_proto::readings::uuid_text;

/// One folder for each GPU of the host; absent without NVIDIA's kernel driver.
const GPUS: &str = "/proc/driver/nvidia/gpus";
/// Files that the driver opens for any GPU.
///
/// Files in the folder of capabilities have permissions of their own.
const COMMON: [&str; 3] = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-caps"];

/// Returns the files; for an unknown GPU the files of all GPUs, and an error that names it.
pub fn of_gpus(uuids: &[[u8; 16]]) -> (Vec<PathBuf>, Result<(), String>) {
    below(Path::new(GPUS), uuids)
}

/// Returns the files of all GPUs of this host.
pub fn all() -> Vec<PathBuf> {
    // No GPU has this UUID, so that the answer is every one.
    below(Path::new(GPUS), &[[0; 16]]).0
}

fn below(gpus: &Path, uuids: &[[u8; 16]]) -> (Vec<PathBuf>, Result<(), String>) {
    let Ok(folders) = fs::read_dir(gpus) else { return (Vec::new(), Ok(())) };
    let known: Vec<_> = folders
        .filter_map(|folder| fs::read_to_string(folder.ok()?.path().join("information")).ok())
        .filter_map(|text| {
            let value = |key| text.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
            let minor: u32 = value("Device Minor:")?.parse().ok()?;
            Some((value("GPU UUID:")?.to_owned(), PathBuf::from(format!("/dev/nvidia{minor}"))))
        })
        .collect();
    let mut files: Vec<_> = COMMON.iter().map(PathBuf::from).collect();
    for uuid in uuids.iter().map(uuid_text) {
        match known.iter().find(|(known, _)| *known == uuid) {
            Some((_, file)) => files.push(file.clone()),
            None => {
                files.extend(known.into_iter().map(|(_, file)| file));
                return (
                    files,
                    Err(format!(
                        "{} does not list {uuid}: device files of all GPUs stay open",
                        gpus.display()
                    )),
                );
            }
        }
    }
    (files, Ok(()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_gpus_of_the_lease() {
        let host = tempfile::tempdir().unwrap();
        let uuid = |n| [n; 16];
        for n in [3u8, 0, 7] {
            let folder = host.path().join(format!("0000:0{n}:00.0"));
            fs::create_dir(&folder).unwrap();
            let text = format!(
                "Model: \t\t NVIDIA H200\nGPU UUID: \t {}\nDevice Minor: \t {n}\n",
                uuid_text(&uuid(n))
            );
            fs::write(folder.join("information"), text).unwrap();
        }
        let nodes = |files: &[PathBuf]| -> Vec<String> {
            let mut names: Vec<_> = files.iter().map(|f| f.display().to_string()).collect();
            names.retain(|f| !COMMON.contains(&f.as_str()));
            names.sort();
            names
        };
        let (files, found) = below(host.path(), &[uuid(7), uuid(3)]);
        assert_eq!((nodes(&files), found), (vec!["/dev/nvidia3".into(), "/dev/nvidia7".into()], Ok(())));
        assert!(COMMON.iter().all(|common| files.contains(&PathBuf::from(common))));

        let (files, found) = below(host.path(), &[uuid(9)]);
        assert_eq!(nodes(&files), ["/dev/nvidia0", "/dev/nvidia3", "/dev/nvidia7"]);
        assert!(found.unwrap_err().contains(&uuid_text(&uuid(9))));
        assert_eq!(below(&host.path().join("none"), &[uuid(9)]), (vec![], Ok(())));
    }
}
