//! ZeRO: flat layout, shards, passes over the step program, gather, reduce and update
