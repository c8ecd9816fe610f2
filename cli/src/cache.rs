//! The cache of code that this user's programs compiled, kept for later runs.

use std::path::PathBuf;

use gpusession_common::units::human_bytes;
use gpusession_proto::user_cache;
use serde_json::json;

use crate::exit::{Failure, Result, code};
use crate::setup::Outcome;

fn folder() -> Result<PathBuf> {
    user_cache::folder().ok_or_else(|| {
        Failure::new(code::FAILED, "no cache: neither CUDA_CACHE_PATH nor XDG_CACHE_HOME nor HOME is set")
    })
}

/// Files and their lengths in bytes; empty if the folder does not exist yet.
fn files(folder: &std::path::Path) -> Vec<(PathBuf, u64)> {
    let all = std::fs::read_dir(folder).into_iter().flatten().flatten();
    all.filter_map(|entry| Some((entry.path(), entry.metadata().ok().filter(|m| m.is_file())?.len())))
        .collect()
}

/// Reports the size of the cache.
pub fn show() -> Result<Outcome> {
    let folder = folder()?;
    let files = files(&folder);
    let (bytes, max) = (files.iter().map(|(_, bytes)| bytes).sum(), user_cache::max_bytes());
    Ok(Outcome {
        text: format!(
            "{}: {} files, {} of at most {}",
            folder.display(),
            files.len(),
            human_bytes(bytes),
            human_bytes(max)
        ),
        json: json!({ "schema": 1, "folder": folder, "files": files.len(), "bytes": bytes, "max_bytes": max }),
    })
}

/// Deletes the cached files. Running programs do not notice.
pub fn clear() -> Result<Outcome> {
    let folder = folder()?;
    let (mut count, mut bytes) = (0, 0);
    for (path, len) in files(&folder) {
        std::fs::remove_file(&path)
            .map_err(|e| Failure::new(code::FAILED, format!("{}: {e}", path.display())))?;
        (count, bytes) = (count + 1, bytes + len);
    }
    Ok(Outcome {
        text: format!("{}: {count} files deleted, {}", folder.display(), human_bytes(bytes)),
        json: json!({ "schema": 1, "folder": folder, "files_deleted": count, "bytes_deleted": bytes }),
    })
}
