//! A simulated CUDA driver: a `libcuda.so.1` that runs PTX on the CPU and misbehaves on request.

pub mod ptx;
