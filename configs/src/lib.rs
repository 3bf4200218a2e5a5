//! The only code that knows ds.yaml: DeepSpeed's keys, as typed and resolved
