//! Checkpoints: safetensors shards and one manifest, committed atomically
