//! Library of `gpuserver`.
