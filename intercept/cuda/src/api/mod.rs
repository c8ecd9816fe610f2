//! Exported functions, by the chapters of the driver API's manual.

pub mod context;
pub mod copy;
pub mod copy_batch;
pub mod core_dump;
pub mod device;
pub mod event;
pub mod generated;
pub mod graph;
pub mod graph_nodes;
pub mod graph_params;
pub mod graph_queries;
pub mod green;
pub mod launch;
pub mod link;
pub mod managed;
pub mod memory;
pub mod misc;
pub mod module;
pub mod pool;
pub mod reference;
pub mod share;
pub mod stream;
pub mod tensor_map;
pub mod user_object;
pub mod vmm;
